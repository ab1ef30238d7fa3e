// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const diskSize = "size=16m"

// apply creates an object.
func apply(ctx context.Context, r *rig.Rig, resource string, object map[string]any) {
	r.T.Helper()
	client, err := dynamic.NewForConfig(r.ControlPlane.AdminConfig())
	r.Must(err)
	o := &unstructured.Unstructured{Object: object}
	_, err = client.Resource(schema.GroupVersionResource{Version: "v1", Resource: resource}).Namespace(o.GetNamespace()).Create(ctx, o, metav1.CreateOptions{})
	r.Must(err)
}

// smallDisk mounts a small file system for the hub's data.
func smallDisk(t *testing.T, data string) {
	t.Helper()
	if err := os.MkdirAll(data, 0o700); err != nil {
		t.Fatal(err)
	}
	err := unix.Mount("edgehub-test", data, "tmpfs", 0, diskSize)
	if errors.Is(err, unix.EPERM) {
		t.Skip("needs root: a small file system of its own")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(data, 0); err != nil {
			t.Error(err)
		}
	})
}

// fillUp writes a file until the disk is full, and returns its path.
func fillUp(dir string) (string, error) {
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	for n := 64 << 10; n > 0; {
		switch _, err := f.Write(make([]byte, n)); {
		case errors.Is(err, unix.ENOSPC):
			n /= 2
		case err != nil:
			return "", err
		}
	}
	return path, nil
}

// TestDiskFull fills the disk up while the hub works: it goes on from memory, says
// so, and is none the worse once there is room again. Killed on the full disk, it
// comes back with what was written before, which may be old but never short.
func TestDiskFull(t *testing.T) {
	s := newSlaughter(t)
	smallDisk(t, s.Hub.DataDir())
	ctx, g := s.begin(t, 0)
	s.write(ctx, 50)
	readers := s.follow(ctx, g)
	s.converge(ctx, readers)
	s.listViews(ctx, len(s.views))
	s.Settle()
	s.wantJournal(true)

	filler, err := fillUp(s.Hub.DataDir())
	s.Must(err)
	s.write(ctx, 60)
	s.wantJournal(false)
	s.converge(ctx, readers)
	s.listViews(ctx, len(s.views)) // online, still
	s.write(ctx, 20)
	s.converge(ctx, readers)
	s.Offline()
	s.T.Log("from memory, the disk being full:")
	s.listViews(ctx, len(s.views))
	s.Must(s.Hub.Kill())
	s.Must(s.start(ctx))
	s.T.Log("after SIGKILL, the disk being full:")
	s.listViews(ctx, 0)

	s.Online()
	s.converge(ctx, readers)
	s.wantJournal(false)
	s.Must(os.Remove(filler))
	s.wantJournal(true)
	s.listViews(ctx, len(s.views))
	s.Settle()
	s.Must(s.mark(ctx))
	s.Link.Cut()
	s.Must(s.Hub.Kill())
	s.Must(s.start(ctx))
	s.T.Log("after SIGKILL, with room on the disk again:")
	s.listViews(ctx, len(s.views))
	s.Must(s.Link.Heal())
	s.converge(ctx, readers)
}

// listViews compares the list of every view with the truth, and wants at least so
// many answered.
func (s *slaughter) listViews(ctx context.Context, atLeast int) {
	s.T.Helper()
	got := map[*view]rig.List{}
	for _, v := range s.views {
		switch l, status, err := s.list(ctx, v, 0); {
		case err != nil:
			s.T.Errorf("%v: %v", v, err)
		case status == http.StatusOK:
			got[v] = l
		case status != http.StatusServiceUnavailable || atLeast == len(s.views):
			s.T.Errorf("%v = %d", v, status)
		}
	}
	s.Must(s.mark(ctx))
	for v, l := range got {
		if err := s.truthOf(v, l).compare(l, v.keep); err != nil {
			s.T.Errorf("%v: %v", v, err)
		}
	}
	if len(got) < atLeast {
		s.T.Errorf("%d lists were answered, want %d", len(got), atLeast)
	}
	s.T.Logf("%d of %d lists answered, all of them right", len(got), len(s.views))
}

// wantJournal waits until metrics and readiness say whether the journal can be
// written. The hub is ready all the time.
func (s *slaughter) wantJournal(writable bool) {
	s.T.Helper()
	s.Must(process.Poll(s.T.Context(), fmt.Sprintf("the hub says that its journal is writable=%v", writable), func(ctx context.Context) error {
		v, err := s.Hub.Metric(ctx, "edgehub_cache_journal_writable")
		if err != nil {
			return err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.Hub.MetricsURL()+"/readyz?verbose", nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		sign := map[bool]string{true: "[+]journal", false: "[-]journal"}[writable]
		if (v == 1) != writable || resp.StatusCode != http.StatusOK || !strings.Contains(string(text), sign) {
			return fmt.Errorf("journal_writable %v, readyz %d:\n%s", v, resp.StatusCode, text)
		}
		return nil
	}))
}
