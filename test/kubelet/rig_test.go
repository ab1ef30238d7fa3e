// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kubelet runs kubelets through edgehub, kubemark's and a real one on
// containerd, and cuts the link: what ran before must run again after everything
// on the node was killed, or the node was booted anew, while nobody could be
// asked; and when the link is back, nobody lists again.
package kubelet

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const (
	nodeName  = "edge"
	nodeUser  = "system:node:" + nodeName
	namespace = "work"

	// patience is for one thing to happen on a machine that does much else.
	patience = 4 * time.Minute
)

// A rig is a control plane, a link to it, and a hub at its end. The caller starts
// a kubelet with config.
type rig struct {
	t      *testing.T
	cp     *controlplane.ControlPlane
	link   *link.Link
	hub    *node.Hub
	config *rest.Config // the node's, through the hub
	direct *rest.Config // the same without the hub
	pods   []corev1.Pod // as created, in order
	values []string     // of the pods' Secrets
}

// newRig starts everything but the kubelet. via makes, from the control plane,
// the address that the link leads to; nil: the API server.
func newRig(t *testing.T, via func(testing.TB, *controlplane.ControlPlane, *rest.Config) string) *rig {
	t.Helper()
	ctx := t.Context()
	cp := controlplane.New(t, controlplane.Config{Audit: true, ControllerManager: true})
	if err := cp.CreateNamespace(ctx, namespace); err != nil {
		t.Fatal(err)
	}
	direct, err := cp.NodeConfig(nodeName)
	if err != nil {
		t.Fatal(err)
	}
	target := cp.Addr()
	if via != nil {
		target = via(t, cp, direct)
	}
	l, err := link.New(ctx, target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	hub, err := node.NewHub(ctx, node.HubConfig{
		ServerURLs: []string{l.URL()}, ServerCAFile: cp.CAFile(), CertFile: direct.CertFile, KeyFile: direct.KeyFile,
	})
	if err != nil {
		t.Fatal(err)
	}
	process.Run(t, hub)
	return &rig{t: t, cp: cp, link: l, hub: hub, config: hub.Through(direct), direct: direct}
}

// must ends the test for an error.
func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// poll waits until condition returns nil.
func (r *rig) poll(what string, condition func(context.Context) error) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	r.must(process.Poll(ctx, what, condition))
}

// create makes n pods on the node, each with a ConfigMap and a Secret of its own,
// mounted and in its environment, and a projected token.
func (r *rig) create(n int) {
	r.t.Helper()
	ctx, client := r.t.Context(), r.cp.Client.CoreV1()
	for range n {
		i := len(r.values)
		secret := fmt.Sprintf("nobody-may-find-this-on-disk-%d", i)
		meta := metav1.ObjectMeta{Name: fmt.Sprintf("p-%02d", i)}
		_, err := client.ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"key": configValue(i)}}, metav1.CreateOptions{})
		r.must(err)
		_, err = client.Secrets(namespace).Create(ctx, &corev1.Secret{ObjectMeta: meta, Data: map[string][]byte{"key": []byte(secret)}}, metav1.CreateOptions{})
		r.must(err)
		pod, err := client.Pods(namespace).Create(ctx, newPod(meta.Name), metav1.CreateOptions{})
		r.must(err)
		r.pods, r.values = append(r.pods, *pod), append(r.values, secret)
	}
	r.poll(fmt.Sprintf("all %d pods are Running", len(r.pods)), r.running)
}

func configValue(i int) string { return fmt.Sprintf("value-%d", i) }

func newPod(name string) *corev1.Pod {
	ref := corev1.LocalObjectReference{Name: name}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName: nodeName,
			Containers: []corev1.Container{{
				Name: "c", Image: node.Image,
				Env: []corev1.EnvVar{
					{Name: "CONFIG", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: ref, Key: "key"}}},
					{Name: "SECRET", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: ref, Key: "key"}}},
				},
				VolumeMounts: []corev1.VolumeMount{{Name: "config", MountPath: "/config"}, {Name: "secret", MountPath: "/secret"}},
			}},
			Volumes: []corev1.Volume{
				{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: ref}}},
				{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name}}},
			},
		},
	}
}

// intact is a condition: the API server has exactly the pods that were created,
// and none of them is deleted, evicted or failed.
func (r *rig) intact(ctx context.Context) error {
	list, err := r.cp.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if len(list.Items) != len(r.pods) {
		return fmt.Errorf("the API server has %d pods, want %d", len(list.Items), len(r.pods))
	}
	var errs []error
	for i, p := range list.Items {
		if p.UID != r.pods[i].UID || p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded || p.Status.Reason != "" {
			errs = append(errs, fmt.Errorf("pod %s: uid %s (created as %s), deleted at %v, phase %s, reason %q: %s",
				p.Name, p.UID, r.pods[i].UID, p.DeletionTimestamp, p.Status.Phase, p.Status.Reason, p.Status.Message))
		}
	}
	return errors.Join(errs...)
}

