// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

const (
	idlePeriod  = 5 * time.Minute // kubelet's for the node's status; once in each
	leasePeriod = 10 * time.Second
	statusAfter = 45 * time.Second
	loneEvents  = 60
	lonePeriod  = 2 * time.Second
	writeRounds = 6
)

var (
	loneMaps    = mapSet{namespace: "lone", n: 50, bytes: 5000}
	writtenMaps = mapSet{namespace: "written", n: 1000, bytes: 5000}
)

// disk measures what the kernel counts as written by the hub.
func (b *bench) disk(ctx context.Context) error {
	for _, f := range []func(context.Context) error{b.eventsWritten, b.relistWritten, b.loneWritten, b.idleWritten} {
		if err := f(ctx); err != nil {
			return err
		}
	}
	return nil
}

// A countedWatch counts the bytes of events that pass.
type countedWatch struct {
	bytes  atomic.Int64
	cancel context.CancelFunc
	done   chan struct{}
}

func countEvents(ctx context.Context, c *rest.Config, path string) (*countedWatch, error) {
	client, err := newClient(c, false)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	resp, err := request{client, c.Host + path + "?watch=1&resourceVersion=0", protobufType}.open(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	w := &countedWatch{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		defer client.CloseIdleConnections()
		defer resp.Body.Close()
		_, _ = io.Copy(w, resp.Body) // it ends with ctx
	}()
	return w, nil
}

// Write counts.
func (w *countedWatch) Write(p []byte) (int, error) {
	w.bytes.Add(int64(len(p)))
	return len(p), nil
}

func (w *countedWatch) close() {
	w.cancel()
	<-w.done
}

// A followed is a hub with a watch on ConfigMaps, all of them on disk.
type followed struct {
	*hub
	watch   *countedWatch
	bytes   int64 // of events, when it began
	written float64
}

func (b *bench) follow(ctx context.Context, m mapSet) (*followed, error) {
	if err := b.seedMaps(ctx, m); err != nil {
		return nil, err
	}
	h, err := b.newHub(ctx, false)
	if err != nil {
		return nil, err
	}
	if err := onDisk(h.DataDir()); err != nil {
		return nil, errors.Join(err, h.close())
	}
	f := &followed{hub: h}
	f.watch, err = countEvents(ctx, h.Through(b.direct()), "/api/v1/namespaces/"+m.namespace+"/configmaps")
	if err == nil {
		err = wait(ctx, 4*time.Second)
	}
	if err == nil {
		f.bytes = f.watch.bytes.Load()
		f.written, err = writeBytes(h.PID())
	}
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	return f, nil
}

// ratio returns the bytes written by the byte of event.
func (f *followed) ratio(ctx context.Context) (ratio float64, events int64, err error) {
	if err := wait(ctx, 3*time.Second); err != nil { // the last flush
		return 0, 0, err
	}
	written, err := writeBytes(f.PID())
	events = f.watch.bytes.Load() - f.bytes
	return (written - f.written) / float64(events), events, err
}

func (f *followed) close() error {
	f.watch.close()
	return f.hub.close()
}

// onDisk refuses a file system in memory, for which nothing is counted.
func onDisk(dir string) error {
	const tmpfs = 0x01021994
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return err
	}
	if s.Type == tmpfs {
		return fmt.Errorf("%s is in memory: set TMPDIR to a folder on a disk", dir)
	}
	return nil
}

// touch updates a ConfigMap.
func (b *bench) touch(ctx context.Context, m mapSet, i int) error {
	o := newMap(m, i)
	_, err := b.cp.Client.CoreV1().ConfigMaps(m.namespace).Update(ctx, o, metav1.UpdateOptions{})
	return err
}

