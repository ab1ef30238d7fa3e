// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package availability disturbs the companion, two replicas of it behind a Service, while
// clients create pods all the time: replicas are rolled, killed and frozen, certificates
// and their authority replaced and expired. Pods of others must be created always, and
// at once; annotated ones may fail only while nobody serves, must then say who is missing,
// and must have the rule when they are created.
package availability

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/companion"
	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

const (
	namespace = "work"

	// patience is for one thing to happen on a machine that does much else.
	patience = 90 * time.Second
	// atOnce is how long a pod of others may take: less than the webhooks' time-out,
	// so that one who waited for them shows.
	atOnce  = 4500 * time.Millisecond
	timeout = 5 // seconds, of the webhooks
	// preStop is how long a replica goes on after it is no endpoint any more.
	preStop = time.Second
	// mendTime is how long it may take until a certificate that somebody has spoiled is
	// replaced; less than the lease of a leader that was killed.
	mendTime = 10 * time.Second
	// lifetime is the shortest that the companion allows: certificates are renewed
	// every 40 s.
	lifetime = time.Minute
)

// values are the chart's. NodePools have no part in this.
var values = []string{fmt.Sprintf("admission.timeoutSeconds=%d", timeout), "nodePools.mode=off", "nodePools.crd.install=never"}

// A stage is all that the disturbances play on.
type stage struct {
	t         *testing.T // the whole test's
	now       *testing.T // that of the disturbance
	cp        *controlplane.ControlPlane
	release   *companion.Release
	balancer  *balancer
	replicas  []*replica
	others    *client
	annotated *client
	asked     int // what askedSoFar was when the clients began
}

func TestAvailability(t *testing.T) {
	s := newStage(t)
	first := s.served()
	for _, d := range []struct {
		name string
		run  func(*stage, *testing.T)
	}{
		{"Rolled", (*stage).rolled},
		{"Frozen", (*stage).frozen},
		{"LeaderKilled", (*stage).leaderKilled},
		{"CertificateRenewed", func(s *stage, t *testing.T) { s.renewed(t, first) }}, // before or now
		{"CertificateExpired", (*stage).expired},
		{"AuthorityReplaced", (*stage).authorityReplaced},
		{"AllKilledAndCertificateExpired", (*stage).allKilled},
		{"AllKilledWithFailurePolicyIgnore", (*stage).ignored},
	} {
		if !t.Run(d.name, func(t *testing.T) { s.now = t; d.run(s, t) }) {
			break // the next would begin with what this one has left
		}
	}
	s.checkOthers(t)
}

