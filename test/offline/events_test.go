// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	eventsByDefault = 300
	killsByDefault  = 3
	lateEvents      = 10
	// flushDelay makes each Event take a while to be sent.
	flushDelay = 5 * time.Millisecond
)

// An emitter is a node that tells of Events while its hub is killed again and again.
type emitter struct {
	*rig.Rig
	rng     *rand.Rand
	node    *rig.Endpoint
	told    []string // the message of each Event as it was told last, in the order of their names
	repeats int      // POSTs that got no answer

	killing sync.WaitGroup
	failed  chan error
}

// TestEventsSurviveKills creates Events while the link is cut, in both groups and
// encodings, some of them again with a higher count, and kills the hub in between;
// then it heals a slow link and kills the hub while it sends. In the end the API
// server has every Event once, with the last body, in the order in which they were
// accepted; those, too, that come while others still wait. Then client-go's own recorders do the same without the kills.
//
// It fails if an Event is acknowledged before it is on disk, sent from the wrong end,
// or forgotten before it is sent.
func TestEventsSurviveKills(t *testing.T) {
	t.Parallel()
	n, kills, seed := rig.Number(t, "EDGEHUB_EVENTS", eventsByDefault), rig.Number(t, "EDGEHUB_KILLS", killsByDefault), rig.Seed(t)
	e := &emitter{Rig: rig.New(t, nil), rng: rand.New(rand.NewPCG(seed, 0)), failed: make(chan error, kills)}
	process.Run(t, e.Hub)
	e.WaitLink(true)
	e.node = e.Through(e.Node)
	e.Offline()
	began := time.Now()
	e.emit(n, kills)
	t.Logf("%d Events accepted in %v, with %d kills and %d POSTs repeated", n, time.Since(began).Round(time.Millisecond), kills, e.repeats)

	began = time.Now()
	e.Link.Delay(flushDelay)
	e.Online()
	e.emitLate(n)
	for k, at := range e.moments(n, kills) {
		e.killOnce(at, []link.Direction{link.ToServer, link.ToClient}[k%2])
	}
	e.sent()
	t.Logf("sent in %v, with %d kills", time.Since(began).Round(time.Millisecond), kills)
	e.Link.Delay(0)
	e.check()
	t.Run("recorders", func(t *testing.T) {
		e.T = t
		e.recorders()
	})
	e.T = t
}

// moments are when to kill, by how many Events there are, in order.
func (e *emitter) moments(n, kills int) []int {
	at := make([]int, kills)
	for i := range at {
		at[i] = 1 + e.rng.IntN(n-1)
	}
	slices.Sort(at)
	return at
}

func eventName(i int) string { return fmt.Sprintf("e-%05d", i) }

// emit has n Events accepted one after the other, and kills the hub meanwhile.
func (e *emitter) emit(n, kills int) {
	e.T.Helper()
	at := e.moments(n, kills)
	for i := range n {
		for len(at) > 0 && at[0] == i {
			at = at[1:]
			e.killSoon()
		}
		e.told = append(e.told, "")
		e.tell(i, 1)
		// Some again, the one before the last, so that it is not the newest that is replaced.
		if j := i - 1; j >= 0 && j%5 == 0 {
			e.tell(j, 2)
		}
		if j := i - 3; j >= 0 && j%15 == 0 {
			e.tell(j, 3)
		}
	}
	e.killing.Wait()
	close(e.failed)
	for err := range e.failed {
		e.T.Errorf("kill and start: %v", err)
	}
}

// emitLate has some more accepted while the link is up and others wait.
func (e *emitter) emitLate(n int) {
	e.T.Helper()
	for i := range lateEvents {
		e.told = append(e.told, "")
		e.tell(n+i, 1)
	}
	if waiting, err := e.Hub.Metric(e.T.Context(), "edgehub_outbox_events"); err != nil || waiting <= lateEvents {
		e.T.Errorf("%v Events wait, %v, want some before the %d late ones", waiting, err, lateEvents)
	}
}

// killSoon kills the hub a moment later, and starts it.
func (e *emitter) killSoon() {
	e.killing.Wait() // one at a time
	ctx, moment := e.T.Context(), time.Duration(e.rng.IntN(20_000))*time.Microsecond
	e.killing.Go(func() {
		<-time.After(moment)
		err := e.Hub.Kill()
		if err == nil {
			err = e.Hub.Start(ctx)
		}
		if err != nil {
			e.failed <- err
		}
	})
}

// tell creates the i-th Event as it is when it has happened so many times. A POST
// without an answer is repeated, as client-go does; any other answer than 201 makes
// client-go drop the Event.
func (e *emitter) tell(i int, count int32) {
	e.T.Helper()
	name := eventName(i)
	a := eventForms[i%len(eventForms)].create(name, count)
	e.Must(process.Poll(e.T.Context(), name+" is accepted", func(ctx context.Context) error {
		got := send(ctx, e.node, a)
		if got.err != nil {
			e.repeats++
			return got.err
		}
		if got.status != http.StatusCreated {
			e.T.Errorf("%v = %v, want 201", a, got)
		}
		return nil
	}))
	e.told[i] = told(name, count)
}

// killOnce kills the hub once the API server has so many Events, and starts it. What is
// on its way in the direction given is lost: an Event that nobody knows the API server
// has not got, or its answer.
func (e *emitter) killOnce(there int, lost link.Direction) {
	e.T.Helper()
	e.Must(process.Poll(e.T.Context(), fmt.Sprintf("%d Events are sent", there), func(context.Context) error {
		if n := len(eventsOf(e.Rig, "e-")); n < there {
			return fmt.Errorf("%d are", n)
		}
		return nil
	}))
	e.Link.BlackHole(lost)
	e.Must(e.Hub.Kill())
	e.Link.Cut()
	e.Must(e.Link.Heal())
	e.T.Logf("killed when %d Events were at the API server", len(eventsOf(e.Rig, "e-")))
	e.Must(e.Hub.Start(e.T.Context()))
}

// sent waits until the hub has sent all. What a kill has interrupted is sent again:
// the API server may have taken it (409), also where it found nobody to tell (504).
func (e *emitter) sent() {
	e.T.Helper()
	waitSent(e.Rig)
	requests, err := e.ControlPlane.Requests(time.Time{})
	e.Must(err)
	codes := map[int32]int{}
	for _, r := range requests {
		if isEventCreate(r) && r.ResponseStatus != nil {
			codes[r.ResponseStatus.Code]++
		}
	}
	e.T.Logf("answers of the API server to POSTs of Events, by code: %v", codes)
}

// check compares what the API server has with what was told.
func (e *emitter) check() {
	e.T.Helper()
	var got []string
	for _, v := range eventsOf(e.Rig, "e-") {
		got = append(got, v.Message)
		if want := told(v.Name, max(count(v), 1)); v.Message != want {
			e.T.Errorf("%s says %q, its count %d", v.Name, v.Message, count(v))
		}
	}
	if d := cmp.Diff(e.told, got); d != "" {
		e.T.Errorf("the API server has other Events than were told, or in another order (-told +there):\n%s", d)
	}
}
