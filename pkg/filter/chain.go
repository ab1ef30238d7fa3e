// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

// readyPatience is how long a request waits for what a filter has to know.
const readyPatience = 10 * time.Second

// Config is what a Chain needs.
type Config struct {
	// Next answers; RequestInfo and User are in the context of its requests.
	Next http.RoundTripper
	// Entries are all filters and observers, in the order in which filters are asked.
	Entries []Entry
	// Dir is where large lists are gathered in files without a name. Empty: in memory.
	Dir string
	// InMemory reports that a resource must not touch the disk in clear. Nil: none.
	InMemory func(schema.GroupResource) bool

	// Former are rules that were in force before a restart, and Remember, which is called
	// by Use before anything else, takes down what Former is to be after the next one.
	// Nil: nothing is remembered.
	Former   []Former
	Remember func([]Former)

	Registerer prometheus.Registerer
}

// A Chain is an http.RoundTripper that answers as Next does, through the filters that are
// in force for the request. Safe for concurrent use.
type Chain struct {
	cfg      Config
	metrics  *metrics
	rules    atomic.Pointer[ruleset]
	sessions *sessions
	changed  chan struct{} // wakes Run; holds one

	using   sync.Mutex // one Use at a time
	mu      sync.Mutex // guards what follows
	watches map[expirer]struct{}
}

// An expirer is a watch that is under way.
type expirer interface {
	// current reports whether it would still be filtered in the same way.
	current() bool
	// expire ends it such that its client lists again.
	expire()
}

var _ http.RoundTripper = (*Chain)(nil)

// New makes a chain in which the entries are in force that are so by default.
func New(cfg Config) (*Chain, error) {
	if cfg.InMemory == nil {
		cfg.InMemory = func(schema.GroupResource) bool { return false }
	}
	if cfg.Remember == nil {
		cfg.Remember = func([]Former) {}
	}
	cfg.Former = slices.Clone(cfg.Former)
	for i, f := range cfg.Former {
		if f.Until.IsZero() {
			cfg.Former[i].Until = time.Now() // it was until the end
		}
	}
	c := &Chain{cfg: cfg, metrics: newMetrics(cfg.Registerer), sessions: newSessions(), changed: make(chan struct{}, 1), watches: map[expirer]struct{}{}}
	if err := c.Use(nil, nil); err != nil {
		return nil, err
	}
	return c, nil
}

// A ruleset is what is in force, until the next Use.
type ruleset struct {
	byResource map[schema.GroupResource][]*inForce
	dependents []Dependent
	former     []Former
}

// A Former is a rule that was in force: who watched through it may still hold what it
// showed, and lists again before it goes on.
type Former struct {
	Rule  Rule      `json:"rule"`
	Until time.Time `json:"until"` // zero: it still was when this was taken down
}

const (
	// maxFormer bounds how many of them are remembered, and formerAge for how long.
	maxFormer = 256
	formerAge = 24 * time.Hour
)

// An inForce is an entry with the rule that puts it in force.
type inForce struct {
	*Entry
	rule Rule
}

// Use puts the rules in force, and the entries more after all others, each of which must
// have a rule. What is not named is in force if it is so by default. On an error all stays
// as it was.
func (c *Chain) Use(rules []Rule, more []Entry) error {
	c.using.Lock()
	defer c.using.Unlock()
	all := slices.Concat(c.cfg.Entries, more)
	set := &ruleset{byResource: map[schema.GroupResource][]*inForce{}}
	known := map[string]bool{}
	for i := range all {
		e := &all[i]
		if known[e.Name()] {
			return fmt.Errorf("filter %s is there twice", e.Name())
		}
		known[e.Name()] = true
		at := slices.IndexFunc(rules, func(r Rule) bool { return r.Name == e.Name() })
		rule := Rule{Disabled: !e.Default}
		if at >= 0 {
			rule = rules[at]
		}
		if rule.Disabled {
			continue
		}
		if f, ok := e.Filter.(Conditional); ok && f.Usable() != nil {
			return fmt.Errorf("filter %s: %w", e.Name(), f.Usable())
		}
		set.add(e, rule)
	}
	for _, r := range rules {
		if !known[r.Name] {
			return fmt.Errorf("filter %s is not known", r.Name)
		}
	}
	set.former = c.cfg.Former
	if old := c.rules.Load(); old != nil {
		set.former = old.past(time.Now())
	}
	c.cfg.Remember(set.past(time.Time{})) // before anything is shown by it
	c.rules.Store(set)
	c.metrics.use(all, set)
	c.wake()
	return nil
}

