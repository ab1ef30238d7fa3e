// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package companion runs cmd/edgehub-webhook for tests as the chart has it: what the
// chart renders is applied to a control plane, and each replica is a process with the
// arguments of the chart's Deployment and the rights of its ServiceAccount. The API
// server reaches the webhooks on loopback.
package companion

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

const (
	// Namespace is the one that the chart is installed in.
	Namespace = "edgehub-system"
	// Name is the release's, and so that of the webhook configuration.
	Name = "edgehub"
	// User is the companion's identity.
	User = "system:serviceaccount:" + Namespace + ":" + Name + "-webhook"
)

// onNodes are kinds that make pods, hooks of helm's, or what guards pods: without
// kubelets they are of no use here.
var onNodes = []string{"Deployment", "DaemonSet", "Job", "PodDisruptionBudget", "NetworkPolicy", "Service", "PodMonitor", "ServiceMonitor"}

// A Release is what the chart has made of a cluster.
type Release struct {
	// Address is where the API server asks for admission, localhost:port.
	Address string

	cp   *controlplane.ControlPlane
	dir  string
	args []string // of the Deployment
	n    int      // replicas so far
}

// Install renders the chart with values, each as helm's --set has it
// (admission.mode=policy), and applies it. It returns before any replica runs.
func Install(t testing.TB, cp *controlplane.ControlPlane, values ...string) *Release {
	t.Helper()
	p, err := port.Free()
	if err != nil {
		t.Fatal(err)
	}
	r := &Release{Address: net.JoinHostPort("localhost", strconv.Itoa(p)), cp: cp, dir: t.TempDir()}
	if err := cp.CreateNamespace(t.Context(), Namespace); err != nil {
		t.Fatal(err)
	}
	if err := r.apply(t.Context(), values); err != nil {
		t.Fatal(err)
	}
	return r
}

// Upgrade applies the chart with other values.
func (r *Release) Upgrade(t testing.TB, values ...string) {
	t.Helper()
	if err := r.apply(t.Context(), values); err != nil {
		t.Fatal(err)
	}
}

// Render returns what the chart renders with values, for the API server of the tests.
func Render(ctx context.Context, values ...string) ([]*unstructured.Unstructured, error) {
	bin, err := controlplane.Binaries(ctx, "helm")
	if err != nil {
		return nil, err
	}
	root, err := controlplane.Root()
	if err != nil {
		return nil, err
	}
	args := []string{
		"template", Name, filepath.Join(root, "charts", "edgehub"), "--namespace", Namespace, "--no-hooks", "--kube-version", "1.36.3",
		"--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy", "--api-versions", "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy",
	}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "helm"), args...)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("helm template: %w\n%s", err, stderr.Bytes())
	}
	var objects []*unstructured.Unstructured
	for d := yaml.NewYAMLOrJSONDecoder(&out, 4096); ; {
		o := &unstructured.Unstructured{}
		if err := d.Decode(&o.Object); errors.Is(err, io.EOF) {
			return objects, nil
		} else if err != nil {
			return nil, err
		}
		if len(o.Object) > 0 {
			objects = append(objects, o)
		}
	}
}

func (r *Release) apply(ctx context.Context, values []string) error {
	objects, err := Render(ctx, values...)
	if err != nil {
		return err
	}
	var all bytes.Buffer
	for _, o := range objects {
		switch {
		case o.GetKind() == "Deployment":
			if r.args, err = argsOf(o); err != nil {
				return err
			}
			continue
		case slices.Contains(onNodes, o.GetKind()):
			continue
		case o.GetKind() == "MutatingWebhookConfiguration":
			if err := r.redirect(o); err != nil {
				return err
			}
		}
		text, err := sigsyaml.Marshal(o.Object)
		if err != nil {
			return err
		}
		fmt.Fprintf(&all, "---\n%s", text)
	}
	return r.kubectl(ctx, &all)
}

// argsOf returns the arguments of a Deployment's first container.
func argsOf(deployment *unstructured.Unstructured) ([]string, error) {
	containers, _, err := unstructured.NestedSlice(deployment.Object, "spec", "template", "spec", "containers")
	if err != nil || len(containers) == 0 {
		return nil, fmt.Errorf("deployment %s has no containers: %w", deployment.GetName(), err)
	}
	container, _ := containers[0].(map[string]any)
	args, _, err := unstructured.NestedStringSlice(container, "args")
	return args, err
}

