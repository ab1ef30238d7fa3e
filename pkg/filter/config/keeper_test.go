// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// with is a document that names one filter; bad ones name one that is not there.
func with(name string) string { return head + "filters:\n- name: " + name + "\n" }

// A bench is a keeper with what it needs; everything happens in a bubble.
type bench struct {
	t         *testing.T
	dir, path string
	cluster   *fakeCluster
	options   Options
	registry  *prometheus.Registry

	*Keeper
	stop func()
	logs ktesting.Buffer

	mu      sync.Mutex // guards what follows: virtual time orders nothing for the race detector
	applied []string   // what was brought into force, by its first filter
	refuse  string     // which filter cannot be brought into force
}

func newBench(t *testing.T) *bench {
	dir := t.TempDir()
	b := &bench{t: t, dir: dir, path: filepath.Join(dir, "filters.yaml"), cluster: newFakeCluster()}
	if err := os.Mkdir(filepath.Join(dir, "data"), 0o700); err != nil {
		t.Fatal(err)
	}
	b.options = Options{Known: known(), File: b.path, Dir: filepath.Join(dir, "data"), Cluster: b.cluster.source(), Apply: b.apply}
	return b
}

func (b *bench) refuses(filter string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refuse = filter
}

func (b *bench) apply(c *Configuration) error {
	name := "defaults"
	if len(c.Rules) > 0 {
		name = c.Rules[0].Name
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if name == b.refuse {
		return fmt.Errorf("%s: no room", name)
	}
	b.applied = append(b.applied, name)
	return nil
}

// load begins anew, as a restart does.
func (b *bench) load() error {
	b.t.Helper()
	b.end()
	b.applied, b.registry = nil, prometheus.NewPedanticRegistry()
	b.options.Registerer = b.registry
	var err error
	if b.Keeper, err = NewKeeper(b.options); err != nil {
		b.t.Fatal(err)
	}
	return b.Load(b.context())
}

// context has a logger of its own.
func (b *bench) context() context.Context {
	logger := ktesting.NewLogger(b.t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	b.logs = logger.GetSink().(ktesting.Underlier).GetBuffer()
	return klog.NewContext(b.t.Context(), logger)
}

// wantLogged counts the lines since Run began.
func (b *bench) wantLogged(what, message string, want int) {
	b.t.Helper()
	if got := strings.Count(b.logs.String(), message); got != want {
		b.t.Errorf("%s: %q was logged %d times, want %d:\n%s", what, message, got, want, b.logs.String())
	}
}

// start is load and Run, until what is there to be seen has been.
func (b *bench) start() {
	b.t.Helper()
	if err := b.load(); err != nil {
		b.t.Fatalf("Load() = %v, want nil", err)
	}
	ctx, cancel := context.WithCancel(b.context())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	b.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			b.t.Errorf("Run() = %v, want nil", err)
		}
	}
	synctest.Wait()
}

func (b *bench) end() {
	if b.stop != nil {
		b.stop()
		b.stop = nil
	}
}

// pass lets time pass.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func (b *bench) write(path, content string) {
	b.t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) copyPath() string { return filepath.Join(b.options.Dir, lastGoodFile) }

// want compares what was applied since the start, where what is in force came from, and
// the errors by source.
func (b *bench) want(what string, applied []string, inForce string, errs map[string]string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if diff := cmp.Diff(applied, b.applied); diff != "" {
		b.t.Errorf("%s: Apply (-want +got):\n%s", what, diff)
	}
	now, got := map[string]string{}, "nothing"
	for _, s := range b.Status().Sources {
		if s.InForce {
			got = s.Source
		}
		if s.Error != "" {
			now[s.Source] = strings.ReplaceAll(s.Error, b.dir+"/", "")
		}
		if n := testutil.ToFloat64(b.metrics.inForce.WithLabelValues(s.Source)); (n == 1) != s.InForce {
			b.t.Errorf("%s: edgehub_filter_config_in_force{%s} = %v, want %v", what, s.Source, n, s.InForce)
		}
	}
	if got != inForce {
		b.t.Errorf("%s: in force is %s, want %s", what, got, inForce)
	}
	if errs == nil {
		errs = map[string]string{}
	}
	if diff := cmp.Diff(errs, now); diff != "" {
		b.t.Errorf("%s: errors (-want +got):\n%s", what, diff)
	}
}

