// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/follow"
)

// A fakeCluster answers watches of the one ConfigMap.
type fakeCluster struct {
	mu      sync.Mutex // guards what follows
	shape   codec.Shape
	code    int // 0: the link is down
	object  *corev1.ConfigMap
	watches map[*io.PipeWriter]bool
	link    chan struct{}
	asked   []string // of requests, who, what and where
}

func newFakeCluster() *fakeCluster {
	return &fakeCluster{
		shape:   codec.Shape{Representation: codec.Representation{Protobuf: true}, APIVersion: "v1", Kind: "ConfigMap", ListKind: "ConfigMapList"},
		code:    http.StatusOK,
		watches: map[*io.PipeWriter]bool{},
		link:    make(chan struct{}),
	}
}

func (f *fakeCluster) source() follow.Source {
	return follow.Source{
		Transport: f,
		User:      func() user.Info { return &user.DefaultInfo{Name: "system:node:edge-1"} },
		Changed: func() <-chan struct{} {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.link
		},
	}
}

// RoundTrip implements http.RoundTripper.
func (f *fakeCluster) RoundTrip(req *http.Request) (*http.Response, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	info, _ := request.RequestInfoFrom(req.Context())
	who, _ := request.UserFrom(req.Context())
	f.asked = append(f.asked, strings.Join([]string{who.GetName(), info.Verb, info.Path, info.FieldSelector}, " "))
	if f.code == 0 {
		return nil, errors.New("the link is down")
	}
	if f.code != http.StatusOK {
		return &http.Response{StatusCode: f.code, Body: http.NoBody, Request: req}, nil
	}
	r, w := io.Pipe()
	context.AfterFunc(req.Context(), func() { _ = w.CloseWithError(req.Context().Err()) })
	f.watches[w] = true
	var b []byte
	if f.object != nil {
		b = f.frame(watch.Added)
	}
	b = f.shape.AppendBookmark(b, "7", true)
	go func() { _, _ = w.Write(b) }()
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {f.shape.WatchContentType()}}, Body: r, Request: req}, nil
}

func (f *fakeCluster) frame(t watch.EventType) []byte {
	bare, err := f.object.Marshal()
	if !f.shape.Protobuf {
		bare, err = json.Marshal(f.object)
	}
	if err != nil {
		panic(err)
	}
	return f.shape.AppendFrame(nil, t, bare)
}

// set changes the link, and breaks all watches.
func (f *fakeCluster) set(code int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.code = code
	for w := range f.watches {
		_ = w.CloseWithError(errors.New("the link was lost"))
	}
	clear(f.watches)
	close(f.link)
	f.link = make(chan struct{})
}

// say makes the ConfigMap hold these data; nil: there is none.
func (f *fakeCluster) say(data map[string]string) {
	f.mu.Lock()
	kind := watch.Modified
	if data == nil {
		kind = watch.Deleted
	} else {
		f.object = configMap(data)
	}
	b := f.frame(kind)
	if data == nil {
		f.object = nil
	}
	watches := f.watches
	f.mu.Unlock()
	for w := range watches {
		_, _ = w.Write(b)
	}
	synctest.Wait()
}

// hold changes what the next watch begins with; "": there is none.
func (f *fakeCluster) hold(s string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.object = nil
	if s != "" {
		f.object = configMap(holding(s))
	}
}

func configMap(data map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "edgehub-config", ResourceVersion: "8"}, Data: data}
}

func holding(s string) map[string]string { return map[string]string{"config.yaml": s, "other": "x"} }

const (
	mapName    = "kube-system/edgehub-config"
	mapUnknown = mapName + `:4: filters[0].name: unknown filter "nonsense", known are masterservice, servicetopology, hostnetworkpool`
)

