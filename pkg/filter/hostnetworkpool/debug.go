// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// A Document is what the Observer answers with, as JSON.
type Document struct {
	Node        string          `json:"node"`
	Pool        string          `json:"pool"` // "": in none
	Type        string          `json:"type,omitempty"`
	HostNetwork bool            `json:"hostNetwork"`
	State       nodepool.State  `json:"state"`
	Source      nodepool.Origin `json:"source,omitempty"`
	Drift       nodepool.Drift  `json:"drift,omitempty"`
	Findings    []Finding       `json:"findings"`
	// Pods is how many pods of this node are known; AllPods, whether these are all.
	Pods    int  `json:"pods"`
	AllPods bool `json:"allPods"`
	// Changed is when the membership or a finding last changed.
	Changed time.Time `json:"changed,omitzero"`
}

// Document is the state at the last computation.
func (o *Observer) Document() Document {
	o.mu.Lock()
	defer o.mu.Unlock()
	m := o.shown.membership
	return Document{
		Node: o.cfg.NodeName(), Pool: m.Pool, Type: m.Type, HostNetwork: m.HostNetwork, State: m.State, Source: m.Origin, Drift: m.Drift,
		Findings: append([]Finding{}, o.shown.findings...), Pods: len(o.pods), AllPods: o.whole, Changed: o.shown.changed.UTC(),
	}
}

// ServeHTTP answers GET and HEAD with the Document.
func (o *Observer) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(o.Document()) // the client is gone
}
