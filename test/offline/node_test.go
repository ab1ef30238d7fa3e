// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"bytes"
	"fmt"
	"net/http"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/test/rig"
)

const (
	ownNode    = "/api/v1/nodes/" + rig.NodeName
	ownCSINode = "/apis/storage.k8s.io/v1/csinodes/" + rig.NodeName
	leases     = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
	ownLease   = leases + "/" + rig.NodeName
)

var encodings = []string{rig.JSON, rig.Protobuf}

// alreadyExists wants a 409 on which a client goes on.
func (w *world) alreadyExists(c *caller, a ask) {
	w.T.Helper()
	if got := w.ask(c, a, http.StatusConflict); got.reason() != metav1.StatusReasonAlreadyExists {
		w.T.Errorf("%s: %v = %v, want the reason AlreadyExists", c.name, a, got)
	}
}

// ownNodeCreate fails without the rule create_exists: kubelet tries to register for
// ever, and does nothing else. It also fails if the rule holds for another Node, or another
// caller.
func (w *world) ownNodeCreate() row {
	register := func(name, media string) ask {
		return create("/api/v1/nodes", media, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name}}})
	}
	return row{
		name: "own Node create",
		online: func() {
			w.same(w.node, ask{path: ownNode, accept: rig.Protobuf})
			for _, media := range encodings {
				w.sameVerdict(w.node, register(rig.NodeName, media))
				w.sameVerdict(w.node, register("n9", media))
			}
		},
		offline: func() {
			for _, media := range encodings {
				w.alreadyExists(w.node, register(rig.NodeName, media))
				w.refused(w.node, register(rig.NodeName, media).with("dryRun=All"))
				w.refused(w.node, register("n9", media))
				w.refused(w.node, register(otherNode, media))
				w.refused(w.callers[operator], register(rig.NodeName, media))
				w.alreadyExists(w.stranger, register(otherNode, media)) // its hub has looked for the pool of its Node
			}
		},
	}
}

// statusPatch is what kubelet sends, for one condition.
func statusPatch(condition string) []byte {
	now := time.Now().UTC().Format(time.RFC3339)
	return fmt.Appendf(nil, `{"status":{"$setElementOrder/conditions":[{"type":%[1]q}],"conditions":[{"type":%[1]q,"status":"True","reason":"Test","lastHeartbeatTime":%[2]q}]}}`, condition, now)
}

func patch(path string, kind types.PatchType, body []byte) ask {
	return ask{method: http.MethodPatch, path: path, contentType: string(kind), body: body}
}

func hasCondition(n *corev1.Node, name string) bool {
	for _, c := range n.Status.Conditions {
		if string(c.Type) == name {
			return true
		}
	}
	return false
}

