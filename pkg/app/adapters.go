// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/edgehub/edgehub/pkg/cache"
	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter/hostnetworkpool"
	"github.com/edgehub/edgehub/pkg/follow"
	"github.com/edgehub/edgehub/pkg/identity"
	"github.com/edgehub/edgehub/pkg/nodepool"
	"github.com/edgehub/edgehub/pkg/outbox"
	"github.com/edgehub/edgehub/pkg/proxy/contract"
	"github.com/edgehub/edgehub/pkg/upstream"
)

// Each package names what it needs by an interface of its own; here they meet.
var (
	_ contract.Responses = responses{}
	_ identity.Verdicts  = verdicts{}
	_ contract.Outbox    = events{}
	_ cache.Upstream     = (*upstream.Upstream)(nil)
)

// responses lets the offline contract keep answers in the cache.
type responses struct{ cache *cache.Cache }

func (r responses) PutResponse(u user.Info, class, key string, v contract.Response) {
	r.cache.PutResponse(u, class, key, cache.Response{ContentType: v.ContentType, Body: v.Body, Time: v.Time})
}

func (r responses) Response(u user.Info, class, key string) (contract.Response, bool) {
	v, ok := r.cache.Response(u, class, key)
	return contract.Response{ContentType: v.ContentType, Body: v.Body, Time: v.Time}, ok
}

// events lets the offline contract keep Events in the outbox.
type events struct{ *outbox.Outbox }

func (e events) Put(ctx context.Context, v contract.Event) error {
	return e.Outbox.Put(ctx, outbox.Event{Group: v.Group, Namespace: v.Namespace, Name: v.Name, ContentType: v.ContentType, Body: v.Body})
}

// Events are in clear unless everything is encrypted. What is sealed begins with its
// key's name, and no Event, whatever its encoding, begins with a 0.
const (
	sealedEvent = '\x00'
	sealIDBytes = 8
)

func (d *disk) sealEvent(all bool) func(b []byte, place string) ([]byte, error) {
	return func(b []byte, place string) ([]byte, error) {
		if !all {
			return b, nil
		}
		id := d.sealer.Current()
		sealed, err := d.sealer.Seal(id, b, place)
		return append([]byte(string(sealedEvent)+id), sealed...), err
	}
}

func (d *disk) openEvent(b []byte, place string) ([]byte, error) {
	if len(b) < 1+sealIDBytes || b[0] != sealedEvent {
		return b, nil
	}
	return d.sealer.Open(string(b[1:1+sealIDBytes]), b[1+sealIDBytes:], place)
}

// sealedNow reports whether an Event on disk is as sealEvent would leave it.
func (d *disk) sealedNow(all bool) func(b []byte) bool {
	return func(b []byte) bool {
		if len(b) < 1+sealIDBytes || b[0] != sealedEvent {
			return !all
		}
		return all && string(b[1:1+sealIDBytes]) == d.sealer.Current()
	}
}

// podOnNode tells identity which pods there are.
func podOnNode(c *cache.Cache) func(namespace, name, uid string) bool {
	return func(namespace, name, uid string) bool {
		return c.NodeKnows(schema.GroupVersionResource{Version: "v1", Resource: "pods"}, namespace, name, uid)
	}
}

// reportClass is the class of what hostnetworkpool keeps in the cache.
const reportClass = "report"

// newReport makes the observer of kubelet's pods. Its Events go the way of kubelet's.
func newReport(node string, source follow.Source, up *upstream.Upstream, store *cache.Cache, pool *nodepool.Tracker, next http.RoundTripper, reg prometheus.Registerer) (*hostnetworkpool.Observer, error) {
	return hostnetworkpool.New(hostnetworkpool.Config{
		Node: up.Node, NodeName: func() string { return node }, Membership: pool.Membership, Changed: pool.Changed, Events: next,
		Pods: func(ctx context.Context, see func(watch.EventType, codec.Shape, []byte)) error {
			return source.List(ctx, follow.Query{GroupVersionResource: pods.WithVersion("v1"), FieldSelector: "spec.nodeName=" + node}, see)
		},
		Load: func() ([]byte, bool) {
			r, ok := store.Response(up.Node(), reportClass, hostnetworkpool.Name)
			return r.Body, ok
		},
		Store: func(b []byte) {
			store.PutResponse(up.Node(), reportClass, hostnetworkpool.Name, cache.Response{ContentType: "application/json", Body: b, Time: time.Now()})
		},
		Registerer: reg,
	})
}

// verdictClass is the class of identity's verdicts in the cache.
const verdictClass = "verdict"

// verdicts lets identity keep what it was told about tokens in the cache, among
// the records of the node.
type verdicts struct {
	cache *cache.Cache
	node  func() user.Info
}

// A verdict is stored behind one byte: the cache keeps no empty body, and an
// empty verdict has a meaning.
const verdictPrefix = '\x01'

func (v verdicts) Load(key string) ([]byte, bool) {
	r, ok := v.cache.Response(v.node(), verdictClass, key)
	if !ok || len(r.Body) == 0 || r.Body[0] != verdictPrefix {
		return nil, false
	}
	return r.Body[1:], true
}

func (v verdicts) Store(key string, verdict []byte) {
	v.cache.PutResponse(v.node(), verdictClass, key, cache.Response{ContentType: "application/json", Body: append([]byte{verdictPrefix}, verdict...), Time: time.Now()})
}
