// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

const serviceAccountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

// A daemonSet is what of one matters here.
type daemonSet struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Template struct {
			Spec struct {
				NodeSelector map[string]string `json:"nodeSelector"`
				Affinity     *corev1.Affinity  `json:"affinity"`
			} `json:"spec"`
		} `json:"template"`
	} `json:"spec"`
}

// unwanted says why the DaemonSet does not want its pod on this node any more; "": it does.
// An error, 401 and 403 included, is not an answer.
func (i *installer) unwanted(ctx context.Context) (why string, err error) {
	api, err := i.clusterAPI()
	if err != nil {
		return "", err
	}
	namespace, name, _ := strings.Cut(i.o.DaemonSet, "/")
	var d daemonSet
	_, err = api.get(ctx, "/apis/apps/v1/namespaces/"+namespace+"/daemonsets/"+name, &d)
	if e := (*answerError)(nil); errors.As(err, &e) && e.code == http.StatusNotFound {
		// Not everything that says 404 is an API server that has this kind of object.
		if s := e.status; s.Kind == "Status" && s.Reason == metav1.StatusReasonNotFound && s.Details != nil && s.Details.Kind == "daemonsets" && s.Details.Name == name {
			return "it is gone", nil
		}
	}
	switch {
	case err != nil:
		return "", fmt.Errorf("GET DaemonSet %s at %s: %w", i.o.DaemonSet, api.url, err)
	case d.Kind != "DaemonSet" || d.Namespace != namespace || d.Name != name:
		return "", fmt.Errorf("GET DaemonSet %s at %s: the answer is %s %s/%s", i.o.DaemonSet, api.url, d.Kind, d.Namespace, d.Name)
	case d.DeletionTimestamp != nil:
		return "it is being deleted", nil
	}
	k, err := i.peekKubelet()
	if err != nil {
		return "", err
	}
	s, err := i.direct(k.node)
	if err != nil {
		return "", err
	}
	var n metav1.PartialObjectMetadata
	if _, err := s.get(ctx, "/api/v1/nodes/"+k.name, &n); err != nil {
		return "", fmt.Errorf("GET Node %s at %s: %w", k.name, s.url, err)
	}
	if n.Kind != "Node" || n.Name != k.name {
		return "", fmt.Errorf("GET Node %s at %s: the answer is %s %s", k.name, s.url, n.Kind, n.Name)
	}
	return d.excludes(n.Name, n.Labels)
}

// peekKubelet reads kubelet's kubeconfig without taking the node.
func (i *installer) peekKubelet() (*kubelet, error) {
	if err := i.load(); err != nil {
		return nil, err
	}
	return i.readKubelet()
}

// excludes says why a node is not one that is selected; "": it is. What it does not
// understand is an error. Taints are not looked at: they come and go.
func (d daemonSet) excludes(node string, nodeLabels map[string]string) (why string, err error) {
	spec := d.Spec.Template.Spec
	if !labels.SelectorFromSet(spec.NodeSelector).Matches(labels.Set(nodeLabels)) {
		return "its nodeSelector does not select this node", nil
	}
	if spec.Affinity == nil || spec.Affinity.NodeAffinity == nil || spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return "", nil
	}
	// Terms are alternatives; an empty one selects nothing.
	for _, t := range spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		if len(t.MatchExpressions)+len(t.MatchFields) == 0 {
			continue
		}
		byLabels, err := matches(t.MatchExpressions, nodeLabels)
		if err != nil {
			return "", err
		}
		byFields, err := matches(t.MatchFields, map[string]string{metav1.ObjectNameField: node})
		if err != nil {
			return "", err
		}
		if byLabels && byFields {
			return "", nil
		}
	}
	return "its nodeAffinity does not select this node", nil
}

var operators = map[corev1.NodeSelectorOperator]selection.Operator{
	corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpNotIn: selection.NotIn, corev1.NodeSelectorOpExists: selection.Exists,
	corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist, corev1.NodeSelectorOpGt: selection.GreaterThan, corev1.NodeSelectorOpLt: selection.LessThan,
}

func matches(all []corev1.NodeSelectorRequirement, set map[string]string) (bool, error) {
	ok := true
	for _, r := range all {
		op, known := operators[r.Operator]
		if !known {
			return false, fmt.Errorf("nodeAffinity: operator %q is not known", r.Operator)
		}
		if r.Key == metav1.ObjectNameField {
			if op != selection.In && op != selection.NotIn {
				return false, fmt.Errorf("nodeAffinity: %s with operator %q", r.Key, r.Operator)
			}
			r.Key = "name" // the other is not one of a label
			if v, has := set[metav1.ObjectNameField]; has {
				set = map[string]string{"name": v}
			}
		}
		req, err := labels.NewRequirement(r.Key, op, r.Values)
		if err != nil {
			return false, fmt.Errorf("nodeAffinity: %w", err)
		}
		ok = ok && req.Matches(labels.Set(set))
	}
	return ok, nil
}

// clusterAPI is the API server by --kubeconfig, or as this pod's ServiceAccount.
func (i *installer) clusterAPI() (*server, error) {
	if i.o.Kubeconfig != "" {
		s, err := byKubeconfig(i.o.Kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("--kubeconfig %s: %w", i.o.Kubeconfig, err)
		}
		return s, nil
	}
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("--kubeconfig: required outside of a pod: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set")
	}
	ca, err := os.ReadFile(filepath.Join(serviceAccountDir, "ca.crt"))
	if err != nil {
		return nil, err
	}
	s, err := newServer("https://"+net.JoinHostPort(host, port), ca)
	if err != nil {
		return nil, err
	}
	s.token = tokenFrom(filepath.Join(serviceAccountDir, "token"))
	return s, nil
}

func tokenFrom(file string) func() (string, error) {
	return func() (string, error) {
		b, err := os.ReadFile(file)
		return string(bytes.TrimSpace(b)), err
	}
}

// byKubeconfig understands tokens and client certificates.
func byKubeconfig(file string) (*server, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	w, err := parseKubeconfig(raw)
	if err != nil {
		return nil, err
	}
	if err := checkServer(w.cluster.Server); err != nil {
		return nil, fmt.Errorf("%s.server: %w", w.clusterField, err)
	}
	load := func(field, path string, data []byte) []byte {
		if len(data) > 0 || path == "" {
			return data
		}
		if !filepath.IsAbs(path) {
			path = filepath.Join(filepath.Dir(file), path)
		}
		b, e := os.ReadFile(path)
		if e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", field, e))
		}
		return b
	}
	ca := load(w.clusterField+".certificate-authority", w.cluster.CertificateAuthority, w.cluster.CertificateAuthorityData)
	cert := load(w.userField+".client-certificate", w.user.ClientCertificate, w.user.ClientCertificateData)
	key := load(w.userField+".client-key", w.user.ClientKey, w.user.ClientKeyData)
	if err != nil {
		return nil, err
	}
	var pairs []tls.Certificate
	if len(cert) > 0 {
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("%s.client-certificate: %w", w.userField, err)
		}
		pairs = append(pairs, pair)
	}
	s, err := newServer(w.cluster.Server, ca, pairs...)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s.certificate-authority: %w", w.clusterField, err)
	case w.user.TokenFile != "":
		path := w.user.TokenFile
		if !filepath.IsAbs(path) {
			path = filepath.Join(filepath.Dir(file), path)
		}
		s.token = tokenFrom(path)
	case w.user.Token != "":
		s.token = func() (string, error) { return w.user.Token, nil }
	case len(pairs) == 0:
		return nil, fmt.Errorf("%s: neither a token nor a client certificate", w.userField)
	}
	return s, nil
}
