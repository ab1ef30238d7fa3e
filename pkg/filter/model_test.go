// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/codec"
)

// modelRounds is how many sequences one run tries.
const modelRounds = 200

// TestModel: clients that follow the rules of client-go's reflector end with what the
// filters make of the truth, whatever happens, and are never told what makes no sense to
// them.
func TestModel(t *testing.T) {
	s := seed(t)
	for round := range uint64(modelRounds) {
		synctest.Test(t, func(t *testing.T) {
			m := newModel(t, rand.New(rand.NewPCG(s, round)))
			for range 60 {
				m.step()
			}
			m.settle()
		})
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
}

// A model is a Chain between a server and clients, with all that can change.
type model struct {
	*rig
	rand    *rand.Rand
	t       testing.TB
	server  *server
	pool    *dependency
	clients []*modelClient
	cancel  context.CancelFunc
	running sync.WaitGroup

	// What is in force.
	mark    string
	hide    string // by configuration
	dynamic bool   // and by pool
}

func newModel(t testing.TB, r *rand.Rand) *model {
	m := &model{t: t, rand: r, server: newServer(t), pool: newDependency("red"), dynamic: true}
	m.rig = newRig(t, m.server, entry(withholding(m.pool), true))
	ctx, cancel := context.WithCancel(t.Context())
	m.cancel = cancel
	m.running.Go(func() { _ = m.Run(ctx) })
	for i := range 4 {
		c := &modelClient{t: t, chain: m.Chain, rand: rand.New(rand.NewPCG(r.Uint64(), 1)), name: fmt.Sprint(i), resource: forms[0].resource, program: []string{"same", "same", "other", "custom"}[i], protobuf: i < 3}
		if i == 3 {
			c.resource = widgets
		}
		m.clients = append(m.clients, c)
		m.running.Go(func() { c.run(ctx) })
	}
	return m
}

func (m *model) color() string { return []string{"red", "green", "blue", ""}[m.rand.IntN(4)] }

// step lets something happen, and mostly waits for what comes of it.
func (m *model) step() {
	switch n := m.rand.IntN(20); {
	case n < 9:
		m.server.set(string('a'+rune(m.rand.IntN(5))), m.color())
	case n < 10:
		m.server.bookmark(m.rand.IntN(2) == 0)
	case n < 12:
		m.pool.set(m.color(), nil)
	case n < 14:
		m.configure()
	case n < 15:
		m.server.breakOff()
	case n < 16:
		m.server.mu.Lock()
		m.server.chunk = m.rand.IntN(40)
		m.server.mu.Unlock()
	case n < 18:
		m.clients[m.rand.IntN(len(m.clients))].drop()
	default:
		<-time.After(time.Duration(m.rand.IntN(5000)) * time.Millisecond)
	}
	if m.rand.IntN(3) > 0 {
		synctest.Wait()
		m.accounts(m.t)
	}
}

func (m *model) configure() {
	m.dynamic, m.mark, m.hide = m.rand.IntN(3) > 0, "", ""
	rules := []Rule{{Name: "pool", Disabled: !m.dynamic}}
	var more []Entry
	if m.rand.IntN(2) == 0 {
		m.mark = []string{"x", "y"}[m.rand.IntN(2)]
		e := entry(marking(m.mark), false)
		e.Version = m.mark
		more = append(more, e)
	}
	if m.rand.IntN(3) == 0 {
		m.hide = []string{"blue", "green"}[m.rand.IntN(2)]
		e := entry(dropping(m.hide), true)
		e.Version = m.hide
		more = append(more, e)
	}
	m.use(rules, more...)
}

// truth is what clients are to hold now.
func (m *model) truth() map[string]thing {
	m.server.mu.Lock()
	defer m.server.mu.Unlock()
	want := maps.Clone(m.server.things)
	for name, o := range want {
		if m.dynamic && o.color == m.pool.get() || o.color == m.hide {
			delete(want, name)
			continue
		}
		o.mark = m.mark
		want[name] = o
	}
	return want
}

// settle lets clients come to rest, and compares.
func (m *model) settle() {
	<-time.After(10 * time.Minute)
	synctest.Wait()
	for _, c := range m.clients {
		c.mu.Lock()
		if diff := cmp.Diff(m.truth(), c.store, cmp.AllowUnexported(thing{}), cmp.Transformer("", func(s map[string]thing) map[string]thing {
			if len(s) == 0 {
				return nil
			}
			return s
		})); diff != "" {
			m.t.Errorf("client %s (%s) at %s does not hold what it is to hold (-want +got):\n%s", c.name, c.program, c.rv, diff)
		}
		c.mu.Unlock()
	}
	m.accounts(m.t)
	m.cancel()
	m.running.Wait()
	m.accounts(m.t)
	if n := m.server.watches(); n != 0 || len(m.watches) != 0 {
		m.t.Errorf("%d watches of the server and %d of the chain go on after all", n, len(m.watches))
	}
	for _, list := range m.sessions.byKey {
		for _, v := range list {
			if v.live {
				m.t.Error("a view is live after all watches have ended")
			}
		}
	}
}

// A modelClient is a reflector. It may lose its connection at any byte, and then goes on
// from any state that it was in since its last list.
type modelClient struct {
	t        testing.TB
	chain    *Chain
	rand     *rand.Rand
	name     string
	resource schema.GroupResource
	program  string
	protobuf bool // it can do either

	mu    sync.Mutex // guards what follows
	store map[string]thing
	rv    string // "": it has to list
	past  []snapshot
	body  io.Closer
}

type snapshot struct {
	rv    string
	store map[string]thing
}

func (c *modelClient) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.body != nil {
		c.body.Close()
	}
}

