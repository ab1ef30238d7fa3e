// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/datadir"
	"github.com/edgehub/edgehub/pkg/follow"
)

const (
	pollPeriod = time.Second
	// savePeriod is between tries to write the last good copy.
	savePeriod = time.Minute
)

// Where a configuration is from; the values of the label source.
const (
	sourceConfigMap = "configmap"
	sourceFile      = "file"
	sourceLastGood  = "last_good"
	sourceDefaults  = "defaults"
)

// Options are those of a Keeper.
type Options struct {
	Known Known
	// File is the path of the configuration. Empty: none.
	File string
	// Namespace is that of the ConfigMap edgehub-config. Empty: none.
	Namespace string
	// Cluster is where the ConfigMap is followed; needed with Namespace.
	Cluster follow.Source
	// Dir, which must exist, is where the last good copy is kept.
	Dir string
	// Apply brings a configuration into force, and must not change it. On an error what
	// was in force must still be. It is called by one goroutine at a time, first by Load.
	Apply      func(*Configuration) error
	Registerer prometheus.Registerer // nil: none
}

// A Keeper keeps in force what the ConfigMap says; where there is none, what the file
// says; and without either the defaults. What cannot be accepted changes nothing.
type Keeper struct {
	options Options
	metrics *metrics
	status  atomic.Pointer[Status]

	// What follows belongs to Load, and then to Run.
	configMap, file, lastGood, defaults *source

	polled   polled
	inForce  *version
	since    time.Time
	onDisk   []byte // the last good copy; nil: none
	unsaved  error  // why onDisk is not what it should be
	saveNext time.Time
}

// A source is one of the places that a configuration can come from.
type source struct {
	kind, name string
	good       *version // the last that was accepted; nil: none
	err        error    // why the newest is not accepted
}

// A version is what a source said at some time.
type version struct {
	from     *source
	copied   bool // read from the last good copy
	document []byte
	conf     *Configuration
	warnings []string
}

// Status says what is in force, and what is not, and why.
type Status struct {
	Since   time.Time      `json:"since"`
	Sources []SourceStatus `json:"sources"` // the first that can be used is in force
}

// SourceStatus is about one source: configmap, file, last_good or defaults.
type SourceStatus struct {
	Source   string   `json:"source"`
	Name     string   `json:"name,omitempty"` // NAMESPACE/NAME, or a path
	InForce  bool     `json:"inForce"`
	Error    string   `json:"error,omitempty"` // why the newest content is not in force
	Warnings []string `json:"warnings,omitempty"`
}

// NewKeeper makes a Keeper. Load comes next, and then Run.
func NewKeeper(o Options) (*Keeper, error) {
	m, err := newMetrics(o.Registerer)
	if err != nil {
		return nil, err
	}
	k := &Keeper{
		options:   o,
		metrics:   m,
		configMap: &source{kind: sourceConfigMap, name: o.Namespace + "/" + configMapName},
		file:      &source{kind: sourceFile, name: o.File},
		lastGood:  &source{kind: sourceLastGood, name: filepath.Join(o.Dir, lastGoodFile)},
		defaults:  &source{kind: sourceDefaults, name: sourceDefaults},
		polled:    polled{path: o.File},
	}
	k.defaults.good = &version{from: k.defaults, conf: &Configuration{}}
	k.publish()
	return k, nil
}

// Status is safe for concurrent use.
func (k *Keeper) Status() Status { return *k.status.Load() }

func (k *Keeper) publish() {
	s := &Status{Since: k.since}
	for _, of := range []*source{k.configMap, k.file, k.lastGood, k.defaults} {
		if !k.configured(of) {
			continue
		}
		now := SourceStatus{Source: of.kind, Name: of.name, InForce: k.inForce != nil && k.inForce.source(k) == of}
		switch {
		case of.err != nil:
			now.Error = of.err.Error()
		case now.InForce && of == k.configMap && of.good == nil:
			now.Error = of.name + ": is gone, and stays in force, since nothing else is good"
		}
		if now.InForce {
			now.Warnings = k.inForce.warnings
		}
		s.Sources = append(s.Sources, now)
		set(k.metrics.inForce, of.kind, now.InForce)
	}
	k.status.Store(s)
}

