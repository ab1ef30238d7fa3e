// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	utiljson "k8s.io/apimachinery/pkg/util/json"
)

// Selector decides which objects a list or watch with a label and a field selector
// is about, as kube-apiserver does, from bare objects. It is safe for concurrent
// use.
type Selector struct {
	label     labels.Selector
	labelKeys []string // that label looks at
	field     fields.Selector
	fields    fields.Requirements
}

// ParseSelector parses the two query parameters; "" selects everything. The
// grammar is that of kube-apiserver. Whether a field can be selected is not known
// before there are objects, see [Selector.Matches].
func ParseSelector(labelSelector, fieldSelector string) (*Selector, error) {
	label, err := labels.Parse(labelSelector)
	if err != nil {
		return nil, fmt.Errorf("label selector: %w", err)
	}
	field, err := fields.ParseSelector(fieldSelector)
	if err != nil {
		return nil, fmt.Errorf("field selector: %w", err)
	}
	s := &Selector{label: label, field: field, fields: field.Requirements()}
	requirements, _ := label.Requirements()
	for _, r := range requirements {
		if !slices.Contains(s.labelKeys, r.Key()) {
			s.labelKeys = append(s.labelKeys, r.Key())
		}
	}
	return s, nil
}

// Empty reports whether everything is selected.
func (s *Selector) Empty() bool { return s.label.Empty() && s.field.Empty() }

// String is the selector with label requirements and their values in order. It has
// the form of a URL query, which tells the two parts apart whatever is in them, and
// is "" for a selector that selects everything.
func (s *Selector) String() string {
	q := url.Values{}
	if text := s.label.String(); text != "" {
		q.Set("labelSelector", text)
	}
	if text := s.field.String(); text != "" {
		q.Set("fieldSelector", text)
	}
	return q.Encode()
}

// Matches reports whether the object is selected. Labels, metadata.name and
// metadata.namespace are read from the raw bytes; the other fields that
// kube-apiserver 1.36 lets clients select by in pods, nodes, namespaces, secrets,
// services, replicationcontrollers, jobs and certificatesigningrequests by decoding
// the object. In custom resources a field is looked up by its path, if it is there
// and no object or list. Everything else is ErrUnsupportedField, never a guess;
// that goes for what kube-apiserver refuses for the kind, and for all fields
// but the metadata of PartialObjectMetadata. Other errors are ErrMalformed.
func (s *Selector) Matches(shape Shape, bare []byte) (bool, error) {
	read, err := s.reader(shape)
	if err != nil {
		return false, err
	}
	labelled := true
	if len(s.labelKeys) > 0 {
		set, err := readLabels(shape.Representation, bare, s.labelKeys)
		if err != nil {
			return false, fmt.Errorf("read labels of %s object: %w", shape.Representation, err)
		}
		labelled = s.label.Matches(set)
	}
	if len(s.fields) == 0 || !labelled && !shape.Unstructured {
		return labelled, nil
	}
	// The fields of a custom resource are read in any case: only then is it known
	// whether they can be.
	matched, err := s.matchFields(shape, bare, read)
	return labelled && matched, err
}

// reader returns what reads the kind's own fields, nil if none is selected, or
// ErrUnsupportedField.
func (s *Selector) reader(shape Shape) (fieldReader, error) {
	kind, special := selectableKinds[[2]string{shape.APIVersion, shape.Kind}]
	var read fieldReader
	for _, r := range s.fields {
		switch {
		case r.Field == "metadata.name":
		case r.Field == "metadata.namespace" && !kind.clusterScoped:
		case special && slices.Contains(kind.fields, r.Field):
			read = kind.read
		case shape.Unstructured && shape.Partial == "":
		default:
			return nil, fmt.Errorf("%s of %s %s: %w", r.Field, shape.APIVersion, shape.Kind, ErrUnsupportedField)
		}
	}
	return read, nil
}

