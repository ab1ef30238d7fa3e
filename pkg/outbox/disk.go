// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package outbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/cache/journal"
)

const logName = "events"

// Kinds of journal entries. Each put has a scope of its own, so that a damaged one
// is lost alone.
const (
	entryPut  = 1 // Meta: meta, Body: the Event's, sealed; Scope: its place
	entryGone = 2 // Meta: meta with a Place; nothing up to there waits; Scope: 0
)

// meta is what the disk says of an Event besides its body.
type meta struct {
	// Place orders the queue. What replaces an Event has its place.
	Place       uint64 `json:"place"`
	Group       string `json:"group,omitempty"`
	Namespace   string `json:"namespace,omitempty"`
	Name        string `json:"name,omitempty"`
	ContentType string `json:"contentType,omitempty"`
}

// sealPlace is what a sealed body is bound to; no two Events have the same.
func (m *meta) sealPlace() string { return fmt.Sprintf("event %q %q %q", m.Group, m.Namespace, m.Name) }

func (m *meta) encode() []byte {
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings and a number
	}
	return b
}

func (m *meta) entry(body []byte) journal.Entry {
	return journal.Entry{Scope: uint32(m.Place), Kind: entryPut, Meta: m.encode(), Body: body}
}

func goneEntry(place uint64) journal.Entry {
	return journal.Entry{Kind: entryGone, Meta: (&meta{Place: place}).encode()}
}

// Load reads what waits on disk; what was read already is not read again. Put and
// Run do it if nobody else has. Until then Holds and Empty know of nothing.
//
// Damage is no error: what is whole is kept. An error means that the disk could
// not be read at all, and that Load may be called again.
func (o *Outbox) Load(ctx context.Context) error {
	o.disk.Lock()
	defer o.disk.Unlock()
	return o.load(ctx)
}

func (o *Outbox) load(ctx context.Context) error {
	if o.log != nil {
		return nil
	}
	r := replay{items: map[key]*item{}, damaged: map[uint32]bool{}}
	log, err := o.cfg.Journal.OpenLog(logName, journal.Replay{Batch: r.batch, Damaged: r.damagedScope, DamagedAll: r.damagedAll})
	if err != nil {
		return fmt.Errorf("outbox: %w", err)
	}
	queue, lost := r.queue()
	o.mu.Lock()
	o.log, o.queue, o.items, o.next = log, queue, r.items, r.last+1
	o.gone, o.noted = r.gone, r.gone
	for _, it := range queue {
		o.bytes += it.size()
	}
	drop := 0
	for ; len(o.queue) > o.cfg.MaxEvents || o.bytes > o.cfg.MaxBytes; drop++ {
		o.pop() // the limits were larger before
	}
	o.mu.Unlock()
	o.metrics.dropped.WithLabelValues("full").Add(float64(drop))
	o.metrics.dropped.WithLabelValues("damaged").Add(float64(lost))
	logger := klog.FromContext(ctx)
	if lost > 0 {
		logger.Info("Outbox is damaged on disk; the Events that are whole will be sent", "damages", lost, "events", len(o.queue))
	}
	if lost > 0 || len(r.damaged) > 0 || o.wasteful() || o.outdated() {
		if err := o.rewrite(ctx); err != nil {
			logger.Error(err, "Outbox could not be written anew")
		}
	}
	o.changed()
	return nil
}

// changed wakes whoever has something to do now. The caller holds disk.
func (o *Outbox) changed() {
	if len(o.queue) > 0 {
		signal(o.added)
	}
	if o.gone != o.noted {
		signal(o.popped)
	}
}

// A replay builds the queue from its log.
type replay struct {
	items   map[key]*item
	gone    uint64
	last    uint64 // the highest place
	damaged map[uint32]bool
	holes   int // where anything may be lost
}

func (r *replay) damagedScope(scope uint32) { r.damaged[scope] = true }
func (r *replay) damagedAll()               { r.holes++ }

func (r *replay) batch(entries []journal.Entry, refs []journal.Ref) {
	for i, e := range entries {
		it := &item{ref: refs[i]}
		if err := json.Unmarshal(e.Meta, &it.meta); err != nil {
			r.damagedScope(e.Scope)
			continue
		}
		r.last = max(r.last, it.Place)
		switch e.Kind {
		case entryPut:
			if e := (Event{Group: it.Group, Namespace: it.Namespace, Name: it.Name, ContentType: it.ContentType}); e.check() != nil {
				r.damagedScope(entries[i].Scope) // somebody else has written it
				continue
			}
			r.items[it.key()] = it
		case entryGone:
			r.gone = max(r.gone, it.Place)
		default:
			r.damagedScope(e.Scope)
		}
	}
}

// queue is what waits, by place, and how often something that may have waited is lost.
func (r *replay) queue() (queue []*item, lost int) {
	for k, it := range r.items {
		if it.Place <= r.gone {
			delete(r.items, k)
			continue
		}
		queue = append(queue, it)
	}
	slices.SortFunc(queue, func(a, b *item) int { return cmp.Compare(a.Place, b.Place) })
	lost = r.holes
	for scope := range r.damaged {
		if scope > uint32(r.gone) {
			lost++
		}
	}
	return queue, lost
}

const (
	// entryOverhead is about what an entry costs on disk besides names and body.
	entryOverhead = 168
	// emptyBytes is how long the log of an empty queue may be. It costs less to go on
	// in it than to begin a new one.
	emptyBytes = 64 << 10
)