// wantCopy compares the last good copy; "": there is none.
func (b *bench) wantCopy(what, from, name, document string) {
	b.t.Helper()
	want := ""
	if from != "" {
		want = fmt.Sprintf("# edgehub: the last good configuration of filters, from %s %q\n%s", from, name, document)
	}
	got, err := os.ReadFile(b.copyPath())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		b.t.Fatal(err)
	}
	if string(got) != want {
		b.t.Errorf("%s: copy = %q, want %q", what, got, want)
	}
	if _, err := os.Stat(b.copyPath() + ".tmp"); err == nil {
		b.t.Errorf("%s: a temporary file was left", what)
	}
}

func (b *bench) reloads(source, outcome string) float64 {
	return testutil.ToFloat64(b.metrics.reloads.WithLabelValues(source, outcome))
}

func (b *bench) wantCounts(what string, source string, valid, accepted, refused float64) {
	b.t.Helper()
	got := []float64{testutil.ToFloat64(b.metrics.valid.WithLabelValues(source)), b.reloads(source, "accepted"), b.reloads(source, "refused")}
	if want := []float64{valid, accepted, refused}; !slices.Equal(got, want) {
		b.t.Errorf("%s: valid, accepted and refused of %s = %v, want %v", what, source, got, want)
	}
}

// inBubble runs a test where time is virtual.
func inBubble(t *testing.T, test func(b *bench)) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.end()
		test(b)
	})
}

const unknownFilter = `filters.yaml:4: filters[0].name: unknown filter "nonsense", known are masterservice, servicetopology, hostnetworkpool`

func TestApplyRefuses(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.path, with("masterservice"))
		b.refuses("servicetopology")
		b.start()
		b.write(b.path, with("servicetopology"))
		pass(5 * pollPeriod)
		b.want("refused", []string{"masterservice"}, "file", map[string]string{"file": "filters.yaml: servicetopology: no room"})
		b.wantCopy("refused", "file", b.path, with("masterservice"))
		b.wantCounts("refused", "file", 0, 1, 1)

		// A restart: the copy.
		if err := b.load(); err != nil {
			t.Fatalf("Load() = %v, want nil", err)
		}
		b.want("restarted", []string{"masterservice"}, "last_good", map[string]string{"file": "filters.yaml: servicetopology: no room"})
		b.wantCounts("restarted", "file", 0, 0, 1)
		b.wantCounts("restarted", "last_good", 1, 1, 0)

		if err := os.Remove(b.copyPath()); err != nil {
			t.Fatal(err)
		}
		if err := b.load(); err == nil || !strings.Contains(err.Error(), "servicetopology: no room") {
			t.Errorf("Load() = %v, want what Apply said", err)
		}
		b.options.File = ""
		b.refuses("defaults")
		if err := b.load(); err == nil || !strings.Contains(err.Error(), "defaults: no room") {
			t.Errorf("Load() = %v, want what Apply said", err)
		}
	})
}

func TestLoadFile(t *testing.T) {
	inBubble(t, func(b *bench) {
		if err := b.load(); err == nil || !strings.Contains(err.Error(), "no such file") {
			t.Errorf("Load() without the file = %v, want an error", err)
		}
		b.write(b.path, with("nonsense"))
		if err := b.load(); err == nil || strings.ReplaceAll(err.Error(), b.dir+"/", "") != "configuration of filters: "+unknownFilter {
			t.Errorf("Load() of a bad file = %v, want %s", err, unknownFilter)
		}
		b.want("bad", nil, "nothing", map[string]string{"file": unknownFilter})
		b.wantCopy("bad", "", "", "")

		b.write(b.path, with("masterservice"))
		if err := b.load(); err != nil {
			t.Errorf("Load() of a good file = %v, want nil", err)
		}
		b.write(b.path, with("nonsense"))
		b.start()
		b.want("bad, with a copy", []string{"masterservice"}, "last_good", map[string]string{"file": unknownFilter})
		b.wantCopy("bad, with a copy", "file", b.path, with("masterservice"))
		b.write(b.path, with("servicetopology"))
		pass(2 * pollPeriod)
		b.want("mended", []string{"masterservice", "servicetopology"}, "file", nil)
		b.wantCopy("mended", "file", b.path, with("servicetopology"))

		b.write(b.path, with("nonsense"))
		b.write(b.copyPath(), with("foo"))
		copyError := `data/filters-last-good.yaml:4: filters[0].name: unknown filter "foo", known are masterservice, servicetopology, hostnetworkpool`
		if err := b.load(); err == nil || strings.ReplaceAll(err.Error(), b.dir+"/", "") != "configuration of filters: "+unknownFilter+"\n"+copyError {
			t.Errorf("Load() with a bad copy = %v, want both errors", err)
		}
		b.want("both bad", nil, "nothing", map[string]string{"file": unknownFilter, "last_good": copyError})
		b.wantCounts("both bad", "last_good", 0, 0, 1)

		b.write(b.copyPath(), strings.TrimSuffix(with("masterservice"), "\n"))
		if err := b.load(); err == nil || !strings.Contains(err.Error(), "may have been cut short") {
			t.Errorf("Load() with half a copy = %v, want an error", err)
		}
		b.write(b.path, with("masterservice"))
		if err := b.load(); err != nil {
			t.Errorf("Load() with half a copy and a good file = %v, want nil", err)
		}
		b.want("the copy is mended", []string{"masterservice"}, "file", nil)
		b.wantCopy("the copy is mended", "file", b.path, with("masterservice"))
		b.wantCounts("the copy is mended", "last_good", 1, 0, 1)
	})
}

