// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"path/filepath"
	"strconv"

	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/process"
)

const (
	serviceRange = "10.0.0.0/16"
	podRange     = "10.244.0.0/16"
)

func (cp *ControlPlane) command(name string, args []string, more ...string) process.Command {
	return process.Command{Path: filepath.Join(cp.bin, name), Dir: cp.dir, Args: append(args, more...)}
}

func (cp *ControlPlane) etcdCommand() process.Command {
	url, peer := "https://"+addr(cp.ports.etcd), "http://"+addr(cp.ports.etcdPeer)
	c := cp.command("etcd", []string{
		"--name=test", "--data-dir=" + cp.etcdDir(),
		"--listen-client-urls=" + url, "--advertise-client-urls=" + url,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=test=" + peer,
		"--cert-file=" + cp.pki("etcd.crt"), "--key-file=" + cp.pki("etcd.key"),
		"--client-cert-auth", "--trusted-ca-file=" + cp.pki("ca.crt"),
		// It votes for itself alone: no need to wait for others' votes.
		"--heartbeat-interval=10", "--election-timeout=100",
		"--unsafe-no-fsync", "--log-level=warn",
	})
	c.Ready = cp.serves(url + "/health")
	return c
}

func (cp *ControlPlane) apiserverCommand() process.Command {
	args := []string{
		"--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(cp.ports.apiserver),
		"--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
		"--etcd-servers=https://" + addr(cp.ports.etcd), "--etcd-cafile=" + cp.pki("ca.crt"),
		"--etcd-certfile=" + cp.pki("apiserver.crt"), "--etcd-keyfile=" + cp.pki("apiserver.key"),
		"--tls-cert-file=" + cp.pki("apiserver.crt"), "--tls-private-key-file=" + cp.pki("apiserver.key"),
		"--client-ca-file=" + cp.pki("ca.crt"), "--token-auth-file=" + cp.usersFile(),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + cp.pki("sa.key"), "--service-account-signing-key-file=" + cp.pki("sa.key"),
		"--service-cluster-ip-range=" + serviceRange, "--allow-privileged",
		"--kubelet-client-certificate=" + cp.pki("kubelet-client.crt"), "--kubelet-client-key=" + cp.pki("kubelet-client.key"),
		"--kubelet-preferred-address-types=InternalIP,Hostname",
		"--requestheader-client-ca-file=" + cp.pki("front-proxy-ca.crt"), "--requestheader-allowed-names=front-proxy-client",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--requestheader-group-headers=X-Remote-Group", "--requestheader-username-headers=X-Remote-User",
		"--proxy-client-cert-file=" + cp.pki("front-proxy-client.crt"), "--proxy-client-key-file=" + cp.pki("front-proxy-client.key"),
	}
	if cp.config.Audit {
		args = append(args, "--audit-policy-file="+filepath.Join(cp.dir, "audit-policy.yaml"),
			"--audit-log-path="+cp.auditLog(), "--audit-log-maxsize=100000") // MB: never rotated
	}
	c := cp.command("kube-apiserver", args, cp.config.APIServerArgs...)
	c.Ready = cp.ready
	return c
}

func (cp *ControlPlane) controllerManagerCommand() process.Command {
	kubeconfig := cp.kubeconfigFor("controller-manager")
	c := cp.command("kube-controller-manager", []string{
		"--kubeconfig=" + kubeconfig, "--leader-elect=false", "--kube-api-qps=1000", "--kube-api-burst=1000",
		"--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
		"--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(cp.ports.controllerManager),
		"--tls-cert-file=" + cp.pki("apiserver.crt"), "--tls-private-key-file=" + cp.pki("apiserver.key"),
		"--use-service-account-credentials", "--root-ca-file=" + cp.pki("ca.crt"),
		"--service-account-private-key-file=" + cp.pki("sa.key"),
		"--cluster-signing-cert-file=" + cp.pki("ca.crt"), "--cluster-signing-key-file=" + cp.pki("ca.key"),
		"--allocate-node-cidrs", "--cluster-cidr=" + podRange, "--service-cluster-ip-range=" + serviceRange,
	}, cp.config.ControllerManagerArgs...)
	c.Ready = cp.serves("https://" + addr(cp.ports.controllerManager) + "/healthz")
	return c
}

func (cp *ControlPlane) schedulerCommand() process.Command {
	kubeconfig := cp.kubeconfigFor("scheduler")
	c := cp.command("kube-scheduler", []string{
		"--kubeconfig=" + kubeconfig, "--leader-elect=false", "--kube-api-qps=1000", "--kube-api-burst=1000",
		"--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
		"--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(cp.ports.scheduler),
		"--tls-cert-file=" + cp.pki("apiserver.crt"), "--tls-private-key-file=" + cp.pki("apiserver.key"),
	}, cp.config.SchedulerArgs...)
	c.Ready = cp.serves("https://" + addr(cp.ports.scheduler) + "/readyz")
	return c
}

// ready is a condition: the API server serves all that it is to serve.
func (cp *ControlPlane) ready(ctx context.Context) error {
	return cp.serves(cp.URL() + "/readyz")(ctx)
}

// serves makes a condition: the URL answers the administrator with 200.
func (cp *ControlPlane) serves(url string) func(context.Context) error {
	return func(ctx context.Context) error {
		config, err := rest.TLSConfigFor(cp.admin)
		if err != nil {
			return err
		}
		return get(ctx, url, config)
	}
}

// get asks over a connection of its own, so that nothing of an earlier life of
// the server is used.
func get(ctx context.Context, url string, config *tls.Config) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	transport := &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	return nil
}