// wasteful reports whether so much of the log is of no use any more that it should
// be written anew. The caller holds disk.
func (o *Outbox) wasteful() bool {
	allowed := o.cfg.MaxBytes / 2
	if len(o.queue) == 0 {
		allowed = min(allowed, emptyBytes)
	}
	dead := o.log.Size()
	for _, it := range o.queue {
		dead -= entryOverhead + int64(len(it.Namespace)+len(it.Name)+len(it.ContentType)) + it.size()
	}
	return dead > allowed
}

// outdated reports whether something waits that is to be sealed in another way. The
// caller holds disk.
func (o *Outbox) outdated() bool {
	v := o.log.View()
	defer v.Close()
	var body []byte
	return slices.ContainsFunc(o.queue, func(it *item) bool {
		b, err := v.Read(it.ref, body[:0])
		body = b
		return err == nil && !o.cfg.Current(b)
	})
}

// reseal returns a body of the disk as it would be sealed now.
func (o *Outbox) reseal(it *item, b []byte) ([]byte, error) {
	if o.cfg.Current(b) {
		return b, nil
	}
	clear, err := o.cfg.Open(b, it.sealPlace())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errSealed, err)
	}
	return o.cfg.Seal(clear, it.sealPlace())
}

// rewrite makes the log consist of what waits. The caller holds disk.
func (o *Outbox) rewrite(ctx context.Context) error {
	v := o.log.View()
	defer v.Close()
	var (
		kept []*item
		body []byte
	)
	refs, err := o.log.Rewrite(func(yield func(journal.Entry, error) bool) {
		for _, it := range o.queue {
			b, err := v.Read(it.ref, body[:0])
			if err == nil {
				body = b
				b, err = o.reseal(it, b)
			}
			if isLost(err) {
				continue
			}
			if !yield(it.entry(b), err) {
				return
			}
			kept = append(kept, it)
		}
	})
	if err != nil {
		return fmt.Errorf("outbox: %w", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if lost := len(o.queue) - len(kept); lost > 0 {
		o.lose(ctx, lost)
	}
	o.queue, o.bytes = kept, 0
	clear(o.items)
	for i, it := range kept {
		it.ref = refs[i]
		o.items[it.key()] = it
		o.bytes += it.size()
	}
	o.noted, o.unnoted = o.gone, 0
	return nil
}

var errSealed = errors.New("sealed body does not open")

// isLost tells a body that nobody will ever read from one that cannot be read just
// now, for want of files that may be open, say.
func isLost(err error) bool {
	return errors.Is(err, journal.ErrDamaged) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, errSealed)
}

func (o *Outbox) lose(ctx context.Context, n int) {
	o.metrics.dropped.WithLabelValues("damaged").Add(float64(n))
	klog.FromContext(ctx).Info("Events in the outbox are damaged on disk and were dropped", "events", n)
}

// oldest returns what is to be sent next with its body, nil if nothing waits. What
// is lost is dropped on the way.
func (o *Outbox) oldest(ctx context.Context) (*item, []byte, error) {
	o.disk.Lock()
	defer o.disk.Unlock()
	for len(o.queue) > 0 {
		it := o.queue[0]
		body, err := o.body(it)
		if err == nil {
			return it, body, nil
		}
		if !isLost(err) {
			return nil, nil, fmt.Errorf("outbox: %w", err)
		}
		o.lose(ctx, 1)
		o.remove(ctx)
	}
	return nil, nil, nil
}

// body reads the body of an item that waits. The caller holds disk.
func (o *Outbox) body(it *item) ([]byte, error) {
	v := o.log.View()
	defer v.Close()
	b, err := v.Read(it.ref, nil)
	if err != nil {
		return nil, err
	}
	if b, err = o.cfg.Open(b, it.sealPlace()); err != nil {
		return nil, fmt.Errorf("%w: %w", errSealed, err)
	}
	return b, nil
}

// finish takes an item out of the queue that needs not be sent any more, unless it
// was replaced or dropped meanwhile.
func (o *Outbox) finish(ctx context.Context, it *item) {
	o.disk.Lock()
	defer o.disk.Unlock()
	if len(o.queue) > 0 && o.queue[0] == it {
		o.remove(ctx)
	}
}

// maxUnnoted is how many Events may have been sent before the disk is told.
const maxUnnoted = 16

// remove takes the oldest item out of the queue. The caller holds disk.
func (o *Outbox) remove(ctx context.Context) {
	o.mu.Lock()
	o.pop()
	o.unnoted++
	o.mu.Unlock()
	o.changed()
	if o.unnoted%maxUnnoted == 0 {
		// A disk that takes nothing keeps no Event from being sent, so there is nothing
		// to be done about an error; noteSent tries again, and logs it.
		_ = o.note(ctx)
	}
}

// note tells the disk what is gone, by a new log if the old one is mostly of no
// use. The caller holds disk.
func (o *Outbox) note(ctx context.Context) error {
	if o.log == nil || o.gone == o.noted {
		return nil
	}
	if o.wasteful() && o.rewrite(ctx) == nil {
		return nil // else the next change tries again
	}
	if _, err := o.log.Append([]journal.Entry{goneEntry(o.gone)}); err != nil {
		return fmt.Errorf("outbox: %w", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.noted, o.unnoted = o.gone, 0
	return nil
}