func (s *ruleset) add(e *Entry, r Rule) {
	if r.Clients == nil {
		r.Clients = e.Clients
	}
	if r.Resources == nil {
		r.Resources = e.Resources
	}
	if r.Verbs == nil {
		r.Verbs = e.Verbs
	}
	if e.Filter != nil && (slices.Contains(r.Verbs, "list") || slices.Contains(r.Verbs, "watch")) {
		r.Verbs = slices.Concat(r.Verbs, []string{"list", "watch"}) // a watch goes on from a list
	}
	for _, gr := range r.Resources {
		s.byResource[gr] = append(s.byResource[gr], &inForce{e, r})
	}
	if d, ok := e.Filter.(Dependent); ok {
		s.dependents = append(s.dependents, d)
	}
}

// past is what will have been in force when the ruleset ends.
func (s *ruleset) past(until time.Time) []Former {
	past := slices.DeleteFunc(slices.Clone(s.former), func(o Former) bool { return time.Since(o.Until) > formerAge })
	for _, list := range s.byResource {
		for _, f := range list {
			if f.Filter == nil {
				continue
			}
			past = slices.DeleteFunc(past, func(o Former) bool { return reflect.DeepEqual(o.Rule, f.rule) })
			past = append(past, Former{f.rule, until})
		}
	}
	return past[max(0, len(past)-maxFormer):]
}

// matches reports whether the filter is for a request.
func (u *Rule) matches(r *Request) bool {
	return slices.Contains(u.Resources, schema.GroupResource{Group: r.APIGroup, Resource: r.Resource}) && slices.Contains(u.Verbs, r.Verb) && slices.ContainsFunc(u.Clients, func(c Client) bool {
		return (c.User == "" || c.User == r.User.GetName()) && (c.Program == "" || c.Program == r.Program)
	})
}

// tracked reports whether the client may hold, by a filter that is or was in force,
// something else than what there is.
func (s *ruleset) tracked(r *Request, filters []*inForce) bool {
	return len(filters) > 0 || slices.ContainsFunc(s.former, func(f Former) bool { return f.Rule.matches(r) })
}

// match returns what is in force for a request: filters and observers, each in order.
func (s *ruleset) match(r *Request) (filters []*inForce, observers []Observer) {
	for _, f := range s.byResource[schema.GroupResource{Group: r.APIGroup, Resource: r.Resource}] {
		switch {
		case !f.rule.matches(r):
		case f.Filter != nil:
			filters = append(filters, f)
		default:
			observers = append(observers, f.Observer)
		}
	}
	return filters, observers
}

// requestOf reads off a request what filters go by; nil if none is for it. A status is
// read as the object that it is of.
func requestOf(req *http.Request) *Request {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok || !info.IsResourceRequest || info.Subresource != "" && info.Subresource != "status" {
		return nil
	}
	u, ok := request.UserFrom(req.Context())
	if !ok || req.Method != http.MethodGet && (req.Method != http.MethodHead || info.Verb == "watch") {
		return nil
	}
	return &Request{RequestInfo: info, User: u, Program: programOf(req.UserAgent())}
}

// A pipeline is the filters of one request, as they were when it began.
type pipeline struct {
	chain   *Chain
	request *Request
	filters []*inForce

	mu      sync.Mutex // guards what follows
	rules   *ruleset
	changed []<-chan struct{} // of what they depend on
}

// newPipeline begins with the filters of a request. Their inputs are what they are from
// now on.
func (c *Chain) newPipeline(r *Request, rules *ruleset, filters []*inForce) *pipeline {
	p := &pipeline{chain: c, request: r, filters: filters, rules: rules}
	for _, f := range filters {
		if d, ok := f.Filter.(Dependent); ok {
			p.changed = append(p.changed, d.Changed())
		}
	}
	return p
}

// withholds reports whether an object may be dropped.
func (p *pipeline) withholds() bool {
	return slices.ContainsFunc(p.filters, func(f *inForce) bool { return f.Withholds })
}

