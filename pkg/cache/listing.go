// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"sync"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/seal"
)

// A keyOrder remembers the order of a scope's keys from one list to the next.
type keyOrder []string

// inOrder returns the objects in key order. Keys are sorted only when names have
// come or gone since the last time. The caller holds the log's lock.
func (s *scope) inOrder() []*object {
	if len(s.order) == len(s.objects) {
		if all, ok := s.ordered(); ok {
			return all
		}
	}
	s.order = slices.AppendSeq(make(keyOrder, 0, len(s.objects)), maps.Keys(s.objects))
	slices.Sort(s.order)
	all, _ := s.ordered()
	return all
}

// ordered is false if a name has gone; since their number is the same, that is so
// as well if one has come.
func (s *scope) ordered() ([]*object, bool) {
	all := make([]*object, len(s.order))
	for i, key := range s.order {
		if all[i] = s.objects[key]; all[i] == nil {
			return nil, false
		}
	}
	return all, true
}

// A listing is what a scope held at one moment: where the bytes of its objects are,
// in key order. It takes few bytes an object, needs no lock, and has to be closed.
type listing struct {
	scope *scope
	key   Key // of the scope
	shape codec.Shape
	rv    string
	view  *pinnedView
	items []listItem
	fresh [][]byte // what was not on disk
}

// A listItem says where an object is. Segment 0, which no Ref has, is the fresh
// one with the number Offset-1.
type listItem struct {
	key string
	ref journal.Ref
}

// listing takes down the state of the scope. The caller holds the log's lock.
func (s *scope) listing() *listing { return s.listingOf(s.inOrder()) }

func (s *scope) listingOf(objects []*object) *listing {
	s.used = s.log.c.now()
	w := &listing{scope: s, key: s.key, shape: s.shape, rv: s.rv, view: s.log.view(), items: make([]listItem, len(objects))}
	for i, o := range objects {
		bare, ref := o.place()
		item := listItem{key: o.key, ref: ref}
		if bare != nil {
			w.fresh = append(w.fresh, bare)
			item.ref = journal.Ref{Offset: uint32(len(w.fresh)), Length: uint32(len(bare))}
		}
		w.items[i] = item
	}
	return w
}

func (w *listing) close() {
	if w.view != nil {
		w.view.Close()
		w.view = nil
	}
}

// length is the length of an object in clear.
func (w *listing) length(i listItem) int {
	if i.ref.Segment != 0 && w.view != nil && w.view.seal != "" {
		return int(i.ref.Length) - seal.Overhead
	}
	return int(i.ref.Length)
}

func (w *listing) lens() iter.Seq[int] {
	return func(yield func(int) bool) {
		for _, i := range w.items {
			if !yield(w.length(i)) {
				return
			}
		}
	}
}

// narrow leaves what key asks for. Objects are only read where a selector has to
// see them.
func (w *listing) narrow(key Key) error {
	if w.key == key {
		return nil
	}
	labels, fields := key.LabelSelector, key.FieldSelector
	if labels == w.key.LabelSelector {
		labels = ""
	}
	if fields == w.key.FieldSelector {
		fields = ""
	}
	sel, err := codec.ParseSelector(labels, fields)
	if err != nil {
		return err
	}
	w.narrowKeys(key)
	if sel.Empty() {
		return nil
	}
	b := w.bodies()
	defer b.close()
	kept := w.items[:0]
	for b.next < len(w.items) {
		i := w.items[b.next]
		bare, err := b.read()
		if err != nil {
			return err
		}
		if ok, err := sel.Matches(w.shape, bare); err != nil {
			return err
		} else if ok {
			kept = append(kept, i)
		}
	}
	w.items = kept
	return nil
}

// narrowKeys leaves what has the namespace and name of key.
func (w *listing) narrowKeys(key Key) {
	w.items = slices.DeleteFunc(w.items, func(i listItem) bool { return !key.names(i.key) })
}

// bodies reads the objects of a listing one after the other.
type bodies struct {
	*listing
	next   int
	reader *journal.Reader
	place  string // what comes before the key in the place of a sealed object
}

