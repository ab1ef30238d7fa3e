// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/cert"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/edgehub/edgehub/test/companion"
	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

// The ways of a pod that are compared. Each has a namespace of its own, and what makes
// the difference is in force in that alone.
const (
	withNothing = "nothing"
	withPolicy  = "policy"
	withAllow   = "no-op webhook"
	withWebhook = "webhook"

	// allowServer is the word for the program's other self that allows all.
	allowServer = "allow"

	// Many short rounds: what else the machine does meets all ways alike.
	admissionRounds = 16
	admissionTime   = 500 * time.Millisecond
	admissionConns  = 8
	excludeLabel    = "nodepool.openyurt.io/hostnetwork"
)

var (
	ways  = []string{withNothing, withPolicy, withAllow, withWebhook}
	kinds = []string{"annotated", "others"}
)

func namespaceOf(way string) string { return "admission-" + strings.Fields(way)[0] }

// admission measures the creation of pods: with the annotation, which the rule is for,
// and without, which should cost nothing.
func (b *bench) admission(ctx context.Context) error {
	r, err := b.newAdmissionRun(ctx)
	if err != nil {
		return err
	}
	defer b.closing(r.close)
	var all []string
	for _, kind := range kinds {
		for _, way := range ways {
			all = append(all, way+"/"+kind)
		}
	}
	m := admissionTimes{samples{}, samples{}, samples{}}
	err = alternate(admissionRounds, all, func(key string) error { return r.round(ctx, key, m) })
	if err != nil {
		return err
	}
	for _, kind := range kinds {
		b.admissionLines(kind, m)
	}
	return nil
}

// admissionTimes are by way and kind.
type admissionTimes struct {
	rate samples // pods a second, on all connections
	cpu  samples // ms of the API server and of who serves webhooks, a pod
	took samples // ms of a pod, on one connection
}

func (r *admissionRun) round(ctx context.Context, key string, m admissionTimes) error {
	before, err := r.spent()
	if err != nil {
		return err
	}
	many, perSecond, err := r.create(ctx, key, admissionConns)
	if err != nil {
		return err
	}
	after, err := r.spent()
	if err != nil {
		return err
	}
	m.rate.add(key, perSecond)
	m.cpu.add(key, 1000*(after-before)/float64(len(many)))
	one, _, err := r.create(ctx, key, 1)
	m.took[key] = append(m.took[key], one...)
	return err
}

// spent returns the CPU time of the servers that have a part in admission.
func (r *admissionRun) spent() (sum float64, err error) {
	pids := []int{r.b.server}
	for _, p := range r.processes {
		pids = append(pids, p.PID())
	}
	for _, pid := range pids {
		s, err := cpuSeconds(pid)
		if err != nil {
			return 0, err
		}
		sum += s
	}
	return sum, nil
}

func (b *bench) admissionLines(kind string, m admissionTimes) {
	pods := map[string]string{"annotated": "pods with the annotation", "others": "pods without the annotation"}[kind]
	key := func(way string) string { return way + "/" + kind }
	took := func(way string) string {
		all := m.took[key(way)]
		return fmt.Sprintf("p50 %.1f ms, p99 %.1f ms", quantile(all, .5), quantile(all, .99))
	}
	for _, way := range ways[1:] {
		b.add(result{Name: fmt.Sprintf("creating %s, %d connections, %s: of the throughput with nothing", pods, admissionConns, way),
			Value: 100 * m.rate.median(key(way)) / m.rate.median(key(withNothing)), Unit: "%",
			Versus: fmt.Sprintf("%.0f/s, with nothing %.0f/s; CPU of API server and webhook server %.1f ms a pod, with nothing %.1f ms",
				m.rate.median(key(way)), m.rate.median(key(withNothing)), mean(m.cpu[key(way)]), mean(m.cpu[key(withNothing)]))})
		b.add(result{Name: fmt.Sprintf("creating %s, one at a time, %s: p50 later than with nothing", pods, way), Value: m.took.median(key(way)) - m.took.median(key(withNothing)), Unit: "ms",
			Versus: took(way) + "; with nothing " + took(withNothing)})
	}
}

// An admissionRun is the API server with all ways in force.
type admissionRun struct {
	b         *bench
	dir       string
	clients   []*http.Client
	url       string
	bodies    map[string][]byte // by kind
	processes []*process.Process
	bundle    []byte // the certificate of both servers
}

