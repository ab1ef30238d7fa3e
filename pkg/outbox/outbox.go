// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package outbox keeps the Events that kubelet creates while the link to the API
// server is down, durably and within bounds, and sends them when it is back: one
// at a time, oldest first, as the node. The offline contract puts them in.
//
// One caveat: an Event may be sent twice. What was sent is noted on disk a little
// later, and an answer can be lost on the way. The API server then says that the
// Event exists already, which is as good as created.
package outbox

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/http/httpguts"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/cache/journal"
)

// ErrTooLarge is returned by Put for an Event that is larger than one may be: it
// would never be taken.
var ErrTooLarge = errors.New("event is too large")

const (
	// MaxEventBytes bounds the body of one Event. etcd takes 1.5 MiB for
	// any object; an Event has some kilobytes.
	MaxEventBytes = 1 << 20

	defaultMaxEvents = 2000
	defaultMaxBytes  = 8 << 20

	// Names and namespaces of objects end there.
	maxNameBytes = 253
	// The longest media types that a client of the API server asks for have 60.
	maxContentTypeBytes = 256
)

// Config is what an Outbox needs. What has no default is required.
type Config struct {
	// Journal is the outbox's own: it keeps one log there. Whoever opened it closes
	// it, after Run has returned.
	Journal *journal.Journal

	// Upstream gets what is sent: requests without credential, whose context names
	// Node as the user. IsUnavailable tells those of its errors that mean that there
	// is no link. The channel that Changed returns is closed at the next change of Up.
	Upstream      http.RoundTripper
	IsUnavailable func(error) bool
	Up            func() bool
	Changed       func() <-chan struct{}
	Node          func() user.Info

	// Seal and Open encrypt the bodies on disk. What was sealed for one place must
	// not open in another. Both nil: bodies are in clear.
	Seal, Open func(b []byte, place string) ([]byte, error)
	// Current reports whether a body on disk is as Seal would leave it now; what is not
	// is written anew by Load. Nil: all are.
	Current func(b []byte) bool

	// MaxEvents and MaxBytes, of the bodies as they are on disk, bound the queue:
	// beyond them the oldest Events are dropped. Defaults 2,000 and 8 MiB. The disk
	// may have to hold twice MaxBytes, and for moments half of it more.
	MaxEvents int
	MaxBytes  int64

	// Registerer gets the metrics. Nil: they are counted and not shown.
	Registerer prometheus.Registerer
}

func (c *Config) complete() error {
	if c.Journal == nil || c.Upstream == nil || c.IsUnavailable == nil || c.Up == nil || c.Changed == nil || c.Node == nil {
		return errors.New("outbox: Journal, Upstream, IsUnavailable, Up, Changed and Node are required")
	}
	if (c.Seal == nil) != (c.Open == nil) {
		return errors.New("outbox: Seal and Open go together")
	}
	if c.Seal == nil {
		asIs := func(b []byte, _ string) ([]byte, error) { return b, nil }
		c.Seal, c.Open = asIs, asIs
	}
	if c.Current == nil {
		c.Current = func([]byte) bool { return true }
	}
	if c.MaxEvents == 0 {
		c.MaxEvents = defaultMaxEvents
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = defaultMaxBytes
	}
	if c.MaxEvents < 0 || c.MaxBytes < 0 {
		return fmt.Errorf("outbox: MaxEvents %d or MaxBytes %d is negative", c.MaxEvents, c.MaxBytes)
	}
	return nil
}

// An Event is a request to create one.
type Event struct {
	// Group is "" for core/v1 and "events.k8s.io" for events.k8s.io/v1.
	Group           string
	Namespace, Name string
	// ContentType is the request's. Empty: the API server guesses.
	ContentType string
	// Body is the Event as the client sent it, at most MaxEventBytes.
	Body []byte
}

const eventsGroup = "events.k8s.io"

// check wants what can be sent later: nobody is there then to be told.
func (e *Event) check() error {
	if e.Group != "" && e.Group != eventsGroup {
		return fmt.Errorf("outbox: %q is not a group of Events", e.Group)
	}
	for what, s := range map[string]string{"namespace": e.Namespace, "name": e.Name} {
		if s == "" || len(s) > maxNameBytes || !utf8.ValidString(s) || len(content.IsPathSegmentName(s)) > 0 {
			return fmt.Errorf("outbox: %q is no %s of an Event", s[:min(len(s), maxNameBytes)], what)
		}
	}
	if len(e.ContentType) > maxContentTypeBytes || !httpguts.ValidHeaderFieldValue(e.ContentType) {
		return errors.New("outbox: the Content-Type is no media type")
	}
	if len(e.Body) > MaxEventBytes {
		return fmt.Errorf("outbox: %w: %d bytes", ErrTooLarge, len(e.Body))
	}
	return nil
}

// A key is what an Event is known by in the API server, whatever its group.
type key struct{ namespace, name string }

// An item is an Event that waits; its body is on disk.
type item struct {
	meta
	ref journal.Ref // changes with a rewrite; guarded as Outbox.queue is
}

func (i *item) key() key    { return key{i.Namespace, i.Name} }
func (i *item) size() int64 { return int64(i.ref.Length) }