// eventsWritten updates 1,000 ConfigMaps in turn, each more than a second after
// its last time, so that no event is written together with the next of its object.
func (b *bench) eventsWritten(ctx context.Context) error {
	f, err := b.follow(ctx, writtenMaps)
	if err != nil {
		return err
	}
	defer b.closing(f.close)
	compactions, err := f.Metric(ctx, "edgehub_cache_journal_rewrites_total")
	if err != nil {
		return err
	}
	for range writeRounds {
		start := time.Now()
		if err := each(ctx, writtenMaps.n, func(ctx context.Context, i int) error { return b.touch(ctx, writtenMaps, i) }); err != nil {
			return err
		}
		if err := wait(ctx, time.Until(start.Add(2500*time.Millisecond))); err != nil {
			return err
		}
	}
	ratio, events, err := f.ratio(ctx)
	if err != nil {
		return err
	}
	after, err := f.Metric(ctx, "edgehub_cache_journal_rewrites_total")
	b.add(result{Name: "disk: bytes written by the byte of event, with compaction", Value: ratio, Unit: "×", Target: atMost(2),
		Versus: fmt.Sprintf("%d events of 5 KB, %.1f MB, %.0f compactions; %s1.6 ×", writeRounds*writtenMaps.n, float64(events)/1e6, after-compactions, yurtHub)})
	return err
}

// relistWritten lists again what is on disk.
func (b *bench) relistWritten(ctx context.Context) error {
	if err := b.seedPods(ctx, manyPods); err != nil {
		return err
	}
	h, err := b.newHub(ctx, false)
	if err != nil {
		return err
	}
	defer b.closing(h.close)
	r, err := toAs(ctx, h.Through(b.direct()), manyPods.path(), protobufType, true)
	if err != nil {
		return err
	}
	defer r.close()
	if err := wait(ctx, 4*time.Second); err != nil {
		return err
	}
	first, err := writeBytes(h.PID())
	if err != nil {
		return err
	}
	const again = 5
	if _, err := r.times(ctx, again); err != nil {
		return err
	}
	if err := wait(ctx, 3*time.Second); err != nil {
		return err
	}
	after, err := writeBytes(h.PID())
	b.add(result{Name: "disk: bytes written for an identical relist of 5,000 pods", Value: (after - first) / again, Unit: "B", Target: atMost(0),
		Versus: fmt.Sprintf("the first one %.1f MB; %s44 MB", first/1e6, yurtHub)})
	return err
}

// A diskRun is what takes minutes of waiting, beside the other parts.
type diskRun struct {
	lone     *followed
	loneDone chan error
	ratio    float64
	events   int64

	idle     *hub
	clients  *nodeClients
	statuses int // updates so far
	idleDone chan error
	measured chan idleSpan
}

// An idleSpan is what an idle node's hub has written in one period.
type idleSpan struct {
	pages, journal, log float64
	leases              int
}

// background begins with a hub that sees one event at a time, and one with a node's
// usual clients on which nothing happens but heartbeats.
func (b *bench) background(ctx context.Context) (err error) {
	d := &diskRun{loneDone: make(chan error, 1), idleDone: make(chan error, 1), measured: make(chan idleSpan, 1)}
	ctx, cancel := context.WithCancel(ctx)
	b.closes = append(b.closes, func() error { cancel(); return nil })
	if d.lone, err = b.follow(ctx, loneMaps); err != nil {
		return err
	}
	b.closes = append(b.closes, d.lone.close)
	if err := b.seedNodeSet(ctx); err != nil {
		return err
	}
	if d.idle, err = b.newHub(ctx, false); err != nil {
		return err
	}
	b.closes = append(b.closes, d.idle.close)
	if d.clients, err = b.newNodeClients(ctx, d.idle); err != nil {
		return err
	}
	b.closes = append(b.closes, func() error { d.clients.close(); return nil })
	go func() { d.loneDone <- b.writeLone(ctx, d) }()
	go func() { d.idleDone <- d.beIdle(ctx) }()
	b.disks = d
	return nil
}

