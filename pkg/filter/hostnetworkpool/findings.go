// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/hostport"
	"github.com/edgehub/edgehub/pkg/nodepool"
)

// A Kind is what is wrong; it is the reason of an Event.
type Kind string

const (
	// NoPodNetwork means: a pod that is not on the host network, on a node in a host-network
	// pool, where it has no network but lo.
	NoPodNetwork Kind = "NoPodNetwork"
	// HostPortConflict means: a pod wants a host port that another one on this node, or the
	// pod itself, has too.
	HostPortConflict Kind = "HostPortConflict"
	// ExcludedPodOnHostNetworkPool means: a pod asks to stay off host-network pools and is on one.
	ExcludedPodOnHostNetworkPool Kind = "ExcludedPodOnHostNetworkPool"
	// PoolLabelDrift means: the NodePool and the labels of the node differ.
	PoolLabelDrift Kind = "PoolLabelDrift"
)

var kinds = []Kind{NoPodNetwork, HostPortConflict, ExcludedPodOnHostNetworkPool, PoolLabelDrift}

// A Finding is about a pod, or, if it names none, about the node. Two are the same if
// their UID, Kind and Detail are.
type Finding struct {
	Kind      Kind   `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	UID       string `json:"uid,omitempty"`
	// Detail tells findings of a kind apart: the port, the drift.
	Detail string `json:"detail,omitempty"`
	// Message says what to do, in at most 200 bytes.
	Message string `json:"message"`
	// Stale is set while the link is down: it was so when it was last known.
	Stale bool `json:"stale,omitempty"`
}

const (
	idBytes = 8
	// maxMessageNameBytes is what is shown of a pod's namespace and name in a message,
	// such that it fits.
	maxMessageNameBytes = 80
	maxMessageBytes     = 200
)

func clip(s string, maxBytes int) string {
	if len(s) <= maxBytes {
		return s
	}
	return strings.ToValidUTF8(s[:maxBytes-3], "") + "..."
}

// id identifies a finding wherever it is kept, in 16 hex digits.
func (f *Finding) id() string {
	h := sha256.New()
	for _, s := range []string{f.UID, string(f.Kind), f.Detail} {
		var length [4]byte
		binary.BigEndian.PutUint32(length[:], uint32(len(s)))
		h.Write(length[:])
		h.Write([]byte(s))
	}
	return hex.EncodeToString(h.Sum(nil)[:idBytes])
}

func (f *Finding) keysAndValues() []any {
	kv := []any{"kind", f.Kind, "detail", f.Detail, "message", f.Message}
	if f.Pod != "" {
		kv = append(kv, "pod", klog.KRef(f.Namespace, f.Pod))
	}
	return kv
}

// find returns all findings about the pods of a node, sorted.
func find(pods []*pod, m nodepool.Membership) []Finding {
	found := conflicts(pods)
	if m.State != nodepool.Unknown && m.HostNetwork {
		for _, p := range pods {
			found = append(found, onHostNetworkPool(p, m.Pool)...)
		}
	}
	if m.Drift != nodepool.NoDrift {
		found = append(found, Finding{Kind: PoolLabelDrift, Detail: strings.TrimSpace(string(m.Drift) + " " + m.Pool), Message: driftMessage(m)})
	}
	for i := range found {
		found[i].Stale = m.State == nodepool.Stale
		found[i].Message = clip(found[i].Message, maxMessageBytes)
	}
	slices.SortFunc(found, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.UID, b.UID), cmp.Compare(a.Detail, b.Detail))
	})
	return found
}

func (p *pod) finding(kind Kind, detail, message string) Finding {
	return Finding{Kind: kind, Namespace: p.namespace, Pod: p.name, UID: p.uid, Detail: detail, Message: message}
}

func onHostNetworkPool(p *pod, pool string) (found []Finding) {
	if p.terminal {
		return nil
	}
	if !p.hostNetwork {
		found = append(found, p.finding(NoPodNetwork, "", fmt.Sprintf(
			"Pool %s has no pod network: set hostNetwork: true, or recreate the pod with annotation %s: %q.", pool, nodepool.ExcludeAnnotation, nodepool.True)))
	}
	if p.excluded {
		found = append(found, p.finding(ExcludedPodOnHostNetworkPool, "", fmt.Sprintf(
			"The pod asks to stay off host-network pools, yet runs in pool %s: delete it, so that its owner creates one elsewhere.", pool)))
	}
	return found
}

func driftMessage(m nodepool.Membership) string {
	const label = nodepool.HostNetworkLabel + "=" + nodepool.True
	switch m.Drift {
	case nodepool.LabelMissing:
		return fmt.Sprintf("Pool %s is a host-network pool: set the label %s on this node.", m.Pool, label)
	case nodepool.LabelNotTrue:
		return fmt.Sprintf("Pool %s is a host-network pool: correct the label of this node to %s.", m.Pool, label)
	case nodepool.LabelLeftOver:
		return fmt.Sprintf("The node is in no host-network pool: remove its label %s.", nodepool.HostNetworkLabel)
	}
	return fmt.Sprintf("The node's label names pool %s, which does not exist: create the NodePool, or move the node.", m.Pool)
}

// A place is a host port of a pod, on whatever IPs.
type place struct {
	uid      string
	port     int32
	protocol corev1.Protocol
}

// rivals are who else wants a place: the first by name, and whether there are more. The
// pod itself has no name here. Of many pods with one port not all pairs are kept.
type rivals struct {
	first string
	more  bool
}

func (r *rivals) add(name string) {
	switch {
	case name == r.first || name == "":
	case r.first == "":
		r.first = name
	default:
		r.first, r.more = min(r.first, name), true
	}
}

func conflicts(pods []*pod) []Finding {
	byUID := make(map[string]*pod, len(pods))
	holders := make([]hostport.Holder, 0, len(pods))
	for _, p := range pods {
		byUID[p.uid] = p
		holders = append(holders, hostport.Holder{ID: p.uid, Ports: p.ports})
	}
	places := map[place]*rivals{}
	add := func(c, other hostport.Claim) {
		at := place{c.Holder, c.Port.Port, c.Protocol}
		if places[at] == nil {
			places[at] = &rivals{}
		}
		name := ""
		if p := byUID[other.Holder]; other.Holder != c.Holder {
			name = p.namespace + "/" + p.name
		}
		places[at].add(name)
	}
	for c := range hostport.Collisions(holders) {
		add(c.First, c.Second)
		add(c.Second, c.First)
	}
	found := make([]Finding, 0, len(places))
	for at, r := range places {
		detail := fmt.Sprintf("%d/%s", at.port, at.protocol)
		found = append(found, byUID[at.uid].finding(HostPortConflict, detail, r.message(detail)))
	}
	return found
}

func (r *rivals) message(port string) string {
	if r.first == "" {
		return fmt.Sprintf("Two containers of the pod want host port %s: change the port of one of them.", port)
	}
	name, others := clip(r.first, maxMessageNameBytes), ""
	if r.more {
		others = " and others"
	}
	return fmt.Sprintf("Host port %s is also wanted by %s%s: change the port of all but one, or move them to other nodes.", port, name, others)
}
