// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package webhook wires edgehub's companion in the cluster together. Its parts are in
// the packages below, each with a function Add that takes the manager: exclude keeps
// pods off host-network pools, pools keeps nodes' labels and the status of NodePools,
// autonomy lets pods outlive a cut, approver approves the hubs' serving certificates.
// [Main] is all that main calls.
//
// All replicas answer admission requests, only the leader writes to the cluster.
package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"sync/atomic"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	"github.com/edgehub/edgehub/pkg/nodepool"
	"github.com/edgehub/edgehub/pkg/webhook/approver"
	"github.com/edgehub/edgehub/pkg/webhook/autonomy"
	"github.com/edgehub/edgehub/pkg/webhook/exclude"
	"github.com/edgehub/edgehub/pkg/webhook/pools"
)

// Main does what the command line says, without the program's name: runs the companion
// until ctx ends or a part of it fails, or, with retire as the first word, prepares the
// chart's end, telling out. Help is printed and pflag.ErrHelp returned.
func Main(ctx context.Context, args []string, out io.Writer) error {
	if len(args) > 0 && args[0] == "retire" {
		return Retire(ctx, args[1:], out)
	}
	options := DefaultOptions()
	if err := options.Parse(args); err != nil {
		return err
	}
	return Run(ctx, options)
}

// Run runs the companion until ctx ends or a part of it fails. Options must have been
// validated.
func Run(ctx context.Context, o Options) error {
	ctrl.SetLogger(klog.FromContext(ctx))
	config, err := clientConfig(o.Kubeconfig)
	if err != nil {
		return err
	}
	mgr, err := newManager(config, o)
	if err != nil {
		return err
	}
	if err := addControllers(mgr, o); err != nil {
		return err
	}
	if o.Admission {
		if err := addAdmission(ctx, mgr, o); err != nil {
			return err
		}
	}
	if err := errors.Join(mgr.AddHealthzCheck("ping", healthz.Ping), mgr.AddReadyzCheck("ping", healthz.Ping)); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting", "admission", o.Admission, "nodePools", o.NodePools, "autonomy", o.Autonomy, "approveServingCertificates", o.ApproveServing)
	return mgr.Start(ctx)
}

// clientConfig is without a limit of its own: the API server has its priority and
// fairness.
func clientConfig(kubeconfig string) (config *rest.Config, err error) {
	if kubeconfig == "" {
		config, err = rest.InClusterConfig()
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	config.QPS = -1
	config.UserAgent = "edgehub-webhook"
	return config, nil
}

func newManager(config *rest.Config, o Options) (manager.Manager, error) {
	own := fields.OneTermEqualSelector("metadata.name", o.CertificateSecret)
	metrics, probes := o.MetricsListenAddress, o.ProbeListenAddress
	if metrics == "" {
		metrics = "0" // controller-runtime's word for none
	}
	if probes == "" {
		probes = "0"
	}
	return manager.New(config, manager.Options{
		Metrics:                 server.Options{BindAddress: metrics},
		HealthProbeBindAddress:  probes,
		LivenessEndpointName:    "/livez",
		LeaderElection:          o.LeaderElect,
		LeaderElectionID:        "edgehub-webhook",
		LeaderElectionNamespace: o.Namespace,
		// A leader that ends leaves at once, so that the next need not wait.
		LeaderElectionReleaseOnCancel: true,
		Cache: cache.Options{
			DefaultTransform: cache.TransformStripManagedFields(),
			ByObject: map[client.Object]cache.ByObject{
				&corev1.Secret{}: {Namespaces: map[string]cache.Config{o.Namespace: {FieldSelector: own}}},
				&corev1.Pod{}:    {Transform: trimPod},
				&corev1.Node{}:   {Transform: trimNode},
				&certificatesv1.CertificateSigningRequest{}: {
					Field: fields.OneTermEqualSelector("spec.signerName", certificatesv1.KubeletServingSignerName),
				},
			},
		},
	})
}

// trimPod leaves of a Pod what the parts look at: all Pods of a large cluster are in the
// cache of each replica, and whoever may make Pods decides how large the rest is. Patches
// are made of differences, so what is missing on both sides is not touched.
func trimPod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	trim := func(containers []corev1.Container) (trimmed []corev1.Container) {
		for _, c := range containers {
			trimmed = append(trimmed, corev1.Container{Name: c.Name, Ports: c.Ports, RestartPolicy: c.RestartPolicy})
		}
		return trimmed
	}
	annotations := map[string]string{}
	for _, key := range []string{nodepool.ExcludeAnnotation, autonomy.Annotation, autonomy.OriginalAnnotation, corev1.MirrorPodAnnotationKey} {
		if value, ok := pod.Annotations[key]; ok {
			annotations[key] = value
		}
	}
	pod.ObjectMeta = metav1.ObjectMeta{
		Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion, DeletionTimestamp: pod.DeletionTimestamp,
		Annotations:     annotations,
		OwnerReferences: slices.DeleteFunc(pod.OwnerReferences, func(r metav1.OwnerReference) bool { return r.Controller == nil || !*r.Controller }),
	}
	pod.Spec = corev1.PodSpec{
		NodeName: pod.Spec.NodeName, HostNetwork: pod.Spec.HostNetwork, Tolerations: pod.Spec.Tolerations,
		Containers: trim(pod.Spec.Containers), InitContainers: trim(pod.Spec.InitContainers),
	}
	pod.Status = corev1.PodStatus{Phase: pod.Status.Phase}
	return pod, nil
}

