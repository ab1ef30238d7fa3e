// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/node"
)

// These are a contract with OpenYurt, and written out here so that a slip shows.
const (
	excludeAnnotation = "apps.openyurt.io/exclude-host-network-pool"
	hostNetworkLabel  = "nodepool.openyurt.io/hostnetwork"
	poolLabel         = "apps.openyurt.io/nodepool"
)

// TestInstall has helm install, upgrade and remove the chart on a real node. Pods of
// others are created at all times; annotated ones get the rule in every mode; in the end
// there is what was there before.
func TestInstall(t *testing.T) {
	t.Parallel()
	node.RequireContainerd(t)
	cp := cluster(t)
	m := newMachine(t, cp)
	r := &installation{t: t, cp: cp, values: m.values(cp.URL())}
	before := everything(t, cp)
	others := createPods(t, cp.Client, newPod(nil))
	annotated := createPods(t, cp.Client, newPod(map[string]string{excludeAnnotation: "true"}))

	since := time.Now()
	r.helm("install", "--set", "hub.nodeSelector.nobody=none") // hubs come below
	r.ruled("the webhook mutates")
	annotated.flush()
	caBundle, certificate := r.certificate()

	r.labelNode(`{"metadata":{"labels":{"edgehub.test/edge":"true"}}}`)
	r.helm("upgrade", "--set", "webhook.logLevel=2", "--set", "autonomy.enabled=true")
	r.ruled("after an upgrade")
	if b, c := r.certificate(); !bytes.Equal(b, caBundle) || !bytes.Equal(c, certificate) {
		t.Error("helm upgrade has changed caBundle or certificate")
	}
	t.Logf("annotated pods that failed while the companion was rolled: %v", annotated.flush())
	r.pools()
	r.hubServes()

	for _, mode := range []string{"policy", "both"} {
		r.helm("upgrade", "--set", "admission.mode="+mode)
		r.ruled("admission.mode=" + mode)
	}
	r.labelNode(`{"metadata":{"labels":{"` + poolLabel + `":null,"` + hostNetworkLabel + `":null}}}`)
	if _, err := kubectl(t.Context(), nil, "delete", "nodepools", "--all"); err != nil {
		t.Fatal(err)
	}
	annotated.flush()
	start := time.Now()
	if _, err := helm(t.Context(), t, "uninstall", release, "--kubeconfig", cp.AdminKubeconfig(), "--namespace", namespace, "--timeout", "5m"); err != nil {
		t.Fatal(err)
	}
	t.Logf("helm uninstall took %v", time.Since(start).Round(time.Second))
	for _, failed := range [][]error{others.stop(), annotated.stop()} {
		if len(failed) > 0 {
			t.Errorf("%d pods could not be created, such as: %v", len(failed), failed[0])
		}
	}
	t.Logf("the slowest of %d pods of others took %v", others.n.Load(), time.Duration(others.slowest.Load()))
	r.nothingLeft(before)
	r.checkRights(since)
}

// An installation is the release in the cluster.
type installation struct {
	t      *testing.T
	cp     *controlplane.ControlPlane
	values []string
}

// helm installs or upgrades the release and waits for its pods.
func (r *installation) helm(verb string, values ...string) {
	r.t.Helper()
	args := append([]string{verb, release, chartDir(r.t), "--kubeconfig", r.cp.AdminKubeconfig(), "--namespace", namespace, "--wait", "--timeout", "3m"}, r.values...)
	start := time.Now()
	if _, err := helm(r.t.Context(), r.t, append(args, values...)...); err != nil {
		r.explain()
		r.t.Fatal(err)
	}
	r.t.Logf("helm %s %v took %v", verb, values, time.Since(start).Round(time.Second))
}

// explain logs why pods may not be ready.
func (r *installation) explain() {
	for _, args := range [][]string{
		{"get", "pods", "-o", "wide"}, {"get", "events"}, {"logs", "-l", "app.kubernetes.io/part-of=edgehub", "--prefix", "--tail=30", "--all-containers"},
	} {
		out, err := kubectl(context.WithoutCancel(r.t.Context()), nil, append(args, "--namespace", namespace)...)
		r.t.Log(out, err)
	}
}

// ruled waits until an annotated pod is kept off host-network pools, and another is not.
func (r *installation) ruled(what string) {
	r.t.Helper()
	poll(r.t, what, func(ctx context.Context) error {
		for annotation, want := range map[string]bool{"true": true, "false": false} {
			pod, err := dryRun(ctx, r.cp.Client, newPod(map[string]string{excludeAnnotation: annotation}))
			if err != nil {
				return err
			}
			if got := keptOff(pod); got != want {
				return fmt.Errorf("annotation %q: kept off host-network pools = %v, want %v", annotation, got, want)
			}
		}
		return nil
	})
}

func keptOff(pod *corev1.Pod) bool {
	a := pod.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return false
	}
	for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		if !slices.ContainsFunc(term.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool {
			return e.Key == hostNetworkLabel && e.Operator == corev1.NodeSelectorOpNotIn && slices.Equal(e.Values, []string{"true"})
		}) {
			return false
		}
	}
	return true
}

