// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	stepsByDefault = 60
	quietEvery     = 12 // steps
	convergeWithin = time.Minute

	configNamespace = "kube-system"
	configName      = "edgehub-config"
)

// A walk is a random sequence of writes, changes of what filters go by, and faults.
type walk struct {
	*stage
	rng       *rand.Rand
	writers   []*writer
	truths    map[string]*truth // by resource
	followers []*follower
	direct    *rig.Endpoint
	force     *force
	names     int // of rules
	done      map[string]int

	inFile, inMap   document
	files           []document // in the file since one of it was in force for certain
	ofFile, ofMap   string     // marks; ofMap is empty without a ConfigMap
	pool            string
	withheld, other int // at quiet points
}

// TestRandomFilters does what comes to the dice's mind: writes, other configurations of
// filters in the file and in the ConfigMap, another pool, cuts, dead hubs, clients that go
// away. Followers of every shape are only ever shown what a configuration that may be in
// force makes of what there was, and at quiet points hold exactly what the one in force
// makes of what there is.
func TestRandomFilters(t *testing.T) {
	t.Parallel()
	seed, steps := rig.Seed(t), rig.Number(t, "EDGEHUB_STEPS", stepsByDefault)
	t.Cleanup(func() { rig.KeepSeed(t, "./test/filters", seed, steps) })
	w := newWalk(t, seed)
	ctx, cancel := context.WithCancel(t.Context())
	w.Must(w.join(ctx, w.pool))
	process.Run(t, w.Hub)
	w.WaitLink(true)
	w.write(ctx, 2*names)
	for _, resource := range resources {
		w.truths[resource] = &truth{resource: resource, force: w.force, objects: map[string][]revision{}}
		w.Must(w.truths[resource].follow(ctx, w.direct))
	}
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for _, v := range views() {
		f := &follower{view: v, truth: w.truths[v.resource], endpoint: w.Direct(w.credential(v.byNode, v.program)), held: map[string]thing{}}
		w.followers = append(w.followers, f)
		running.Go(func() { f.run(ctx) })
	}
	began := time.Now()
	for step := 1; step <= steps && !t.Failed(); step++ {
		w.step(ctx)
		if step%quietEvery == 0 || step == steps {
			w.quiet(ctx)
		}
	}
	w.tell(time.Since(began))
}

func newWalk(t *testing.T, seed uint64) *walk {
	t.Helper()
	w := &walk{rng: rand.New(rand.NewPCG(seed, 0)), truths: map[string]*truth{}, force: &force{}, done: map[string]int{}, pool: "p1"}
	w.inFile = newDocument(w.rng, document{}, &w.names)
	w.stage = newStage(t, w.inFile, "--config-namespace="+configNamespace)
	w.ofFile = "document-1"
	w.files = []document{w.inFile}
	w.force.rest(w.inFile, w.pool)
	w.direct = w.Direct(w.ControlPlane.TokenConfig(writerUser))
	for i, resource := range resources {
		w.writers = append(w.writers, newWriter(w.stage, resource, seed+uint64(i)+1))
	}
	return w
}

// write has each writer do n things.
func (w *walk) write(ctx context.Context, n int) {
	w.T.Helper()
	for range n {
		for _, writer := range w.writers {
			w.Must(writer.step(ctx))
		}
	}
}

func (w *walk) pause(ctx context.Context, most int) {
	select {
	case <-time.After(time.Duration(w.rng.IntN(most)) * time.Millisecond):
	case <-ctx.Done():
	}
}

// step does one thing.
func (w *walk) step(ctx context.Context) {
	w.T.Helper()
	switch dice := w.rng.IntN(100); {
	case dice < 30:
		w.did("bursts of writes")
		w.write(ctx, 1+w.rng.IntN(8))
	case dice < 39:
		w.did("clients gone")
		for _, f := range w.followers {
			if w.rng.IntN(2) == 0 {
				f.drop()
			}
		}
	case dice < 48:
		w.did("cuts")
		w.Link.Cut()
		w.write(ctx, w.rng.IntN(5))
		w.Must(w.Link.Heal())
	case dice < 56:
		w.did("mid-frame")
		w.Link.TruncateAfter(int64(1 + w.rng.IntN(6000)))
		w.write(ctx, 1+w.rng.IntN(3))
	case dice < 66:
		w.restart(ctx)
	case dice < 84:
		w.did("configurations")
		w.configure(ctx)
	case dice < 92:
		w.did("pools")
		w.move(ctx)
	default:
		w.did("link waited for")
		w.Online()
	}
	w.pause(ctx, 250)
}

func (w *walk) did(what string) { w.done[what]++ }

// restart ends the hub in one way or the other, and starts it again. Much may happen in
// between.
func (w *walk) restart(ctx context.Context) {
	w.T.Helper()
	end := w.Hub.Kill
	if w.rng.IntN(2) == 0 {
		w.did("hub stopped")
		end = w.Hub.Stop
	} else {
		w.did("hub killed")
	}
	w.Must(end())
	w.write(ctx, w.rng.IntN(5))
	if w.rng.IntN(3) == 0 {
		w.did("configurations without a hub")
		w.configure(ctx)
	}
	if w.rng.IntN(5) == 0 {
		w.did("pools without a hub")
		w.move(ctx)
	}
	w.Must(w.Hub.Start(ctx))
}

