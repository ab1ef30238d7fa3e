// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"encoding/json"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// OriginalAnnotation of a pod is what autonomy has changed of its tolerations: a JSON list
// of them as they were. One that was added has tolerationSeconds 0 there: it cannot be
// removed again, and tolerating for no time is what not tolerating comes to. Of tolerations
// that differ only in tolerationSeconds all are listed, in their order.
const OriginalAnnotation = "edgehub.io/autonomy-original-tolerations"

// cutTaints are what Kubernetes puts on a node that it does not hear of, with the effect
// NoExecute and no value.
var cutTaints = []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable}

// matches reports whether t tolerates the taint key:NoExecute, by the rules of the API.
// Lt and Gt never do: the taint has no number.
func matches(t *corev1.Toleration, key string) bool {
	if t.Effect != "" && t.Effect != corev1.TaintEffectNoExecute || t.Key != "" && t.Key != key {
		return false
	}
	switch t.Operator {
	case corev1.TolerationOpExists:
		return true
	case corev1.TolerationOpEqual, "":
		return t.Value == ""
	}
	return false
}

// shorter compares tolerationSeconds, of which nil is for ever.
func shorter(a, b *int64) bool { return a != nil && (b == nil || *a < *b) }

// raise returns tolerations by which a pod stays on a node that is cut for seconds at
// least, nil for ever, and what of the original ones that has changed, as OriginalAnnotation
// has it. Every toleration that matches is raised, not only the first, by which Kubernetes
// 1.36 goes but which the API does not promise. None gets shorter.
func raise(original []corev1.Toleration, seconds *int64) (raised, changed []corev1.Toleration) {
	before := slices.Clone(original)
	raised = slices.Clone(original)
	for _, key := range cutTaints {
		tolerated := false
		for i := range raised {
			if !matches(&raised[i], key) {
				continue
			}
			tolerated = true
			if shorter(raised[i].TolerationSeconds, seconds) {
				raised[i].TolerationSeconds = seconds
			}
		}
		if !tolerated {
			t := corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: seconds}
			raised = append(raised, t)
			t.TolerationSeconds = new(int64)
			before = append(before, t)
		}
	}
	touched := map[corev1.Toleration]bool{}
	for i, t := range before {
		if shorter(t.TolerationSeconds, raised[i].TolerationSeconds) {
			touched[timeless(t)] = true
		}
	}
	for _, t := range before {
		if touched[timeless(t)] {
			changed = append(changed, t)
		}
	}
	return raised, changed
}

// timeless is the same for tolerations that differ in tolerationSeconds at most. As a key
// it keeps pods with a hundred thousand tolerations, which the API allows, cheap.
func timeless(t corev1.Toleration) corev1.Toleration {
	t.TolerationSeconds = nil
	return t
}

// restore undoes raise. What the record says of tolerations that raise would never have
// changed is not believed: anybody who may write a pod may write its annotations.
func restore(raised, changed []corev1.Toleration) []corev1.Toleration {
	restored, left := slices.Clone(raised), map[corev1.Toleration][]corev1.Toleration{}
	for _, t := range changed {
		left[timeless(t)] = append(left[timeless(t)], t)
	}
	for i := range restored {
		t := &restored[i]
		if t.Effect != corev1.TaintEffectNoExecute || !slices.ContainsFunc(cutTaints, func(key string) bool { return matches(t, key) }) {
			continue
		}
		if was := left[timeless(*t)]; len(was) > 0 {
			left[timeless(*t)] = was[1:]
			t.TolerationSeconds = was[0].TolerationSeconds
		}
	}
	return restored
}

// plan returns the tolerations that a pod should have, and its OriginalAnnotation, "" for
// none. What is planned for a pod with the planned ones is the same again.
func plan(pod *corev1.Pod, s setting) (tolerations []corev1.Toleration, original string) {
	var changed []corev1.Toleration
	if json.Unmarshal([]byte(pod.Annotations[OriginalAnnotation]), &changed) != nil {
		changed = nil // nobody knows any more
	}
	tolerations = restore(pod.Spec.Tolerations, changed)
	if !s.on {
		return tolerations, ""
	}
	tolerations, changed = raise(tolerations, s.seconds)
	if len(changed) == 0 {
		return tolerations, ""
	}
	text, err := json.Marshal(changed)
	if err != nil {
		panic(err) // strings and numbers
	}
	return tolerations, string(text)
}

// limited reports whether a pod with these tolerations would leave a node with the taints
// after some time.
func limited(tolerations []corev1.Toleration, taints []string) bool {
	return slices.ContainsFunc(tolerations, func(t corev1.Toleration) bool {
		return t.TolerationSeconds != nil && slices.ContainsFunc(taints, func(key string) bool { return matches(&t, key) })
	})
}
