// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cache is a persistent, node-local watch cache with the API server's
// own semantics. It is an http.RoundTripper between the reverse proxy and the
// upstream: what the API server says is kept as the bytes it said, in scopes
// (what one list or watch asked for, by whom, in which form), and a client is
// answered from upstream or from a scope through the same door.
//
// A scope is complete or it is an error; it is never silently short.
package cache

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/seal"
)

// SourceHeader tells the proxy where an answer comes from: upstream, feed or
// replay. It is not for clients.
const SourceHeader = "Edgehub-Source"

const (
	sourceUpstream = "upstream"
	sourceFeed     = "feed"
	sourceReplay   = "replay"
)

// An Upstream is the way to the API servers.
type Upstream interface {
	http.RoundTripper
	// Up reports whether an API server can be reached, as far as is known.
	Up() bool
	// Changed is closed at the next change of Up.
	Changed() <-chan struct{}
}

// Config is what a Cache needs. Zero limits and periods become the defaults.
type Config struct {
	Upstream Upstream
	// IsUnavailable recognises the upstream's error for a link that is down.
	IsUnavailable func(error) bool
	Journal       *journal.Journal
	// Node is the node's own identity: its feeds outlive their watchers, and
	// are opened again at start.
	Node func() user.Info
	// Sealer encrypts at rest what must not lie there in clear: Secrets, and what
	// PutResponse keeps.
	Sealer *seal.Sealer
	// SealAll encrypts all else too.
	SealAll bool

	// Shared are the resources whose feeds run as the node and serve all who may
	// read them; none by default.
	Shared []schema.GroupResource
	// StrictInitialList sends a WatchList without a resourceVersion to the API server
	// while the link is up, where it is otherwise answered from a live feed.
	StrictInitialList bool

	MaxBytes         int64 // on disk; default 1 GiB
	MaxScopes        int   // default 2,000
	MaxObjects       int   // of one scope; default 50,000
	MaxScopeBytes    int64 // of one scope; default 256 MiB
	MaxObjectBytes   int   // of one object or watch frame; default 8 MiB
	MaxResponseBytes int   // of one whole response; default 16 MiB

	// MaxAges bound for how long what a user was shown is replayed to it.
	MaxAges MaxAges

	FeedLinger        time.Duration // of the node's feeds after their last watcher; default 10 min
	FlushPeriod       time.Duration // default 500 ms
	StatusFlushPeriod time.Duration // of changes of status alone; default 5 min

	Registerer prometheus.Registerer
}

func (cfg *Config) setDefaults() {
	setDefault(&cfg.MaxBytes, 1<<30)
	setDefault(&cfg.MaxScopes, 2000)
	setDefault(&cfg.MaxObjects, 50000)
	setDefault(&cfg.MaxScopeBytes, 256<<20)
	setDefault(&cfg.MaxObjectBytes, 8<<20)
	setDefault(&cfg.MaxResponseBytes, 16<<20)
	setDefault(&cfg.FeedLinger, 10*time.Minute)
	setDefault(&cfg.FlushPeriod, 500*time.Millisecond)
	setDefault(&cfg.StatusFlushPeriod, 5*time.Minute)
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// A Cache answers requests from the API server or from what it said before.
// Safe for concurrent use.
type Cache struct {
	cfg     Config
	journal *journal.Journal
	metrics *metrics
	guard   *guard
	shares  *shares
	now     func() time.Time

	mu     sync.Mutex
	logs   map[logName]*log
	onDisk map[logName]bool // found at start
	feeds  map[*feed]struct{}
	ended  bool // no feed is started any more

	running   sync.WaitGroup // feeds
	flushWake chan struct{}
	downSince atomic.Int64 // Unix nanoseconds; 0 while the link is up
	resets    atomic.Int64 // of the history: what was asked for before is not recorded after
	noInitial sync.Map     // API servers' answer to sendInitialEvents, see feed.go
}

var _ http.RoundTripper = (*Cache)(nil)

// New makes a cache over an open journal. Nothing is read before Run or the first
// request that needs it.
func New(cfg Config) (*Cache, error) {
	cfg.setDefaults()
	if cfg.Sealer == nil {
		return nil, errors.New("cache: Sealer is required")
	}
	c := &Cache{
		cfg: cfg, journal: cfg.Journal, now: time.Now,
		logs: map[logName]*log{}, onDisk: map[logName]bool{}, feeds: map[*feed]struct{}{}, flushWake: make(chan struct{}, 1),
	}
	for _, text := range c.journal.Logs() {
		if name, err := parseLogName(text); err == nil {
			c.onDisk[name] = true
		}
	}
	c.metrics = newMetrics(cfg.Registerer, c)
	c.guard, c.shares = newGuard(c), newShares(c)
	return c, nil
}

// Run loads what is on disk, opens the node's feeds again, writes to disk what
// changes, and evicts. When ctx ends, all feeds and watchers end, and what is not
// on disk yet is written.
func (c *Cache) Run(ctx context.Context) error {
	c.loadAll(ctx)
	c.openPinned(ctx)
	c.running.Go(func() { c.shares.run(ctx) })
	c.maintain(ctx)
	c.endFeeds()
	c.running.Wait()
	return c.flushAll(func(*log) bool { return true })
}

// logOf returns the log of a name, loaded.
func (c *Cache) logOf(name logName) *log {
	c.mu.Lock()
	l := c.logs[name]
	if l == nil {
		l = newLog(c, name)
		c.logs[name] = l
	}
	l.touched = c.now()
	c.mu.Unlock()
	l.openOnce(klog.Background())
	return l
}

// maxEagerLogs is how many logs there may be before a watch alone makes no more: each
// takes some memory before the API server has said that its resource exists.
const maxEagerLogs = 1000

func (c *Cache) crowded() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.logs) >= maxEagerLogs
}