// An Outbox is the queue of Events of one node. Safe for concurrent use.
type Outbox struct {
	cfg     Config
	metrics *metrics
	added   chan struct{} // 1: there is an Event to send
	popped  chan struct{} // 1: there is something to note on disk

	// disk is held while the log is read or written, and never while something is
	// sent. What follows changes with both locks held, so that it is always what the
	// log says; it may be read with either.
	disk sync.Mutex
	mu   sync.RWMutex

	log   *journal.Log // nil: not read yet
	queue []*item      // by place
	items map[key]*item
	bytes int64
	next  uint64 // the place of the next Event
	gone  uint64 // no Event up to this place waits any more
	noted uint64 // as gone, on disk
	// unnoted is how many Events left the queue since noted.
	unnoted int
}

// New makes an Outbox. It reads nothing yet.
func New(cfg Config) (*Outbox, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	o := &Outbox{cfg: cfg, added: make(chan struct{}, 1), popped: make(chan struct{}, 1), items: map[key]*item{}, next: 1}
	var err error
	if o.metrics, err = newMetrics(cfg.Registerer, o); err != nil {
		return nil, err
	}
	return o, nil
}

// Holds reports whether an Event of this name waits, or is being sent.
func (o *Outbox) Holds(namespace, name string) bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.items[key{namespace, name}] != nil
}

// Empty reports whether nothing waits.
func (o *Outbox) Empty() bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return len(o.queue) == 0
}

// Put adds an Event to the queue. When it returns nil the Event is on disk; with
// an error nothing of it is kept, and what waited before does so still. It waits
// for the disk, but not for what is being sent.
//
// An Event of the same namespace and name that waits already is replaced, in its
// place; if it is being sent just then, the new one is sent after it. If the queue
// is full the oldest are dropped, also the one that is being sent.
func (o *Outbox) Put(ctx context.Context, e Event) error {
	if err := e.check(); err != nil {
		return err
	}
	it := &item{meta: meta{Group: e.Group, Namespace: e.Namespace, Name: e.Name, ContentType: e.ContentType}}
	body, err := o.cfg.Seal(e.Body, it.sealPlace())
	if err != nil {
		return fmt.Errorf("outbox: seal: %w", err)
	}
	if int64(len(body)) > o.cfg.MaxBytes {
		return fmt.Errorf("outbox: %w: %d bytes", ErrTooLarge, len(body))
	}
	o.disk.Lock()
	defer o.disk.Unlock()
	if err := ctx.Err(); err != nil {
		return err // the client has gone while the disk was slow
	}
	if err := o.load(ctx); err != nil {
		return err
	}
	if o.wasteful() {
		// Not put off when it fails: the disk is to hold so much and no more.
		if err := o.rewrite(ctx); err != nil {
			return err
		}
	}
	drop := o.placeFor(it, int64(len(body)))
	refs, err := o.log.Append(o.entries(it, body, drop))
	if err != nil {
		return fmt.Errorf("outbox: %w", err)
	}
	it.ref = refs[len(refs)-1]
	if n := o.insert(it, drop); n > 0 {
		o.metrics.dropped.WithLabelValues("full").Add(float64(n))
		klog.FromContext(ctx).V(2).Info("Outbox is full, the oldest Events were dropped", "events", n)
	}
	signal(o.added)
	return nil
}

// entries are what Put writes: together with the Event, that others are gone.
func (o *Outbox) entries(it *item, body []byte, drop int) []journal.Entry {
	gone := o.gone
	if drop > 0 {
		gone = o.queue[drop-1].Place
	}
	if gone == o.noted {
		return []journal.Entry{it.entry(body)}
	}
	return []journal.Entry{goneEntry(gone), it.entry(body)}
}

// placeFor gives a new item its place, and says how many of the oldest have to go
// for it. The caller holds disk.
func (o *Outbox) placeFor(it *item, size int64) (drop int) {
	old := o.items[it.key()]
	n, bytes := len(o.queue), o.bytes+size
	if old != nil {
		n, bytes = n-1, bytes-old.size()
	}
	for ; n >= o.cfg.MaxEvents || bytes > o.cfg.MaxBytes; drop++ {
		if d := o.queue[drop]; d != old {
			n, bytes = n-1, bytes-d.size()
		}
	}
	it.Place = o.next
	// An old one among those that go leaves no place: all up to there is gone.
	if old != nil && (drop == 0 || old.Place > o.queue[drop-1].Place) {
		it.Place = old.Place
	}
	return drop
}

// insert does what placeFor planned, once it is on disk. It returns how many
// Events were dropped. The caller holds disk.
func (o *Outbox) insert(it *item, drop int) (dropped int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	old := o.items[it.key()]
	for range drop {
		if o.pop() != old {
			dropped++
		}
	}
	o.noted, o.unnoted = o.gone, 0
	if it.Place == o.next {
		o.queue = append(o.queue, it)
		o.next++
	} else {
		o.queue[slices.Index(o.queue, old)] = it
		o.bytes -= old.size()
	}
	o.items[it.key()] = it
	o.bytes += it.size()
	return dropped
}

// pop takes the oldest item out of the queue. The caller holds both locks.
func (o *Outbox) pop() *item {
	it := o.queue[0]
	o.queue[0] = nil // the array lives on
	o.queue = o.queue[1:]
	delete(o.items, it.key())
	o.bytes -= it.size()
	o.gone = it.Place
	return it
}

// signal wakes who waits on c, now or next.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