// ownNodePatchStatus fails without the rule node_status: after a reboot kubelet
// mounts no attachable volume. It also fails if the overlay is sent, outlives the cut,
// or gets a resourceVersion of its own.
func (w *world) ownNodePatchStatus() row {
	path, last := ownNode+"/status", &corev1.Node{}
	return row{
		name: "own Node patch status",
		online: func() {
			a := patch(path, types.StrategicMergePatchType, statusPatch("Online"))
			w.ask(w.node, a, http.StatusOK)
			last = decode[corev1.Node](w.same(w.node, ask{path: ownNode}).body)
			if !hasCondition(last, "Online") {
				w.T.Errorf("%v online left %v", a, last.Status.Conditions)
			}
		},
		offline: func() {
			recorded := decode[corev1.Node](w.replayed(w.node, ask{path: ownNode}, http.StatusOK).body)
			// Changes of the status alone go to disk every five minutes; a kill takes the last.
			if recorded.UID != last.UID || w.restarts == 0 && recorded.ResourceVersion != last.ResourceVersion {
				w.T.Errorf("the recorded Node is %s at %s, want %s at %s", recorded.UID, recorded.ResourceVersion, last.UID, last.ResourceVersion)
			}
			for i, accept := range []string{rig.JSON, rig.Protobuf + "," + rig.JSON} {
				a := patch(path, types.StrategicMergePatchType, statusPatch(fmt.Sprint("Cut", i)))
				a.accept = accept
				w.mergedNode(w.replayed(w.node, a, http.StatusOK), recorded, i)
				w.mergedNode(w.replayed(w.node, ask{path: ownNode, accept: accept}, http.StatusOK), recorded, i)
			}
			a := patch(path, types.MergePatchType, []byte(`{"spec":{"unschedulable":true},"status":{"phase":"Running"}}`))
			if n := decode[corev1.Node](w.replayed(w.node, a, http.StatusOK).body); n.Spec.Unschedulable || n.Status.Phase != "Running" || !hasCondition(n, "Cut1") {
				w.T.Errorf("%v = %+v, want the status alone patched", a, n)
			}
			stale := patch(path, types.MergePatchType, []byte(`{"metadata":{"resourceVersion":"1"},"status":{"phase":"Pending"}}`))
			w.ask(w.node, stale, http.StatusConflict)
			strategic := func(path string) ask { return patch(path, types.StrategicMergePatchType, statusPatch("Never")) }
			w.refused(w.node, patch(path, types.JSONPatchType, []byte(`[{"op":"add","path":"/status/phase","value":"Running"}]`)))
			w.refused(w.node, patch(path+"?fieldManager=x&force=true", types.ApplyYAMLPatchType, []byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"}}`)))
			w.refused(w.node, strategic(path).with("dryRun=All"))
			w.refused(w.node, strategic(ownNode))
			w.refused(w.node, strategic("/api/v1/nodes/"+otherNode+"/status"))
			w.refused(w.callers[operator], strategic(path))
			w.replayed(w.stranger, strategic("/api/v1/nodes/"+otherNode+"/status"), http.StatusOK) // as above
			n := *last
			w.refused(w.node, ask{method: http.MethodPut, path: path, body: encode(rig.JSON, &n)})
		},
		healed: func() {
			n := decode[corev1.Node](w.same(w.node, ask{path: ownNode}).body)
			if n.ResourceVersion != last.ResourceVersion || hasCondition(n, "Cut0") {
				w.T.Errorf("the Node after the cut is at %s with %v, want it as before, at %s", n.ResourceVersion, n.Status.Conditions, last.ResourceVersion)
			}
			// The overlay is gone for good: what is patched now stands on the API server's.
			w.ask(w.node, patch(path, types.StrategicMergePatchType, statusPatch("Healed")), http.StatusOK)
			last = decode[corev1.Node](w.same(w.node, ask{path: ownNode}).body)
			if !hasCondition(last, "Healed") || hasCondition(last, "Cut1") {
				w.T.Errorf("the Node patched after the cut has %v", last.Status.Conditions)
			}
		},
	}
}

// mergedNode wants the recorded Node with the conditions of the i-th patch and those
// before it.
func (w *world) mergedNode(got answer, recorded *corev1.Node, i int) {
	w.T.Helper()
	n := decode[corev1.Node](got.body)
	if n.UID != recorded.UID || n.ResourceVersion != recorded.ResourceVersion {
		w.T.Errorf("the patched Node is %s at %s, want %s at %s", n.UID, n.ResourceVersion, recorded.UID, recorded.ResourceVersion)
	}
	want := []string{"Cut0", "Cut1"}[:i+1]
	for _, c := range recorded.Status.Conditions {
		want = append(want, string(c.Type))
	}
	for _, name := range want {
		if !hasCondition(n, name) {
			w.T.Errorf("the patched Node has %v, want %s, too", n.Status.Conditions, name)
		}
	}
}

func newLease(name, holder string) *coordinationv1.Lease {
	seconds, now := int32(40), metav1.NowMicro()
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "kube-node-lease"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &now},
	}
}