func newStage(t *testing.T) *stage {
	cp := controlplane.New(t, controlplane.Config{})
	if err := cp.CreateNamespace(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	s := &stage{t: t, now: t, cp: cp, release: companion.Install(t, cp, values...)}
	s.balancer = newBalancer(t, s.release.Address)
	for range 2 {
		s.start(s.newReplica())
	}
	probe := &client{name: "probe", annotated: true}
	s.poll("annotated pods get the rule", func(ctx context.Context) error {
		p, err := cp.Client.CoreV1().Pods(namespace).Create(ctx, probe.pod(0), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil && !excludes(p) {
			err = errors.New("it has none")
		}
		return err
	})
	var err error
	if s.asked, err = s.askedSoFar(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.others = newClient(t, "other", false, cp.AdminConfig())
	s.annotated = newClient(t, "annotated", true, cp.AdminConfig())
	return s
}

// newReplica returns a replica that does not run yet.
func (s *stage) newReplica() *replica {
	p, err := port.Free()
	if err != nil {
		s.t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", p)
	return &replica{s.release.NewReplica(s.t, address, "--certificate-lifetime="+lifetime.String()), address}
}

// start starts a replica and returns when it is an endpoint.
func (s *stage) start(r *replica) {
	s.now.Helper()
	if err := r.Start(s.now.Context()); err != nil {
		s.now.Fatal(err)
	}
	s.replicas = append(s.replicas, r)
	s.balancer.add(r)
	s.poll("the replica is an endpoint", func(context.Context) error {
		if n := s.balancer.ready(); n < len(s.replicas) {
			return fmt.Errorf("%d of %d are", n, len(s.replicas))
		}
		return nil
	})
}

// restart starts replicas again that have ended, at once.
func (s *stage) restart(replicas ...*replica) {
	s.now.Helper()
	started := make(chan error)
	for _, r := range replicas {
		go func() { started <- r.Start(s.now.Context()) }()
	}
	for range replicas {
		if err := <-started; err != nil {
			s.now.Fatal(err)
		}
	}
}

func (s *stage) poll(what string, condition func(context.Context) error) {
	s.now.Helper()
	ctx, cancel := context.WithTimeout(s.now.Context(), patience)
	defer cancel()
	if err := process.Poll(ctx, what, condition); err != nil {
		s.now.Fatal(err)
	}
}

// settle waits until annotated pods get the rule again, holds everything since from to
// what must hold always, and returns what was lost of them, and until when.
func (s *stage) settle(t *testing.T, from time.Time) (lost int, until time.Duration) {
	t.Helper()
	var all []creation
	s.poll("annotated pods get the rule again", func(context.Context) error {
		const enough = 10
		if all = s.annotated.since(from); len(all) < enough {
			return fmt.Errorf("%d pods so far", len(all))
		}
		if bad := failed(all[len(all)-enough:]); len(bad) > 0 {
			return fmt.Errorf("%d of the last %d did not: %w", len(bad), enough, bad[0].err)
		}
		return nil
	})
	bad := failed(all)
	for _, c := range bad {
		switch {
		case c.err == nil:
			t.Error("an annotated pod was created without the rule")
		case !namesWebhook(c.err):
			t.Errorf("who is missing is not in the error: %v", c.err)
		}
		until = c.begun.Add(c.took).Sub(from)
	}
	if len(bad) > 0 {
		t.Logf("the last error: %v", bad[len(bad)-1].err)
	}
	others := s.others.since(from)
	t.Logf("annotated pods: %d of %d failed, until %.1f s after it began, p50 %v; %d of others: p50 %v, p99 %v, max %v", len(bad), len(all), until.Seconds(),
		quantile(all, .5).Round(time.Millisecond), len(others), quantile(others, .5).Round(time.Millisecond), quantile(others, .99).Round(time.Millisecond), quantile(others, 1).Round(time.Millisecond))
	return len(bad), until
}

// checkOthers holds all pods of others to what must hold always, and the API server to
// not asking about them.
func (s *stage) checkOthers(t *testing.T) {
	all := s.others.since(time.Time{})
	slow := 0
	var refused []creation
	for _, c := range all {
		if c.err != nil || c.rule {
			refused = append(refused, c)
		}
		if c.took > atOnce {
			slow++
		}
	}
	if len(refused) > 0 {
		t.Errorf("%d of %d pods without the annotation were refused or have the rule; the first: %v", len(refused), len(all), refused[0].err)
	}
	if slow > 0 {
		t.Errorf("%d of %d pods without the annotation took more than %v, the slowest %v", slow, len(all), atOnce, quantile(all, 1))
	}
	asked, err := s.askedSoFar(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	asked -= s.asked
	annotated := len(s.annotated.since(time.Time{}))
	t.Logf("%d pods of others; %d annotated, the API server asked %d times", len(all), annotated, asked)
	if asked < annotated*9/10 || asked > annotated+1 { // one is under way
		t.Errorf("the API server asked %d times, want once for each of the %d annotated pods", asked, annotated)
	}
}

// askedSoFar returns how many creations the API server has put to any webhook.
func (s *stage) askedSoFar(ctx context.Context) (n int, err error) {
	text, err := s.cp.Client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "apiserver_admission_webhook_request_total{") && strings.Contains(line, `operation="CREATE"`) {
			var count float64
			if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &count); err != nil {
				return 0, err
			}
			n += int(count)
		}
	}
	return n, nil
}

// rolled replaces one replica after the other, as the chart's Deployment does: the new
// one is ready before the old one is no endpoint any more, and that goes on for the time
// of preStop. First the API server keeps its connections as long as they let it, then it
// makes one for each request. Nothing may be lost.
func (s *stage) rolled(t *testing.T) {
	from := time.Now()
	all := func() {
		for range s.replicas {
			s.replaceFirst(t)
		}
	}
	all()
	s.reconnecting(t, all)
	if lost, _ := s.settle(t, from); lost > 0 {
		t.Errorf("%d annotated pods failed, want 0", lost)
	}
}

func (s *stage) replaceFirst(t *testing.T) {
	old := s.replicas[0]
	s.start(s.newReplica())
	s.replicas = s.replicas[1:]
	s.balancer.remove(old)
	if err := wait(t.Context(), preStop); err != nil {
		t.Fatal(err)
	}
	if err := old.Stop(); err != nil {
		t.Error(err)
	}
}

// reconnecting calls f, and meanwhile lets no connection outlive a request or two.
func (s *stage) reconnecting(t *testing.T, f func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var cutting sync.WaitGroup
	cutting.Go(func() {
		for wait(ctx, pause) == nil {
			s.annotated.between(s.balancer.cut)
		}
	})
	f()
	cancel()
	cutting.Wait()
}

// frozen stops both where they are: they take connections and never answer.
func (s *stage) frozen(t *testing.T) {
	from := time.Now()
	for _, r := range s.replicas {
		if err := r.Freeze(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	s.poll("an annotated pod fails", s.fails(from))
	for _, r := range s.replicas {
		if err := r.Thaw(); err != nil {
			t.Fatal(err)
		}
	}
	thawed := time.Since(from)
	lost, until := s.settle(t, from)
	if took := s.annotated.slowest(from); took > (timeout+3)*time.Second {
		t.Errorf("an annotated pod took %v to fail, want %d s, the time-out", took, timeout)
	}
	t.Logf("%d lost; right %.1f s after they went on", lost, (until - thawed).Seconds())
}

// fails makes a condition: an annotated pod has failed at from or later.
func (s *stage) fails(from time.Time) func(context.Context) error {
	return func(context.Context) error {
		if len(failed(s.annotated.since(from))) == 0 {
			return errors.New("none has")
		}
		return nil
	}
}

// renewed waits until the certificate is another one than at first.
func (s *stage) renewed(t *testing.T, first *x509.Certificate) {
	from := time.Now()
	s.poll("the certificate is renewed", func(ctx context.Context) error {
		now, err := s.handshake(ctx)
		if err == nil && now.Equal(first) {
			err = fmt.Errorf("it is the one valid until %v", first.NotAfter)
		}
		return err
	})
	s.annotated.between(s.balancer.cut)
	if lost, _ := s.settle(t, from); lost > 0 {
		t.Errorf("%d annotated pods failed, want 0", lost)
	}
	if left := time.Until(first.NotAfter); left < 0 {
		t.Errorf("renewed %v after it had expired", -left)
	}
}

// leaderKilled kills the leader, which is not missed but for what it had in hand; the
// other one leads when the lease is over.
func (s *stage) leaderKilled(t *testing.T) {
	i := slices.IndexFunc(s.replicas, func(r *replica) bool { return leads(t.Context(), r) == nil })
	if i < 0 {
		t.Fatal("none of the replicas leads")
	}
	leader, other := s.replicas[i], s.replicas[1-i]
	from := time.Now()
	if err := leader.Kill(); err != nil {
		t.Fatal(err)
	}
	s.poll("the other one leads", func(ctx context.Context) error { return leads(ctx, other) })
	t.Logf("the other one leads after %.1f s", time.Since(from).Seconds())
	s.restart(leader)
	_, until := s.settle(t, from)
	if limit := probePeriod + 3*time.Second; until > limit {
		t.Errorf("annotated pods failed until %v after the leader was killed, want at most %v", until, limit)
	}
}

// leads returns nil if a replica is the leader.
func leads(ctx context.Context, r *replica) error {
	metrics, err := r.Metrics(ctx)
	if err == nil && !strings.Contains(metrics, `leader_election_master_status{name="edgehub-webhook"} 1`) {
		err = errors.New("it does not")
	}
	return err
}

// expired puts a certificate that has expired into the Secret.
func (s *stage) expired(t *testing.T) { s.mended(t, expire) }

// authorityReplaced takes everything out of the Secret, and so the authority that the API
// server trusts.
func (s *stage) authorityReplaced(t *testing.T) {
	s.mended(t, func(_ *testing.T, secret *corev1.Secret) { secret.Data = nil })
}

// mended spoils the Secret and holds the time until a new certificate is served and
// trusted to a limit. All the time no connection outlives a request, so that the API
// server looks at certificates.
func (s *stage) mended(t *testing.T, spoil func(*testing.T, *corev1.Secret)) {
	t.Helper()
	before, from := s.served(), time.Now()
	s.edit(t, spoil)
	s.poll("new connections are good", func(ctx context.Context) error {
		s.annotated.between(s.balancer.cut)
		now, err := s.handshake(ctx)
		if err == nil && now.Equal(before) {
			err = errors.New("the certificate is that of before")
		}
		return err
	})
	t.Logf("new connections are good after %.1f s", time.Since(from).Seconds())
	s.annotated.between(s.balancer.cut)
	if _, until := s.settle(t, from); until > mendTime {
		t.Errorf("annotated pods failed until %v, want at most %v", until, mendTime)
	}
}

// allKilled kills both, and the certificate expires while they are gone. The first that is
// back makes a new one: it need not lead, so the lease of the old leader is not waited for.
func (s *stage) allKilled(t *testing.T) {
	from := time.Now()
	s.killAll(t)
	s.edit(t, expire)
	s.poll("an annotated pod fails", s.fails(from))
	s.restart(s.replicas...)
	started := time.Since(from)
	_, until := s.settle(t, from)
	t.Logf("ready %.1f s after the kill, right %.1f s after that", started.Seconds(), (until - started).Seconds())
	if limit := started + mendTime; until > limit {
		t.Errorf("annotated pods failed until %v, want at most %v", until, limit)
	}
}

func (s *stage) killAll(t *testing.T) {
	t.Helper()
	for _, r := range s.replicas {
		if err := r.Kill(); err != nil {
			t.Fatal(err)
		}
	}
}

// ignored kills both where the chart says that annotated pods do not wait for them.
func (s *stage) ignored(t *testing.T) {
	s.release.Upgrade(t, append(slices.Clone(values), "admission.failurePolicy=Ignore")...)
	s.killAll(t)
	from := time.Now()
	s.poll("annotated pods are created without the rule", func(context.Context) error {
		const enough = 10
		all := s.annotated.since(from)
		without := len(slices.DeleteFunc(slices.Clone(all[max(0, len(all)-enough):]), func(c creation) bool { return c.err != nil || c.rule }))
		if without < enough {
			return fmt.Errorf("%d of the last %d are", without, enough)
		}
		return nil
	})
	s.restart(s.replicas...)
	restarted := time.Now()
	s.poll("annotated pods get the rule again", func(context.Context) error {
		all := s.annotated.since(restarted)
		if len(all) == 0 || !all[len(all)-1].rule {
			return errors.New("they do not")
		}
		return nil
	})
	for _, c := range s.annotated.since(restarted) {
		if c.err != nil {
			t.Errorf("an annotated pod was refused: %v", c.err)
		}
	}
	t.Logf("right %.1f s after they were ready", time.Since(restarted).Seconds())
}
