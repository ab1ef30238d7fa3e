// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"context"
	"fmt"
	"strings"
	"time"

	"gomodules.xyz/jsonpatch/v2"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// lookupTimeout bounds how long a request waits for what is not in the cache yet. The
// controller comes later anyway.
const lookupTimeout = 500 * time.Millisecond

// A podHandler changes pods as they are created. It refuses none, and is safe for
// concurrent use.
type podHandler struct {
	nodes   client.Reader
	pools   *poolReader
	decoder admission.Decoder
}

// Handle answers an admission request.
func (h *podHandler) Handle(ctx context.Context, req admission.Request) admission.Response {
	response := admission.Allowed("")
	if req.Operation != admissionv1.Create || req.Resource.Resource != "pods" || req.SubResource != "" {
		return response
	}
	var pod corev1.Pod
	err := h.decoder.Decode(req, &pod)
	if err == nil && !exempt(&pod) {
		var place *setting
		var known bool
		if place, known, err = h.place(ctx, &pod); known {
			response.Patches = patch(&pod, ofPod(&pod, place))
		}
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "A pod is left to the controller", "pod", klog.KRef(req.Namespace, req.Name))
	}
	return response
}

// place returns what is said where the pod will run, and whether that is known.
func (h *podHandler) place(ctx context.Context, pod *corev1.Pod) (s *setting, known bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	name := onlyPool(&pod.Spec)
	if pod.Spec.NodeName != "" {
		var node corev1.Node
		switch err := h.nodes.Get(ctx, client.ObjectKey{Name: pod.Spec.NodeName}, &node); {
		case apierrors.IsNotFound(err):
			return nil, false, nil
		case err != nil:
			return nil, false, fmt.Errorf("get Node %s: %w", pod.Spec.NodeName, err)
		}
		if s, _ := ofNode(node.Annotations); s != nil {
			return s, true, nil
		}
		name = node.Labels[nodepool.PoolLabel]
	}
	if name == "" {
		return nil, pod.Spec.NodeName != "", nil
	}
	pool, err := h.pools.get(ctx, name)
	if err != nil {
		return nil, false, err
	}
	if pool != nil {
		s, _ = ofPool(pool.Annotations) // the controller complains
	}
	return s, true, nil
}

// onlyPool returns the one pool that the pod may be scheduled to, "" if there are several
// or if it does not say.
func onlyPool(spec *corev1.PodSpec) string {
	pool, selected := spec.NodeSelector[nodepool.PoolLabel]
	if spec.Affinity == nil || spec.Affinity.NodeAffinity == nil || spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return pool
	}
	var all sets.Set[string] // nil: any pool
	for _, term := range spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		if len(term.MatchExpressions)+len(term.MatchFields) == 0 {
			continue // matches no node
		}
		of := poolsOf(term)
		if of == nil {
			return pool // it does not narrow
		}
		all = all.Union(of)
	}
	if selected {
		if all.Has(pool) {
			return pool
		}
		return ""
	}
	if len(all) != 1 {
		return ""
	}
	return all.UnsortedList()[0]
}

// poolsOf returns the pools that a term admits, nil for any.
func poolsOf(term corev1.NodeSelectorTerm) (admitted sets.Set[string]) {
	for _, e := range term.MatchExpressions {
		if e.Key != nodepool.PoolLabel || e.Operator != corev1.NodeSelectorOpIn {
			continue
		}
		if values := sets.New(e.Values...); admitted == nil {
			admitted = values
		} else {
			admitted = admitted.Intersection(values)
		}
	}
	return admitted
}

// full reports whether so many bytes more would be too many for the API server.
func full(annotations map[string]string, more int) bool {
	for key, value := range annotations {
		more += len(key) + len(value)
	}
	return more > apivalidation.TotalAnnotationSizeLimitB
}

// patch returns what is to be changed of a pod. It is written out rather than compared,
// since what this program does not know of a pod must stay in it.
func patch(pod *corev1.Pod, s setting) (operations []jsonpatch.JsonPatchOperation) {
	tolerations, original := plan(pod, s)
	if !apiequality.Semantic.DeepEqual(tolerations, pod.Spec.Tolerations) {
		operations = append(operations, jsonpatch.NewOperation("add", "/spec/tolerations", tolerations))
	}
	before, had := pod.Annotations[OriginalAnnotation]
	if len(original) > len(before) && full(pod.Annotations, len(OriginalAnnotation)+len(original)) {
		return nil // the API server would refuse the pod
	}
	path := "/metadata/annotations/" + strings.ReplaceAll(OriginalAnnotation, "/", "~1")
	switch {
	case original == before:
	case original == "":
		operations = append(operations, jsonpatch.NewOperation("remove", path, nil))
	case had, len(pod.Annotations) > 0:
		operations = append(operations, jsonpatch.NewOperation("add", path, original))
	default:
		operations = append(operations, jsonpatch.NewOperation("add", "/metadata/annotations", map[string]string{OriginalAnnotation: original}))
	}
	return operations
}