// ownLease fails without the rule lease: kubelet logs an error every few seconds,
// and its Lease in the hub grows old. It also fails if the copy is sent, outlives the
// cut, or is there for another Lease or caller.
func (w *world) ownLease() row {
	lease := newLease(rig.NodeName, rig.NodeName)
	put := func(path string, l *coordinationv1.Lease, media string) ask {
		return ask{method: http.MethodPut, path: path, contentType: media, accept: media, body: encode(media, l)}
	}
	renew := func() { now := metav1.NowMicro(); lease.Spec.RenewTime = &now }
	update := func() {
		renew()
		got := w.ask(w.node, put(ownLease, lease, rig.Protobuf), http.StatusOK)
		lease = decode[coordinationv1.Lease](got.body)
		w.same(w.node, ask{path: ownLease, accept: rig.Protobuf})
		w.same(w.node, ask{path: ownLease})
	}
	return row{
		name: "own Lease",
		online: func() {
			w.ask(w.node, create(leases, rig.JSON, lease), http.StatusCreated)
			lease = decode[coordinationv1.Lease](w.same(w.node, ask{path: ownLease}).body)
			update()
		},
		offline: func() {
			got := decode[coordinationv1.Lease](w.replayed(w.node, ask{path: ownLease}, http.StatusOK).body)
			// Like a status, renewals go to disk every five minutes.
			if got.UID != lease.UID || w.restarts == 0 && got.ResourceVersion != lease.ResourceVersion {
				w.T.Errorf("the recorded Lease is %s at %s, want %s at %s", got.UID, got.ResourceVersion, lease.UID, lease.ResourceVersion)
			}
			for _, media := range encodings {
				renew()
				a := put(ownLease, lease, media)
				for _, got := range []answer{w.replayed(w.node, a, http.StatusOK), w.replayed(w.node, ask{path: ownLease, accept: media}, http.StatusOK)} {
					if !bytes.Equal(got.body, a.body) {
						w.T.Errorf("%v left %v, want what was written", a, got)
					}
				}
				w.alreadyExists(w.node, create(leases, media, newLease(rig.NodeName, rig.NodeName)))
				w.refused(w.node, a.with("dryRun=All"))
				w.refused(w.callers[operator], a)
				w.refused(w.stranger, create(leases, media, newLease(otherNode, otherNode)))
				w.refused(w.node, create(leases, media, newLease(otherNode, otherNode)))
				w.refused(w.node, put(leases+"/"+otherNode, newLease(otherNode, otherNode), media))
				inA := newLease(rig.NodeName, rig.NodeName)
				inA.Namespace = "a"
				w.refused(w.node, put("/apis/coordination.k8s.io/v1/namespaces/a/leases/"+rig.NodeName, inA, media))
				w.refused(w.node, put(ownLease, newLease(otherNode, otherNode), media)) // the body is of another one
			}
			w.refused(w.node, patch(ownLease, types.MergePatchType, []byte(`{"spec":{"leaseDurationSeconds":41}}`)))
			w.refused(w.node, ask{method: http.MethodDelete, path: ownLease})
			w.refused(w.stranger, ask{path: leases + "/" + otherNode})
			w.refused(w.callers[operator], ask{path: ownLease})
		},
		healed: func() {
			got := decode[coordinationv1.Lease](w.same(w.node, ask{path: ownLease}).body)
			if got.ResourceVersion != lease.ResourceVersion || got.Spec.RenewTime.Equal(lease.Spec.RenewTime) {
				w.T.Errorf("the Lease after the cut is at %s, renewed at %v, want %s and earlier than %v", got.ResourceVersion, got.Spec.RenewTime, lease.ResourceVersion, lease.Spec.RenewTime)
			}
			update() // the next one is accepted: it stands on the resourceVersion that the API server has
		},
	}
}

// ownCSINode fails without the rule csinode_unknown: on a 404 kubelet tries to create
// the CSINode and exits. The other hub has a complete copy of all CSINodes, live until
// the cut, and the node's is not in it; of any other object that means 404.
func (w *world) ownCSINode() row {
	csiNode := func(name string) *storagev1.CSINode {
		return &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	const all = "/apis/storage.k8s.io/v1/csinodes"
	var given answer
	return row{
		name: "own CSINode",
		online: func() {
			given = w.same(w.node, ask{path: ownCSINode, accept: rig.Protobuf})
			w.ask(w.node, ask{path: ownCSINode, accept: rig.Protobuf}, http.StatusOK)
			w.watch(w.stranger.through, all, rig.Protobuf).sync(w)
			w.other.WaitFeeds()
			w.same(w.stranger, ask{path: all + "/" + otherNode, accept: rig.Protobuf}) // 404
		},
		offline: func() {
			if got := w.replayed(w.node, ask{path: ownCSINode, accept: rig.Protobuf}, http.StatusOK); !got.is(given) {
				w.T.Errorf("the CSINode offline is %v, want %v", got, given)
			}
			w.refused(w.stranger, ask{path: all + "/" + otherNode, accept: rig.Protobuf})
			if w.restarts == 0 {
				w.ask(w.stranger, ask{path: all + "/none", accept: rig.Protobuf}, http.StatusNotFound)
			}
			for _, media := range encodings {
				w.alreadyExists(w.node, create(all, media, csiNode(rig.NodeName)))
				w.refused(w.node, create(all, media, csiNode(otherNode)))
				w.refused(w.stranger, create(all, media, csiNode(otherNode)))
			}
			w.refused(w.node, ask{method: http.MethodPut, path: ownCSINode, body: encode(rig.JSON, csiNode(rig.NodeName))})
		},
		healed: func() { w.same(w.node, ask{path: ownCSINode, accept: rig.Protobuf}) },
	}
}
