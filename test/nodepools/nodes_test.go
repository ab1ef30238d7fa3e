// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepools

import (
	"context"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// nodes may not write what the companion acts on: it may do more to them than they may
// themselves.
func (s *scene) nodes() {
	const name = "thief"
	s.createNode(name, "", true)
	config, err := s.cp.NodeConfig(name)
	s.must(err)
	self, err := kubernetes.NewForConfig(config)
	s.must(err)
	patch := func(ctx context.Context, p string) error {
		_, err := self.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, []byte(p), metav1.PatchOptions{})
		return err
	}
	forged := `{"metadata":{"annotations":{"nodepool.openyurt.io/previous-attributes":"{\"taints\":[{\"key\":\"admin\",\"effect\":\"NoExecute\"}]}"}}}`
	s.eventually("the policy about nodes is in force", func(ctx context.Context) error {
		if err := patch(ctx, forged); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "not for the node to write") {
			return context.DeadlineExceeded
		}
		return nil
	})
	for p, allowed := range map[string]bool{
		`{"metadata":{"labels":{"apps.openyurt.io/nodepool":"hosts"}}}`:                                                                   false,
		`{"metadata":{"labels":{"nodepool.openyurt.io/hostnetwork":"true"}}}`:                                                             false,
		`{"metadata":{"labels":{"example.com/own":"x"},"annotations":{"volumes.kubernetes.io/controller-managed-attach-detach":"true"}}}`: true,
	} {
		if err := patch(s.Context(), p); (err == nil) != allowed {
			s.Errorf("the node patches itself with %s: %v, want allowed %v", p, err, allowed)
		}
	}
	s.patchNode(name, strings.ReplaceAll(forged, "admin", "x")) // who administers nodes may
	s.must(s.client.CoreV1().Nodes().Delete(s.Context(), name, metav1.DeleteOptions{}))
}