// running is a condition: the API server has been told that all pods are ready.
func (r *rig) running(ctx context.Context) error {
	if err := r.intact(ctx); err != nil {
		return err
	}
	list, err := r.cp.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, p := range list.Items {
		ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
		if p.Status.Phase != corev1.PodRunning || !ready {
			return fmt.Errorf("pod %s: phase %s, conditions %v, containers %v", p.Name, p.Status.Phase, p.Status.Conditions, p.Status.ContainerStatuses)
		}
	}
	return nil
}

// ready waits until the node is Ready, and says how long that took.
func (r *rig) ready(since time.Time) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	r.must(r.cp.WaitNodeReady(ctx, nodeName))
	r.t.Logf("node is Ready after %v", time.Since(since).Round(time.Millisecond))
}

// back waits until the node, healed at the time given, is Ready again, has renewed
// its Lease, and has told the API server that all its pods run.
func (r *rig) back(healed time.Time) {
	r.t.Helper()
	r.ready(healed)
	r.poll("the node's Lease is renewed", func(ctx context.Context) error {
		lease, err := r.cp.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, nodeName, metav1.GetOptions{})
		if err == nil && (lease.Spec.RenewTime == nil || lease.Spec.RenewTime.Time.Before(healed)) {
			err = fmt.Errorf("it was renewed at %v, want %v or later", lease.Spec.RenewTime, healed)
		}
		return err
	})
	r.poll("all pods are Running", r.running)
	r.t.Logf("Lease renewed and all pods Running after %v", time.Since(healed).Round(time.Millisecond))
}

// notReady waits until the control plane has noticed that the node is silent.
func (r *rig) notReady() {
	r.t.Helper()
	r.poll("the control plane misses the node", func(ctx context.Context) error {
		n, err := r.cp.Client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown {
				return nil
			}
		}
		return errors.New("it is still Ready")
	})
}

// cut makes the link swallow everything, and waits until the hub has noticed.
func (r *rig) cut() {
	r.t.Helper()
	start := time.Now()
	r.link.BlackHole(link.Both)
	r.poll("the hub has noticed the cut", func(ctx context.Context) error {
		up, err := r.hub.Metric(ctx, "edgehub_upstream_healthy")
		if err == nil && up != 0 {
			err = errors.New("it says that the API server is healthy")
		}
		return err
	})
	r.t.Logf("cut noticed after %v", time.Since(start).Round(time.Millisecond))
}

// heal ends the cut; from now on the requests at the API server count. It waits
// until every feed follows the API server again. Kubelet's watches go on as if
// nothing had happened, but for those of the ConfigMap and the Secret of each of
// the pods that were deleted meanwhile.
func (r *rig) heal(deleted int) time.Time {
	r.t.Helper()
	before := r.endedWatches()
	defer func() {
		if ended := r.endedWatches() - before; ended > float64(2*deleted) {
			r.t.Errorf("%v of kubelet's watches ended when the link was healed, want at most %d", ended, 2*deleted)
		}
	}()
	healed := time.Now()
	r.must(r.link.Heal())
	r.feedsLive(healed)
	return healed
}

// feedsLive waits until every feed follows the API server.
func (r *rig) feedsLive(since time.Time) {
	r.t.Helper()
	r.poll("all feeds are live", func(ctx context.Context) error {
		feeds, err := r.hub.Metric(ctx, "edgehub_cache_feeds")
		live, liveErr := r.hub.Metric(ctx, "edgehub_cache_feeds_live")
		if err := errors.Join(err, liveErr); err != nil {
			return err
		}
		if feeds == 0 || live != feeds {
			return fmt.Errorf("%v of %v feeds are live", live, feeds)
		}
		return nil
	})
	r.t.Logf("all feeds live after %v", time.Since(since).Round(time.Millisecond))
}

// endedWatches returns how many watches through the hub are over.
func (r *rig) endedWatches() float64 {
	r.t.Helper()
	n, err := r.hub.Metric(r.t.Context(), "edgehub_proxy_requests_total", `verb="watch"`)
	r.must(err)
	return n
}

// checkNoLists wants that since the time given the node has fetched no state anew:
// no LIST, no watch that begins with the state. All that it asks for by then has been
// recorded, so every watch must resume. The one read by which the hub finds out
// whether history was reset is not of any scope.
func (r *rig) checkNoLists(since time.Time) {
	r.t.Helper()
	events, err := r.cp.Requests(since)
	r.must(err)
	lists, resumed := 0, 0
	for _, e := range events {
		if e.User.Username != nodeUser || e.Verb != "list" && e.Verb != "watch" {
			continue
		}
		switch kind := syncOf(e); kind {
		case "":
			resumed++
		case historyRead:
		default:
			lists++
			r.t.Errorf("after that: %s: %s %s", kind, e.Verb, e.RequestURI)
		}
	}
	if resumed == 0 {
		r.t.Errorf("no watch of %s was resumed among %d requests", nodeUser, len(events))
	}
	r.t.Logf("after that: %d lists, %d watches resumed", lists, resumed)
}

