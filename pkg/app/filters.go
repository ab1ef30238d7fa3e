// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/cache"
	"github.com/edgehub/edgehub/pkg/datadir"
	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/filter/cel"
	"github.com/edgehub/edgehub/pkg/filter/config"
	"github.com/edgehub/edgehub/pkg/filter/discardcloudservice"
	"github.com/edgehub/edgehub/pkg/filter/forwardkubesvctraffic"
	"github.com/edgehub/edgehub/pkg/filter/hostnetworkpool"
	"github.com/edgehub/edgehub/pkg/filter/inclusterconfig"
	"github.com/edgehub/edgehub/pkg/filter/masterservice"
	"github.com/edgehub/edgehub/pkg/filter/nodeportisolation"
	"github.com/edgehub/edgehub/pkg/filter/serviceenvupdater"
	"github.com/edgehub/edgehub/pkg/filter/servicetopology"
	"github.com/edgehub/edgehub/pkg/follow"
	"github.com/edgehub/edgehub/pkg/nodepool"
	"github.com/edgehub/edgehub/pkg/upstream"
)

// What filters are for.
var (
	services       = schema.GroupResource{Resource: "services"}
	endpoints      = schema.GroupResource{Resource: "endpoints"}
	endpointSlices = schema.GroupResource{Group: "discovery.k8s.io", Resource: "endpointslices"}
	configMaps     = schema.GroupResource{Resource: "configmaps"}
	pods           = schema.GroupResource{Resource: "pods"}
	secrets        = schema.GroupResource{Resource: "secrets"}

	reads = []string{"get", "list", "watch"}
)

// entries are all filters there are, in the order in which they are asked. The rules that
// operators write in CEL come after them.
func (f *filters) entries(hub netip.AddrPort) []filter.Entry {
	place := f.pool.Place()
	kubelet, kubeProxy := filter.Program("kubelet"), filter.Program("kube-proxy")
	return []filter.Entry{
		{Observer: f.report, Resources: only(pods), Verbs: []string{"list", "watch"}, Clients: []filter.Client{{}}, Default: true},
		{Filter: masterservice.New(hub), Resources: only(services), Verbs: reads, Clients: kubelet},
		{Filter: discardcloudservice.New(), Resources: only(services), Verbs: reads, Clients: kubeProxy, Withholds: true},
		{Filter: nodeportisolation.New(place), Resources: only(services), Verbs: reads, Clients: kubeProxy, Withholds: true},
		{Filter: f.topology, Resources: only(endpointSlices, endpoints), Verbs: reads, Clients: filter.Program("kube-proxy", "coredns", "nginx-ingress-controller")},
		{Filter: forwardkubesvctraffic.New(hub), Resources: only(endpointSlices), Verbs: reads, Clients: kubeProxy}, // after the one above, which would remove the hub
		{Filter: inclusterconfig.New(), Resources: only(configMaps), Verbs: reads, Clients: kubelet},
		{Filter: serviceenvupdater.New(hub), Resources: only(pods), Verbs: reads, Clients: kubelet},
	}
}

func only(resources ...schema.GroupResource) []schema.GroupResource { return resources }

// filters are the chain of filters, and what they go by.
type filters struct {
	chain    *filter.Chain
	keeper   *config.Keeper
	rules    *cel.Rules
	pool     *nodepool.Tracker
	services *follow.Table[string]
	topology *servicetopology.Filter
	report   *hostnetworkpool.Observer
}

