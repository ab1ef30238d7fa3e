// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/test/rig"
)

const (
	nobody = 65534 // a user without groups
	// lowAgent is the User-Agent of the user low when it attacks nobody.
	lowAgent = "in-good-faith"
	// maxResident is far more than the hub takes in peace (about 60 MiB), and far
	// less than what is thrown at it.
	maxResident = 768 * mega
)

// users are those that the attacker runs as.
func users(t *testing.T) []int {
	if os.Getuid() != 0 {
		t.Logf("not run as root: the attacker is this test's own user, %d, and no other", os.Getuid())
		return []int{os.Getuid()}
	}
	return []int{nobody, 0}
}

// attack runs the attacker as a user and returns what came of it.
func (s *stage) attack(uid int, p plan) []outcome {
	s.T.Helper()
	input, err := json.Marshal(p)
	s.Must(err)
	cmd := exec.CommandContext(s.T.Context(), filepath.Join(s.dir, "attacker"))
	cmd.Dir, cmd.Stdin = s.dir, bytes.NewReader(input)
	cmd.Env = []string{asAttacker + "=1", "GORACE=atexit_sleep_ms=10"} // by default it sleeps for a second
	if os.Getuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	}
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := cmd.Run(); err != nil {
		s.T.Fatalf("attacker of user %d: %v\n%s", uid, err, complaint.String())
	}
	var outcomes []outcome
	for d := json.NewDecoder(&out); ; {
		var o outcome
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return outcomes
		}
		s.Must(err)
		outcomes = append(outcomes, o)
	}
}

// tell fails the test with what was found.
func (s *stage) tell(faults []string) {
	s.T.Helper()
	const most = 60
	for _, f := range faults[:min(most, len(faults))] {
		s.T.Error(f)
	}
	if len(faults) > most {
		s.T.Errorf("and %d more", len(faults)-most)
	}
}

// attempt makes the attempts that are wanted and judges. Each address, and each
// user, has its turn; online both addresses have, and what the API server itself
// says is asked then.
func (s *stage) attempt(st state, want func(attempt) bool) {
	s.T.Helper()
	p, both := s.plan, s.plan.HTTPS
	for n, at := range attempts() {
		if want(at) {
			p.Attempts = append(p.Attempts, n)
		}
	}
	for i, uid := range users(s.T.(*testing.T)) {
		p.Compare = st == online && i == 0
		switch {
		case i > 0 && st != online:
			continue // it is the same to the hub: root can do more than ask, but not here
		case i > 0 || st == offline:
			p.HTTPS = both[:1]
		case st == restarted:
			p.HTTPS = both[1:]
		}
		outcomes := s.attack(uid, p)
		s.compare(outcomes, p.Compare)
		s.tell(judgeAll(p, outcomes, st))
		s.T.Logf("user %d: %d attempts, %d outcomes", uid, len(p.Attempts), len(outcomes))
	}
}

// compare remembers what the API server itself has said, or adds what it said
// earlier.
func (s *stage) compare(outcomes []outcome, said bool) {
	for i, o := range outcomes {
		if said {
			s.direct[o.Attempt] = o.Direct
		} else {
			outcomes[i].Direct = s.direct[o.Attempt]
		}
	}
}

func isWrite(at attempt) bool {
	return slices.ContainsFunc(writes(), func(w attempt) bool { return w.name == at.name })
}

// TestHostileRequestsAreRefused has somebody without rights try forged and missing
// credentials and requests that could be read in two ways, online, offline and
// after a restart: nobody gets more than the API server itself would give.
func TestHostileRequestsAreRefused(t *testing.T) {
	s := onStage(t)
	s.inEachState(func(st state) { s.attempt(st, func(at attempt) bool { return !isWrite(at) }) })
	s.checkLog()
}

// TestHostileWritesChangeNothing has somebody without rights write, online, offline
// and after a restart: nothing has changed in the API server then, and nothing is
// made up for when the link is back.
func TestHostileWritesChangeNothing(t *testing.T) {
	s := onStage(t)
	before := s.versions()
	s.inEachState(func(st state) { s.attempt(st, isWrite) })
	sentBefore := len(s.capture.all())
	s.WaitFeeds()
	s.Must(s.good.ask(t.Context(), aSecret))
	if diff := cmp.Diff(before, s.versions()); diff != "" {
		t.Errorf("objects before (-) and after (+):\n%s", diff)
	}
	for _, r := range s.capture.all()[sentBefore:] {
		if _, ok := agentNumber(s.plan.Marker, fmt.Sprint(r.Header)); ok {
			t.Errorf("%s %s of the attacker was sent again when the link was back", r.Method, r.URI)
		}
	}
}