const historyRead = "history read"

// checkNoneDeleted wants that nobody has ever asked the API server to delete or
// evict a pod.
func (r *rig) checkNoneDeleted() {
	r.t.Helper()
	events, err := r.cp.Requests(time.Time{})
	r.must(err)
	for _, verb := range []string{"delete", "deletecollection"} {
		if n := controlplane.Count(events, "", verb, "pods"); n > 0 {
			r.t.Errorf("%d requests to %s pods, want none", n, verb)
		}
	}
	if n := controlplane.Count(events, "", "create", "pods/eviction"); n > 0 {
		r.t.Errorf("%d pods were evicted", n)
	}
	r.must(r.intact(r.t.Context()))
}

// syncOf says how a list or watch gets a whole state; "": not at all, it resumes.
func syncOf(e auditv1.Event) string {
	u, err := url.ParseRequestURI(e.RequestURI)
	if err != nil {
		return "unparsable"
	}
	q := u.Query()
	switch rv := q.Get("resourceVersion"); {
	case e.Verb == "list" && u.Path == "/api/v1/nodes" && q.Get("limit") == "1" && rv == "":
		return historyRead
	case e.Verb == "list":
		return "list"
	case q.Get("sendInitialEvents") == "true":
		return "watch with initial events"
	case rv == "" || rv == "0":
		return "watch from anywhere"
	}
	return ""
}

// checkReplays wants that the hub has answered from its records.
func (r *rig) checkReplays() {
	r.t.Helper()
	text, err := r.hub.Metrics(r.t.Context())
	r.must(err)
	n, err := r.hub.Metric(r.t.Context(), "edgehub_proxy_requests_total", `source="replay"`)
	r.must(err)
	if n == 0 {
		r.t.Errorf("edgehub_proxy_requests_total{source=\"replay\"} = 0 while the link is down")
	}
	tokens, err := r.hub.Metric(r.t.Context(), "edgehub_proxy_offline_answers_total")
	r.must(err)
	if tokens == 0 {
		r.t.Error("edgehub_proxy_offline_answers_total = 0 while the link is down")
	}
	if panics, err := r.hub.Metric(r.t.Context(), "edgehub_proxy_panics_total"); err != nil || panics != 0 {
		r.t.Errorf("edgehub_proxy_panics_total = %v, %v, want 0", panics, err)
	}
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "edgehub_proxy_requests_total") && strings.Contains(line, `source="replay"`) || strings.HasPrefix(line, "edgehub_proxy_offline_answers_total") {
			r.t.Log(strings.TrimSpace(line))
		}
	}
}

// checkAtRest wants that no file of the hub holds a Secret's value or a token,
// neither as it is nor in any base64. tokens is a folder below which projected
// tokens are files named token.
func (r *rig) checkAtRest(tokens string) {
	r.t.Helper()
	var needles [][]byte
	for _, v := range r.values {
		needles = append(needles, anyBase64(v)...)
	}
	found := 0
	for _, file := range r.files(tokens) {
		if filepath.Base(file) != "token" {
			continue
		}
		token, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // its volume was written anew
		}
		r.must(err)
		_, signature, ok := strings.Cut(strings.TrimPrefix(string(token), "ey"), ".")
		if !ok || len(signature) < 64 {
			r.t.Errorf("%s is no token", file)
			continue
		}
		found++
		// The signature is random: a token of another pod does not hold it.
		needles = append(needles, anyBase64(signature[len(signature)-64:])...)
	}
	if found < len(r.pods) {
		r.t.Errorf("found %d tokens below %s, want one of each of %d pods", found, tokens, len(r.pods))
	}
	bytesRead := 0
	for _, file := range append(r.files(r.hub.DataDir()), r.hub.Log()) {
		content, err := os.ReadFile(file)
		r.must(err)
		bytesRead += len(content)
		for _, n := range needles {
			if bytes.Contains(content, n) {
				r.t.Errorf("%s holds a Secret's value or a token: %.20q...", file, n)
			}
		}
	}
	if bytesRead < 10000 {
		r.t.Errorf("the hub has only %d bytes on disk", bytesRead)
	}
	r.t.Logf("%d values and %d tokens in none of %d bytes", len(r.values), found, bytesRead)
}

// anyBase64 returns the forms in which s can stand in a text: as it is, and what
// its base64 has in common with that of any text which s is a part of.
func anyBase64(s string) [][]byte {
	forms := [][]byte{[]byte(s)}
	for skip := range 3 {
		part := s[skip:]
		part = part[:len(part)/3*3]
		forms = append(forms, []byte(base64.RawStdEncoding.EncodeToString([]byte(part))), []byte(base64.RawURLEncoding.EncodeToString([]byte(part))))
	}
	return forms
}

// files returns all regular files below dir.
func (r *rig) files(dir string) (files []string) {
	r.t.Helper()
	r.must(filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		return err
	}))
	return files
}

// phase is how far a test is, for the log.
func (r *rig) phase(text string) { r.t.Helper(); r.t.Log("--- " + text) }