func (s *Selector) matchFields(shape Shape, bare []byte, read fieldReader) (bool, error) {
	meta, err := ReadMeta(shape.Representation, bare)
	if err != nil {
		return false, err
	}
	var own fields.Set
	if read != nil {
		if own, err = read(shape.Protobuf, bare); err != nil {
			return false, fmt.Errorf("decode %s %s: %w: %w", shape.APIVersion, shape.Kind, err, ErrMalformed)
		}
	}
	matched := true
	for _, r := range s.fields {
		var value string
		switch {
		case r.Field == "metadata.name":
			value = meta.Name
		case r.Field == "metadata.namespace":
			value = meta.Namespace
		case shape.Unstructured:
			if value, err = readPath(bare, r.Field); err != nil {
				return false, err
			}
		default:
			value = own[r.Field]
		}
		if (value == r.Value) != (r.Operator != selection.NotEquals) {
			matched = false
		}
	}
	return matched, nil
}

// labelSet holds those labels of an object that a selector looks at.
type labelSet []label

type label struct{ key, value string }

var _ labels.Labels = labelSet(nil)

// Has implements labels.Labels.
func (s labelSet) Has(key string) bool {
	_, ok := s.Lookup(key)
	return ok
}

// Get implements labels.Labels.
func (s labelSet) Get(key string) string {
	value, _ := s.Lookup(key)
	return value
}

// Lookup implements labels.Labels. The last of several entries counts.
func (s labelSet) Lookup(key string) (string, bool) {
	for _, l := range slices.Backward(s) {
		if l.key == key {
			return l.value, true
		}
	}
	return "", false
}

func readLabels(rep Representation, bare []byte, keys []string) (labelSet, error) {
	var set labelSet
	err := eachOfMap(rep, bare, "labels", metaLabels, func(k []byte, v func() (string, error)) error {
		i := slices.IndexFunc(keys, func(key string) bool { return key == string(k) })
		if i < 0 {
			return nil
		}
		if !rep.Protobuf && set.Has(keys[i]) {
			return fmt.Errorf("JSON member %q occurs twice: %w", keys[i], ErrMalformed)
		}
		value, err := v()
		set = append(set, label{keys[i], value})
		return err
	})
	return set, err
}

// readPath reads a scalar of a custom resource, rendered as kube-apiserver does
// it for selectableFields of a CRD. Whether the CRD names the field is not known
// here; without a value there is nothing to go by.
func readPath(object []byte, path string) (string, error) {
	unsupported := fmt.Errorf("%s: no such value: %w", path, ErrUnsupportedField)
	for name := range strings.SplitSeq(path, ".") {
		if object[0] != '{' {
			return "", unsupported
		}
		var next []byte
		var seen uint
		for o := newJSONObject(object); ; {
			ok, err := o.next()
			if err != nil {
				return "", err
			}
			if !ok {
				break
			}
			if string(o.key) != name {
				continue
			}
			if err := once(&seen, 0, name); err != nil {
				return "", err
			}
			next = o.value
		}
		if next == nil {
			return "", unsupported
		}
		object = next
	}
	switch c := object[0]; {
	case c == '"':
		return unquoteJSON(object)
	case c == 't', c == 'f':
		return string(object), nil
	case c == '-', isDigit(c):
		if n, err := strconv.ParseInt(string(object), 10, 64); err == nil {
			return strconv.FormatInt(n, 10), nil
		}
	}
	return "", unsupported
}

// fieldReader decodes an object and renders the selectable fields of its kind.
type fieldReader func(protobuf bool, bare []byte) (fields.Set, error)

// selectableKind is what a kind adds to metadata.name and metadata.namespace.
type selectableKind struct {
	fields        []string // that clients may name, in the API version at hand
	clusterScoped bool     // metadata.namespace is refused
	read          fieldReader
}

