// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// impatience is how an informer of these tests waits after a failure: client-go's own would
// be at 30 s after a few.
var impatience = wait.Backoff{Duration: 100 * time.Millisecond, Cap: time.Second, Steps: 8, Factor: 1.5, Jitter: 0.5}

// A spec says who has an informer of what.
type spec struct {
	program   string // plain is one for which no filter is in force
	resource  string
	namespace string
	selector  metav1.ListOptions
	byNode    bool
}

const plain = "plain"

var specs = []spec{
	{program: "kubelet", resource: "services", byNode: true},
	{program: "kubelet", resource: "configmaps", namespace: "kube-system", byNode: true},
	{program: "kubelet", resource: "pods", selector: metav1.ListOptions{FieldSelector: "spec.nodeName=" + rig.NodeName}, byNode: true},
	{program: "kube-proxy", resource: "services", selector: metav1.ListOptions{LabelSelector: "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name"}},
	{program: "kube-proxy", resource: "endpointslices", selector: metav1.ListOptions{LabelSelector: "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name"}},
	{program: "coredns", resource: "endpointslices"},
	{program: "nginx-ingress-controller", resource: "endpoints"},
	{program: "nginx-ingress-controller", resource: "endpointslices"},
	{program: plain, resource: "services"},
	{program: plain, resource: "endpointslices"},
	{program: plain, resource: "endpoints"},
	{program: plain, resource: "configmaps", namespace: "kube-system", byNode: true},
	{program: plain, resource: "pods", selector: metav1.ListOptions{FieldSelector: "spec.nodeName=" + rig.NodeName}, byNode: true},
}

// An informer is client-go's, over a store that is compared.
type informer struct {
	spec
	json   bool // JSON with LIST and WATCH; else protobuf with WatchList
	direct *cache.ListWatch
	*cache.Reflector
	store *store
}

func (i *informer) String() string {
	return fmt.Sprintf("%s's informer of %s, JSON %t", i.program, i.resource, i.json)
}

// A store takes what an informer is told, and does not believe everything.
type store struct {
	cache.Store

	mu       sync.Mutex
	problems []string
}

func (s *store) check(what string, o any, want bool) {
	if _, held, err := s.Get(o); err != nil || held != want {
		key, _ := cache.MetaNamespaceKeyFunc(o)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.problems = append(s.problems, fmt.Sprintf("%s %s, and it is held: %t, %v", what, key, held, err))
	}
}

// Add implements cache.Store.
func (s *store) Add(o any) error { s.check("ADDED", o, false); return s.Store.Add(o) }

// Update implements cache.Store.
func (s *store) Update(o any) error { s.check("MODIFIED", o, true); return s.Store.Update(o) }

// A mode is a ListerWatcher with or without WatchList.
type mode struct {
	*cache.ListWatch
	without bool
}

// IsWatchListSemanticsUnSupported is how client-go asks.
func (m mode) IsWatchListSemanticsUnSupported() bool { return m.without }

var examples = map[string]runtime.Object{
	"services": &corev1.Service{}, "configmaps": &corev1.ConfigMap{}, "pods": &corev1.Pod{}, "endpointslices": &discoveryv1.EndpointSlice{},
	"endpoints": &corev1.Endpoints{}, //nolint:staticcheck // what old clients read
}

// listWatch lists and watches what a spec says.
func (s spec) listWatch(c *rest.Config) (*cache.ListWatch, error) {
	c.WarningHandler = rest.NoWarnings{}
	k, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, err
	}
	client := k.CoreV1().RESTClient()
	if s.resource == "endpointslices" {
		client = k.DiscoveryV1().RESTClient()
	}
	return cache.NewFilteredListWatchFromClient(client, s.resource, s.namespace, func(o *metav1.ListOptions) {
		o.LabelSelector, o.FieldSelector = s.selector.LabelSelector, s.selector.FieldSelector
	}), nil
}

