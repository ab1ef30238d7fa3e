// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filtertest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/edgehub/edgehub/pkg/filter"
)

const web = `{"kind":"Service","apiVersion":"v1","metadata":{"name":"web","namespace":"shop"},"spec":{"clusterIP":"10.96.0.7"}}`

// A fake is a filter of Services.
type fake func(*filter.Object, *corev1.Service) (filter.Verdict, error)

func (fake) Name() string { return "fake" }

func (f fake) Apply(_ context.Context, o *filter.Object) (filter.Verdict, error) {
	s, err := filter.As[corev1.Service](o)
	if err != nil {
		return filter.Keep, err
	}
	return f(o, s)
}

func set(ip string) fake {
	return func(_ *filter.Object, s *corev1.Service) (filter.Verdict, error) {
		if s.Spec.ClusterIP == ip {
			return filter.Keep, nil
		}
		s.Spec.ClusterIP = ip
		return filter.Change, nil
	}
}

func TestJudge(t *testing.T) {
	for _, tc := range []struct {
		name string
		f    fake
		want golden
	}{
		{"keep", func(*filter.Object, *corev1.Service) (filter.Verdict, error) { return filter.Keep, nil }, golden{Ext: keepExt}},
		{"drop", func(*filter.Object, *corev1.Service) (filter.Verdict, error) { return filter.Drop, nil }, golden{Ext: dropExt}},
		{"error", func(*filter.Object, *corev1.Service) (filter.Verdict, error) { return filter.Keep, errors.New("no") }, golden{errExt, "no\n"}},
		{"change", set("169.254.2.1"), golden{outExt, `{
  "kind": "Service",
  "apiVersion": "v1",
  "metadata": {
    "name": "web",
    "namespace": "shop"
  },
  "spec": {
    "clusterIP": "169.254.2.1"
  }
}
`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got, err := judge(t.Context(), tc.f, []byte(web)); err != nil || got != tc.want {
				t.Errorf("judge(web) = %v, %v, want %v", got, err, tc.want)
			}
		})
	}
}

// What filters must not do is found.
func TestJudgeRefuses(t *testing.T) {
	for _, tc := range []struct {
		name, in, want string
		f              fake
	}{
		{"changes and says keep", web, "json: fake said keep", func(_ *filter.Object, s *corev1.Service) (filter.Verdict, error) {
			s.Spec.ClusterIP = ""
			return filter.Keep, nil
		}},
		{"says change and does not", web, "json: fake said change", func(*filter.Object, *corev1.Service) (filter.Verdict, error) { return filter.Change, nil }},
		{"changes again", web, "json: fake said change to what it had let pass", func(_ *filter.Object, s *corev1.Service) (filter.Verdict, error) {
			s.Spec.ClusterIP += "0"
			return filter.Change, nil
		}},
		{"drops what it let pass", web, "json: fake said drop to what it had let pass", func(_ *filter.Object, s *corev1.Service) (filter.Verdict, error) {
			if s.Spec.ClusterIP == "" {
				return filter.Drop, nil
			}
			s.Spec.ClusterIP = ""
			return filter.Change, nil
		}},
		{"drops in JSON only", web, "protobuf: fake said keep, and in JSON drop", func(o *filter.Object, _ *corev1.Service) (filter.Verdict, error) {
			if o.Shape().Protobuf {
				return filter.Keep, nil
			}
			return filter.Drop, nil
		}},
		{"another error in protobuf", web, "protobuf: fake said error: in true, and in JSON error: in false", func(o *filter.Object, _ *corev1.Service) (filter.Verdict, error) {
			if o.Shape().Protobuf {
				return filter.Keep, errors.New("in true")
			}
			return filter.Keep, errors.New("in false")
		}},
		{"another object in protobuf", web, "protobuf: fake made another object", func(o *filter.Object, s *corev1.Service) (filter.Verdict, error) {
			if o.Shape().Protobuf {
				return set("192.0.2.2")(o, s)
			}
			return set("192.0.2.1")(o, s)
		}},
		{"no JSON", "{", "unexpected end", nil},
		{"no object", "{}", "kind", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got, err := judge(t.Context(), tc.f, []byte(tc.in)); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("judge(%s) = %v, %v, want an error with %q", tc.in, got, err, tc.want)
			}
		})
	}
}

func TestGoldenFiles(t *testing.T) {
	stem := filepath.Join(t.TempDir(), "case")
	if got, err := read(stem); err == nil {
		t.Errorf("read(no golden) = %v, nil, want an error", got)
	}
	for _, want := range []golden{{outExt, "{}\n"}, {Ext: keepExt}, {Ext: dropExt}, {errExt, "no\n"}} {
		if err := want.write(stem); err != nil {
			t.Fatal(err)
		}
		if got, err := read(stem); err != nil || got != want {
			t.Errorf("read() = %v, %v, want %v, which was written after another one", got, err, want)
		}
	}
	if err := os.WriteFile(stem+dropExt, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := read(stem); err == nil {
		t.Errorf("read(two goldens) = %v, nil, want an error", got)
	}
}

func TestRun(t *testing.T) {
	dir := t.TempDir()
	stem := filepath.Join(dir, "web")
	if err := os.WriteFile(stem+inExt, []byte(web), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (golden{Ext: dropExt}).write(stem); err != nil {
		t.Fatal(err)
	}
	Run(t, dir, fake(func(*filter.Object, *corev1.Service) (filter.Verdict, error) { return filter.Drop, nil }))
}