// current reports whether the request would still be filtered in the same way.
func (p *pipeline) current() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ch := range p.changed {
		select {
		case <-ch:
			return false
		default:
		}
	}
	now := p.chain.rules.Load()
	if now == p.rules {
		return true
	}
	filters, _ := now.match(p.request)
	if !slices.EqualFunc(filters, p.filters, func(a, b *inForce) bool { return a.Name() == b.Name() && a.Version == b.Version }) {
		return false
	}
	p.rules = now
	return true
}

// ready waits until all filters know what they depend on, and returns the pipeline that
// goes by that.
func (c *Chain) ready(ctx context.Context, r *Request) (p *pipeline, err error) {
	timer := time.NewTimer(readyPatience)
	defer timer.Stop()
	for {
		rules := c.rules.Load()
		filters, _ := rules.match(r)
		p = c.newPipeline(r, rules, filters)
		waits := p.changed
		err = nil
		for _, f := range filters {
			if d, ok := f.Filter.(Dependent); ok && d.Ready() != nil {
				err = errors.Join(err, fmt.Errorf("edgehub: filter %s is not ready: %w", f.Name(), d.Ready()))
			}
		}
		if err == nil {
			return p, nil
		}
		cases := []reflect.SelectCase{{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())}, {Dir: reflect.SelectRecv, Chan: reflect.ValueOf(timer.C)}}
		for _, ch := range waits {
			cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ch)})
		}
		if at, _, _ := reflect.Select(cases); at < 2 {
			for _, f := range filters {
				c.metrics.objects.WithLabelValues(f.Name(), verdictError).Inc()
			}
			return nil, apierrors.NewServiceUnavailable(err.Error())
		}
	}
}

// apply asks the filters one after the other, and returns the bytes to send unless the
// verdict is Drop.
func (p *pipeline) apply(ctx context.Context, o *Object) (Verdict, []byte, error) {
	changed := Keep
	for _, f := range p.filters {
		start := time.Now()
		v, err := f.Filter.Apply(ctx, o)
		if v == Drop && err == nil && !f.Withholds {
			err = errors.New("it may not withhold objects")
		}
		p.chain.metrics.count(f.Name(), v, err, time.Since(start))
		switch {
		case err != nil:
			return Keep, nil, p.failed(ctx, f, o, err)
		case v == Drop:
			return Drop, nil, nil
		case v == Change:
			changed = Change
		}
	}
	if changed == Keep {
		return Keep, o.bare, nil
	}
	b, err := o.Encode()
	if err != nil {
		err = p.failed(ctx, p.filters[len(p.filters)-1], o, err)
	}
	return Change, b, err
}

// failed logs why a response fails, and returns what its client is told.
func (p *pipeline) failed(ctx context.Context, f *inForce, o *Object, err error) error {
	m, _ := o.Meta() // a part of the message only
	klog.FromContext(ctx).Error(err, "Filter cannot judge an object; the response fails", "filter", f.Name(), "resource", p.request.Resource, "object", klog.KRef(m.Namespace, m.Name))
	return apierrors.NewInternalError(fmt.Errorf("edgehub: filter %s cannot judge %s %s/%s", f.Name(), p.request.Resource, m.Namespace, m.Name))
}

func (c *Chain) wake() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// Run ends watches whose filters have changed, so that their clients list again, until ctx
// ends.
func (c *Chain) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		rules := c.rules.Load()
		cases := []reflect.SelectCase{{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())}, {Dir: reflect.SelectRecv, Chan: reflect.ValueOf(c.changed)}}
		for _, d := range rules.dependents {
			cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(d.Changed())})
		}
		c.expireWatches()
		reflect.Select(cases)
	}
	return nil
}

func (c *Chain) expireWatches() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for w := range c.watches {
		if !w.current() {
			w.expire()
		}
	}
}

// track has a watch end when its filters change, until untrack.
func (c *Chain) track(w expirer) {
	c.mu.Lock()
	c.watches[w] = struct{}{}
	c.mu.Unlock()
	if !w.current() {
		w.expire() // Run may have looked before it was there
	}
}

func (c *Chain) untrack(w expirer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.watches, w)
}
