// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hostnetworkpool is an observer of what kubelet is told of its pods. It never
// alters a pod: it reports those that cannot work as they are on a node whose pool has no
// pod network, or that want the same host port, in metrics, in the log, in a JSON
// document and in one Event per pod and finding.
//
// One caveat: it sees what kubelet lists and watches, and asks by itself only for what
// kubelet has been told before this process began. Pods from manifests on the node are
// known by their mirrors in the API server.
package hostnetworkpool

import (
	"context"
	"errors"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/nodepool"
)

// Name is that of the observer in configuration, logs and metrics.
const Name = "hostnetworkpool"

// settlePeriod is how long changes are gathered before findings are computed anew.
const settlePeriod = time.Second

// Config is what an Observer needs. All is required but Pods, Load, Store and
// Registerer.
type Config struct {
	// Node is this node's own identity, and NodeName its name.
	Node     func() user.Info
	NodeName func() string
	// Membership is which pool the node is in; Changed's channel is closed when that
	// changes.
	Membership func() nodepool.Membership
	Changed    func() <-chan struct{}
	// Pods tells of the pods of the node that there are, such as kubelet would list them,
	// and returns nil only if these were all. Nil: only kubelet's own requests tell.
	Pods func(ctx context.Context, see func(watch.EventType, codec.Shape, []byte)) error
	// Events takes requests to create Events, whose context has RequestInfo and User.
	Events http.RoundTripper
	// Load returns what Store was last given, also before a restart: some kilobytes that
	// say which Events were sent. Without them these are sent again after a restart, and
	// the API server sees that it has them.
	Load  func() ([]byte, bool)
	Store func([]byte)
	// Registerer gets the metrics. Nil: they are counted and not shown.
	Registerer prometheus.Registerer
}

var errNoPods = errors.New("nobody can be asked for pods")

func (c *Config) complete() error {
	if c.Node == nil || c.NodeName == nil || c.Membership == nil || c.Changed == nil || c.Events == nil {
		return errors.New("hostnetworkpool: Node, NodeName, Membership, Changed and Events are required")
	}
	if c.Pods == nil {
		c.Pods = func(context.Context, func(watch.EventType, codec.Shape, []byte)) error { return errNoPods }
	}
	if c.Load == nil {
		c.Load = func() ([]byte, bool) { return nil, false }
	}
	if c.Store == nil {
		c.Store = func([]byte) {}
	}
	return nil
}

// An Observer sees the pods of the node pass by. As an http.Handler it answers with a
// [Document]. Safe for concurrent use.
type Observer struct {
	cfg     Config
	metrics *metrics
	reports *reporter
	dirty   chan struct{} // 1: pods have changed since findings were computed
	asked   chan struct{} // closed when kubelet is there
	first   sync.Once

	mu   sync.Mutex        // guards what follows
	pods map[string]*entry // by uid
	// byName are those of pods that came last under their namespace/name.
	byName map[string]*entry
	key    []byte // reused to look up in byName
	open   map[*observation]struct{}
	clock  uint64 // counts what was seen
	whole  bool   // once pods were all there are
	shown  view
}

// A view is what was last computed. It does not change.
type view struct {
	membership nodepool.Membership
	findings   []Finding
	changed    time.Time // 0: never
}

var (
	_ filter.Observer = (*Observer)(nil)
	_ http.Handler    = (*Observer)(nil)
)

// New makes an Observer. It reads nothing yet.
func New(cfg Config) (*Observer, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, err
	}
	return &Observer{
		cfg: cfg, metrics: m, reports: newReporter(cfg, m), dirty: make(chan struct{}, 1), asked: make(chan struct{}), pods: map[string]*entry{}, byName: map[string]*entry{}, open: map[*observation]struct{}{},
		shown: view{membership: nodepool.Membership{State: nodepool.Unknown}},
	}, nil
}

// Name is the observer's.
func (o *Observer) Name() string { return Name }

// Observe is of interest for lists and watches of all pods of this node, by the node
// itself: that is kubelet.
func (o *Observer) Observe(r *filter.Request) filter.Observation {
	if !o.concerns(r) {
		return nil
	}
	o.first.Do(func() { close(o.asked) })
	return o.begin()
}

func (o *Observer) begin() *observation {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := &observation{observer: o, since: o.clock, gone: map[string]bool{}}
	o.open[s] = struct{}{}
	return s
}

func (o *Observer) concerns(r *filter.Request) bool {
	i := r.RequestInfo
	if r.User == nil || r.User.GetName() == "" || r.User.GetName() != o.cfg.Node().GetName() {
		return false
	}
	if !i.IsResourceRequest || i.APIGroup != "" || i.Resource != "pods" || i.Subresource != "" || i.Verb != "list" && i.Verb != "watch" {
		return false
	}
	if i.Namespace != "" || i.Name != "" || i.LabelSelector != "" {
		return false
	}
	selector, err := fields.ParseSelector(i.FieldSelector)
	if err != nil || len(selector.Requirements()) != 1 {
		return false
	}
	node, ok := selector.RequiresExactMatch("spec.nodeName")
	return ok && node != "" && node == o.cfg.NodeName()
}

// Run computes findings and sends Events until ctx ends.
func (o *Observer) Run(ctx context.Context) error {
	o.reports.load(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { o.reports.run(ctx) })
	running.Go(func() { o.fill(ctx) })
	for {
		membership := o.cfg.Changed()
		o.compute(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-o.dirty:
		case <-membership:
		}
		if !wait(ctx, settlePeriod) {
			return nil
		}
		select {
		case <-o.dirty:
		default:
		}
	}
}

// wait returns false if ctx ends before d has passed.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// compute finds what there is to find now, and tells of the difference.
func (o *Observer) compute(ctx context.Context) {
	m := o.cfg.Membership()
	o.mu.Lock()
	pods := make([]*pod, 0, len(o.pods))
	for _, e := range o.pods {
		pods = append(pods, e.pod)
	}
	was, whole := o.shown, o.whole
	o.mu.Unlock()

	is := view{membership: m, findings: find(pods, m), changed: was.changed}
	if m != was.membership || !slices.Equal(is.findings, was.findings) {
		is.changed = time.Now()
	}
	logDifference(klog.FromContext(ctx), was.findings, is.findings)
	o.metrics.show(is.findings)
	// What does not show as long as something is unknown is not gone.
	o.reports.want(is.findings, whole && m.State != nodepool.Unknown)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.shown = is
}

func logDifference(logger klog.Logger, was, is []Finding) {
	before, after := byID(was), byID(is)
	for _, f := range is {
		if _, ok := before[f.id()]; !ok {
			logger.Info("Finding appeared", f.keysAndValues()...)
		}
	}
	for _, f := range was {
		if _, ok := after[f.id()]; !ok {
			logger.Info("Finding is gone", f.keysAndValues()...)
		}
	}
}

func byID(findings []Finding) map[string]Finding {
	m := make(map[string]Finding, len(findings))
	for _, f := range findings {
		m[f.id()] = f
	}
	return m
}

// touch tells Run that pods have changed.
func (o *Observer) touch() {
	select {
	case o.dirty <- struct{}{}:
	default:
	}
}

// same reports whether two states of a pod come to the same findings.
func same(a, b *pod) bool {
	x, y := *a, *b
	x.resourceVersion, y.resourceVersion = "", ""
	return reflect.DeepEqual(x, y)
}