func (b *bench) newAdmissionRun(ctx context.Context) (_ *admissionRun, err error) {
	r := &admissionRun{b: b, url: b.direct().Host, bodies: map[string][]byte{}}
	if r.dir, err = os.MkdirTemp("", "edgehub-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	for range admissionConns {
		c, err := newClient(b.direct(), true)
		if err != nil {
			return nil, err
		}
		r.clients = append(r.clients, c)
	}
	for _, way := range ways {
		if err := b.cp.CreateNamespace(ctx, namespaceOf(way)); err != nil {
			return nil, err
		}
	}
	for _, kind := range kinds {
		if r.bodies[kind], err = podBody(kind == "annotated"); err != nil {
			return nil, err
		}
	}
	if err := r.serve(ctx); err != nil {
		return nil, err
	}
	for _, way := range ways {
		if err := process.Poll(ctx, "pods go through "+way, func(ctx context.Context) error { return r.inForce(ctx, way) }); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// podBody is a pod without a name, as clients post it.
func podBody(annotated bool) ([]byte, error) {
	p := newPod(podSet{}, 0)
	p.Name, p.GenerateName, p.Spec.NodeName = "", "pod-", ""
	if annotated {
		p.Annotations["apps.openyurt.io/exclude-host-network-pool"] = "true"
	}
	return json.Marshal(p)
}

// serve starts the companion and the server that allows all, and puts the ways in force.
func (r *admissionRun) serve(ctx context.Context) error {
	bundle, key, err := cert.GenerateSelfSignedCertKey("localhost", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		return err
	}
	r.bundle = bundle
	err = errors.Join(os.WriteFile(r.dir+"/"+corev1.TLSCertKey, bundle, 0o600), os.WriteFile(r.dir+"/"+corev1.TLSPrivateKeyKey, key, 0o600), r.b.cp.CreateNamespace(ctx, companion.Namespace))
	if err != nil {
		return err
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "certificate"}, Type: corev1.SecretTypeTLS, Data: map[string][]byte{corev1.TLSCertKey: bundle, corev1.TLSPrivateKeyKey: key}}
	if _, err := r.b.cp.Client.CoreV1().Secrets(companion.Namespace).Create(ctx, secret, metav1.CreateOptions{}); err != nil {
		return err
	}
	ours, err := r.startCompanion(ctx)
	if err != nil {
		return err
	}
	allow, err := r.startAllow(ctx)
	if err != nil {
		return err
	}
	hooks, err := companion.Render(ctx, "admission.mode=webhook")
	if err != nil {
		return err
	}
	policies, err := companion.Render(ctx, "admission.mode=policy")
	if err != nil {
		return err
	}
	return errors.Join(r.apply(ctx, hooks, withWebhook, ours), r.apply(ctx, hooks, withAllow, allow), r.apply(ctx, policies, withPolicy, ""))
}

// startCompanion starts it as it is shipped, without its controllers, and returns its
// address.
func (r *admissionRun) startCompanion(ctx context.Context) (string, error) {
	program, err := controlplane.Build(ctx, "edgehub-webhook")
	if err != nil {
		return "", err
	}
	var free [2]string
	for i := range free {
		p, err := port.Free()
		if err != nil {
			return "", err
		}
		free[i] = "localhost:" + strconv.Itoa(p)
	}
	p := process.New(process.Command{
		Path: program, Dir: r.dir,
		Args: []string{
			"--kubeconfig=" + r.b.cp.AdminKubeconfig(), "--namespace=" + companion.Namespace, "--webhook-listen-address=" + free[0], "--probe-listen-address=" + free[1],
			"--metrics-listen-address=", "--cert-dir=" + r.dir + "/companion", "--certificates=secret", "--certificate-secret=certificate",
			"--leader-elect=false", "--nodepools=off", "--autonomy=false", "--approve-serving-certificates=false",
		},
		Ready: func(ctx context.Context) error { return ready(ctx, "http://"+free[1]+"/readyz") },
	})
	r.processes = append(r.processes, p)
	return free[0], p.Start(ctx)
}

// startAllow starts the server that allows all, and returns its address.
func (r *admissionRun) startAllow(ctx context.Context) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	n, err := port.Free()
	if err != nil {
		return "", err
	}
	address := "localhost:" + strconv.Itoa(n)
	p := process.New(process.Command{
		Name: allowServer, Path: self, Dir: r.dir, Args: []string{allowServer, strconv.Itoa(n), r.dir},
		Ready: func(ctx context.Context) error {
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
			if err == nil {
				err = conn.Close()
			}
			return err
		},
	})
	r.processes = append(r.processes, p)
	return address, p.Start(ctx)
}

