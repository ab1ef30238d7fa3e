// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// refusedWithin is how long a refusal may take: nothing waits for a dead link.
const refusedWithin = time.Second

// sameWithin is how long API server and hub may take to agree, with room for a machine
// that is busy.
const sameWithin = 20 * time.Second

// An ask is a request, whoever sends it.
type ask struct {
	method      string // "": GET
	path        string
	contentType string // of the body; "": JSON
	accept      string // "": JSON
	header      http.Header
	body        []byte
	what        string // for the reader of a failure
}

func (a ask) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %s", cmp.Or(a.method, http.MethodGet), a.path, a.what))
}

// create makes an ask of an object in one of the two encodings, answered in the same.
func create(path, media string, o runtime.Object) ask {
	return ask{method: http.MethodPost, path: path, contentType: media, accept: media, body: encode(media, o)}
}

// with adds parameters to the path.
func (a ask) with(parameters string) ask {
	a.path = rig.With(a.path, parameters)
	return a
}

// An answer is one that was read to its end.
type answer struct {
	status int
	header http.Header
	body   []byte
	took   time.Duration
	err    error
}

func (a answer) String() string { return fmt.Sprintf("%d, %v: %.300q", a.status, a.err, a.body) }

// is reports whether both say the same.
func (a answer) is(b answer) bool {
	return a.err == nil && b.err == nil && a.status == b.status && bytes.Equal(a.body, b.body)
}

// lists reports whether both are lists of the same objects, byte for byte. The list's
// own resourceVersion goes on while nothing else does, and a kill may set it back.
func (a answer) lists(b answer) bool {
	x, err := rig.ReadList(a.body)
	y, errY := rig.ReadList(b.body)
	return err == nil && errY == nil && x.Kind == y.Kind && slices.EqualFunc(x.Items, y.Items, bytes.Equal)
}

// reason is that of a Status, "" for all else.
func (a answer) reason() metav1.StatusReason {
	var s metav1.Status
	if json.Unmarshal(a.body, &s) != nil || s.Kind != "Status" {
		return ""
	}
	return s.Reason
}

func send(ctx context.Context, e *rig.Endpoint, a ask) answer {
	h := a.header.Clone()
	if h == nil {
		h = http.Header{}
	}
	h.Set("Accept", cmp.Or(a.accept, rig.JSON))
	if a.body != nil {
		h.Set("Content-Type", cmp.Or(a.contentType, rig.JSON))
	}
	start := time.Now()
	resp, err := e.Do(ctx, cmp.Or(a.method, http.MethodGet), a.path, h, a.body)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: body, took: time.Since(start), err: err}
}

// same wants the hub to say, byte for byte, what the API server says, and returns
// it. The API server is asked before and after, since its answer may change.
func (w *world) same(c *caller, a ask) (got answer) {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.T.Context(), sameWithin)
	defer cancel()
	w.Must(process.Poll(ctx, fmt.Sprintf("%s: %v is the same directly and through the hub", c.name, a), func(ctx context.Context) error {
		before := send(ctx, c.direct, a)
		got = send(ctx, c.through, a)
		if after := send(ctx, c.direct, a); !before.is(after) {
			return fmt.Errorf("directly it changes: %v, then %v", before, after)
		}
		if !got.is(before) {
			return fmt.Errorf("through the hub %v, directly %v", got, before)
		}
		return nil
	}))
	return got
}

// sameVerdict is same for answers that hold a new uid or a time: the code and the
// reason of a refusal count.
func (w *world) sameVerdict(c *caller, a ask) answer {
	w.T.Helper()
	want, got := send(w.T.Context(), c.direct, a), send(w.T.Context(), c.through, a)
	if got.err != nil || want.err != nil || got.status != want.status || got.reason() != want.reason() {
		w.T.Errorf("%s: %v online = %v, want as directly %v", c.name, a, got, want)
	}
	return got
}

// ask sends a request through the hub and wants the status.
func (w *world) ask(c *caller, a ask, status int) answer {
	w.T.Helper()
	got := send(w.T.Context(), c.through, a)
	if got.err != nil || got.status != status {
		w.T.Errorf("%s: %v = %v, want %d", c.name, a, got, status)
	}
	return got
}

// replayed wants an answer of the node's, with its warning.
func (w *world) replayed(c *caller, a ask, status int) answer {
	w.T.Helper()
	got := w.ask(c, a, status)
	if !slices.ContainsFunc(got.header.Values("Warning"), func(v string) bool { return strings.HasPrefix(v, "110 edgehub ") }) {
		w.T.Errorf("%s: %v has the warnings %q, want one that begins with 110", c.name, a, got.header.Values("Warning"))
	}
	return got
}

// refused wants 503 in all its parts, and soon.
func (w *world) refused(c *caller, a ask) {
	w.T.Helper()
	got := send(w.T.Context(), c.through, a)
	if err := got.unavailable(time.Now()); err != nil {
		w.T.Errorf("%s: %v (%s) = %v, want 503: %v", c.name, a, a.contentType, got, err)
	}
}

// unavailable returns what is missing for a 503 as clients want it.
func (a answer) unavailable(now time.Time) error {
	if a.err != nil {
		return a.err
	}
	var errs []error
	miss := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if a.status != http.StatusServiceUnavailable {
		miss("status %d", a.status)
	}
	if a.took > refusedWithin {
		miss("it took %v", a.took)
	}
	var s metav1.Status
	if err := json.Unmarshal(a.body, &s); err != nil {
		return errors.Join(append(errs, err)...)
	}
	if s.Kind != "Status" || s.APIVersion != "v1" || s.Status != metav1.StatusFailure || s.Code != http.StatusServiceUnavailable || s.Reason != metav1.StatusReasonServiceUnavailable {
		miss("a Status %+v", s)
	}
	if s.Details == nil || s.Details.RetryAfterSeconds < 1 {
		miss("details %v", s.Details)
	}
	// As a date: client-go makes ten more tries by itself of a number.
	at, err := http.ParseTime(a.header.Get("Retry-After"))
	if err != nil || at.Before(now.Add(-2*time.Second)) || at.After(now.Add(time.Minute)) {
		miss("Retry-After %q", a.header.Get("Retry-After"))
	}
	return errors.Join(errs...)
}

// encode writes an object of a built-in kind as a client would.
func encode(media string, o runtime.Object) []byte {
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), media)
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if !ok || err != nil {
		panic(fmt.Sprintf("encode %T as %s: %v", o, media, err))
	}
	b, err := runtime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, kinds[0].GroupVersion()), o)
	if err != nil {
		panic(err)
	}
	return b
}

// decode reads an object of a built-in kind; the zero value if it is none.
func decode[T any](body []byte) *T {
	o, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	if got, ok := o.(any).(*T); err == nil && ok {
		return got
	}
	return new(T)
}
