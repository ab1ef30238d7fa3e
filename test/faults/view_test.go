// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/edgehub/edgehub/test/rig"
)

// A view is what one user asks for again and again, in one form.
type view struct {
	byNode   bool // else a user with a token
	resource string
	path     string // with its selector
	accept   string
	watched  bool
	pages    int // > 0: listed in pages of so many
	keep     func(key string, labels map[string]string) bool

	mu       sync.Mutex
	life     int       // of the hub: how often it has been killed
	recorded time.Time // first time in this round that all of it had passed
	durable  bool      // a hub that was killed a second later had it
	seen     []sighting

	ok, missing, missingDurable int // offline lists
}

// A sighting is an event as it came through the hub.
type sighting struct {
	at time.Time
	rv int64
}

func in(namespace string) func(string, map[string]string) bool {
	return func(key string, _ map[string]string) bool { return strings.HasPrefix(key, namespace+"/") }
}
func everything(string, map[string]string) bool { return true }
func with(label, value string) func(string, map[string]string) bool {
	return func(_ string, labels map[string]string) bool { return labels[label] == value }
}

func views() []*view {
	pbjs := rig.Protobuf + "," + rig.JSON
	return []*view{
		{byNode: true, resource: "pods", path: "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1", accept: pbjs, watched: true, keep: with("node", "n1")},
		{byNode: true, resource: "configmaps", path: "/api/v1/configmaps?", accept: pbjs, watched: true, keep: everything},
		{byNode: true, resource: "secrets", path: "/api/v1/namespaces/a/secrets?", accept: pbjs, watched: true, keep: in("a")},
		{byNode: true, resource: "widgets", path: "/apis/example.com/v1/widgets?", accept: rig.JSON, watched: true, keep: everything},
		{byNode: true, resource: "pods", path: "/api/v1/pods?", accept: rig.MetadataProtobuf, watched: true, keep: everything},
		{resource: "configmaps", path: "/api/v1/namespaces/a/configmaps?", accept: rig.JSON, watched: true, keep: in("a")},
		{resource: "configmaps", path: "/api/v1/configmaps?labelSelector=parity%3Deven", accept: rig.JSON, watched: true, keep: with("parity", "even")},
		{resource: "pods", path: "/api/v1/namespaces/b/pods?", accept: rig.JSON, watched: true, keep: in("b")},
		{resource: "secrets", path: "/api/v1/secrets?", accept: rig.JSON, watched: true, keep: everything},
		{resource: "widgets", path: "/apis/example.com/v1/namespaces/a/widgets?", accept: rig.JSON, watched: true, keep: in("a")},
		{resource: "widgets", path: "/apis/example.com/v1/widgets?labelSelector=parity%3Dodd", accept: rig.JSON, keep: with("parity", "odd")},
		{resource: "pods", path: "/api/v1/pods?", accept: pbjs, pages: 10, keep: everything},
		{resource: "secrets", path: "/api/v1/namespaces/b/secrets?", accept: pbjs, keep: in("b")},
		{byNode: true, resource: "secrets", path: "/api/v1/secrets?labelSelector=parity%3Deven", accept: pbjs, keep: with("parity", "even")},
	}
}

// form names the representation of a view.
func (v *view) form() string {
	switch {
	case v.accept == rig.MetadataProtobuf:
		return "partial"
	case strings.HasPrefix(v.accept, rig.Protobuf):
		return "protobuf"
	}
	return "json"
}

func (v *view) String() string {
	who := "user"
	if v.byNode {
		who = "node"
	}
	return fmt.Sprintf("%s %s (%s)", who, v.path, v.form())
}

// now returns which life of the hub a request is about to meet.
func (v *view) now() (life int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.life
}

// noteRecorded notes that the hub has had all of it, if it is still that hub: what
// a client reads may be what a dead one has sent.
func (v *view) noteRecorded(life int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.recorded.IsZero() && v.life == life {
		v.recorded = time.Now()
	}
}

func (v *view) noteSeen(life int, rv int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.life == life {
		v.seen = append(v.seen, sighting{time.Now(), rv})
	}
}

// killed ends a round. It returns the newest resourceVersion that must be on
// disk.
func (v *view) killed(at time.Time) (floor int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.recorded.IsZero() && at.Sub(v.recorded) > time.Second {
		v.durable = true
	}
	// Pods and custom resources have changes that may stay in memory for longer.
	if v.resource == "configmaps" || v.resource == "secrets" {
		for _, s := range v.seen {
			if at.Sub(s.at) > flushPatience {
				floor = max(floor, s.rv)
			}
		}
	}
	v.life++
	v.recorded, v.seen = time.Time{}, nil
	return floor
}

// settled reports whether all of it has been on disk for a moment.
func (v *view) settled() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.durable || !v.recorded.IsZero() && time.Since(v.recorded) > flushPatience
}