// trimNode does so for a Node, most of which are the names of images.
func trimNode(object any) (any, error) {
	node, ok := object.(*corev1.Node)
	if !ok {
		return object, nil
	}
	node.ManagedFields = nil
	node.Status = corev1.NodeStatus{Conditions: node.Status.Conditions, Addresses: node.Status.Addresses}
	return node, nil
}

func addControllers(mgr manager.Manager, o Options) error {
	if err := pools.Add(mgr, pools.Options{Mode: o.NodePools}); err != nil {
		return fmt.Errorf("node pools: %w", err)
	}
	if o.Autonomy {
		if err := autonomy.Add(mgr); err != nil {
			return fmt.Errorf("autonomy: %w", err)
		}
	}
	if o.ApproveServing {
		if err := approver.Add(mgr, approver.Options{DNSNames: o.ServingDNSNames, IPs: o.ServingIPs, APIServer: o.APIServerNames}); err != nil {
			return fmt.Errorf("approval of serving certificates: %w", err)
		}
	}
	return nil
}

// addAdmission serves admission requests as soon as there is a certificate.
func addAdmission(ctx context.Context, mgr manager.Manager, o Options) error {
	host, port, err := splitAddress(o.WebhookListenAddress)
	if err != nil {
		return fmt.Errorf("--webhook-listen-address: %w", err)
	}
	callers, err := onlyCallers(o.ClientCAFile, o.ClientNames)
	if err != nil {
		return err
	}
	hooks := webhook.NewServer(webhook.Options{Host: host, Port: port, CertDir: o.CertDir, TLSOpts: []func(*tls.Config){callers}})
	if err := exclude.AddWebhooks(mgr, hooks); err != nil {
		return fmt.Errorf("exclusion from host-network pools: %w", err)
	}
	if o.Autonomy {
		if err := autonomy.AddWebhooks(mgr, hooks); err != nil {
			return fmt.Errorf("autonomy: %w", err)
		}
	}
	if err := os.MkdirAll(o.CertDir, 0o700); err != nil {
		return fmt.Errorf("--cert-dir: %w", err)
	}
	files := &certificateFiles{cache: mgr.GetCache(), dir: o.CertDir, ready: make(chan struct{})}
	if err := mgr.Add(files); err != nil {
		return err
	}
	if o.Certificates == selfManaged {
		if err := addRotator(mgr, o); err != nil {
			return fmt.Errorf("certificate: %w", err)
		}
	}
	if err := mgr.Add(&afterCertificate{files.ready, hooks}); err != nil {
		return err
	}
	// One handshake tells that the server serves; if it stops, the process ends. To dial each
	// time would fill the log where clients must show a certificate.
	var served atomic.Bool
	return mgr.AddReadyzCheck("admission", func(req *http.Request) error {
		select {
		case <-files.ready:
		default:
			return errors.New("no certificate yet")
		}
		if served.Load() {
			return nil
		}
		err := hooks.StartedChecker()(req)
		served.Store(err == nil)
		return err
	})
}