func TestConfigMap(t *testing.T) {
	for _, protobuf := range []bool{true, false} {
		inBubble(t, func(b *bench) {
			b.cluster.shape.Protobuf = protobuf
			b.options.Namespace = "kube-system"
			b.write(b.path, with("masterservice"))
			b.start()
			b.want("none", []string{"masterservice"}, "file", nil)
			if got, want := strings.Join(b.cluster.asked, "\n"), "system:node:edge-1 watch /api/v1/namespaces/kube-system/configmaps metadata.name=edgehub-config"; got != want {
				t.Errorf("requests = %q, want %q", got, want)
			}

			b.cluster.say(holding(with("servicetopology")))
			b.want("there is one", []string{"masterservice", "servicetopology"}, "configmap", nil)
			b.wantCopy("there is one", "configmap", mapName, with("servicetopology"))
			b.wantCounts("there is one", "configmap", 1, 1, 0)

			b.cluster.say(holding(with("nonsense")))
			b.want("bad", []string{"masterservice", "servicetopology"}, "configmap", map[string]string{"configmap": mapUnknown})
			b.wantCopy("bad", "configmap", mapName, with("servicetopology"))
			b.wantCounts("bad", "configmap", 0, 1, 1)

			b.cluster.say(map[string]string{"config.yml": with("masterservice")})
			b.want("without the key", []string{"masterservice", "servicetopology"}, "configmap", map[string]string{"configmap": mapName + ": has no key config.yaml"})

			b.write(b.path, with("hostnetworkpool"))
			pass(2 * pollPeriod)
			b.want("another file", []string{"masterservice", "servicetopology"}, "configmap", map[string]string{"configmap": mapName + ": has no key config.yaml"})
			b.wantCounts("another file", "file", 1, 2, 0)
			b.wantCopy("another file", "configmap", mapName, with("servicetopology"))

			b.cluster.say(nil)
			b.want("deleted", []string{"masterservice", "servicetopology", "hostnetworkpool"}, "file", nil)
			b.wantCopy("deleted", "file", b.path, with("hostnetworkpool"))
			b.wantCounts("deleted", "configmap", 1, 1, 2)

			b.cluster.say(holding(strings.TrimSuffix(with("hostnetworkpool"), "\n")))
			b.want("says the same as the file", []string{"masterservice", "servicetopology", "hostnetworkpool"}, "configmap", nil)
			b.wantCopy("says the same as the file", "configmap", mapName, with("hostnetworkpool"))
		})
	}
}

func TestConfigMapBadAtTheStart(t *testing.T) {
	for _, file := range []bool{true, false} {
		inBubble(t, func(b *bench) {
			b.options.Namespace = "kube-system"
			b.cluster.hold(with("nonsense"))
			inForce, applied := "defaults", "defaults"
			if file {
				b.write(b.path, with("masterservice"))
				inForce, applied = "file", "masterservice"
			} else {
				b.options.File = ""
			}
			b.start()
			b.want("bad", []string{applied}, inForce, map[string]string{"configmap": mapUnknown})
			b.cluster.say(holding(with("servicetopology")))
			b.want("mended", []string{applied, "servicetopology"}, "configmap", nil)
			b.cluster.say(nil)
			b.want("deleted", []string{applied, "servicetopology", applied}, inForce, nil)
			if !file {
				b.wantCopy("deleted", "", "", "")
			}
		})
	}
}

func TestConfigMapCannotBeRead(t *testing.T) {
	for _, test := range []struct {
		code  int
		want  string
		valid int // -1: nobody can say, which is not logged
	}{
		{403, mapName + ": the node may not get, list and watch it (403)", 0},
		{404, mapName + ": is not there (404)", 0},
		{500, mapName + ": /v1, Resource=configmaps: the API server answered 500", -1},
		{0, mapName + ": the link is down", -1},
	} {
		inBubble(t, func(b *bench) {
			b.options.Namespace = "kube-system"
			b.write(b.path, with("masterservice"))
			b.cluster.set(test.code)
			b.start()
			pass(10 * time.Minute)
			b.want(test.want, []string{"masterservice"}, "file", map[string]string{"configmap": test.want})
			b.wantLogged(test.want, "cannot be read", test.valid+1)
			families, err := b.registry.Gather()
			if err != nil {
				t.Fatal(err)
			}
			valid := -1
			for _, f := range families {
				for _, m := range f.GetMetric() {
					if f.GetName() == "edgehub_filter_config_valid" && m.GetLabel()[0].GetValue() == "configmap" {
						valid = int(m.GetGauge().GetValue())
					}
				}
			}
			if valid != test.valid {
				t.Errorf("%d: edgehub_filter_config_valid{configmap} = %d, want %d", test.code, valid, test.valid)
			}
			b.cluster.hold(with("servicetopology"))
			b.cluster.set(http.StatusOK)
			synctest.Wait()
			b.want("readable", []string{"masterservice", "servicetopology"}, "configmap", nil)
		})
	}
}