// logIfKnown returns the log of a name if there is one, in memory or on disk; nil
// if not. A request that the API server has not answered yet makes none.
func (c *Cache) logIfKnown(name logName) *log {
	c.mu.Lock()
	known := c.logs[name] != nil || c.onDisk[name]
	c.mu.Unlock()
	if !known {
		return nil
	}
	return c.logOf(name)
}

func (c *Cache) allLogs() []*log {
	c.mu.Lock()
	defer c.mu.Unlock()
	logs := make([]*log, 0, len(c.logs))
	for _, l := range c.logs {
		logs = append(logs, l)
	}
	return logs
}

// RoundTrip answers a request whose context carries its RequestInfo and user.
// An error is an apierrors.APIStatus, or what the upstream returned.
func (c *Cache) RoundTrip(req *http.Request) (*http.Response, error) {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok {
		return nil, errors.New("cache: request without RequestInfo")
	}
	if req.Header.Get("Upgrade") != "" {
		return c.pass(req)
	}
	if !info.IsResourceRequest {
		if req.Method != http.MethodGet || !recordable(req.URL.Path) {
			return c.pass(req)
		}
		caller, err := callerOf(req)
		if err != nil {
			return nil, err
		}
		name := logName{User: caller.user.GetName(), Identity: caller.identity}
		return c.roundTripResponse(req, name, codec.ParseAccept(req.Header.Values("Accept")))
	}
	return c.roundTripResource(req, info)
}

func (c *Cache) roundTripResource(req *http.Request, info *request.RequestInfo) (*http.Response, error) {
	if passOnly(info.Subresource) || !c.recorded(info) {
		return c.pass(req)
	}
	switch info.Verb {
	case "get", "list", "watch":
	case "create", "update", "patch", "delete":
		return c.write(req, info)
	default:
		return c.pass(req)
	}
	if req.Method != http.MethodGet {
		return c.pass(req)
	}
	q, err := parseQuery(req, info)
	if err != nil {
		return nil, err
	}
	switch {
	case info.Verb == "watch":
		return c.watch(req, q)
	case info.Subresource != "":
		return c.roundTripResponse(req, q.name, q.accepted)
	case info.Verb == "list":
		return c.list(req, q)
	}
	return c.get(req, q)
}

// passOnly are the subresources that are a conversation with a node or a pod, or
// hand out credentials; nothing of them is recorded here.
func passOnly(subresource string) bool {
	return slices.Contains([]string{"log", "exec", "attach", "portforward", "proxy", "token", "binding", "eviction"}, subresource)
}

// recorded reports whether a resource is worth recording at all.
func (c *Cache) recorded(info *request.RequestInfo) bool {
	switch {
	case info.Resource == "events" && (info.APIGroup == "" || info.APIGroup == "events.k8s.io"):
		return false
	case info.APIGroup == "metrics.k8s.io", info.APIGroup == "custom.metrics.k8s.io", info.APIGroup == "external.metrics.k8s.io":
		return false
	case info.APIGroup == "authentication.k8s.io", info.APIGroup == "authorization.k8s.io":
		return false
	case info.APIGroup == "coordination.k8s.io" && info.Resource == "leases":
		// A create has no name in its path; the node may only make its own.
		own := "system:node:"+info.Name == c.cfg.Node().GetName() || info.Verb == "create"
		return info.Namespace == "kube-node-lease" && own
	}
	return true
}

// pass sends a request upstream.
func (c *Cache) pass(req *http.Request) (*http.Response, error) {
	resp, err := c.cfg.Upstream.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	resp.Header.Set(SourceHeader, sourceUpstream)
	return resp, nil
}