// versions returns the resourceVersions of all that may be attacked.
func (s *stage) versions() map[string]int64 {
	s.T.Helper()
	all := map[string]int64{}
	admin := s.Direct(s.ControlPlane.AdminConfig())
	for _, path := range []string{
		"/api/v1/namespaces/a/configmaps", "/api/v1/namespaces/b/configmaps", secrets, "/api/v1/namespaces/a/serviceaccounts", "/api/v1/namespaces/a/pods",
		"/api/v1/namespaces/a/events", "/api/v1/nodes", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
		"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", "/apis/certificates.k8s.io/v1/certificatesigningrequests",
	} {
		l, status, err := admin.List(s.T.Context(), path, rig.JSON)
		s.Must(err)
		if status != http.StatusOK {
			s.T.Fatalf("GET %s = %d, want 200", path, status)
		}
		for _, item := range l.Items {
			m, err := rig.ReadMeta(item, false)
			s.Must(err)
			all[path+" "+m.Key] = m.ResourceVersion
		}
	}
	return all
}

// TestFloodsDoNotStarveKubelet has somebody without rights be too much in every way,
// all at once: what kubelet asks for meanwhile is answered in time, and the hub ends
// what has no end.
func TestFloodsDoNotStarveKubelet(t *testing.T) {
	s := onStage(t)
	s.inEachState(func(st state) {
		var wanted []flood
		for _, f := range floods() {
			// What is slow takes long, and its limits know nothing of the link.
			if !f.slow || st == online {
				wanted = append(wanted, f)
			}
		}
		outcomes, w := s.flood(wanted, s.good.asks()...)
		s.judgeFloods(wanted, outcomes, st)
		s.judgeWitness(w)
		resident, err := s.Hub.Metric(s.T.Context(), "process_resident_memory_bytes")
		s.Must(err)
		s.T.Logf("the hub takes %.0f MiB of memory", resident/mega)
		if resident > maxResident {
			s.T.Errorf("the hub takes %.0f MiB of memory, want %d at most", resident/mega, maxResident/mega)
		}
	})
	s.checkLog()
}

// TestSlowBodiesTakeNoPlaces has nobody, and somebody without rights, send bodies
// that never end: each is ended in time, and kubelet does not stand behind them.
func TestSlowBodiesTakeNoPlaces(t *testing.T) {
	s := onStage(t)
	outcomes, w := s.flood(slowBodies(), s.good.asks()...)
	s.subtest("each is ended", func() { s.judgeFloods(slowBodies(), outcomes, online) })
	s.subtest("kubelet is answered", func() { s.judgeWitness(w) })
}

// TestUnknownTokensDoNotDisturbOthers has nobody make up tokens, about each of which
// the API server has to be asked: those who have a good one are answered, and
// kubelet.
func TestUnknownTokensDoNotDisturbOthers(t *testing.T) {
	s := onStage(t)
	e := s.lowThrough()
	questions := []struct {
		method, path, body string
		want               int
	}{
		{http.MethodGet, readable, "", http.StatusOK},
		{http.MethodPost, reviews[0], `{"kind":"SelfSubjectReview","apiVersion":"authentication.k8s.io/v1"}`, http.StatusCreated},
	}
	byLow := func(ctx context.Context, n int) error {
		ctx, cancel := context.WithTimeout(ctx, goodPatience)
		defer cancel()
		q := questions[n%len(questions)]
		resp, err := e.Do(ctx, q.method, q.path, http.Header{"Content-Type": {rig.JSON}, "Accept": {rig.JSON}}, []byte(q.body))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != q.want {
			body, _ := io.ReadAll(resp.Body)
			return fmt.Errorf("low: %s %s = %d, want %d: %.200s", q.method, q.path, resp.StatusCode, q.want, body)
		}
		return nil
	}
	outcomes, w := s.flood([]flood{unknownTokens}, append(s.good.asks(), byLow, byLow, byLow, byLow, byLow, byLow)...)
	s.judgeFloods([]flood{unknownTokens}, outcomes, online)
	s.judgeWitness(w)
}