func (k *Keeper) configured(s *source) bool {
	switch s {
	case k.configMap:
		return k.options.Namespace != ""
	case k.file:
		return k.options.File != ""
	case k.lastGood:
		return k.configured(k.configMap) || k.configured(k.file)
	}
	return true
}

// source is where people would look for v.
func (v *version) source(k *Keeper) *source {
	if v.copied {
		return k.lastGood
	}
	return v.from
}

// Load brings into force what is known without the cluster: the last good copy if it
// came from the ConfigMap, else the file, else, where the file is bad, the last good
// copy. It fails where a file is configured and there is nothing good in its place.
func (k *Keeper) Load(ctx context.Context) error {
	defer k.publish()
	var candidates []*version
	last := k.loadLastGood(ctx)
	if last != nil && last.from == k.configMap {
		k.configMap.good = last
		candidates = append(candidates, last)
	}
	switch {
	case k.options.File != "":
		b, err := k.polled.load()
		if v, err := k.parse(k.file, b, err); err != nil {
			k.refuse(ctx, k.file, err)
		} else {
			k.file.good = v
			candidates = append(candidates, v)
		}
		if last != nil && last.from != k.configMap {
			candidates = append(candidates, last)
		}
	default:
		candidates = append(candidates, k.defaults.good)
	}
	for _, v := range candidates {
		err := k.adopt(ctx, v)
		if err == nil {
			k.loaded(ctx, v)
			return nil
		}
		k.refuse(ctx, v.source(k), err)
		if v.from.good == v && v.from != k.defaults {
			v.from.good = nil
		}
	}
	return fmt.Errorf("configuration of filters: %w", errors.Join(k.file.err, k.lastGood.err, k.defaults.err))
}

// loaded notes that v is the first to be in force.
func (k *Keeper) loaded(ctx context.Context, v *version) {
	if v.copied {
		k.accept(k.lastGood)
	}
	if k.file.good != nil {
		k.accept(k.file)
	}
	if v.from != k.defaults || k.options.Namespace == "" { // else the ConfigMap may say more
		k.save(ctx)
	}
}

// loadLastGood returns nil if there is no copy, or none that can be used.
func (k *Keeper) loadLastGood(ctx context.Context) *version {
	b, err := readFile(k.lastGood.name)
	k.onDisk = b
	if !k.configured(k.lastGood) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	v, err := k.parse(k.lastGood, b, err)
	if err != nil {
		k.refuse(ctx, k.lastGood, err)
		return nil
	}
	set(k.metrics.valid, k.lastGood.kind, true)
	v.copied = true
	if isFrom(b, sourceConfigMap, k.configMap.name) {
		v.from = k.configMap
	}
	return v
}

// parse makes a version of what was read of a source.
func (k *Keeper) parse(from *source, b []byte, err error) (*version, error) {
	if err != nil {
		return nil, err
	}
	read := parseFile
	if from == k.configMap { // where nothing is cut short
		read = Parse
	}
	conf, warnings, err := read(from.name, b, k.options.Known)
	if err != nil {
		return nil, err
	}
	return &version{from: from, document: b, conf: conf, warnings: warnings}, nil
}

// Run follows the file and the ConfigMap until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	ticker := time.NewTicker(pollPeriod)
	defer ticker.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	var c *cluster
	var changed <-chan struct{}
	if k.options.Namespace != "" {
		c = followConfigMap(k.options.Cluster, k.options.Namespace)
		wg.Go(func() { _ = c.table.Run(ctx) }) // it ends with ctx only
	}
	for {
		if c != nil {
			changed = c.table.Changed()
			k.lookAtConfigMap(ctx, c)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-ticker.C:
			k.lookAtFile(ctx)
			if k.unsaved != nil && !time.Now().Before(k.saveNext) {
				k.save(ctx)
				k.publish()
			}
		}
	}
}

