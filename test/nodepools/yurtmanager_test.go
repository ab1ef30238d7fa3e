// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepools

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func fromJSON(text string, into any) error { return json.Unmarshal([]byte(text), into) }

// yurtManager comes, by each of its signs, and goes: while it is there nothing is written.
func (s *scene) yurtManager() {
	ctx, c := s.Context(), s.client
	s.createPool("y-host", spec{"hostNetwork": true, "labels": spec{"given": "yes"}}, nil)
	s.createNode("y-1", "y-host", true)
	s.wantLabels(map[string]string{"y-1": "true"})
	for _, sign := range s.signs() {
		s.must(sign.create())
		s.wantWriting(0)
		since := time.Now()
		s.setLabel("y-1", hostNetworkLabel, "")
		s.setLabel("y-1", "given", "")
		s.setReady("y-1", false)
		s.createNode("y-2", "y-host", true)
		s.createNode("y-3", "missing-"+sign.name[:3], true)
		// The reports go on, and show that all this is known.
		s.eventually(sign.name+": the companion knows of the second node", func(ctx context.Context) error {
			if ready, not := s.metric(ctx, `edgehub_pool_nodes{pool="y-host",ready="true"}`), s.metric(ctx, `edgehub_pool_nodes{pool="y-host",ready="false"}`); ready != 1 || not != 1 {
				return fmt.Errorf("%v nodes are ready and %v are not", ready, not)
			}
			return nil
		})
		// One of another name is no sign.
		if sign.name == "deployment" {
			_, err := c.AppsV1().Deployments("default").Create(ctx, newDeployment("yurt-manager-webhook"), metav1.CreateOptions{})
			s.must(err)
		}
		s.wantNoWrites(since)

		s.must(sign.remove())
		s.wantWriting(1)
		s.wantLabels(map[string]string{"y-1": "true", "y-2": "true"})
		s.eventually(sign.name+": the status is written", func(ctx context.Context) error {
			p, err := s.dynamic.Resource(v1beta2).Get(ctx, "y-host", metav1.GetOptions{})
			if err != nil {
				return err
			}
			var is struct {
				Nodes        []string
				ReadyNodeNum int
			}
			if err := fromJSON(canonical(p.Object["status"]), &is); err != nil {
				return err
			}
			if len(is.Nodes) != 2 || is.ReadyNodeNum != 1 {
				return fmt.Errorf("status %+v", is)
			}
			return nil
		})
		s.setReady("y-1", true)
		for _, node := range []string{"y-2", "y-3"} {
			s.must(c.CoreV1().Nodes().Delete(ctx, node, metav1.DeleteOptions{}))
		}
	}
}

func (s *scene) wantWriting(want float64) {
	s.Helper()
	s.eventually(fmt.Sprintf("edgehub_pool_writing is %v", want), func(ctx context.Context) error {
		if got := s.metric(ctx, "edgehub_pool_writing"); got != want {
			return fmt.Errorf("it is %v", got)
		}
		return nil
	})
}

// A sign is an object by which yurt-manager is known.
type sign struct {
	name           string
	create, remove func() error
}

func (s *scene) signs() []sign {
	ctx, c := s.Context(), s.client
	return []sign{
		{"deployment", func() error {
			_, err := c.AppsV1().Deployments("kube-system").Create(ctx, newDeployment("yurt-manager"), metav1.CreateOptions{})
			return err
		}, func() error {
			return c.AppsV1().Deployments("kube-system").Delete(ctx, "yurt-manager", metav1.DeleteOptions{})
		}},
		{"mutating webhooks", func() error {
			_, err := c.AdmissionregistrationV1().MutatingWebhookConfigurations().Create(ctx, &admissionv1.MutatingWebhookConfiguration{
				ObjectMeta: metav1.ObjectMeta{Name: "yurt-manager-mutating-webhook-configuration"}}, metav1.CreateOptions{})
			return err
		}, func() error {
			return c.AdmissionregistrationV1().MutatingWebhookConfigurations().Delete(ctx, "yurt-manager-mutating-webhook-configuration", metav1.DeleteOptions{})
		}},
		{"validating webhooks", func() error {
			_, err := c.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(ctx, &admissionv1.ValidatingWebhookConfiguration{
				ObjectMeta: metav1.ObjectMeta{Name: "yurt-manager-validating-webhook-configuration"}}, metav1.CreateOptions{})
			return err
		}, func() error {
			return c.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(ctx, "yurt-manager-validating-webhook-configuration", metav1.DeleteOptions{})
		}},
	}
}

func newDeployment(name string) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}},
	}
}
