// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controlplane runs a real Kubernetes control plane for tests: etcd and
// kube-apiserver, and on request the controller manager and the scheduler, as
// processes on loopback with a certificate authority of their own. It can be
// stopped, killed, restarted, set back to a snapshot, and asked who requested
// what.
package controlplane

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

// A StaticUser authenticates by a token that the API server reads when it
// starts. Its rights are what RBAC gives to the name and the groups.
type StaticUser struct {
	Name   string
	Groups []string
	Token  string // "": a random one
}

// Config says what to run. The zero value is etcd and kube-apiserver.
type Config struct {
	Dir               string // for data, certificates and logs; "": a temporary one, removed by Stop
	Users             []StaticUser
	ControllerManager bool
	Scheduler         bool
	Audit             bool // for Requests

	// More flags, after the rig's own.
	APIServerArgs, ControllerManagerArgs, SchedulerArgs []string
}

// A ControlPlane is a running control plane. Its methods are safe for concurrent
// use, but for those that stop and start parts of it.
type ControlPlane struct {
	// Client is an administrator's, without client-side rate limits.
	Client kubernetes.Interface

	config    Config
	dir       string
	bin       string
	ports     ports
	ca        *authority
	frontCA   *authority
	admin     *rest.Config
	users     map[string]StaticUser
	etcd      *process.Process
	apiserver *process.Process
	others    []*process.Process // controller manager, scheduler

	mu     sync.Mutex // guards issued
	issued int        // certificates to clients; numbers their files
}

type ports struct{ etcd, etcdPeer, apiserver, controllerManager, scheduler int }

// Start runs a control plane and returns when it serves, RBAC's default roles
// and the default ServiceAccount of the namespace default included. ctx limits
// the start, not the life.
func Start(ctx context.Context, c Config) (_ *ControlPlane, err error) {
	names := []string{"etcd", "kube-apiserver"}
	if c.ControllerManager {
		names = append(names, "kube-controller-manager")
	}
	if c.Scheduler {
		names = append(names, "kube-scheduler")
	}
	cp := &ControlPlane{config: c, dir: c.Dir}
	if cp.bin, err = Binaries(ctx, names...); err != nil {
		return nil, err
	}
	if c.Dir == "" {
		if cp.dir, err = os.MkdirTemp("", "edgehub-controlplane-"); err != nil {
			return nil, err
		}
	}
	if err = cp.prepare(); err == nil {
		err = cp.start(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("control plane: %w", err), cp.Stop())
	}
	return cp, nil
}

