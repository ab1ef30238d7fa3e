// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	// Annotation of a NodePool or a Node lets pods stay there while the node is cut: "true"
	// for ever, a duration such as "24h" for so long; "false" does not. Of a pod only
	// "false" counts: nothing is done to it then.
	Annotation = "edgehub.io/autonomy"

	// What OpenYurt calls the same, of Nodes alone. The first counts if it is "true", the
	// second is a duration, which is for ever if it is not positive.
	openYurtAnnotation         = "node.beta.openyurt.io/autonomy"
	openYurtDurationAnnotation = "node.openyurt.io/autonomy-duration"
)

// A setting is what somebody has said of autonomy.
type setting struct {
	on      bool
	seconds *int64 // nil: for ever
}

var (
	forever = setting{on: true}
	off     = setting{}

	errValue    = errors.New(`want "true", "false", or a duration above 0 such as "24h"`)
	errFlag     = errors.New(`want "true" or "false"`)
	errDuration = errors.New(`want a duration such as "24h", or "0" for ever`)
)

// during rounds up: an API server takes whole seconds, and 0 of them are none.
func during(d time.Duration) setting {
	seconds := int64(d / time.Second)
	if d%time.Second > 0 {
		seconds++
	}
	return setting{on: true, seconds: &seconds}
}

// parse reads the value of Annotation.
func parse(value string) (setting, error) {
	switch value {
	case "true":
		return forever, nil
	case "false":
		return off, nil
	}
	if d, err := time.ParseDuration(value); err == nil && d > 0 {
		return during(d), nil
	}
	return off, errValue
}

// ofPool returns what a NodePool's annotations say, nil for nothing. A value that means
// nothing is an error, and nothing is said by it.
func ofPool(annotations map[string]string) (*setting, error) {
	value, ok := annotations[Annotation]
	if !ok {
		return nil, nil
	}
	s, err := parse(value)
	if err != nil {
		return nil, wrong(Annotation, value, err)
	}
	return &s, nil
}

// ofNode is ofPool for a Node. Annotation goes before OpenYurt's, and of these "true" before
// the duration, as there.
func ofNode(annotations map[string]string) (*setting, error) {
	own, err := ofPool(annotations)
	if own != nil {
		return own, nil
	}
	flag, flagged := annotations[openYurtAnnotation]
	switch {
	case flag == "true":
		return &forever, err
	case flagged && flag != "false":
		err = errors.Join(err, wrong(openYurtAnnotation, flag, errFlag))
	}
	if value, ok := annotations[openYurtDurationAnnotation]; ok {
		d, perr := time.ParseDuration(value)
		switch {
		case perr != nil:
			err = errors.Join(err, wrong(openYurtDurationAnnotation, value, errDuration))
		case d <= 0:
			return &forever, err
		default:
			s := during(d)
			return &s, err
		}
	}
	if flag == "false" {
		return &off, err
	}
	return nil, err
}

func wrong(annotation, value string, err error) error {
	return fmt.Errorf("annotation %s is %.64q: %w", annotation, value, err)
}

// exempt reports whether nothing is done to a pod: it is over or about to be, kubelet's own
// copy of a static pod, or of a DaemonSet, whose pods tolerate both taints for ever anyway.
func exempt(pod *corev1.Pod) bool {
	if pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return true
	}
	if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return true
	}
	for _, o := range pod.OwnerReferences {
		if o.Kind == "DaemonSet" && o.Controller != nil && *o.Controller {
			return true
		}
	}
	return false
}

// ofPod is what is wanted for a pod where place is said, nil for nothing.
func ofPod(pod *corev1.Pod, place *setting) setting {
	if place == nil || pod.Annotations[Annotation] == "false" {
		return off
	}
	return *place
}