func newInformer(s *stage, of spec, json bool) *informer {
	s.T.Helper()
	i := &informer{spec: of, json: json, store: &store{Store: cache.NewStore(cache.MetaNamespaceKeyFunc)}}
	c := s.credential(of.byNode, of.program)
	c.ContentType, c.AcceptContentTypes = rig.Protobuf, rig.Protobuf+","+rig.JSON
	if json {
		c.ContentType, c.AcceptContentTypes = rig.JSON, rig.JSON
	}
	lw, err := of.listWatch(c)
	s.Must(err)
	i.direct, err = of.listWatch(s.ControlPlane.TokenConfig(writerUser))
	s.Must(err)
	backoff := impatience
	i.Reflector = cache.NewReflectorWithOptions(mode{lw, json}, examples[of.resource], i.store, cache.ReflectorOptions{Name: i.String(), Backoff: &backoff})
	return i
}

// truth is what the informer should hold, and how many objects the filters withhold or
// change of it.
func (i *informer) truth(ctx context.Context, w *world) (want map[string]runtime.Object, filtered int, err error) {
	list, err := i.direct.ListWithContext(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, 0, err
	}
	want = map[string]runtime.Object{}
	err = meta.EachListItem(list, func(o runtime.Object) error {
		key, err := cache.MetaNamespaceKeyFunc(o)
		v := w.view(i.program, o)
		if v != nil {
			want[key] = v
		}
		if v == nil || !equality.Semantic.DeepEqual(v, o) {
			filtered++
		}
		return err
	})
	return want, filtered, err
}

// agrees says how the informer differs from what it should hold.
func (i *informer) agrees(want map[string]runtime.Object) error {
	for key, w := range want {
		got, ok, err := i.store.GetByKey(key)
		switch {
		case err != nil:
			return err
		case !ok:
			return fmt.Errorf("%s is missing", key)
		case !equality.Semantic.DeepEqual(got, w):
			return fmt.Errorf("%s (-want +got):\n%s", key, cmp.Diff(w, got))
		}
	}
	for _, key := range i.store.ListKeys() {
		if want[key] == nil {
			return fmt.Errorf("%s should not be held", key)
		}
	}
	i.store.mu.Lock()
	defer i.store.mu.Unlock()
	if len(i.store.problems) > 0 {
		return errors.New(strings.Join(i.store.problems, "; "))
	}
	return nil
}

// A drama is what informers live through.
type drama struct {
	*changer
	hub       netip.AddrPort
	inForce   []string
	mark      string
	informers []*informer
	filtered  map[string]int // by program and resource, at quiet points
}

// TestFilteredInformers has informers of the programs that filters are for follow objects
// that change, with all that filters go by, while links are cut and hubs die. At quiet
// points each must hold what docs/filters.md says, and those of other programs the truth.
func TestFilteredInformers(t *testing.T) {
	t.Parallel()
	seed := rig.Seed(t)
	t.Cleanup(func() { rig.KeepSeed(t, "./test/filters", seed, 0) })
	d := newDrama(t, rand.New(rand.NewPCG(seed, 0)))
	ctx, cancel := context.WithCancel(t.Context())
	d.change(ctx, 200)
	d.Must(d.writeProxyConfig(ctx, "kube-proxy", kubeconfigLine)) // the one thing that chance may leave out
	process.Run(t, d.Hub)
	d.WaitLink(true)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for _, s := range specs {
		for _, json := range []bool{false, true} {
			i := newInformer(d.stage, s, json)
			d.informers = append(d.informers, i)
			running.Go(func() { i.RunWithContext(ctx) })
		}
	}
	d.quiet(ctx)
	acts := []func(context.Context){d.cut, d.kill, d.stop, d.offline, d.offlineRestart, d.toggle, d.kill, d.offlineToggle}
	d.rng.Shuffle(len(acts), func(i, j int) { acts[i], acts[j] = acts[j], acts[i] })
	for _, act := range acts {
		d.change(ctx, 1+d.rng.IntN(15))
		act(ctx)
		d.change(ctx, 1+d.rng.IntN(15))
		d.Online()
		if d.quiet(ctx); t.Failed() {
			return
		}
	}
	t.Logf("filtered at quiet points: %v", d.filtered)
	for _, i := range d.informers {
		if got := d.filtered[i.program+" "+i.resource]; (got > 0) != (i.program != plain) && d.applies(i.spec) {
			t.Errorf("%v: %d objects were withheld or changed, which shows nothing", i, got)
		}
	}
}

// applies reports whether there is an address for what is for a spec.
func (d *drama) applies(s spec) bool {
	return d.hub.IsValid() || s.program != "kubelet" || s.resource == "configmaps"
}