func (c *modelClient) form() form {
	f := form{resource: c.resource}
	f.rep.Protobuf = c.protobuf && c.rand.IntN(2) == 0
	return f
}

func (c *modelClient) run(ctx context.Context) {
	for ctx.Err() == nil {
		c.mu.Lock()
		begin := c.rv == ""
		if n := len(c.past); n > 0 && c.rand.IntN(3) == 0 {
			back := c.past[c.rand.IntN(n)]
			c.rv, c.store = back.rv, maps.Clone(back.store)
		}
		c.mu.Unlock()
		var err error
		switch {
		case begin && c.rand.IntN(2) == 0:
			err = c.list(ctx)
		case begin:
			err = c.watch(ctx, watchList, true)
		default:
			err = c.watch(ctx, "allowWatchBookmarks=true&resourceVersion="+c.rv, false)
		}
		if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			c.mu.Lock()
			c.rv, c.past = "", nil
			c.mu.Unlock()
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(c.rand.IntN(2000)) * time.Millisecond):
		}
	}
}

func (c *modelClient) at(rv string, store map[string]thing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rv, c.store = rv, store
	c.past = append(c.past, snapshot{rv, maps.Clone(store)})
}

func (c *modelClient) list(ctx context.Context) error {
	f := c.form()
	resp, err := c.chain.RoundTrip(ask{form: f, verb: "list", program: c.program}.request(ctx))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	things, list := decodeList(c.t, f.rep, body)
	store := map[string]thing{}
	for _, o := range things {
		store[o.name] = o
	}
	c.at(list.ResourceVersion, store)
	return nil
}

// limited loses the connection after some bytes.
type limited struct {
	io.Reader
	left int
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errors.New("connection lost")
	}
	n, err := l.Reader.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

func (c *modelClient) watch(ctx context.Context, query string, initial bool) error {
	f := c.form()
	resp, err := c.chain.RoundTrip(ask{form: f, verb: "watch", query: query, program: c.program}.request(ctx))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return apierrors.NewResourceExpired("too old")
	}
	c.mu.Lock()
	c.body = resp.Body
	store, last := maps.Clone(c.store), 0
	c.mu.Unlock()
	if initial {
		store = map[string]thing{}
	} else if last, err = strconv.Atoi(c.rv); err != nil {
		return err
	}
	body := io.Reader(resp.Body)
	if c.rand.IntN(3) == 0 {
		body = &limited{body, c.rand.IntN(2000)}
	}
	frames := codec.NewFrameReader(body, f.rep, 1<<20)
	for {
		frame, err := frames.Next()
		if err != nil {
			return err
		}
		shape, bare, err := codec.DecodeObject(f.rep, frame.Object)
		if err != nil {
			c.t.Errorf("client %s: %v", c.name, err)
			return err
		}
		if frame.Type == watch.Error {
			return statusError(c.t, shape, bare)
		}
		if frame.Type != watch.Bookmark {
			if err := c.apply(store, frame.Type, f.rep, bare, &last, initial); err != nil {
				return err
			}
		}
		m, err := codec.ReadMeta(f.rep, bare)
		if err != nil {
			return err
		}
		if initial && frame.Type != watch.Bookmark {
			continue
		}
		initial = false
		if last, err = strconv.Atoi(m.ResourceVersion); err != nil {
			return err
		}
		c.at(m.ResourceVersion, store)
	}
}

// apply brings an event into the store if it makes sense.
func (c *modelClient) apply(store map[string]thing, kind watch.EventType, rep codec.Representation, bare []byte, last *int, initial bool) error {
	o, err := decodeThing(rep, bare)
	if err != nil {
		return err
	}
	_, held := store[o.name]
	if held != (kind != watch.Added) {
		c.t.Errorf("client %s (%s) is told %s, and holds %v", c.name, c.program, words(kind, o), store)
	}
	if !initial && o.rv <= *last {
		c.t.Errorf("client %s is told %s after %d", c.name, words(kind, o), *last)
	}
	if kind == watch.Deleted {
		delete(store, o.name)
	} else {
		store[o.name] = o
	}
	return nil
}

func statusError(t testing.TB, shape codec.Shape, bare []byte) error {
	t.Helper()
	var st metav1.Status
	var err error
	if shape.Protobuf {
		err = st.Unmarshal(bare)
	} else {
		err = json.Unmarshal(bare, &st)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &apierrors.StatusError{ErrStatus: st}
}
