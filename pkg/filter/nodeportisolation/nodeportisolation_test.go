// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodeportisolation

import (
	"testing"

	"github.com/edgehub/edgehub/pkg/filter/filtertest"
)

type fakePool struct {
	name    string
	known   bool
	changed chan struct{}
}

func (p fakePool) Name() (string, bool)     { return p.name, p.known }
func (p fakePool) Changed() <-chan struct{} { return p.changed }

func TestGoldens(t *testing.T) {
	for dir, pool := range map[string]fakePool{
		"in-pool-hangzhou": {name: "hangzhou", known: true},
		"in-no-pool":       {known: true},
		"pool-not-known":   {},
	} {
		t.Run(dir, func(t *testing.T) { filtertest.Run(t, "testdata/"+dir, New(pool)) })
	}
}

func TestListens(t *testing.T) {
	for _, tc := range []struct {
		annotation string
		want       bool
	}{
		// The examples of OpenYurt's manual, in pool foo.
		{"foo,bar", true},
		{"foo, *", true},
		{"-foo,-bar", false},
		{"-foo, *", false},
		{"foo,-foo", true},
		{"-foo", false},
		// Of entries that name the same the first counts.
		{"-foo,foo", false},
		{"*,-*", true},
		{"-*,*", false},
		{"bar,-foo,foo,*", false},
		// A name counts more than *, wherever they stand.
		{"*,-foo", false},
		{"-*,foo", true},
		{"foo,-*", true},
		// Nothing is said of this pool.
		{"bar", false},
		{"-bar", false},
		{"-bar,*", true},
		{"*", true},
		{"-*", false},
		// Odd spellings.
		{"", false},
		{" ", false},
		{",,", false},
		{"-", false},
		{"  foo  ,", true},
		{",foo", true},
		{"Foo", false},
		{"foo;bar", false},
		{"foobar", false},
		{"--foo,*", true},
		{"- foo,*", true},
	} {
		if got := listens(tc.annotation, "foo"); got != tc.want {
			t.Errorf("listens(%q, foo) = %t, want %t", tc.annotation, got, tc.want)
		}
	}
}

func TestDependsOnPool(t *testing.T) {
	pool := fakePool{changed: make(chan struct{})}
	f := New(pool)
	if err := f.Ready(); err != nil {
		t.Errorf("Ready() = %v, want nil while the pool is not known", err)
	}
	select {
	case <-f.Changed():
		t.Error("Changed() is closed before the pool changed")
	default:
	}
	close(pool.changed)
	select {
	case <-f.Changed():
	default:
		t.Error("Changed() is not closed when the pool has changed")
	}
}
