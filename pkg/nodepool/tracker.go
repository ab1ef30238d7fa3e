// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/follow"
)

// Config is what a Tracker needs. All is required but Registerer.
type Config struct {
	// Source answers as the node.
	Source follow.Source
	// NodeName is asked once, by Run.
	NodeName func() string
	// Up reports whether the API server is reached; LinkChanged's channel is closed at
	// the next change of it.
	Up          func() bool
	LinkChanged func() <-chan struct{}
	// Registerer gets the metrics. Nil: they are not shown.
	Registerer prometheus.Registerer
}

// A Tracker knows which pool this node is in, now. What it knew comes back after a
// restart, link or no link, as its Source answers from what it keeps. Its methods are
// safe for concurrent use.
type Tracker struct {
	cfg Config

	mu         sync.Mutex // guards what follows
	membership Membership
	nodes      []string // nil: not known
	err        error    // why membership is unknown
	changed    chan struct{}
	placed     chan struct{} // closed at the next change of a Place
}

// errUnknown is before the first answer.
var errUnknown = errors.New("the pool of this node is not known yet")

// NewTracker makes a Tracker, which knows nothing before Run.
func NewTracker(cfg Config) (*Tracker, error) {
	if cfg.Source.Transport == nil || cfg.Source.User == nil || cfg.Source.Changed == nil || cfg.NodeName == nil || cfg.Up == nil || cfg.LinkChanged == nil {
		return nil, errors.New("nodepool: Source, NodeName, Up and LinkChanged are required")
	}
	t := &Tracker{cfg: cfg, membership: Membership{State: Unknown}, err: errUnknown, changed: make(chan struct{}), placed: make(chan struct{})}
	return t, register(cfg.Registerer, t)
}

// Membership is which pool the node is in.
func (t *Tracker) Membership() Membership {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.membership
}

// Nodes returns the names of the nodes of this node's pool, sorted, as the NodePool's
// status has them; this node may be missing. They are the caller's. It is none if the
// node is in no pool, and false if the NodePool has not been read.
func (t *Tracker) Nodes() (names []string, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.nodes), t.nodes != nil
}

// Ready is nil once the membership is known, stale or not.
func (t *Tracker) Ready() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// Changed is closed at the next change of Membership, Nodes or Ready.
func (t *Tracker) Changed() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changed
}

// A Place is what filters go by: which pool the node is in, and with whom.
type Place struct{ t *Tracker }

// Place is that of the Tracker's node.
func (t *Tracker) Place() Place { return Place{t} }

// Name is that of the pool, "" for none; known is false as long as that is open.
func (p Place) Name() (name string, known bool) {
	m := p.t.Membership()
	return m.Pool, m.State != Unknown
}

// Nodes are the Tracker's.
func (p Place) Nodes() (names []string, known bool) { return p.t.Nodes() }

// Ready is the Tracker's.
func (p Place) Ready() error { return p.t.Ready() }

// Changed is closed at the next change of any of these. It is no change that the link comes
// or goes.
func (p Place) Changed() <-chan struct{} {
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	return p.t.placed
}

// Run keeps the Tracker up to date until ctx ends. It fails only if the node has no name.
func (t *Tracker) Run(ctx context.Context) error {
	name := t.cfg.NodeName()
	if name == "" {
		return errors.New("nodepool: the node has no name")
	}
	node := follow.New(t.cfg.Source, follow.Query{GroupVersionResource: schema.GroupVersionResource{Version: "v1", Resource: "nodes"}, Name: name}, readLabels)
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = node.Run(ctx) })

	pool := newSearch(&t.cfg, "") // of no pool: nothing to search
	stop := func() {}
	defer func() { stop() }()
	for {
		nodeChanged, linkChanged := node.Changed(), t.cfg.LinkChanged()
		l, there := node.Get("", name)
		if l.pool != pool.name {
			stop()
			pool, stop = newSearch(&t.cfg, l.pool), func() {}
			if l.pool != "" {
				stop = start(ctx, pool.run)
			}
		}
		a, poolChanged, err := pool.latest()
		if !there {
			t.set(ctx, Membership{Node: name, State: Unknown}, nil, absentBecause(name, node.Err()))
		} else {
			t.set(ctx, judge(name, l, a, t.cfg.Up()), nodesOf(l, a), err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-nodeChanged:
		case <-linkChanged:
		case <-poolChanged:
		}
	}
}

// start runs f until the function that it returns is called, which waits for it.
func start(ctx context.Context, f func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { f(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

func absentBecause(node string, err error) error {
	if err == nil {
		return fmt.Errorf("there is no Node %s", node)
	}
	return fmt.Errorf("node %s: %w", node, err)
}

// nodesOf are nil where they are not known.
func nodesOf(l labels, a answer) []string {
	if l.pool == "" || a.kind == found {
		return append([]string{}, a.pool.Nodes...)
	}
	return nil
}

// set makes it known. err counts only where the membership is unknown.
func (t *Tracker) set(ctx context.Context, m Membership, nodes []string, err error) {
	if m.State != Unknown {
		err = nil
	} else if err == nil {
		err = errUnknown
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.err = err
	was := t.membership
	moved := m != was
	others := !slices.Equal(nodes, t.nodes) || (nodes == nil) != (t.nodes == nil)
	if !moved && !others {
		return
	}
	t.membership, t.nodes = m, nodes
	if others || m.Pool != was.Pool || (m.State == Unknown) != (was.State == Unknown) {
		close(t.placed)
		t.placed = make(chan struct{})
	}
	close(t.changed)
	t.changed = make(chan struct{})
	if moved && (m.State != Unknown || was.State != Unknown) {
		klog.FromContext(ctx).Info("Membership of this node changed", "node", m.Node, "pool", m.Pool, "type", m.Type,
			"hostNetwork", m.HostNetwork, "state", m.State, "source", m.Origin, "drift", m.Drift)
	}
}

func readLabels(shape codec.Shape, bare []byte) (labels, bool, error) {
	var n corev1.Node
	var err error
	if shape.Protobuf {
		err = n.Unmarshal(bare)
	} else {
		err = json.Unmarshal(bare, &n)
	}
	l := labels{pool: strings.ToValidUTF8(n.Labels[PoolLabel], "")} // metrics take nothing else
	l.hostNetwork, l.hasHostNetwork = n.Labels[HostNetworkLabel]
	return l, err == nil, err
}