// newFilters puts the filters that are configured around next, which answers requests. A
// configuration that is bad, with no good one in its place, is an error: clients would be
// shown what they should not be.
func newFilters(ctx context.Context, o Options, up *upstream.Upstream, store *cache.Cache, next http.RoundTripper, reg prometheus.Registerer) (*filters, error) {
	source := follow.Source{Transport: store, User: up.Node, Changed: up.Changed}
	node := strings.TrimPrefix(up.Node().GetName(), "system:node:")
	f := &filters{services: servicetopology.NewServices(source)}
	var err error
	f.pool, err = nodepool.NewTracker(nodepool.Config{Source: source, NodeName: func() string { return node }, Up: up.Up, LinkChanged: up.Changed, Registerer: reg})
	if err != nil {
		return nil, err
	}
	f.topology = servicetopology.New(node, f.pool.Place(), f.services)
	f.rules = cel.NewRules(cel.Config{Node: func() cel.Node {
		name, _ := f.pool.Place().Name()
		return cel.Node{Name: node, Pool: name}
	}, Pool: f.pool.Place(), Registerer: reg})
	if f.report, err = newReport(node, source, up, store, f.pool, next, reg); err != nil {
		return nil, err
	}
	spool := filepath.Join(o.DataDir, "spool")
	if err := errors.Join(os.RemoveAll(spool), os.Mkdir(spool, 0o700)); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	entries := f.entries(o.hubForPods())
	former := formerFile(filepath.Join(o.DataDir, "filters-former.json"))
	f.chain, err = filter.New(filter.Config{
		Former: former.load(ctx), Remember: func(all []filter.Former) { former.save(ctx, all) },
		Next: next, Entries: entries, Dir: spool, InMemory: func(gr schema.GroupResource) bool { return o.EncryptAll || gr == secrets }, Registerer: reg,
	})
	if err != nil {
		return nil, err
	}
	f.keeper, err = config.NewKeeper(config.Options{
		Known: config.Known{Entries: entries, CEL: func(r config.CELRule) error { _, err := f.compile(r); return err }},
		File:  o.FilterConfig, Namespace: o.ConfigNamespace, Cluster: source, Dir: o.DataDir, Apply: f.use, Registerer: reg,
	})
	if err != nil {
		return nil, err
	}
	return f, f.keeper.Load(ctx)
}

// use puts a configuration in force.
func (f *filters) use(c *config.Configuration) error {
	var entries []filter.Entry
	var compiled []filter.Filter
	rules := append([]filter.Rule{}, c.Rules...)
	for _, r := range c.CEL {
		e, err := f.compile(r)
		if err != nil {
			return err
		}
		entries = append(entries, e)
		compiled = append(compiled, e.Filter)
		rules = append(rules, filter.Rule{Name: e.Name()})
	}
	if err := f.chain.Use(rules, entries); err != nil {
		return err
	}
	f.rules.Use(compiled)
	return nil
}

// compile makes the entry of a rule in CEL.
func (f *filters) compile(r config.CELRule) (filter.Entry, error) {
	rule := cel.Rule{Name: r.Name, Match: r.Match, Drop: r.Drop, DryRun: r.DryRun}
	for _, s := range r.Set {
		rule.Set = append(rule.Set, cel.Set{Path: s.Path, Value: s.Value})
	}
	compiled, err := f.rules.New(rule)
	if err != nil {
		return filter.Entry{}, fieldErrors(err)
	}
	version, err := json.Marshal(rule)
	return filter.Entry{
		Filter: compiled, Resources: r.Resources, Verbs: r.Verbs, Clients: r.Clients, Withholds: r.Drop && !r.DryRun, Version: string(version),
	}, err
}

// fieldErrors says in the words of the configuration what is wrong with a rule.
func fieldErrors(err error) error {
	var all []error
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range joined.Unwrap() {
			all = append(all, fieldErrors(e))
		}
		return errors.Join(all...)
	}
	if wrong := (*cel.FieldError)(nil); errors.As(err, &wrong) {
		return &config.FieldError{Field: wrong.Field, Err: wrong.Err}
	}
	return err
}

// state is nil if what is configured is in force.
func (f *filters) state() error {
	var errs []error
	for _, s := range f.keeper.Status().Sources {
		if s.Error != "" {
			errs = append(errs, fmt.Errorf("%s %s: %s", s.Source, s.Name, strings.ReplaceAll(s.Error, "\n", "; ")))
		}
	}
	return errors.Join(errs...)
}

// parts are what lives.
func (f *filters) parts() []part {
	return []part{
		{"filters", f.chain.Run},
		{"filter configuration", f.keeper.Run},
		{"host-network report", f.report.Run},
		{"topology", f.topology.Run},
		{"services", f.services.Run},
		{"node pool", f.pool.Run},
	}
}

// A formerFile is where the rules are taken down that were in force: after a restart their
// clients may still hold what they showed.
type formerFile string

func (f formerFile) load(ctx context.Context) (former []filter.Former) {
	b, err := os.ReadFile(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(b, &former)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Which filters were in force is not known", "path", string(f))
	}
	return former
}

// save does not fail: what cannot be written down is known until the next restart.
func (f formerFile) save(ctx context.Context, former []filter.Former) {
	b, err := json.Marshal(former)
	if err == nil {
		err = datadir.WriteFile(string(f), b, 0o600)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Which filters are in force is not written down", "path", string(f))
	}
}
