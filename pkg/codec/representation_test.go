// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var allRepresentations = []Representation{
	{}, {Protobuf: true}, {Partial: "v1"}, {Partial: "v1beta1"}, {Protobuf: true, Partial: "v1"}, {Protobuf: true, Partial: "v1beta1"},
}

func TestRepresentationText(t *testing.T) {
	seen := map[string]bool{}
	for _, rep := range allRepresentations {
		got, err := ParseRepresentation(rep.String())
		if err != nil || got != rep {
			t.Errorf("ParseRepresentation(%q) = %v, %v, want %v", rep.String(), got, err, rep)
		}
		if seen[rep.String()] {
			t.Errorf("String() = %q for two representations", rep)
		}
		seen[rep.String()] = true
	}
	for _, s := range []string{"", "yaml", "json-partial-v2", "JSON"} {
		if _, err := ParseRepresentation(s); !errors.Is(err, ErrMalformed) {
			t.Errorf("ParseRepresentation(%q) error = %v, want ErrMalformed", s, err)
		}
	}
}

// TestAcceptIsUnderstood holds what a feed sends against what the API server, and
// this package, make of it.
func TestAcceptIsUnderstood(t *testing.T) {
	for _, rep := range allRepresentations {
		for _, list := range []bool{false, true} {
			header := rep.Accept(list)
			if diff := cmp.Diff([]Accepted{{Representation: rep}}, ParseAccept([]string{header})); diff != "" {
				t.Errorf("ParseAccept(%q) (-want +got):\n%s", header, diff)
			}
		}
	}
	const want = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	if got := (Representation{Protobuf: true, Partial: "v1"}).Accept(true); got != want {
		t.Errorf("Accept(true) = %q, want %q", got, want)
	}
}

func TestParseAccept(t *testing.T) {
	json, protobuf := Accepted{}, Accepted{Representation: Representation{Protobuf: true}}
	partial := func(protobuf bool, version string) Accepted {
		return Accepted{Representation: Representation{Protobuf: protobuf, Partial: version}}
	}
	other := func(s string) Accepted { return Accepted{Other: s} }
	for _, tc := range []struct {
		name   string
		header []string
		want   []Accepted
	}{
		{"none", nil, []Accepted{json}},
		{"empty", []string{""}, []Accepted{json}},
		{"anything", []string{"*/*"}, []Accepted{json}},
		{"any application", []string{"application/*"}, []Accepted{json}},
		{"typed client", []string{"application/vnd.kubernetes.protobuf,application/json"}, []Accepted{protobuf, json}},
		{"first line only", []string{"application/json", "application/vnd.kubernetes.protobuf"}, []Accepted{json}},
		{"watch of an old client", []string{"application/vnd.kubernetes.protobuf;stream=watch, application/json;stream=watch"}, []Accepted{protobuf, json}},
		{"other stream", []string{"application/json;stream=other, application/json"}, []Accepted{json}},
		{"kubectl get", []string{"application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json"}, []Accepted{
			other("application/json;as=Table;v=v1;g=meta.k8s.io"), other("application/json;as=Table;v=v1beta1;g=meta.k8s.io"), json,
		}},
		{"metadata client list", []string{"application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"}, []Accepted{
			partial(true, "v1"), partial(false, "v1"), json,
		}},
		{"metadata client get", []string{"application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1beta1"}, []Accepted{partial(false, "v1beta1")}},
		{"no Table in protobuf", []string{"application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io,application/json"}, []Accepted{json}},
		{"cbor", []string{"application/cbor,application/json;q=0.9"}, []Accepted{other("application/cbor"), json}},
		{"yaml", []string{"application/yaml"}, []Accepted{other("application/yaml")}},
		{"quality", []string{"application/json;q=0.5,application/vnd.kubernetes.protobuf"}, []Accepted{protobuf, json}},
		{"wildcard last", []string{"*/*,application/vnd.kubernetes.protobuf"}, []Accepted{protobuf, json}},
		{"curl", []string{"text/html, application/xhtml+xml, */*;q=0.8"}, []Accepted{other("text/html"), other("application/xhtml+xml"), json}},
		{"aggregated discovery", []string{"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json"}, []Accepted{
			other("application/json;as=APIGroupDiscoveryList;v=v2;g=apidiscovery.k8s.io"), json,
		}},
		{"unrecognized parameters", []string{"application/json; charset=utf-8; pretty=1"}, []Accepted{json}},
		{"server version", []string{"application/json;sv=v2,application/vnd.kubernetes.protobuf;sv=v1"}, []Accepted{protobuf}},
		{"garbage", []string{"garbage"}, nil},
		{"no image", []string{"image/*"}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, ParseAccept(tc.header)); diff != "" {
				t.Errorf("ParseAccept(%q) (-want +got):\n%s", tc.header, diff)
			}
		})
	}
}

func TestAcceptedResource(t *testing.T) {
	for accept, want := range map[string]bool{
		"application/json": true, "application/vnd.kubernetes.protobuf": true, "application/yaml": true, "application/cbor": true,
		"application/json;as=Table;v=v1;g=meta.k8s.io":                         true,
		"application/yaml;as=Table;v=v1;g=meta.k8s.io":                         true,
		"application/yaml;as=PartialObjectMetadata;v=v1;g=meta.k8s.io":         true,
		"application/cbor;as=Table;v=v1;g=meta.k8s.io":                         false,
		"application/json;as=Table;v=v2;g=meta.k8s.io":                         false,
		"application/json;as=Table":                                            false,
		"application/json;as=APIGroupDiscoveryList;v=v2;g=apidiscovery.k8s.io": false,
		"text/html": false,
		"application/com.github.proto-openapi.spec.v2@v1.0+protobuf": false,
	} {
		accepted := ParseAccept([]string{accept})
		if len(accepted) != 1 {
			t.Fatalf("ParseAccept(%q) = %v, want one", accept, accepted)
		}
		if got := accepted[0].Resource(); got != want {
			t.Errorf("ParseAccept(%q): Resource() = %v, want %v", accept, got, want)
		}
	}
}

func TestContentTypes(t *testing.T) {
	for _, rep := range allRepresentations {
		for _, contentType := range []string{rep.ContentType(), rep.WatchContentType()} {
			got, ok := FromContentType(contentType)
			if want := (Representation{Protobuf: rep.Protobuf}); !ok || got != want {
				t.Errorf("FromContentType(%q) = %v, %v, want %v", contentType, got, ok, want)
			}
		}
	}
	for contentType, want := range map[string]bool{
		"application/json; charset=utf-8": true, "application/json;stream=watch": true, "application/cbor-seq": false, "text/plain": false, "": false, "/": false,
		"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList": false, "application/yaml": false,
	} {
		if _, got := FromContentType(contentType); got != want {
			t.Errorf("FromContentType(%q) = %v, want %v", contentType, got, want)
		}
	}
}