func (w *listing) bodies() *bodies {
	b := &bodies{listing: w}
	if w.view != nil && w.view.seal != "" {
		b.place = w.scope.place("")
	}
	return b
}

// read returns the next object, valid until the next read.
func (b *bodies) read() ([]byte, error) {
	i := b.items[b.next]
	if i.ref.Segment == 0 && i.ref.Offset > 0 {
		b.next++
		return b.fresh[i.ref.Offset-1], nil
	}
	if b.view == nil {
		return nil, errNoJournal
	}
	if b.reader == nil {
		b.reader = b.view.Reader(b.coming)
	}
	bare, err := b.reader.Read(i.ref)
	if err == nil && b.place != "" {
		bare, err = b.scope.log.c.unseal(b.view.seal, bare, b.place+i.key)
	}
	if err == nil && len(bare) != b.length(i) {
		err = errSealedLength
	}
	if err != nil {
		return nil, fmt.Errorf("read %s of %s: %w", i.key, b.key, err)
	}
	b.next++
	return bare, nil
}

var errSealedLength = fmt.Errorf("%w: unexpected length", seal.ErrBroken)

// coming tells the reader what will be asked for.
func (b *bodies) coming(n int) journal.Ref {
	if n += b.next + 1; n < len(b.items) {
		return b.items[n].ref
	}
	return journal.Ref{}
}

func (b *bodies) close() {
	if b.reader != nil {
		b.reader.Close()
		b.reader = nil
	}
}

// A listBody is a list by concatenation of what a listing holds.
type listBody struct {
	*bodies
	begun bool
	each  func(shape codec.Shape, bare []byte)
	err   error  // after what is in rest
	rest  []byte // what did not fit into the last Read
	space []byte // where it is

	mu      sync.Mutex // guards what follows: Close may come while Read is under way
	reading bool
	closed  bool
}

// EachItem has f called with each object, bare, before it is given; the bytes are valid
// during the call. It is called before the first Read.
func (b *listBody) EachItem(f func(shape codec.Shape, bare []byte)) { b.each = f }

// Read gives the next part. An object that cannot be read aborts the list: a
// short one would be taken for the truth.
func (b *listBody) Read(p []byte) (int, error) {
	if !b.enter() {
		return 0, errListClosed
	}
	defer b.leave()
	n := 0
	for n < len(p) {
		if len(b.rest) == 0 && b.err != nil {
			break
		}
		if len(b.rest) == 0 {
			n += b.fill(p[n:])
		}
		c := copy(p[n:], b.rest)
		b.rest = b.rest[c:]
		n += c
	}
	if n > 0 || len(p) == 0 {
		return n, nil
	}
	return 0, b.err
}

var errListClosed = errors.New("read of a list that is closed")

func (b *listBody) enter() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reading = !b.closed
	return b.reading
}

func (b *listBody) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.reading = false; b.closed {
		b.release()
	}
}

// itemHead is more than what stands before an object in a list.
const itemHead = 512

// fill puts the next part into p and returns its length, or leaves it in rest if p
// may be too short.
func (b *listBody) fill(p []byte) int {
	switch {
	case !b.begun:
		b.begun = true
		b.space = b.shape.AppendListHead(b.space[:0], b.rv, b.lens())
	case b.next == len(b.items):
		b.space = b.shape.AppendListTail(b.space[:0], b.rv)
		b.err = io.EOF
	default:
		first := b.next == 0
		bare, err := b.read()
		if err != nil {
			b.scope.damagedRead(err)
			b.err = err
			return 0
		}
		if b.each != nil {
			b.each(b.shape, bare)
		}
		if len(bare)+itemHead <= len(p) {
			if out := b.shape.AppendListItem(p[:0], bare, first); len(out) <= len(p) {
				return len(out)
			}
		}
		b.space = b.shape.AppendListItem(b.space[:0], bare, first)
	}
	b.rest = b.space
	return 0
}

// Close gives back what the list holds; a Read that is under way does it when it is
// done.
func (b *listBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	if b.closed = true; !b.reading {
		b.release()
	}
	return nil
}

func (b *listBody) release() {
	b.bodies.close()
	b.listing.close()
}