func newDrama(t *testing.T, rng *rand.Rand) *drama {
	t.Helper()
	d := &drama{filtered: map[string]int{}, inForce: slices.Clone(allFilters)}
	var args []string
	if os.Geteuid() == 0 {
		p, err := port.Free()
		if err != nil {
			t.Fatal(err)
		}
		d.hub = netip.AddrPortFrom(hubAddress, uint16(p))
		args = []string{"--link-local-address=" + d.hub.String(), "--link-local-interface=lo"}
		t.Cleanup(func() { removeAddress(t) })
	} else {
		d.inForce = slices.DeleteFunc(d.inForce, func(name string) bool { return slices.Contains(needAddress, name) })
		t.Logf("%v are left out: an address for pods takes root", needAddress)
	}
	s := newStage(t, d.document(), args...)
	d.mark = "document-1"
	d.changer = &changer{stage: s, client: s.ControlPlane.Client, rng: rng}
	return d
}

// removeAddress takes away what a hub that was killed has left.
func removeAddress(t *testing.T) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Error(err)
		return
	}
	all, err := netlink.AddrList(lo, netlink.FAMILY_V4)
	if err != nil {
		t.Error(err)
	}
	for _, a := range all {
		if a.IP.String() == hubAddress.String() {
			if err := netlink.AddrDel(lo, &a); err != nil {
				t.Error(err)
			}
		}
	}
}

// document is the configuration in force.
func (d *drama) document() (doc document) {
	for _, name := range d.inForce {
		doc.Filters = append(doc.Filters, entry{Name: name})
	}
	return doc
}

// change does n things.
func (d *drama) change(ctx context.Context, n int) {
	d.T.Helper()
	for range n {
		d.Must(d.step(ctx))
	}
}

func (d *drama) cut(ctx context.Context) {
	d.Link.Cut()
	d.change(ctx, d.rng.IntN(15))
	d.Must(d.Link.Heal())
}

func (d *drama) kill(ctx context.Context) {
	d.Must(d.Hub.Kill())
	d.change(ctx, d.rng.IntN(10))
	d.Must(d.Hub.Start(ctx))
}

func (d *drama) stop(ctx context.Context) {
	d.Must(d.Hub.Stop())
	d.change(ctx, d.rng.IntN(10))
	d.Must(d.Hub.Start(ctx))
}

func (d *drama) offline(ctx context.Context) {
	d.Offline()
	d.change(ctx, d.rng.IntN(15))
}

// offlineRestart is a quiet point without a link, after another start. The hub is ended in
// order: what one that is killed has not written by then it cannot know.
func (d *drama) offlineRestart(ctx context.Context) {
	d.Online()
	d.quiet(ctx)
	d.Offline()
	d.Must(d.Hub.Stop())
	d.Must(d.Hub.Start(ctx))
	d.quiet(ctx)
}

// toggle puts some filters in force and others not.
func (d *drama) toggle(context.Context) {
	d.inForce = nil
	for _, name := range allFilters {
		if d.rng.IntN(3) > 0 && (d.hub.IsValid() || !slices.Contains(needAddress, name)) {
			d.inForce = append(d.inForce, name)
		}
	}
	d.mark = d.write(d.document())
}

// offlineToggle is a quiet point without a link, with other filters than before.
func (d *drama) offlineToggle(ctx context.Context) {
	d.Online()
	d.quiet(ctx)
	d.Offline()
	d.toggle(ctx)
	d.quiet(ctx)
}

// quiet waits until each informer holds what it should.
func (d *drama) quiet(ctx context.Context) {
	d.T.Helper()
	d.waitInForce(d.mark)
	w, err := d.look(ctx, d.inForce, d.hub)
	d.Must(err)
	ctx, cancel := context.WithTimeout(ctx, convergeWithin)
	defer cancel()
	for _, i := range d.informers {
		want, filtered, err := i.truth(ctx, w)
		d.Must(err)
		d.filtered[i.program+" "+i.resource] += filtered
		if err := process.Poll(ctx, i.String()+" is right", func(context.Context) error { return i.agrees(want) }); err != nil {
			d.T.Errorf("%v\npool %q with %v, in force: %v", err, w.pool, w.near, w.inForce)
			return // the others have no time left
		}
	}
}