// certificate returns what the companion has written, and helm must not touch.
func (r *installation) certificate() (caBundle, certificate []byte) {
	r.t.Helper()
	c, err := r.cp.Client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(r.t.Context(), release, metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	s, err := r.cp.Client.CoreV1().Secrets(namespace).Get(r.t.Context(), release+"-webhook-certificate", metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return c.Webhooks[0].ClientConfig.CABundle, s.Data[corev1.TLSCertKey]
}

func (r *installation) labelNode(patch string) {
	r.t.Helper()
	if _, err := r.cp.Client.CoreV1().Nodes().Patch(r.t.Context(), nodeName, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// pools lets the companion do what it is there for besides admission: the node gets a
// host-network pool's label.
func (r *installation) pools() {
	r.t.Helper()
	pool := `{apiVersion: apps.openyurt.io/v1beta2, kind: NodePool, metadata: {name: p, annotations: {edgehub.io/autonomy: "true"}}, spec: {type: Edge, hostNetwork: true}}`
	if _, err := kubectl(r.t.Context(), strings.NewReader(pool), "create", "-f", "-"); err != nil {
		r.t.Fatal(err)
	}
	r.labelNode(`{"metadata":{"labels":{"` + poolLabel + `":"p"}}}`)
	poll(r.t, "the node has the label of host-network pools", func(ctx context.Context) error {
		n, err := r.cp.Client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err == nil && n.Labels[hostNetworkLabel] != "true" {
			err = fmt.Errorf("labels %v", n.Labels)
		}
		return err
	})
}

// hubServes waits until the DaemonSet's hub on the node is ready and has a certificate
// that the companion has approved.
func (r *installation) hubServes() {
	r.t.Helper()
	poll(r.t, "the hub is ready", func(ctx context.Context) error {
		d, err := r.cp.Client.AppsV1().DaemonSets(namespace).Get(ctx, release+"-hub", metav1.GetOptions{})
		if err == nil && (d.Status.DesiredNumberScheduled != 1 || d.Status.NumberReady != 1) {
			err = fmt.Errorf("status %+v", d.Status)
		}
		return err
	})
	poll(r.t, "the hub's serving certificate is approved", func(ctx context.Context) error {
		all, err := r.cp.Client.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, c := range all.Items {
			if len(c.Status.Certificate) > 0 {
				return nil
			}
		}
		return fmt.Errorf("of %d requests none", len(all.Items))
	})
}

// nothingLeft waits until the cluster holds what it held before, and the CRD.
func (r *installation) nothingLeft(before []string) {
	r.t.Helper()
	const crd = "customresourcedefinitions.apiextensions.k8s.io nodepools.apps.openyurt.io"
	if !slices.Contains(everything(r.t, r.cp), crd) {
		r.t.Error("the CRD is gone, want it kept: nodePools.crd.keep")
	}
	if _, err := kubectl(r.t.Context(), nil, "delete", "crd", "nodepools.apps.openyurt.io"); err != nil {
		r.t.Fatal(err)
	}
	poll(r.t, "there is what was there before", func(context.Context) error {
		if diff := cmp.Diff(before, everything(r.t, r.cp)); diff != "" {
			return fmt.Errorf("(-before +after):\n%s", diff)
		}
		return nil
	})
}

// everything returns the names of all objects, but for Events and requests for
// certificates, which go by themselves in time, and kubelets' Leases.
func everything(t *testing.T, cp *controlplane.ControlPlane) []string {
	t.Helper()
	client, err := metadata.NewForConfig(cp.AdminConfig())
	if err != nil {
		t.Fatal(err)
	}
	lists, err := discovery.NewDiscoveryClientForConfigOrDie(cp.AdminConfig()).ServerPreferredResources()
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, g := range discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"list", "delete"}}, lists) {
		for _, resource := range g.APIResources {
			gvr := schemaOf(g.GroupVersion, resource.Name)
			if gvr.Resource == "events" || gvr.Resource == "certificatesigningrequests" {
				continue
			}
			list, err := client.Resource(gvr).List(t.Context(), metav1.ListOptions{})
			if apierrors.IsNotFound(err) {
				continue // a kind that has just been removed
			}
			if err != nil {
				t.Fatalf("list %s: %v", gvr.GroupResource(), err)
			}
			for _, o := range list.Items {
				if o.Namespace == corev1.NamespaceNodeLease {
					continue
				}
				all = append(all, strings.TrimSpace(gvr.GroupResource().String()+" "+strings.TrimPrefix(o.Namespace+"/"+o.Name, "/")))
			}
		}
	}
	slices.Sort(all)
	return all
}

func newPod(annotations map[string]string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "p-", Annotations: annotations},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: node.Image}}},
	}
}

// dryRun creates a pod in the namespace default and keeps it not.
func dryRun(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod) (*corev1.Pod, error) {
	return client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
}

// A creator creates pods all the time, by dry run: admission is the same, and nobody has
// to run them.
type creator struct {
	n, slowest atomic.Int64
	cancel     context.CancelFunc
	done       chan struct{}

	mu     sync.Mutex
	failed []error // guarded by mu
}

func createPods(t *testing.T, client kubernetes.Interface, pod *corev1.Pod) *creator {
	ctx, cancel := context.WithCancel(t.Context())
	c := &creator{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			start := time.Now()
			_, err := dryRun(ctx, client, pod)
			if ctx.Err() != nil {
				return
			}
			c.n.Add(1)
			c.slowest.Store(max(c.slowest.Load(), int64(time.Since(start))))
			if err != nil {
				c.mu.Lock()
				c.failed = append(c.failed, err)
				c.mu.Unlock()
			}
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	}()
	t.Cleanup(func() { c.stop() })
	return c
}

// flush returns what has failed so far, and forgets it.
func (c *creator) flush() []error {
	c.mu.Lock()
	defer c.mu.Unlock()
	failed := c.failed
	c.failed = nil
	return failed
}

// stop ends it and returns what has failed.
func (c *creator) stop() []error {
	c.cancel()
	<-c.done
	return c.flush()
}