func (k *Keeper) lookAtFile(ctx context.Context) {
	if k.options.File == "" {
		return
	}
	if b, changed, err := k.polled.poll(); changed {
		k.offer(ctx, k.file, b, err)
	}
}

// offer takes what a source says now, if it can be taken.
func (k *Keeper) offer(ctx context.Context, s *source, b []byte, err error) {
	defer k.publish()
	before := s.good
	v, err := k.parse(s, b, err)
	if err == nil {
		s.good = v
		err = k.adopt(ctx, k.effective())
	}
	if err != nil {
		s.good = before
		k.refuse(ctx, s, err)
		return
	}
	k.accept(s)
	k.save(ctx)
}

// withdraw is for a source that says nothing any more.
func (k *Keeper) withdraw(ctx context.Context, s *source) {
	defer k.publish()
	s.good, s.err = nil, nil
	set(k.metrics.valid, s.kind, true)
	v := k.effective()
	if err := k.adopt(ctx, v); err != nil {
		k.refuse(ctx, v.from, err)
	}
	k.save(ctx)
}

// effective is what should be in force.
func (k *Keeper) effective() *version {
	switch {
	case k.configMap.good != nil:
		return k.configMap.good
	case k.file.good != nil:
		return k.file.good
	case k.options.File != "":
		return k.inForce // the file has been bad since the start: less than what is cannot be meant
	}
	return k.defaults.good
}

// adopt brings a version into force, or leaves everything as it is.
func (k *Keeper) adopt(ctx context.Context, v *version) error {
	if v == k.inForce {
		return nil
	}
	if k.inForce == nil || !reflect.DeepEqual(v.conf, k.inForce.conf) { // clients would have to list again
		if err := k.options.Apply(v.conf); err != nil {
			return fmt.Errorf("%s: %w", v.source(k).name, err)
		}
		k.since = time.Now()
	}
	k.inForce = v
	logger := klog.FromContext(ctx)
	at := v.source(k)
	logger.Info("Configuration of filters is in force", "source", at.kind, "name", at.name)
	for _, w := range v.warnings {
		logger.Info("Configuration of filters has a warning", "warning", w)
	}
	return nil
}

func (k *Keeper) accept(s *source) {
	s.err = nil
	if s == k.defaults {
		return
	}
	set(k.metrics.valid, s.kind, true)
	k.metrics.reloads.WithLabelValues(s.kind, accepted).Inc()
}

func (k *Keeper) refuse(ctx context.Context, s *source, err error) {
	s.err = err
	klog.FromContext(ctx).Error(err, "Configuration of filters was refused", "source", s.kind, "name", s.name)
	if s == k.defaults {
		return
	}
	set(k.metrics.valid, s.kind, false)
	k.metrics.reloads.WithLabelValues(s.kind, refused).Inc()
}

// save writes what is in force as the last good copy, if that is not what it is already.
// Without the copy everything goes on; the next try is in a minute.
func (k *Keeper) save(ctx context.Context) {
	var b []byte // the defaults need no copy
	if v := k.inForce; v.copied {
		return
	} else if v.from != k.defaults {
		b = lastGood(v.from.kind, v.from.name, v.document)
	}
	if bytes.Equal(b, k.onDisk) && k.unsaved == nil {
		return
	}
	before := k.unsaved
	if k.unsaved = datadir.WriteFile(k.lastGood.name, b, 0o600); k.unsaved == nil {
		k.onDisk, k.lastGood.err = b, nil
		set(k.metrics.valid, k.lastGood.kind, true)
		return
	}
	k.metrics.writeErrors.Inc()
	k.lastGood.err = k.unsaved
	k.saveNext = time.Now().Add(savePeriod)
	if before == nil || before.Error() != k.unsaved.Error() {
		klog.FromContext(ctx).Error(k.unsaved, "Last good configuration of filters was not written", "path", k.lastGood.name)
	}
}
