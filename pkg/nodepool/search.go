// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepool

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"sync"
	"time"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/follow"
)

// recheckPeriod is after how long the NodePool is looked for in the newest version again:
// a CRD may have been installed, or is gone. One list of one object costs little.
const recheckPeriod = 5 * time.Minute

// A search looks for the NodePool of one name, in one version after the other, and follows
// it in the first that there is.
type search struct {
	cfg  *Config
	name string

	mu      sync.Mutex // guards what follows
	answer  answer
	err     error // why the last version was not read
	changed chan struct{}
}

func newSearch(cfg *Config, name string) *search {
	return &search{cfg: cfg, name: name, changed: make(chan struct{})}
}

func (s *search) latest() (a answer, changed <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answer, s.changed, s.err
}

func (s *search) publish(a answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !reflect.DeepEqual(s.answer, a) {
		s.answer = a
		s.notify()
	}
}

// note keeps why a version is not read, which matters as long as there is no answer.
func (s *search) note(version string, err error) {
	if err != nil {
		err = fmt.Errorf("NodePool %s in %s: %w", s.name, version, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.err
	if s.err = err; s.answer.kind == none && err != nil && (was == nil || was.Error() != err.Error()) {
		s.notify()
	}
}

// notify tells of a change. The caller holds mu.
func (s *search) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// An ending is why one version is followed no more.
type ending int

const (
	lasted  ending = iota // it had its time
	refusal               // by the API server
	cut                   // the link is down, and the cache does not have it
)

// run searches until ctx ends. An answer stays until there is a better one.
func (s *search) run(ctx context.Context) {
	for ctx.Err() == nil {
		link := s.cfg.LinkChanged()
		ended := s.round(ctx)
		if ended == lasted {
			continue
		}
		// What was read before the link was cut is not undone by the cache not having it.
		// Where nothing was, the node's label is all there is.
		if a, _, _ := s.latest(); ended == refusal {
			s.publish(answer{kind: unreadable})
		} else if a.kind == none {
			s.publish(answer{kind: unreached})
		}
		timer := time.NewTimer(recheckPeriod)
		select {
		case <-ctx.Done():
		case <-link:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// round tries the versions until one lasts. It ends with a refusal only if all of them
// were refused.
func (s *search) round(ctx context.Context) ending {
	worst := refusal
	for _, version := range Versions() {
		ended := s.try(ctx, version)
		if ended == lasted {
			return lasted
		}
		worst = max(worst, ended)
	}
	return worst
}

// try follows the NodePool in one version for recheckPeriod, or until it is clear that
// this version cannot be had. While the link is down, another may be in the cache.
func (s *search) try(ctx context.Context, version string) ending {
	query := follow.Query{GroupVersionResource: resourceOf(version), Name: s.name, JSON: true}
	table := follow.New(s.cfg.Source, query, func(_ codec.Shape, object []byte) (Pool, bool, error) {
		p, err := ReadPool(object)
		return p, true, err
	})
	untried := table.Err()
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = table.Run(ctx) })
	timer := time.NewTimer(recheckPeriod)
	defer timer.Stop()
	for {
		changed, link := table.Changed(), s.cfg.LinkChanged()
		err := table.Err()
		s.note(version, err)
		switch {
		case err == nil:
			s.publish(read(table, s.name))
		case !errors.Is(err, untried) && !s.cfg.Up():
			return cut
		case refused(err):
			return refusal
		}
		select {
		case <-ctx.Done():
			return lasted
		case <-timer.C:
			return lasted
		case <-changed:
		case <-link:
		}
	}
}

func read(table *follow.Table[Pool], name string) answer {
	if p, ok := table.Get("", name); ok {
		return answer{found, p}
	}
	return answer{kind: absent}
}

func refused(err error) bool {
	var r *follow.Refusal
	return errors.As(err, &r) && (r.Code == http.StatusNotFound || r.Code == http.StatusForbidden)
}
