// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepool

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadPool(t *testing.T) {
	for _, tc := range []struct {
		name, object string
		want         Pool
	}{
		{"v1beta2", `{"apiVersion":"apps.openyurt.io/v1beta2","kind":"NodePool","metadata":{"name":"a"},"spec":{"hostNetwork":true,"type":"Edge","leaderReplicas":1},"status":{"nodes":["n2","n1","n2"],"readyNodeNum":1}}`,
			Pool{"a", true, "Edge", []string{"n1", "n2"}}},
		{"v1beta2 that was converted", `{"apiVersion":"apps.openyurt.io/v1beta2","metadata":{"name":"a","annotations":{"nodepool.openyurt.io/hostnetwork":"true"}},"spec":{"hostNetwork":false,"type":"Edge"}}`,
			Pool{"a", true, "Edge", nil}},
		{"v1beta1, the field", `{"apiVersion":"apps.openyurt.io/v1beta1","metadata":{"name":"a","annotations":{"nodepool.openyurt.io/hostnetwork":"false"}},"spec":{"hostNetwork":true,"type":"Edge"}}`,
			Pool{"a", true, "Edge", nil}},
		{"v1beta1, neither", `{"apiVersion":"apps.openyurt.io/v1beta1","metadata":{"name":"a"},"spec":{"type":"Cloud"},"status":{"nodes":null}}`,
			Pool{"a", false, "Cloud", nil}},
		{"v1alpha1, the annotation in other letters", `{"apiVersion":"apps.openyurt.io/v1alpha1","metadata":{"name":"a","annotations":{"nodepool.openyurt.io/hostnetwork":"TRUE"}},"spec":{"selector":null},"status":{"nodes":["n"]}}`,
			Pool{"a", true, "", []string{"n"}}},
		{"v1alpha1, another annotation", `{"apiVersion":"apps.openyurt.io/v1alpha1","metadata":{"name":"a","annotations":{"nodepool.openyurt.io/hostnetwork":"1"}},"spec":{"type":"Edge"}}`,
			Pool{"a", false, "Edge", nil}},
		{"names in other letters are other names", `{"metadata":{"name":"a"},"spec":{"HostNetwork":true,"type":"Edge"}}`, Pool{"a", false, "Edge", nil}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := ReadPool([]byte(tc.object))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("ReadPool() (-want +got):\n%s", diff)
			}
		})
	}
	for _, bad := range []string{``, `[]`, `{"spec":{"hostNetwork":"true"}}`, `{"status":{"nodes":"n"}}`} {
		if got, err := ReadPool([]byte(bad)); err == nil {
			t.Errorf("ReadPool(%s) = %v, want an error", bad, got)
		}
	}
}

func TestJudge(t *testing.T) {
	in := func(pool string) labels { return labels{pool: pool} }
	labelled := func(pool, value string) labels { return labels{pool, value, true} }
	host, other := answer{found, Pool{"a", true, "Edge", nil}}, answer{found, Pool{"a", false, "Edge", nil}}
	for _, tc := range []struct {
		name string
		labels
		answer
		down bool
		want Membership
	}{
		{"in no pool", in(""), answer{}, false, Membership{State: Known}},
		{"in no pool, link down", in(""), answer{}, true, Membership{State: Stale}},
		{"in no pool any more", labelled("", "true"), answer{}, false, Membership{State: Known, Drift: LabelLeftOver}},
		{"in no pool, the label does not count", labelled("", "True"), answer{}, false, Membership{State: Known}},
		{"no answer yet", labelled("a", "true"), answer{}, false, Membership{State: Unknown}},
		{"no answer yet, link down", in("a"), answer{}, true, Membership{State: Unknown}},
		{"host network", labelled("a", "true"), host, false, Membership{Pool: "a", Type: "Edge", HostNetwork: true, State: Known, Origin: FromPool}},
		{"host network, link down", labelled("a", "true"), host, true, Membership{Pool: "a", Type: "Edge", HostNetwork: true, State: Stale, Origin: FromPool}},
		{"the label is missing", in("a"), host, false, Membership{Pool: "a", Type: "Edge", HostNetwork: true, State: Known, Origin: FromPool, Drift: LabelMissing}},
		{"the label is not true", labelled("a", "True"), host, false, Membership{Pool: "a", Type: "Edge", HostNetwork: true, State: Known, Origin: FromPool, Drift: LabelNotTrue}},
		{"the label is empty", labelled("a", ""), host, false, Membership{Pool: "a", Type: "Edge", HostNetwork: true, State: Known, Origin: FromPool, Drift: LabelNotTrue}},
		{"pod network", in("a"), other, false, Membership{Pool: "a", Type: "Edge", State: Known, Origin: FromPool}},
		{"the label is left over", labelled("a", "true"), other, false, Membership{Pool: "a", Type: "Edge", State: Known, Origin: FromPool, Drift: LabelLeftOver}},
		{"pod network, the label says so", labelled("a", "false"), other, false, Membership{Pool: "a", Type: "Edge", State: Known, Origin: FromPool}},
		{"no such pool", in("a"), answer{kind: absent}, false, Membership{Pool: "a", State: Known, Origin: FromLabel, Drift: PoolMissing}},
		{"no such pool, labelled", labelled("a", "true"), answer{kind: absent}, false, Membership{Pool: "a", HostNetwork: true, State: Known, Origin: FromLabel, Drift: PoolMissing}},
		{"only the label", labelled("a", "true"), answer{kind: unreadable}, false, Membership{Pool: "a", HostNetwork: true, State: Known, Origin: FromLabel}},
		{"only the label, which does not count", labelled("a", "TRUE"), answer{kind: unreadable}, false, Membership{Pool: "a", State: Known, Origin: FromLabel}},
		{"only the label, link down", labelled("a", "true"), answer{kind: unreadable}, true, Membership{Pool: "a", HostNetwork: true, State: Stale, Origin: FromLabel}},
		{"not reached, the link is just back", labelled("a", "true"), answer{kind: unreached}, false, Membership{Pool: "a", HostNetwork: true, State: Stale, Origin: FromLabel}},
		{"no label", in("a"), answer{kind: unreadable}, false, Membership{Pool: "a", State: Known, Origin: FromLabel}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.want.Node = "n"
			if diff := cmp.Diff(tc.want, judge("n", tc.labels, tc.answer, !tc.down)); diff != "" {
				t.Errorf("judge() (-want +got):\n%s", diff)
			}
		})
	}
}
