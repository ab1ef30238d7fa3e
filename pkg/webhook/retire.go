// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/edgehub/edgehub/pkg/cmdline"
)

// leaseName is that of the Lease by which replicas of the companion choose their leader.
const leaseName = "edgehub-webhook"

// Retire undoes what a release of the chart has done and helm cannot undo: it deletes
// the webhooks, so that they are in nobody's way; then the DaemonSet, and waits until its
// pods have put their nodes back; then the companion, and the Lease that it leaves. What
// is not there is taken for done, so Retire can be run again. Hubs on nodes that are not
// Ready are named in out and stay.
//
// args is a command line without the program's name and the word retire.
func Retire(ctx context.Context, args []string, out io.Writer) error {
	r := retirement{out: out}
	var kubeconfig string
	var timeout time.Duration
	fs := pflag.NewFlagSet("edgehub-webhook retire", pflag.ContinueOnError)
	fs.StringVar(&kubeconfig, "kubeconfig", "", "File with the API server's address and a credential. Empty: those of the pod.")
	fs.StringVar(&r.namespace, "namespace", "edgehub-system", "Namespace of all that follows.")
	fs.StringVar(&r.webhooks, "webhook-configuration", "", "MutatingWebhookConfiguration to delete, first of all. Empty: none.")
	fs.StringVar(&r.daemonSet, "daemonset", "", "DaemonSet to delete, the pods of which are waited for. Empty: none.")
	fs.StringVar(&r.deployment, "deployment", "", "Deployment of the companion to delete, with its Lease, after that. Empty: none.")
	fs.DurationVar(&timeout, "timeout", 4*time.Minute, "How long all of it may take.")
	if err := cmdline.Parse(fs, args); err != nil {
		return err
	}
	if timeout <= 0 {
		return fmt.Errorf("--timeout: %v is not positive", timeout)
	}
	config, err := clientConfig(kubeconfig)
	if err != nil {
		return err
	}
	if r.client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return r.run(ctx)
}

// A retirement is what Retire has been asked for.
type retirement struct {
	client    kubernetes.Interface
	out       io.Writer
	namespace string

	webhooks, daemonSet, deployment string // empty: none
}

func (r retirement) run(ctx context.Context) error {
	if r.webhooks != "" {
		if err := r.remove(ctx, "MutatingWebhookConfiguration", r.webhooks, r.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Delete); err != nil {
			return err
		}
	}
	if r.daemonSet != "" {
		if err := r.remove(ctx, "DaemonSet", r.daemonSet, r.client.AppsV1().DaemonSets(r.namespace).Delete); err != nil {
			return err
		}
		stay, err := r.gone(ctx, func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" && o.Name == r.daemonSet })
		if err != nil {
			return fmt.Errorf("wait for the pods of DaemonSet %s: %w", r.daemonSet, err)
		}
		for _, node := range stay {
			r.say("Node %s is not Ready: what is installed there stays. When it is back, run on it: edgehub uninstall", node)
		}
	}
	if r.deployment == "" {
		return nil
	}
	if err := r.remove(ctx, "Deployment", r.deployment, r.client.AppsV1().Deployments(r.namespace).Delete); err != nil {
		return err
	}
	// A leader that lives would make its Lease again.
	_, err := r.gone(ctx, func(o metav1.OwnerReference) bool {
		hash, ours := strings.CutPrefix(o.Name, r.deployment+"-")
		return o.Kind == "ReplicaSet" && ours && !strings.Contains(hash, "-")
	})
	if err != nil {
		return fmt.Errorf("wait for the pods of Deployment %s: %w", r.deployment, err)
	}
	return r.remove(ctx, "Lease", leaseName, r.client.CoordinationV1().Leases(r.namespace).Delete)
}

// remove deletes an object until that succeeds or the API server refuses it. The object
// is gone when it returns; its pods follow.
func (r retirement) remove(ctx context.Context, kind, name string, del func(context.Context, string, metav1.DeleteOptions) error) error {
	background := metav1.DeletePropagationBackground
	err := r.retry(ctx, func() error { return del(ctx, name, metav1.DeleteOptions{PropagationPolicy: &background}) })
	switch {
	case apierrors.IsNotFound(err):
		r.say("%s %s is not there.", kind, name)
		return nil
	case err != nil:
		return fmt.Errorf("delete %s %s: %w", kind, name, err)
	}
	r.say("%s %s is deleted.", kind, name)
	return nil
}

// retry does it again, once a second, while the API server cannot be reached or is not
// itself: an uninstallation is not to fail for a moment's outage.
func (r retirement) retry(ctx context.Context, do func() error) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		err := do()
		var s apierrors.APIStatus
		if err == nil || errors.As(err, &s) && s.Status().Code < 500 && !apierrors.IsTooManyRequests(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-tick.C:
		}
	}
}

// gone waits until the pods with such an owner are gone, but for those on nodes that are
// not Ready: it returns these nodes, sorted.
func (r retirement) gone(ctx context.Context, ours func(metav1.OwnerReference) bool) (notReady []string, err error) {
	err = r.retry(ctx, func() error {
		pods, err := r.client.CoreV1().Pods(r.namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		nodes := map[string]bool{} // those with such pods: whether they are Ready
		var left []string
		for _, p := range pods.Items {
			if !slices.ContainsFunc(p.OwnerReferences, ours) {
				continue
			}
			ready, asked := nodes[p.Spec.NodeName]
			if !asked {
				if ready, err = r.ready(ctx, p.Spec.NodeName); err != nil {
					return err
				}
				nodes[p.Spec.NodeName] = ready
			}
			if ready {
				left = append(left, fmt.Sprintf("%s on %s", p.Name, p.Spec.NodeName))
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("still there: %s", strings.Join(left, ", "))
		}
		maps.DeleteFunc(nodes, func(_ string, ready bool) bool { return ready })
		notReady = slices.Sorted(maps.Keys(nodes))
		return nil
	})
	return notReady, err
}

// ready reports whether somebody on the node can end its pods. A pod without a node is
// ended by the API server.
func (r retirement) ready(ctx context.Context, name string) (bool, error) {
	if name == "" {
		return true, nil
	}
	node, err := r.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}), nil
}

func (r retirement) say(format string, args ...any) { fmt.Fprintf(r.out, format+"\n", args...) }