// flood has the attacker run floods while a witness asks.
func (s *stage) flood(floods []flood, asks ...ask) ([]outcome, *witness) {
	s.T.Helper()
	p := s.plan
	for _, f := range floods {
		p.Floods = append(p.Floods, f.name)
	}
	w := new(witness)
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(s.T.Context())
	wg.Go(func() { w.run(ctx, asks...) })
	defer wg.Wait()
	defer cancel()
	return s.attack(users(s.T.(*testing.T))[0], p), w
}

func (s *stage) judgeFloods(floods []flood, outcomes []outcome, st state) {
	s.T.Helper()
	for _, f := range floods {
		i := slices.IndexFunc(outcomes, func(o outcome) bool { return o.Flood == f.name })
		if i < 0 {
			s.T.Errorf("%s, %s: nothing came of it", f.name, st)
			continue
		}
		s.T.Logf("%s: %+v", f.name, outcomes[i].Strain)
		s.tell(judgeFlood(f, outcomes[i], st))
	}
}

func (s *stage) judgeWitness(w *witness) {
	s.T.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, err := range w.problem[:min(5, len(w.problem))] {
		s.T.Errorf("beside the attack: %v", err)
	}
	s.T.Logf("asked %d times, %d in vain; p50 %v, p99 %v, longest %v", len(w.took), len(w.problem), rig.Percentile(w.took, 50), rig.Percentile(w.took, 99), rig.Percentile(w.took, 100))
	if len(w.took) < 50 {
		s.T.Errorf("asked only %d times", len(w.took))
	}
}

// TestNobodyBorrowsTheNodesCredential looks at every request that edgehub has sent
// upstream since the beginning, while it was attacked: what went out with the
// node's certificate was the node's own or edgehub's, each of the others had its
// sender's token, and went where edgehub had decided that it goes.
func TestNobodyBorrowsTheNodesCredential(t *testing.T) {
	s := onStage(t)
	if s.attackers(s.capture.all()) == 0 { // it runs alone
		s.attempt(online, func(attempt) bool { return true })
	}
	status, err := s.good.status(t.Context(), redirectPath)
	s.Must(err)
	if status != http.StatusBadGateway {
		t.Errorf("the node's GET of a redirect = %d, want %d", status, http.StatusBadGateway)
	}
	s.Must(s.good.ask(t.Context(), aSecret))
	s.WaitFeeds()
	records, a := s.capture.all(), s.newAudit()
	s.tell(a.all(records))
	log, err := os.ReadFile(s.Hub.Log())
	s.Must(err)
	compared, faults := a.sameDecisions(records, string(log))
	s.tell(faults)
	asNode := 0
	for _, r := range records {
		if r.Node {
			asNode++
		}
	}
	attackers := s.attackers(records)
	t.Logf("%d requests upstream, %d with the node's certificate, %d of the attacker; %d decisions compared", len(records), asNode, attackers, compared)
	if asNode < 10 || attackers < 100 || compared < 100 {
		t.Error("that cannot be all")
	}
	s.subtest("no token goes by unseen", func() { s.tell(hiddenTokens(records)) })
	s.checkLog()
}

// attackers counts the attacker's requests.
func (s *stage) attackers(records []sent) (n int) {
	for _, r := range records {
		if _, ok := agentNumber(s.plan.Marker, r.Header.Get("User-Agent")); ok {
			n++
		}
	}
	return n
}

// checkLog looks for secrets and tokens in the hub's log.
func (s *stage) checkLog() {
	s.T.Helper()
	log, err := os.ReadFile(s.Hub.Log())
	s.Must(err)
	for _, secret := range s.plan.Secrets {
		for _, form := range []string{secret, base64.StdEncoding.EncodeToString([]byte(secret))} {
			if bytes.Contains(log, []byte(form)) {
				s.T.Errorf("the hub's log shows secret %s", secret)
			}
		}
	}
	for name, token := range s.plan.Tokens {
		if bytes.Contains(log, []byte(token)) {
			s.T.Errorf("the hub's log shows token %s", name)
		}
	}
	if !bytes.Contains(log, []byte(s.plan.Marker)) {
		s.T.Error("the hub's log does not tell of the attacker: it cannot be what is thought")
	}
}