func (b *bench) writeLone(ctx context.Context, d *diskRun) (err error) {
	for i := range loneEvents {
		if err := b.touch(ctx, loneMaps, i%loneMaps.n); err != nil {
			return err
		}
		if err := wait(ctx, lonePeriod); err != nil {
			return err
		}
	}
	d.ratio, d.events, err = d.lone.ratio(ctx)
	return err
}

// beIdle measures one period of heartbeats.
func (d *diskRun) beIdle(ctx context.Context) error {
	holder, seconds := nodeName, int32(40)
	lease, err := d.clients.kubelet.CoordinationV1().Leases("kube-node-lease").Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	// What recording has written is not the idle node's; what is told for the first time
	// is written at once.
	if err := d.beat(ctx, lease, true); err != nil {
		return err
	}
	d.statuses = 0
	if err := wait(ctx, leasePeriod); err != nil {
		return err
	}
	before, err := d.writtenByIdle(ctx)
	if err != nil {
		return err
	}
	for start := time.Now(); time.Since(start) < idlePeriod; before.leases++ {
		if err := d.beat(ctx, lease, time.Since(start) > statusAfter); err != nil {
			return err
		}
		if err := wait(ctx, leasePeriod); err != nil {
			return err
		}
	}
	after, err := d.writtenByIdle(ctx)
	d.measured <- idleSpan{after.pages - before.pages, after.journal - before.journal, after.log - before.log, before.leases}
	return err
}

func (d *diskRun) writtenByIdle(ctx context.Context) (s idleSpan, err error) {
	if s.pages, err = writeBytes(d.idle.PID()); err != nil {
		return s, err
	}
	if info, err := os.Stat(d.idle.Log()); err == nil {
		s.log = float64(info.Size())
	}
	s.journal, err = d.idle.Metric(ctx, "edgehub_cache_journal_written_bytes_total")
	return s, err
}

// beat is a kubelet's heartbeat: the lease, and once the node's status.
func (d *diskRun) beat(ctx context.Context, lease *coordinationv1.Lease, status bool) error {
	now := time.Now()
	lease.Spec.RenewTime = &metav1.MicroTime{Time: now}
	renewed, err := d.clients.kubelet.CoordinationV1().Leases(lease.Namespace).Update(ctx, lease, metav1.UpdateOptions{})
	if err != nil {
		return err
	}
	*lease = *renewed
	if !status || d.statuses > 0 {
		return nil
	}
	d.statuses++
	nodes := d.clients.kubelet.CoreV1().Nodes()
	n, err := nodes.Get(ctx, nodeName, metav1.GetOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	for i := range n.Status.Conditions {
		n.Status.Conditions[i].LastHeartbeatTime = metav1.NewTime(now)
	}
	_, err = nodes.UpdateStatus(ctx, n, metav1.UpdateOptions{})
	return err
}

func (b *bench) loneWritten(ctx context.Context) error {
	d := b.disks
	say("waiting for the events that come one by one")
	select {
	case err := <-d.loneDone:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	b.add(result{Name: "disk: bytes written by the byte of event, one every 2 s", Value: d.ratio, Unit: "×", Target: atMost(2),
		Versus: fmt.Sprintf("%d events of %d bytes, each in pages of its own; %s1.6 ×", loneEvents, d.events/loneEvents, yurtHub)})
	return nil
}

func (b *bench) idleWritten(ctx context.Context) error {
	d := b.disks
	say("waiting for the idle node's five minutes to be over")
	select {
	case err := <-d.idleDone:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	s := <-d.measured
	b.add(result{Name: fmt.Sprintf("disk: written by an idle node a day, extrapolated from %.0f s", idlePeriod.Seconds()),
		Value: s.pages / 1e6 * float64(24*time.Hour/idlePeriod), Unit: "MB", Target: atMost(2),
		Versus: fmt.Sprintf("%.1f KB in pages, for %.1f KB of journal and %.1f KB of log; %d lease updates, one node status update; %s120–175 MB", s.pages/1e3, s.journal/1e3, s.log/1e3, s.leases, yurtHub)})
	return nil
}
