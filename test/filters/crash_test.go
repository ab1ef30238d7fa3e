// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/process"
)

// TestPoolAfterCrash moves the node to another pool, kills the hub when the disk rests, and
// starts it without a link: it goes by the pool that it was in.
func TestPoolAfterCrash(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := newStage(t, document{Filters: []entry{{Name: "nodeportisolation"}}})
	s.Must(s.join(ctx, "p1"))
	for _, pool := range []string{"p1", "p2"} {
		_, err := s.ControlPlane.Client.CoreV1().Services("a").Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: "in-" + pool, Annotations: map[string]string{"nodeport.openyurt.io/listen": pool}},
			Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80}}},
		}, metav1.CreateOptions{})
		s.Must(err)
	}
	process.Run(t, s.Hub)
	s.WaitLink(true)
	for _, pool := range []string{"p1", "p2"} {
		s.Must(s.join(ctx, pool))
		s.waitPool(pool)
		s.listsIn(t, pool)
		s.Settle()
	}
	s.Offline()
	s.Must(s.Hub.Kill())
	s.Must(s.Hub.Start(ctx))
	s.listsIn(t, "p2")
}

// listsIn fails the test if kube-proxy's list is not that of a pool.
func (s *stage) listsIn(t *testing.T, pool string) {
	t.Helper()
	for _, p := range []string{"p1", "p2"} {
		path := fmt.Sprintf("/api/v1/namespaces/a/services?fieldSelector=metadata.name%%3Din-%s", p)
		l, status, err := s.endpoint("kube-proxy").List(t.Context(), path, "application/json")
		if want := map[bool]int{true: 1}[p == pool]; err != nil || status != 200 || len(l.Items) != want {
			t.Errorf("in pool %s, kube-proxy lists %d Services that listen in %s (%d, %v), want %d", pool, len(l.Items), p, status, err, want)
		}
	}
}