func ready(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// allowAll is the process: the companion's server with a handler that does nothing.
func allowAll(ctx context.Context, args []string) error {
	ctrl.SetLogger(logr.Discard())
	p, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	s := webhook.NewServer(webhook.Options{Host: "localhost", Port: p, CertDir: args[1]})
	s.Register("/exclude", &admission.Webhook{Handler: admission.HandlerFunc(func(context.Context, admission.Request) admission.Response { return admission.Allowed("") })})
	return s.Start(ctx)
}

// apply creates what the chart has for admission, for the namespace of a way alone, with
// webhooks at address.
func (r *admissionRun) apply(ctx context.Context, objects []*unstructured.Unstructured, way, address string) error {
	client, err := dynamic.NewForConfig(r.b.direct())
	if err != nil {
		return err
	}
	for _, o := range objects {
		gvk := o.GroupVersionKind()
		if gvk.Group != "admissionregistration.k8s.io" {
			continue
		}
		o = o.DeepCopy()
		o.SetName(o.GetName() + "-" + namespaceOf(way))
		if err := r.scope(o, way, address); err != nil {
			return err
		}
		resource, _ := meta.UnsafeGuessKindToResource(gvk)
		if _, err := client.Resource(resource).Create(ctx, o, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("%s %s: %w", gvk.Kind, o.GetName(), err)
		}
	}
	return nil
}

// scope changes an object so that it is in force for the namespace of a way alone.
func (r *admissionRun) scope(o *unstructured.Unstructured, way, address string) error {
	selector := map[string]any{"matchLabels": map[string]any{"kubernetes.io/metadata.name": namespaceOf(way)}}
	switch kind := o.GetKind(); {
	case strings.HasSuffix(kind, "PolicyBinding"):
		name, _, err := unstructured.NestedString(o.Object, "spec", "policyName")
		return errors.Join(err, unstructured.SetNestedField(o.Object, name+"-"+namespaceOf(way), "spec", "policyName"))
	case strings.HasSuffix(kind, "Policy"):
		return unstructured.SetNestedMap(o.Object, selector, "spec", "matchConstraints", "namespaceSelector")
	}
	hooks, _, err := unstructured.NestedSlice(o.Object, "webhooks")
	if err != nil {
		return err
	}
	hooks = slices.DeleteFunc(hooks, func(h any) bool {
		return !strings.HasSuffix(fmt.Sprint(h.(map[string]any)["name"]), ".exclude.edgehub.io")
	})
	for _, h := range hooks {
		hook := h.(map[string]any)
		hook["name"] = namespaceOf(way) + "." + hook["name"].(string)
		hook["namespaceSelector"] = selector
		hook["clientConfig"] = map[string]any{"url": "https://" + address + "/exclude", "caBundle": base64.StdEncoding.EncodeToString(r.bundle)}
	}
	return unstructured.SetNestedSlice(o.Object, hooks, "webhooks")
}

// excluded says whether a pod of a way and kind must have the rule.
func excluded(way, kind string) bool {
	return kind == "annotated" && (way == withPolicy || way == withWebhook)
}

// inForce returns nil once an annotated pod goes its way.
func (r *admissionRun) inForce(ctx context.Context, way string) error {
	if err := r.post(ctx, r.clients[0], way, kinds[0]); err != nil || way != withAllow {
		return err
	}
	metrics, err := r.b.cp.Client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err == nil && !bytes.Contains(metrics, []byte(`webhook_request_total{code="200",name="`+namespaceOf(way))) {
		err = errors.New("nobody has been asked")
	}
	return err
}

// create creates pods on some connections for a round, and returns what each took in ms,
// and how many there were a second.
func (r *admissionRun) create(ctx context.Context, key string, conns int) (_ []float64, perSecond float64, err error) {
	way, kind, _ := strings.Cut(key, "/")
	var g errgroup.Group
	took := make([][]float64, conns)
	start := time.Now()
	for i := range conns {
		g.Go(func() error {
			for time.Since(start) < admissionTime {
				t := time.Now()
				if err := r.post(ctx, r.clients[i], way, kind); err != nil {
					return err
				}
				took[i] = append(took[i], milliseconds(time.Since(t)))
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, 0, err
	}
	all := slices.Concat(took...)
	return all, float64(len(all)) / time.Since(start).Seconds(), nil
}

// post creates a pod, which has the rule when it must and only then.
func (r *admissionRun) post(ctx context.Context, client *http.Client, way, kind string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/api/v1/namespaces/"+namespaceOf(way)+"/pods", bytes.NewReader(r.bodies[kind]))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", jsonType)
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusCreated {
		return fmt.Errorf("create a pod: %s: %s", resp.Status, body)
	}
	if got, want := bytes.Contains(body, []byte(excludeLabel)), excluded(way, kind); got != want {
		return fmt.Errorf("the pod has the rule: %v, want %v", got, want)
	}
	return nil
}

// close ends the servers, and takes the ways out of force: other parts create pods too.
func (r *admissionRun) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	all, api := metav1.ListOptions{}, r.b.cp.Client.AdmissionregistrationV1()
	err := errors.Join(
		api.MutatingWebhookConfigurations().DeleteCollection(ctx, metav1.DeleteOptions{}, all),
		api.MutatingAdmissionPolicies().DeleteCollection(ctx, metav1.DeleteOptions{}, all),
		api.ValidatingAdmissionPolicies().DeleteCollection(ctx, metav1.DeleteOptions{}, all),
	)
	for _, p := range r.processes {
		err = errors.Join(err, p.Close())
	}
	for _, c := range r.clients {
		c.CloseIdleConnections()
	}
	return errors.Join(err, os.RemoveAll(r.dir))
}