// redirect turns the Service of each webhook into a URL.
func (r *Release) redirect(configuration *unstructured.Unstructured) error {
	hooks, _, err := unstructured.NestedSlice(configuration.Object, "webhooks")
	if err != nil {
		return err
	}
	for _, h := range hooks {
		hook, _ := h.(map[string]any)
		path, _, err := unstructured.NestedString(hook, "clientConfig", "service", "path")
		if err != nil || path == "" {
			return fmt.Errorf("webhook %v has no clientConfig.service.path: %w", hook["name"], err)
		}
		hook["clientConfig"] = map[string]any{"url": "https://" + r.Address + path}
	}
	return unstructured.SetNestedSlice(configuration.Object, hooks, "webhooks")
}

func (r *Release) kubectl(ctx context.Context, manifests io.Reader) error {
	bin, err := controlplane.Binaries(ctx, "kubectl")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "kubectl"), "--kubeconfig="+r.cp.AdminKubeconfig(), "apply", "--server-side", "--force-conflicts", "-f", "-")
	cmd.Stdin = manifests
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply: %w\n%s", err, out)
	}
	return nil
}

// A Replica is a process of the companion.
type Replica struct {
	*process.Process
	address, metrics, probes string
}

// NewReplica returns one that listens for admission requests on address, host:port
// (empty: the Release's), with more arguments after the chart's own. It is not started,
// and closed at the end of the test.
func (r *Release) NewReplica(t testing.TB, address string, args ...string) *Replica {
	t.Helper()
	program, err := controlplane.Build(t.Context(), "edgehub-webhook")
	if err != nil {
		t.Fatal(err)
	}
	c := &Replica{address: address}
	if address == "" {
		c.address = r.Address
	}
	for _, a := range []*string{&c.metrics, &c.probes} {
		p, err := port.Free()
		if err != nil {
			t.Fatal(err)
		}
		*a = net.JoinHostPort("127.0.0.1", strconv.Itoa(p))
	}
	r.n++
	dir := filepath.Join(r.dir, strconv.Itoa(r.n))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	credential, err := r.credential(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	all := append(slices.Clone(r.args), "--kubeconfig="+credential, "--webhook-listen-address="+c.address, "--metrics-listen-address="+c.metrics,
		"--probe-listen-address="+c.probes, "--cert-dir="+filepath.Join(dir, "cert"), "--certificate-names=localhost", "-v=4")
	c.Process = process.New(process.Command{
		Name: "edgehub-webhook-" + strconv.Itoa(r.n), Path: program, Args: append(all, args...), Dir: dir,
		Ready: c.Ready, ReadyTimeout: 2 * time.Minute,
	})
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("--- end of the log of replica %s\n%s", filepath.Base(dir), c.LogTail())
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// Start starts a replica of its own at the Release's address, and waits until it is
// ready and the API server trusts it.
func (r *Release) Start(t testing.TB, args ...string) *Replica {
	t.Helper()
	c := r.NewReplica(t, "", args...)
	if err := c.Process.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := process.Poll(t.Context(), "the webhooks have a caBundle", r.Trusted); err != nil {
		t.Fatal(err)
	}
	return c
}

// Trusted returns nil once every webhook, if there are any, has a caBundle. What the
// API server does with it follows within a second or two.
func (r *Release) Trusted(ctx context.Context) error {
	all, err := r.cp.Client.AdmissionregistrationV1().MutatingWebhookConfigurations().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all.Items, func(c admissionv1.MutatingWebhookConfiguration) bool { return c.Name == Name })
	if i < 0 {
		return nil
	}
	for _, h := range all.Items[i].Webhooks {
		if len(h.ClientConfig.CABundle) == 0 {
			return fmt.Errorf("webhook %s has none", h.Name)
		}
	}
	return nil
}

// credential writes a kubeconfig with a token of the companion's ServiceAccount.
func (r *Release) credential(ctx context.Context, dir string) (string, error) {
	_, name, _ := strings.Cut(strings.TrimPrefix(User, "system:serviceaccount:"), ":")
	token, err := r.cp.Client.CoreV1().ServiceAccounts(Namespace).CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	config := rest.AnonymousClientConfig(r.cp.AdminConfig())
	config.BearerToken = token.Status.Token
	file := filepath.Join(dir, "kubeconfig")
	return file, controlplane.WriteKubeconfig(file, config)
}

// Ready returns nil once the replica says that it is.
func (c *Replica) Ready(ctx context.Context) error {
	_, err := get(ctx, "http://"+c.probes+"/readyz")
	return err
}

// Metrics returns what /metrics says now.
func (c *Replica) Metrics(ctx context.Context) (string, error) {
	return get(ctx, "http://"+c.metrics+"/metrics")
}

func get(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, resp.Status, b)
	}
	return string(b), err
}
