// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// large answers a list of n Services, each with a long name of color, of 30 KiB.
func large(t testing.TB, f form, n int) (body []byte, next roundTrip) {
	var things []thing
	for i := range n {
		things = append(things, thing{name: fmt.Sprintf("t%03d", i), color: strings.Repeat("x", 30<<10), rv: 5})
	}
	body = listOf(t, f, 10, things)
	return body, func(req *http.Request) (*http.Response, error) {
		return respond(req, http.StatusOK, f.rep.ContentType(), io.NopCloser(bytes.NewReader(body))), nil
	}
}

func files(t *testing.T, dir string) int {
	t.Helper()
	e, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// openIn counts the files without a name that the process has open in dir.
func openIn(t *testing.T, dir string) int {
	t.Helper()
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && strings.HasPrefix(to, dir+"/") {
			n++
		}
	}
	return n
}

func TestLargeListGoesToAFile(t *testing.T) {
	for _, f := range forms {
		for _, tc := range []struct {
			name    string
			dir     func(t *testing.T) string
			secret  bool
			spooled bool
		}{
			{"file", func(t *testing.T) string { return t.TempDir() }, false, true},
			{"no directory", func(*testing.T) string { return "" }, false, false},
			{"directory is gone", func(t *testing.T) string { return filepath.Join(t.TempDir(), "gone") }, false, false},
			{"in memory", func(t *testing.T) string { return t.TempDir() }, true, false},
		} {
			t.Run(f.name+"/"+tc.name, func(t *testing.T) {
				want, next := large(t, f, 20)
				dir := tc.dir(t)
				c, err := New(Config{Next: next, Entries: []Entry{entry(dropping("red"), true)}, Dir: dir, InMemory: func(gr schema.GroupResource) bool { return tc.secret && gr == f.resource }})
				if err != nil {
					t.Fatal(err)
				}
				resp, err := c.RoundTrip(ask{form: f, verb: "list"}.request(t.Context()))
				if err != nil {
					t.Fatal(err)
				}
				if tc.spooled != (dir != "" && openIn(t, dir) == 1) {
					t.Errorf("a file is open: %t, want %t", !tc.spooled, tc.spooled)
				}
				if resp.ContentLength != int64(len(want)) || resp.Header.Get("Content-Length") != fmt.Sprint(len(want)) {
					t.Errorf("Content-Length is %d, %s, want %d", resp.ContentLength, resp.Header.Get("Content-Length"), len(want))
				}
				got, err := io.ReadAll(resp.Body)
				if !bytes.Equal(got, want) || err != nil {
					t.Errorf("body has %d bytes that are not the %d that came, %v", len(got), len(want), err)
				}
				if err := errors.Join(resp.Body.Close(), resp.Body.Close()); err != nil {
					t.Errorf("Close() = %v", err)
				}
				if n, err := resp.Body.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, io.EOF) {
					t.Errorf("Read() after Close() = %d, %v, want an error", n, err)
				}
				if dir != "" && tc.name != "directory is gone" && (files(t, dir) != 0 || openIn(t, dir) != 0) {
					t.Error("a file remains")
				}
			})
		}
	}
}

func TestListIsClosedInTheMiddle(t *testing.T) {
	_, next := large(t, forms[0], 20)
	r := newRig(t, next, entry(dropping("red"), true))
	resp, err := r.RoundTrip(ask{form: forms[0], verb: "list"}.request(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(resp.Body, make([]byte, 300<<10)); err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); len(b) > 0 || err == nil {
		t.Errorf("Read() after Close() = %d bytes, %v, want an error", len(b), err)
	}
	if n := openIn(t, r.cfg.Dir); n != 0 {
		t.Errorf("%d files are open after Close(), want 0", n)
	}
}

// TestListFailsInTheMiddle: nothing remains of a list whose last object cannot be judged.
func TestListFailsInTheMiddle(t *testing.T) {
	_, next := large(t, forms[0], 20)
	f := fake{"late", func(o *Object) (Verdict, error) {
		if ok, _ := o.Is("shop", "t019"); ok {
			return Keep, errors.New("no")
		}
		return Keep, nil
	}}
	r := newRig(t, next, entry(f, true))
	if code, _, _ := r.answer(ask{form: forms[0], verb: "list"}); code != http.StatusInternalServerError {
		t.Errorf("list answered %d, want 500", code)
	}
	if r.metric("spooled") == 0 || openIn(t, r.cfg.Dir) != 0 || r.sessions.bytes != 0 {
		t.Errorf("spooled %v bytes, %d files open, %d bytes held, want some, 0, 0", r.metric("spooled"), openIn(t, r.cfg.Dir), r.sessions.bytes)
	}
}

// TestDiskIsFull: what a file takes no more of stays in memory.
func TestDiskIsFull(t *testing.T) {
	for _, had := range []int{0, 1 << 20} {
		var want []byte
		s := spool{dir: t.TempDir(), metrics: newMetrics(nil)}
		full := false
		for i := range 30 {
			b := bytes.Repeat([]byte{byte(i)}, 100<<10)
			want = append(want, b...)
			if !full && len(want) > had {
				dev, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
				if err != nil {
					t.Skip(err)
				}
				full = true
				if s.file == nil {
					s.file = dev
				} else if f := s.file; f != nil { // the file refuses from now on, what is in it remains
					ro, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
					if err != nil {
						t.Fatal(err)
					}
					f.Close()
					dev.Close()
					s.file = ro
				}
			}
			if err := s.write(b); err != nil {
				t.Fatal(err)
			}
		}
		if s.dir != "" {
			t.Error("spool goes on with a file that is full")
		}
		if had == 0 {
			s.file = nil // nothing is in it, and /dev/full has no end
		}
		if err := s.rewind(); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want))
		if err := s.read(got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("spool gives something else than was written to it, %v", err)
		}
		s.close()
	}
}

// TestMemoryOfALargeListIsBounded: what is gathered in memory does not grow with the list.
func TestMemoryOfALargeListIsBounded(t *testing.T) {
	s := spool{dir: t.TempDir(), metrics: newMetrics(nil)}
	defer s.close()
	for range 200 {
		if err := s.write(make([]byte, 200<<10)); err != nil {
			t.Fatal(err)
		}
	}
	if n := cap(s.mem); n > 4*spoolMemoryBytes {
		t.Errorf("spool of 40 MiB keeps %d bytes in memory", n)
	}
	r := newRig(t, newServer(t), entry(dropping("red"), true))
	v := r.newView(r.newPipeline(&Request{}, r.rules.Load(), slices.Concat(r.rules.Load().byResource[services])), jsonRep)
	for i := range 200 {
		v.hold(fmt.Sprint(i), make([]byte, 200<<10), "")
	}
	if v.bytes > maxHeldBytes || len(v.held) != 200 {
		t.Errorf("view of 40 MiB remembers %d bytes of %d objects, want at most %d of 200", v.bytes, len(v.held), maxHeldBytes)
	}
}
