// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package security has a hostile process on the node do to a running hub, in front
// of a real API server, what it can think of: as a user without any rights and as
// root, with credentials of its own, with forged ones and with none, by requests
// of which two servers would read two things, and by sheer amount. Everything that
// the hub sends upstream meanwhile is captured.
package security

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
)

// asAttacker makes the test binary the hostile process.
const asAttacker = "EDGEHUB_TEST_AS_ATTACKER"

func TestMain(m *testing.M) {
	if os.Getenv(asAttacker) != "" {
		if err := attack(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // TestMain is main here
		}
		os.Exit(0) //nolint:forbidigo // TestMain is main here
	}
	code := m.Run()
	if err := closeStage(code == 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code) //nolint:forbidigo // TestMain is main here
}

// A plan is all that the attacker knows and is to do. It reads it from its standard
// input.
type plan struct {
	HTTPS    []string // addresses of the hub
	Metrics  string   // another one
	Upstream string   // the API server itself, to compare with
	CAFile   string   // the hub's
	RootFile string   // the API server's

	Marker  string // of its User-Agent
	Tokens  map[string]string
	Certs   map[string]certificate
	Secrets []string // values that it is not to see

	Attempts []int    // which of attempts
	Compare  bool     // each with what the API server itself says
	Floods   []string // which of floods
}

// A certificate is a client's, DER and PKCS #8. The key need not be the
// certificate's.
type certificate struct {
	Chain [][]byte
	Key   []byte
}

// An outcome is what came of an attempt, or of a flood, at one place. It is printed
// as a line of JSON.
type outcome struct {
	Attempt int    `json:",omitempty"`
	Flood   string `json:",omitempty"`
	Name    string
	Place   string

	Statuses []int  `json:",omitempty"` // of all answers on the connection, 1xx left out
	Direct   []int  `json:",omitempty"` // what the API server says
	Length   int    `json:",omitempty"` // of the answers' bodies
	Secret   string `json:",omitempty"` // a value that was seen
	Error    string `json:",omitempty"` // how the connection ended

	Strain strain `json:",omitzero"`
}

// attack carries out the plan and prints the outcomes.
func attack(ctx context.Context) error {
	var p plan
	if err := json.NewDecoder(os.Stdin).Decode(&p); err != nil {
		return fmt.Errorf("read the plan: %w", err)
	}
	a, err := newAttacker(p)
	if err != nil {
		return err
	}
	var mu sync.Mutex // guards out
	out := json.NewEncoder(os.Stdout)
	emit := func(o outcome) error {
		mu.Lock()
		defer mu.Unlock()
		return out.Encode(o)
	}
	if len(p.Floods) > 0 {
		return a.flood(ctx, emit)
	}
	return a.tryAll(ctx, emit)
}

// jobs are the attempts of the plan, each with its places.
func (a *attacker) jobs() (jobs []job) {
	for n, at := range attempts() {
		if !slices.Contains(a.Attempts, n) {
			continue
		}
		for _, address := range addressesOf(at.to, a.plan) {
			jobs = append(jobs, job{n, at, address})
		}
	}
	return jobs
}

func addressesOf(to place, p plan) []string {
	if to == metrics {
		return []string{p.Metrics}
	}
	return p.HTTPS
}