func (c *Cache) unavailable(err error) bool { return c.cfg.IsUnavailable(err) }

// loadAll reads every log, the node's first.
func (c *Cache) loadAll(ctx context.Context) {
	logger := klog.FromContext(ctx)
	node := identityOf(c.cfg.Node(), nil)
	var own, others []logName
	for _, text := range c.journal.Logs() {
		name, err := parseLogName(text)
		switch {
		case err != nil:
			logger.Error(err, "Log of an unknown name in the journal is left alone", "name", text)
		case name.Identity == node:
			own = append(own, name)
		default:
			others = append(others, name)
		}
	}
	start := c.now()
	for _, name := range append(own, others...) {
		if ctx.Err() != nil {
			return
		}
		c.logOf(name)
	}
	logger.V(2).Info("Journal loaded", "logs", len(own)+len(others), "duration", c.now().Sub(start))
}

// openPinned opens the feeds again that the node had when edgehub stopped, so
// that their scopes are fresh before kubelet asks.
func (c *Cache) openPinned(ctx context.Context) {
	u := c.cfg.Node()
	me := caller{user: u, identity: identityOf(u, nil), credential: http.Header{}}
	ctx = request.WithUser(ctx, u)
	for _, l := range c.allLogs() {
		if l.name.Identity != me.identity {
			continue
		}
		l.mu.Lock()
		for _, s := range l.scopes {
			if s.pinned && s.complete && s.feed == nil {
				c.startFeed(ctx, s, me)
			}
		}
		l.mu.Unlock()
	}
}

// maintain flushes what is due and evicts what is too much, until ctx ends.
func (c *Cache) maintain(ctx context.Context) {
	logger := klog.FromContext(ctx)
	housekeeping := time.NewTicker(15 * time.Second)
	defer housekeeping.Stop()
	retry := time.Duration(0)
	for {
		link := c.noteLink()
		wait := retry
		if next, ok := c.nextFlush(); ok {
			wait = max(wait, next.Sub(c.now()))
		} else {
			wait = time.Hour
		}
		select {
		case <-ctx.Done():
			return
		case <-c.flushWake:
			continue
		case <-link:
			continue
		case <-housekeeping.C:
			c.endIdleFeeds()
			c.vouchAll()
			c.replaceForeign()
			c.evict()
			c.forgetEmptyLogs()
			continue
		case <-time.After(wait):
		}
		now := c.now()
		if err := c.flushAll(func(l *log) bool { return !l.due.IsZero() && !l.due.After(now) }); err != nil {
			c.metrics.journalFailures.Inc()
			c.metrics.journalOK.Set(0)
			logger.Error(err, "Journal is not writable; going on from memory")
			retry = 5 * time.Second
			continue
		}
		c.metrics.journalOK.Set(1)
		retry = 0
		c.evict()
	}
}

// noteLink notes since when the link has been down, and returns what is closed at
// its next change.
func (c *Cache) noteLink() <-chan struct{} {
	changed := c.cfg.Upstream.Changed()
	if c.cfg.Upstream.Up() {
		c.downSince.Store(0)
	} else {
		c.downSince.CompareAndSwap(0, c.now().UnixNano())
	}
	return changed
}

func (c *Cache) wakeFlusher() {
	select {
	case c.flushWake <- struct{}{}:
	default:
	}
}

// nextFlush returns when the first log wants to be flushed.
func (c *Cache) nextFlush() (time.Time, bool) {
	var next time.Time
	for _, l := range c.allLogs() {
		l.mu.RLock()
		due := l.due
		l.mu.RUnlock()
		if !due.IsZero() && (next.IsZero() || due.Before(next)) {
			next = due
		}
	}
	return next, !next.IsZero()
}

// maxFlushes is how many logs are flushed at once.
const maxFlushes = 8

// flushAll flushes the logs that want it and joins the errors.
func (c *Cache) flushAll(want func(*log) bool) error {
	var due []*log
	for _, l := range c.allLogs() {
		l.mu.RLock()
		if !l.due.IsZero() && want(l) {
			due = append(due, l)
		}
		l.mu.RUnlock()
	}
	// Several at a time: the file system commits what waits for it together.
	errs := make([]error, len(due))
	var g errgroup.Group
	g.SetLimit(maxFlushes)
	for i, l := range due {
		g.Go(func() error {
			errs[i] = l.flush()
			return nil
		})
	}
	_ = g.Wait() // errs has all of them
	return errors.Join(errs...)
}

// Ready returns an error while the journal cannot be written.
func (c *Cache) Ready() error {
	if !c.metrics.journalWritable() {
		return fmt.Errorf("the journal is not writable; answers are kept in memory only")
	}
	return nil
}