// configure changes the file or the ConfigMap.
func (w *walk) configure(ctx context.Context) {
	w.T.Helper()
	maps := w.ControlPlane.Client.CoreV1().ConfigMaps(configNamespace)
	switch dice := w.rng.IntN(6); {
	case dice < 3:
		w.replaceFile()
	case w.ofMap != "" && dice == 3:
		w.force.becomes(w.files...) // the file may not have been read since
		w.Must(maps.Delete(ctx, configName, metav1.DeleteOptions{}))
		w.ofMap = ""
	default:
		w.inMap = newDocument(w.rng, w.inMap, &w.names)
		w.force.becomes(w.inMap)
		created := w.ofMap == ""
		w.ofMap = w.next()
		text, err := w.inMap.text(w.ofMap)
		w.Must(err)
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: configName}, Data: map[string]string{"config.yaml": string(text)}}
		if created {
			_, err = maps.Create(ctx, m, metav1.CreateOptions{})
		} else {
			_, err = maps.Update(ctx, m, metav1.UpdateOptions{})
		}
		w.Must(err)
	}
}

func (w *walk) replaceFile() {
	w.T.Helper()
	w.inFile = newDocument(w.rng, w.inFile, &w.names)
	w.files = append(w.files, w.inFile)
	w.force.becomes(w.inFile)
	w.ofFile = w.stage.write(w.inFile)
}

// move puts the node into another pool, or into none.
func (w *walk) move(ctx context.Context) {
	w.T.Helper()
	w.pool = pick(w.rng, []string{"p1", "p2", ""})
	w.force.joins(w.pool)
	w.Must(w.join(ctx, w.pool))
}

// inForce is what should be in force, and its mark.
func (w *walk) inForce() (document, string) {
	if w.ofMap != "" {
		return w.inMap, w.ofMap
	}
	return w.inFile, w.ofFile
}

// quiet waits until all is in force, and judges the followers; sometimes once more with the
// link cut, without or with another configuration, or another hub.
func (w *walk) quiet(ctx context.Context) {
	w.T.Helper()
	w.Online()
	w.mark(ctx)
	w.settle(ctx)
	if w.T.Failed() || w.rng.IntN(2) == 0 {
		return
	}
	w.Offline()
	restart := w.rng.IntN(2) == 0
	if restart { // in order: what a hub that is killed has not written by then it cannot know
		w.did("hub stopped without a link")
		w.Must(w.Hub.Stop())
	}
	if w.ofMap == "" && w.rng.IntN(3) > 0 {
		w.did("configurations without a link")
		w.replaceFile()
	}
	if restart {
		w.Must(w.Hub.Start(ctx))
	}
	w.settle(ctx)
	w.Online()
}

// mark waits until the truth is known up to now.
func (w *walk) mark(ctx context.Context) {
	w.T.Helper()
	for _, writer := range w.writers {
		rv, err := writer.update(ctx, "b", "mark")
		if apierrors.IsNotFound(err) {
			w.Must(writer.create(ctx, "b", "mark"))
			rv, err = writer.update(ctx, "b", "mark")
		}
		w.Must(err)
		w.Must(w.truths[writer.resource].wait(ctx, rv))
	}
}

// settle waits until what should be in force is, and all followers hold what it makes of
// what there is; and tells what was wrong on the way.
func (w *walk) settle(ctx context.Context) {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(ctx, convergeWithin)
	defer cancel()
	d, mark := w.inForce()
	w.waitInForce(mark)
	w.waitPool(w.pool) // even if nobody asks for it now
	w.did("quiet points")
	for _, f := range w.followers {
		var withheld, changed int
		err := process.Poll(ctx, f.String()+" is right", func(ctx context.Context) (err error) {
			withheld, changed, err = f.agrees(ctx, w.direct, d, w.pool)
			return err
		})
		f.mu.Lock()
		if err != nil && (ctx.Err() == nil || !w.T.Failed()) { // who comes after the first has no time left
			w.T.Errorf("%v\n%q", err, f.trace)
		}
		for _, p := range f.problems {
			w.T.Error(p)
		}
		f.mu.Unlock()
		w.withheld, w.other = w.withheld+withheld, w.other+changed
	}
	if w.T.Failed() {
		text, err := d.text(mark)
		w.T.Logf("pool %q, in force:\n%s%v", w.pool, text, err)
		w.T.Logf("before:\n%s", w.force)
	}
	if w.force.moved() {
		w.Settle() // so that a hub that is killed goes by the pool, too
	}
	w.force.rest(d, w.pool)
	if w.ofMap == "" {
		w.files = []document{w.inFile}
	}
}

// String shows what may be in force.
func (f *force) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	text := fmt.Sprintf("pools %q\n", f.pools)
	for i, d := range f.documents {
		b, err := d.text(fmt.Sprintf("%d", i))
		text += fmt.Sprintf("%s%v\n", b, err)
	}
	return text
}

// tell says what the walk was like. One in which filters had nothing to do shows nothing.
func (w *walk) tell(took time.Duration) {
	w.T.Helper()
	var streams, starts, events, expired int
	for _, f := range w.followers {
		f.mu.Lock()
		streams, starts, events, expired = streams+f.streams, starts+f.starts, events+f.events, expired+f.expired
		f.mu.Unlock()
	}
	w.T.Logf("%v: %v", took.Round(time.Second), w.done)
	w.T.Logf("%d followers: %d events over %d streams, %d from the start, %d expired; at quiet points %d objects were withheld and %d changed",
		len(w.followers), events, streams, starts, expired, w.withheld, w.other)
	if !w.T.Failed() && w.withheld == 0 && w.other == 0 {
		w.T.Error("no filter has done anything")
	}
}
