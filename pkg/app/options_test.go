// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func valid() Options {
	o := DefaultOptions()
	o.ServerURLs = []string{"https://10.0.0.1:6443"}
	return o
}

func TestValidate(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*Options)
		want   string // what the error holds; empty: none
	}{
		{"as it comes, with a server", func(*Options) {}, ""},
		{"IPv6", func(o *Options) { o.ListenAddress, o.LinkLocalAddress = "[::1]:10268", "[fd00::1]:10268" }, ""},
		{"IPv6 that pods do not reach", func(o *Options) { o.LinkLocalAddress, o.AllowNonLocalListen = "[fe80::1]:10268", true }, "fc00::/7"},
		{"ages", func(o *Options) { o.OfflineMaxAge = map[string]string{"node": "720h", "user": "0"} }, ""},
		{"an age of nobody", func(o *Options) { o.OfflineMaxAge = map[string]string{"users": "1h"} }, "--offline-max-age: \"users\" is no class"},
		{"an age that is none", func(o *Options) { o.OfflineMaxAge = map[string]string{"user": "1 day"} }, "--offline-max-age: user=1 day"},
		{"a negative age", func(o *Options) { o.OfflineMaxAge = map[string]string{"node": "-1h"} }, "--offline-max-age: node=-1h"},
		{"a signer that is none", func(o *Options) { o.ServingCertificate = "acme" }, "--serving-certificate: \"acme\" is neither local nor csr"},
		{"a name that is none", func(o *Options) { o.ServingNames = []string{"kubernetes.default", "10.96.0.1", "*.x"} }, "--serving-names: \"*.x\" is neither a DNS name nor an IP address"},
		{"two servers", func(o *Options) { o.ServerURLs = append(o.ServerURLs, "https://api.example") }, ""},
		{"no metrics", func(o *Options) { o.MetricsListenAddress = "" }, ""},
		{"anywhere, on purpose", func(o *Options) { o.ListenAddress, o.AllowNonLocalListen = "0.0.0.0:10268", true }, ""},
		{"no server", func(o *Options) { o.ServerURLs = nil }, "--server-url: required"},
		{"plain HTTP", func(o *Options) { o.ServerURLs = []string{"http://10.0.0.1"} }, "--server-url: \"http://10.0.0.1\""},
		{"a path", func(o *Options) { o.ServerURLs = []string{"https://10.0.0.1/k8s"} }, "--server-url"},
		{"no CA", func(o *Options) { o.ServerCAFile = "" }, "--server-ca-file: required"},
		{"relative directory", func(o *Options) { o.DataDir = "data" }, "--data-dir"},
		{"port 0", func(o *Options) { o.ListenAddress = "127.0.0.1:0" }, "0 is not a port"},
		{"port 0 of metrics", func(o *Options) { o.MetricsListenAddress = "127.0.0.1:0" }, "--metrics-listen-address: \"127.0.0.1:0\": 0 is not a port"},
		{"port 0, anywhere", func(o *Options) { o.ListenAddress, o.AllowNonLocalListen = "0.0.0.0:0", true }, "0 is not a port"},
		{"port too large", func(o *Options) { o.ListenAddress = "127.0.0.1:65536" }, "from 1 to 65535"},
		{"negative port", func(o *Options) { o.ListenAddress = "127.0.0.1:-1" }, "from 1 to 65535"},
		{"no port", func(o *Options) { o.ListenAddress = "127.0.0.1" }, "address:port"},
		{"a name", func(o *Options) { o.ListenAddress = "localhost:10268" }, "not an IP address"},
		{"all interfaces", func(o *Options) { o.ListenAddress = ":10268" }, "not an IP address"},
		{"any address", func(o *Options) { o.ListenAddress = "0.0.0.0:10268" }, "--allow-non-local-listen"},
		{"a public address", func(o *Options) { o.MetricsListenAddress = "192.0.2.1:10267" }, "--allow-non-local-listen"},
		{"link-local that is not", func(o *Options) { o.LinkLocalAddress = "127.0.0.1:10269" }, "not link-local"},
		{"one port for two", func(o *Options) { o.MetricsListenAddress = o.ListenAddress }, "is --listen-address's already"},
		{"no bytes", func(o *Options) { o.CacheMaxBytes = 0 }, "--cache-max-bytes"},
		{"no time", func(o *Options) { o.RequestTimeout = -time.Second }, "--request-timeout"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := valid()
			tc.change(&o)
			err := o.Validate()
			if (err == nil) != (tc.want == "") || (err != nil && !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("Validate() = %v, want %q in it", err, tc.want)
			}
		})
	}
}

func TestValidateTellsEverything(t *testing.T) {
	o := Options{AllowNonLocalListen: true}
	err := o.Validate()
	for _, flag := range []string{
		"server-url", "server-ca-file", "client-ca-file", "node-cert-file", "node-key-file", "data-dir", "listen-address", "cache-max-bytes", "cache-max-scopes",
		"cache-max-objects-per-scope", "feed-linger", "max-requests-in-flight", "max-streams-in-flight", "max-body-bytes", "request-timeout",
		"shutdown-drain-timeout", "offline-token-max-age", "offline-verdict-max-age", "outbox-max-events", "outbox-max-bytes", "serving-certificate",
	} {
		if !strings.Contains(err.Error(), "--"+flag+": ") {
			t.Errorf("Validate() of nothing does not name --%s: %v", flag, err)
		}
	}
}

func TestRunAll(t *testing.T) {
	errBroken := errors.New("broken")
	for _, tc := range []struct {
		name   string
		end    func(ctx context.Context) error // of the middle part
		cancel bool
		want   []string // order in which parts end
		errs   []string
	}{
		{"told to", func(ctx context.Context) error { <-ctx.Done(); return nil }, true, []string{"first", "middle", "last"}, nil},
		{"one breaks", func(context.Context) error { return errBroken }, false, []string{"middle", "first", "last"}, []string{"middle: broken"}},
		{"one ends by itself", func(context.Context) error { return nil }, false, []string{"middle", "first", "last"}, []string{"middle: ended by itself"}},
		{"one ends badly", func(ctx context.Context) error { <-ctx.Done(); return errBroken }, true, []string{"first", "middle", "last"}, []string{"middle: broken"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				order := make(chan string, 3)
				slow := func(name string) part {
					return part{name, func(ctx context.Context) error {
						<-ctx.Done()
						<-time.After(time.Second) // of the bubble: the next must wait for it
						order <- name
						return nil
					}}
				}
				middle := part{"middle", func(ctx context.Context) error {
					err := tc.end(ctx)
					order <- "middle"
					return err
				}}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tc.cancel {
					time.AfterFunc(time.Minute, cancel)
				}
				err := runAll(ctx, slow("first"), middle, slow("last"))
				close(order)
				var got []string
				for name := range order {
					got = append(got, name)
				}
				if diff := cmp.Diff(tc.want, got); diff != "" {
					t.Errorf("parts ended in this order (-want +got):\n%s", diff)
				}
				if (err == nil) != (tc.errs == nil) || (err != nil && err.Error() != strings.Join(tc.errs, "\n")) {
					t.Errorf("runAll() = %v, want %q", err, tc.errs)
				}
			})
		})
	}
}
