// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A scraper is a ServiceAccount that asks kubelet for its metrics. Who it is, and
// whether it may, kubelet asks the API server: by a TokenReview and a
// SubjectAccessReview.
type scraper struct {
	node  *realNode
	name  string
	token string
}

// newScraper makes one that may.
func (n *realNode) newScraper(name string) *scraper {
	n.t.Helper()
	ctx, meta := n.t.Context(), metav1.ObjectMeta{Name: name}
	_, err := n.cp.Client.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: meta}, metav1.CreateOptions{})
	n.must(err)
	_, err = n.cp.Client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"nodes/metrics"}, Verbs: []string{"get"}},
	}}, metav1.CreateOptions{})
	n.must(err)
	_, err = n.cp.Client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name}},
	}, metav1.CreateOptions{})
	n.must(err)
	tr, err := n.cp.Client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	n.must(err)
	return &scraper{node: n, name: name, token: tr.Status.Token}
}

// scrape asks once.
func (s *scraper) scrape(ctx context.Context) (status int, body string, err error) {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.node.kubelet.URL()+"/metrics", nil)
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// wants waits until kubelet answers with one of these; with 200 it is to be metrics.
func (s *scraper) wants(codes ...int) {
	s.node.t.Helper()
	s.node.poll(fmt.Sprintf("kubelet answers %s with %v", s.name, codes), func(ctx context.Context) error {
		status, body, err := s.scrape(ctx)
		if err == nil && !slices.Contains(codes, status) {
			err = fmt.Errorf("it does with %d: %.200s", status, body)
		}
		if err == nil && status == http.StatusOK && !strings.Contains(body, "kubelet_running_pods") {
			err = fmt.Errorf("it does with no metrics: %.200s", body)
		}
		return err
	})
}

// checkScrapes wants a kubelet that was started while cut, which has asked nobody
// before, to let in whom it knew, and nobody else.
func (n *realNode) checkScrapes(known *scraper) {
	n.t.Helper()
	start := time.Now()
	known.wants(http.StatusOK)
	for _, rule := range []string{"tokenreview", "subjectaccessreview"} {
		got, err := n.hub.Metric(n.t.Context(), "edgehub_proxy_offline_answers_total", fmt.Sprintf("rule=%q", rule))
		n.must(err)
		if got == 0 {
			n.t.Errorf("edgehub_proxy_offline_answers_total{rule=%q} = 0 after kubelet was scraped", rule)
		}
	}
	unknown := &scraper{node: n, name: "one whom it has never seen", token: "unknown"}
	status, body, err := unknown.scrape(n.t.Context())
	n.must(err)
	if status != http.StatusUnauthorized && status != http.StatusForbidden {
		n.t.Errorf("a scraper with an unknown token gets %d, want 401 or 403: %.200s", status, body)
	}
	n.t.Logf("the known scraper gets its metrics, the unknown one %d, all after %v", status, round(time.Since(start)))
}