// prepare makes everything that the processes need.
func (cp *ControlPlane) prepare() (err error) {
	for _, p := range []*int{&cp.ports.etcd, &cp.ports.etcdPeer, &cp.ports.apiserver, &cp.ports.controllerManager, &cp.ports.scheduler} {
		if *p, err = port.Free(); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(cp.pki(""), 0o700); err != nil {
		return err
	}
	if err := cp.issueAll(); err != nil {
		return err
	}
	if err := cp.writeUsers(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(cp.dir, "audit-policy.yaml"), []byte(auditPolicy), 0o600); err != nil {
		return err
	}
	cp.admin = cp.certConfig(cp.pki("admin.crt"), cp.pki("admin.key"))
	if cp.Client, err = kubernetes.NewForConfig(cp.admin); err != nil {
		return err
	}
	cp.etcd = process.New(cp.etcdCommand())
	cp.apiserver = process.New(cp.apiserverCommand())
	if cp.config.ControllerManager {
		cp.others = append(cp.others, process.New(cp.controllerManagerCommand()))
	}
	if cp.config.Scheduler {
		cp.others = append(cp.others, process.New(cp.schedulerCommand()))
	}
	return WriteKubeconfig(cp.AdminKubeconfig(), cp.admin)
}

// start runs what prepare made.
func (cp *ControlPlane) start(ctx context.Context) error {
	if err := cp.startAll(ctx); err != nil {
		return err
	}
	if cp.config.ControllerManager {
		return cp.waitServiceAccount(ctx, "default")
	}
	return cp.fillNamespace(ctx, "default")
}

// startAll starts the processes in their order.
func (cp *ControlPlane) startAll(ctx context.Context) error {
	if err := cp.etcd.Start(ctx); err != nil {
		return err
	}
	if err := cp.apiserver.Start(ctx); err != nil {
		return err
	}
	var g errgroup.Group
	for _, p := range cp.others {
		g.Go(func() error { return p.Start(ctx) })
	}
	return g.Wait()
}

// killAll ends the processes, the servers of others last.
func (cp *ControlPlane) killAll() error {
	var errs []error
	for _, p := range append([]*process.Process{cp.apiserver, cp.etcd}, cp.others...) {
		if p != nil {
			errs = append(errs, p.Kill())
		}
	}
	return errors.Join(errs...)
}

// Stop kills all processes, waits for their end, and removes the data; the
// folder with the logs only if it is a temporary one of Start's.
func (cp *ControlPlane) Stop() error {
	err := cp.killAll()
	if cp.config.Dir == "" {
		return errors.Join(err, os.RemoveAll(cp.dir))
	}
	return errors.Join(err, os.RemoveAll(cp.etcdDir()))
}

// StopAPIServer ends the API server in order.
func (cp *ControlPlane) StopAPIServer() error { return cp.apiserver.Stop() }

// KillAPIServer ends the API server with SIGKILL.
func (cp *ControlPlane) KillAPIServer() error { return cp.apiserver.Kill() }

// StartAPIServer starts it again, with the same port, data and users, and waits
// until it is ready.
func (cp *ControlPlane) StartAPIServer(ctx context.Context) error { return cp.apiserver.Start(ctx) }

// SnapshotEtcd keeps a copy of all data and returns its folder, for
// RestoreEtcd. etcd is frozen meanwhile, for some milliseconds: what it has
// written by then is what it would find after a crash.
func (cp *ControlPlane) SnapshotEtcd(ctx context.Context) (string, error) {
	if err := cp.etcd.Freeze(ctx); err != nil {
		return "", errors.Join(err, cp.etcd.Thaw())
	}
	snapshot := filepath.Join(cp.dir, "snapshot-"+strconv.FormatInt(time.Now().UnixNano(), 10))
	if err := errors.Join(os.CopyFS(snapshot, os.DirFS(cp.etcdDir())), cp.etcd.Thaw()); err != nil {
		return "", fmt.Errorf("copy etcd's data: %w", err)
	}
	return snapshot, nil
}

// RestoreEtcd sets the cluster back to a snapshot, as an operator does: all
// servers are stopped, the data replaced, and all are started again.
func (cp *ControlPlane) RestoreEtcd(ctx context.Context, snapshot string) error {
	if err := cp.killAll(); err != nil {
		return err
	}
	if err := os.RemoveAll(cp.etcdDir()); err != nil {
		return err
	}
	if err := os.CopyFS(cp.etcdDir(), os.DirFS(snapshot)); err != nil {
		return fmt.Errorf("copy the snapshot: %w", err)
	}
	return cp.startAll(ctx)
}

// Dir returns the folder of the certificates and logs.
func (cp *ControlPlane) Dir() string { return cp.dir }

// Addr returns the API server's address, 127.0.0.1:port.
func (cp *ControlPlane) Addr() string { return addr(cp.ports.apiserver) }

// URL returns the API server's URL.
func (cp *ControlPlane) URL() string { return "https://" + cp.Addr() }

// CAFile returns the certificate authority that has signed the API server's
// certificate and those of all clients.
func (cp *ControlPlane) CAFile() string { return cp.ca.file() }

// CAKeyFile returns the key of CAFile.
func (cp *ControlPlane) CAKeyFile() string { return cp.pki("ca.key") }

// LogTail returns the last lines of the servers' logs.
func (cp *ControlPlane) LogTail() string {
	var tail string
	for _, p := range append([]*process.Process{cp.etcd, cp.apiserver}, cp.others...) {
		tail += p.LogTail() + "\n"
	}
	return tail
}

func (cp *ControlPlane) pki(file string) string { return filepath.Join(cp.dir, "pki", file) }
func (cp *ControlPlane) etcdDir() string        { return filepath.Join(cp.dir, "etcd") }

func addr(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// randomToken returns a token that nobody guesses.
func randomToken() string { return rand.Text() }
