// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepool

// A State is how well a Membership is known.
type State string

const (
	// Unknown means: there is no answer yet, or no such Node.
	Unknown State = "unknown"
	// Known means: the API server says so.
	Known State = "known"
	// Stale means: the API server said so, but the link is down and nobody vouches for it now.
	Stale State = "stale"
)

// An Origin is where HostNetwork of a Membership comes from.
type Origin string

const (
	// FromNothing means: the node is in no pool, or that is unknown.
	FromNothing Origin = ""
	// FromPool means: the NodePool.
	FromPool Origin = "NodePool"
	// FromLabel means: only the label of the node, as its NodePool does not exist or cannot be read.
	FromLabel Origin = "NodeLabel"
)

// A Drift is how the pool and the label of the node differ.
type Drift string

const (
	// NoDrift means: they do not differ.
	NoDrift Drift = ""
	// LabelMissing means: the pool is a host-network pool, the node lacks the label.
	LabelMissing Drift = "LabelMissing"
	// LabelNotTrue means: the pool is a host-network pool, and the label has a value that does
	// not count.
	LabelNotTrue Drift = "LabelNotTrue"
	// LabelLeftOver means: the node has the label, but its pool, if any, is no host-network pool.
	LabelLeftOver Drift = "LabelLeftOver"
	// PoolMissing means: the node names a pool that does not exist.
	PoolMissing Drift = "PoolMissing"
)

// A Membership is which pool a node is in. It is comparable.
type Membership struct {
	Node string
	// Pool is "" if the node is in none, or if State is Unknown.
	Pool string
	// Type is the pool's; "" if no NodePool is known.
	Type        string
	HostNetwork bool
	State       State
	Origin      Origin
	Drift       Drift
}

// labels are those of a Node that matter here.
type labels struct {
	pool           string
	hostNetwork    string
	hasHostNetwork bool
}

// An answer is what is known of the NodePool that a node names.
type answer struct {
	kind answerKind
	pool Pool // if kind is found
}

type answerKind int

const (
	none       answerKind = iota // yet
	found                        // and read
	absent                       // there is no NodePool of this name
	unreadable                   // there may be one, but not for us
	unreached                    // there may be one, but the link is down
)

// judge concludes the membership of a node that is there.
func judge(node string, l labels, a answer, up bool) Membership {
	m := Membership{Node: node, Pool: l.pool, State: Stale}
	if up {
		m.State = Known
	}
	switch labelled := l.hostNetwork == True; {
	case l.pool == "":
		m.Drift = drift(l, false)
	case a.kind == none:
		return Membership{Node: node, State: Unknown}
	case a.kind == found:
		m.Type, m.HostNetwork, m.Origin = a.pool.Type, a.pool.HostNetwork, FromPool
		m.Drift = drift(l, a.pool.HostNetwork)
	case a.kind == absent:
		m.HostNetwork, m.Origin, m.Drift = labelled, FromLabel, PoolMissing
	default:
		m.HostNetwork, m.Origin = labelled, FromLabel
		if a.kind == unreached { // until it is asked again
			m.State = Stale
		}
	}
	return m
}

// LabelDrift is how the labels of a node and its pool differ, other than by PoolMissing.
// hostNetwork is false for a node that is in no pool.
func LabelDrift(nodeLabels map[string]string, hostNetwork bool) Drift {
	value, ok := nodeLabels[HostNetworkLabel]
	return drift(labels{hostNetwork: value, hasHostNetwork: ok}, hostNetwork)
}

func drift(l labels, hostNetwork bool) Drift {
	switch labelled := l.hostNetwork == True; {
	case labelled == hostNetwork:
		return NoDrift
	case labelled:
		return LabelLeftOver
	case l.hasHostNetwork:
		return LabelNotTrue
	}
	return LabelMissing
}