// selectableKinds follows Kubernetes 1.36: pkg/apis/*/v*/conversion.go says which
// fields clients may name, ToSelectableFields of pkg/registry/*/*/strategy.go what
// they are. ReplicaSets have status.replicas in the second place only, namespaces
// their "name": a request that names these is refused.
var selectableKinds = map[[2]string]selectableKind{
	{"v1", "Pod"}: {
		fields: []string{
			"spec.nodeName", "spec.host", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName",
			"spec.hostNetwork", "status.phase", "status.podIP", "status.podIPs", "status.nominatedNodeName",
		},
		read: typedReader(podFields),
	},
	{"v1", "Node"}: {
		fields: []string{"spec.unschedulable"}, clusterScoped: true,
		read: typedReader(func(o *corev1.Node) fields.Set {
			return fields.Set{"spec.unschedulable": strconv.FormatBool(o.Spec.Unschedulable)}
		}),
	},
	{"v1", "Namespace"}: {
		fields: []string{"status.phase"}, clusterScoped: true,
		read: typedReader(func(o *corev1.Namespace) fields.Set {
			return fields.Set{"status.phase": string(o.Status.Phase)}
		}),
	},
	{"v1", "Secret"}: {
		fields: []string{"type"},
		read:   typedReader(func(o *corev1.Secret) fields.Set { return fields.Set{"type": string(o.Type)} }),
	},
	{"v1", "Service"}: {
		fields: []string{"spec.clusterIP", "spec.type"},
		read: typedReader(func(o *corev1.Service) fields.Set {
			return fields.Set{"spec.clusterIP": o.Spec.ClusterIP, "spec.type": string(o.Spec.Type)}
		}),
	},
	{"v1", "ReplicationController"}: {
		fields: []string{"status.replicas"},
		read: typedReader(func(o *corev1.ReplicationController) fields.Set {
			return fields.Set{"status.replicas": strconv.Itoa(int(o.Status.Replicas))}
		}),
	},
	{"batch/v1", "Job"}: {
		fields: []string{"status.successful"},
		read: typedReader(func(o *batchv1.Job) fields.Set {
			return fields.Set{"status.successful": strconv.Itoa(int(o.Status.Succeeded))}
		}),
	},
	{"certificates.k8s.io/v1", "CertificateSigningRequest"}: {
		fields: []string{"spec.signerName"}, clusterScoped: true,
		read: typedReader(func(o *certificatesv1.CertificateSigningRequest) fields.Set {
			return fields.Set{"spec.signerName": o.Spec.SignerName}
		}),
	},
}

// podFields goes by the internal Pod, to which conversion brings the v1 Pod.
func podFields(pod *corev1.Pod) fields.Set {
	podIP := pod.Status.PodIP
	if podIP == "" && len(pod.Status.PodIPs) > 0 {
		podIP = pod.Status.PodIPs[0].IP
	}
	serviceAccount := pod.Spec.ServiceAccountName
	if serviceAccount == "" {
		serviceAccount = pod.Spec.DeprecatedServiceAccount
	}
	return fields.Set{
		"spec.nodeName":            pod.Spec.NodeName,
		"spec.host":                pod.Spec.NodeName, // the name that old clients use
		"spec.restartPolicy":       string(pod.Spec.RestartPolicy),
		"spec.schedulerName":       pod.Spec.SchedulerName,
		"spec.serviceAccountName":  serviceAccount,
		"spec.hostNetwork":         strconv.FormatBool(pod.Spec.HostNetwork),
		"status.phase":             string(pod.Status.Phase),
		"status.podIP":             podIP,
		"status.podIPs":            "", // may be named and is empty always, in kube-apiserver
		"status.nominatedNodeName": pod.Status.NominatedNodeName,
	}
}

// typedReader decodes with the types of k8s.io/api.
func typedReader[T any, P interface {
	*T
	Unmarshal([]byte) error
}](render func(P) fields.Set) fieldReader {
	return func(protobuf bool, bare []byte) (fields.Set, error) {
		object := P(new(T))
		if protobuf {
			if err := object.Unmarshal(bare); err != nil {
				return nil, err
			}
			return render(object), nil
		}
		if err := utiljson.Unmarshal(bare, object); err != nil {
			return nil, err
		}
		return render(object), nil
	}
}