func TestDefaults(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.copyPath(), with("masterservice"))
		b.options.File = ""
		b.start()
		b.want("nothing configured", []string{"defaults"}, "defaults", nil)
		b.wantCopy("what nobody asks for any more", "", "", "")
		pass(time.Hour)
		b.want("nothing configured", []string{"defaults"}, "defaults", nil)
	})
}

// A copy that this program cannot read may be one for the next; whoever has taken its
// place knows.
func TestCopyStaysUntilTheConfigMapIsKnown(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.options.File, b.options.Namespace = "", "kube-system"
		document := lastGood(sourceConfigMap, mapName, []byte(with("foo")))
		b.write(b.copyPath(), string(document))
		b.cluster.set(0)
		b.start()
		pass(time.Hour)
		b.want("offline", []string{"defaults"}, "defaults", map[string]string{
			"configmap": mapName + ": the link is down",
			"last_good": `data/filters-last-good.yaml:5: filters[0].name: unknown filter "foo", known are masterservice, servicetopology, hostnetworkpool`,
		})
		b.wantCopy("offline", "configmap", mapName, with("foo"))
		b.cluster.set(http.StatusOK)
		synctest.Wait()
		b.want("online", []string{"defaults"}, "defaults", nil)
		b.wantCopy("online", "", "", "")
	})
}

// The copy is written whole or not at all, and everything goes on without it.
func TestCopyThatCannotBeWritten(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.path, with("masterservice"))
		b.options.Dir = filepath.Join(b.dir, "later")
		b.start()
		failed := map[string]string{"last_good": "open later/filters-last-good.yaml.tmp: no such file or directory"}
		b.want("no folder", []string{"masterservice"}, "file", failed)
		b.write(b.path, with("servicetopology"))
		pass(2 * pollPeriod)
		b.want("no folder", []string{"masterservice", "servicetopology"}, "file", failed)
		b.wantLogged("no folder", "was not written", 0) // Load has said so
		if n := testutil.ToFloat64(b.metrics.writeErrors); n != 2 {
			t.Errorf("edgehub_filter_config_last_good_write_errors_total = %v, want 2", n)
		}
		if err := os.Mkdir(b.options.Dir, 0o700); err != nil {
			t.Fatal(err)
		}
		pass(savePeriod)
		b.want("a minute later", []string{"masterservice", "servicetopology"}, "file", nil)
		b.wantCopy("a minute later", "file", b.path, with("servicetopology"))
		info, err := os.Stat(b.copyPath())
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("Stat(copy) = %v, %v, want mode 0600", info, err)
		}
	})
}

func TestMetrics(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.path, with("masterservice"))
		b.options.Namespace = "kube-system"
		b.start()
		if problems, err := testutil.GatherAndLint(b.registry); err != nil || len(problems) > 0 {
			t.Errorf("GatherAndLint() = %v, %v, want nothing", problems, err)
		}
		if _, err := NewKeeper(b.options); err == nil {
			t.Error("NewKeeper() with a registry that has its metrics = nil, want an error")
		}
	})
}