// A restart goes on with what was in force, before and without the cluster.
func TestRestartWithTheCopyOfAConfigMap(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.options.Namespace = "kube-system"
		b.write(b.path, with("masterservice"))
		b.cluster.hold(with("servicetopology"))
		b.start()
		b.want("first", []string{"masterservice", "servicetopology"}, "configmap", nil)

		b.cluster.set(0)
		b.start()
		down := map[string]string{"configmap": mapName + ": the link is down"}
		b.want("offline", []string{"servicetopology"}, "last_good", down)
		pass(time.Hour)
		b.want("still offline", []string{"servicetopology"}, "last_good", down)
		b.write(b.path, with("hostnetworkpool"))
		pass(2 * pollPeriod)
		b.want("another file", []string{"servicetopology"}, "last_good", down)
		b.cluster.set(http.StatusForbidden)
		synctest.Wait()
		b.want("forbidden", []string{"servicetopology"}, "last_good", map[string]string{"configmap": mapName + ": the node may not get, list and watch it (403)"})
		before, err := os.Stat(b.copyPath())
		if err != nil {
			t.Fatal(err)
		}
		b.cluster.set(http.StatusOK)
		synctest.Wait()
		b.want("the link is back", []string{"servicetopology"}, "configmap", nil)
		if after, err := os.Stat(b.copyPath()); err != nil || !os.SameFile(before, after) {
			t.Errorf("the copy was written again (%v), want the same file", err)
		}

		b.cluster.say(holding(with("nonsense")))
		b.start()
		b.want("bad since", []string{"servicetopology"}, "last_good", map[string]string{"configmap": mapUnknown})
		b.wantCopy("bad since", "configmap", mapName, with("servicetopology"))

		b.cluster.say(nil)
		b.start()
		b.want("deleted", []string{"hostnetworkpool"}, "file", nil)

		b.cluster.hold(with("servicetopology"))
		b.start()
		b.end()
		b.cluster.hold("")
		b.start()
		b.want("deleted meanwhile", []string{"servicetopology", "hostnetworkpool"}, "file", nil)
		b.wantCopy("deleted meanwhile", "file", b.path, with("hostnetworkpool"))
	})
}

func TestCopyOfAConfigMapThatNobodyAsksFor(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.path, with("masterservice"))
		for _, test := range []struct {
			name, file, namespace, want, inForce string
		}{
			{"none configured", b.path, "", "masterservice", "file"},
			{"another one", b.path, "other", "masterservice", "file"},
			{"this one", b.path, "kube-system", "servicetopology", "last_good"},
			{"this one, without a file", "", "kube-system", "servicetopology", "last_good"},
			{"another one, without a file", "", "other", "defaults", "defaults"},
			{"this one in place of a bad file", filepath.Join(b.dir, "none"), "", "servicetopology", "last_good"},
		} {
			b.write(b.copyPath(), string(lastGood(sourceConfigMap, mapName, []byte(with("servicetopology")))))
			b.options.File, b.options.Namespace = test.file, test.namespace
			if err := b.load(); err != nil {
				t.Errorf("%s: Load() = %v, want nil", test.name, err)
			}
			var in string
			for _, s := range b.Status().Sources {
				if s.InForce {
					in = s.Source
				}
			}
			if len(b.applied) != 1 || b.applied[0] != test.want || in != test.inForce {
				t.Errorf("%s: in force is %q of %s, want %s of %s", test.name, b.applied, in, test.want, test.inForce)
			}
		}
	})
}

// The file was never good: less than what is in force cannot be meant.
func TestConfigMapDeletedWhileTheFileIsBad(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.path, with("masterservice"))
		if err := b.load(); err != nil {
			t.Fatal(err)
		}
		b.write(b.path, with("nonsense"))
		b.options.Namespace = "kube-system"
		b.cluster.hold(with("servicetopology"))
		b.start()
		bad := map[string]string{"file": unknownFilter}
		b.want("at the start", []string{"masterservice", "servicetopology"}, "configmap", bad)
		b.cluster.say(nil)
		bad["configmap"] = mapName + ": is gone, and stays in force, since nothing else is good"
		b.want("deleted", []string{"masterservice", "servicetopology"}, "configmap", bad)
		b.write(b.path, with("hostnetworkpool"))
		pass(2 * pollPeriod)
		b.want("mended", []string{"masterservice", "servicetopology", "hostnetworkpool"}, "file", nil)
	})
}

// What comes into force instead of a deleted ConfigMap may be refused, too.
func TestConfigMapDeletedAndTheFileIsRefused(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.path, with("masterservice"))
		b.options.Namespace = "kube-system"
		b.cluster.hold(with("servicetopology"))
		b.start()
		b.refuses("masterservice")
		b.cluster.say(nil)
		b.want("deleted", []string{"masterservice", "servicetopology"}, "configmap", map[string]string{
			"file":      "filters.yaml: masterservice: no room",
			"configmap": mapName + ": is gone, and stays in force, since nothing else is good",
		})
		b.wantCopy("deleted", "configmap", mapName, with("servicetopology"))
	})
}

// What was refused does not come back.
func TestConfigMapDeletedAndTheFileWasRefusedBefore(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.path, with("masterservice"))
		b.options.Namespace = "kube-system"
		b.refuses("servicetopology")
		b.start()
		b.write(b.path, with("servicetopology"))
		pass(2 * pollPeriod)
		b.cluster.say(holding(with("hostnetworkpool")))
		b.cluster.say(nil)
		b.want("deleted", []string{"masterservice", "hostnetworkpool", "masterservice"}, "file", map[string]string{"file": "filters.yaml: servicetopology: no room"})
	})
}
