// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package linklocal keeps the address by which pods with a network of their own
// reach edgehub on an interface of the node, and tells when loopback addresses
// are open to other machines. pkg/app calls it before it listens on the address.
//
// It acts in the network namespace of the process: in a pod, that must be the
// host's. Linux only.
package linklocal

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

// DefaultInterface is the interface that is made where Config names none.
const DefaultInterface = "edgehub0"

// maxInterfaceBytes is the kernel's IFNAMSIZ without the zero at the end.
const maxInterfaceBytes = 15

// Config is what New needs.
type Config struct {
	// Addr is a unicast address, IPv4 or IPv6, that is neither loopback nor
	// unspecified, and has no zone. It should mean nothing outside the node:
	// 169.254.0.0/16, or of IPv6 fc00::/7. IPv6 link-local, fe80::/10, is refused:
	// it ends at one link, so that pods do not reach it.
	Addr netip.Addr
	// Interface is the dummy interface that holds Addr, DefaultInterface if it is
	// empty: at most 15 printable ASCII bytes without space, '/', ':' and '%'.
	Interface string
	// Registerer takes the metrics, of one Address only; nil: nobody does.
	Registerer prometheus.Registerer
}

// check expects the defaults to be there.
func (c Config) check() error {
	var errs []error
	switch {
	case c.Addr.Is6() && c.Addr.IsLinkLocalUnicast():
		errs = append(errs, fmt.Errorf("linklocal: Addr: pods do not reach IPv6 link-local addresses, take one of fc00::/7, is %s", c.Addr))
	case !c.Addr.IsGlobalUnicast() && !c.Addr.IsLinkLocalUnicast():
		errs = append(errs, fmt.Errorf("linklocal: Addr: must be a unicast address other than loopback, is %s", c.Addr))
	}
	if c.Addr.Zone() != "" {
		errs = append(errs, fmt.Errorf("linklocal: Addr: must have no zone, is %s", c.Addr))
	}
	if !validInterface(c.Interface) {
		errs = append(errs, fmt.Errorf("linklocal: Interface: %q is no name for an interface", c.Interface))
	}
	return errors.Join(errs...)
}

func validInterface(name string) bool {
	switch name {
	case "", ".", "..", "all", "default": // the last two are directories beside the interfaces' in /proc/sys
		return false
	}
	return len(name) <= maxInterfaceBytes && !strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r > '~' || strings.ContainsRune("/:%", r)
	})
}

// system is what an Address asks of the operating system.
type system interface {
	// put sees to it that the address is on an interface that is up. It returns
	// the interface, and whether there was something to do.
	put() (iface string, changed bool, err error)
	// remove takes away what put makes, and is content if it is not there.
	remove() error
	// follow calls lost, which does not block, once it is able to, and then each
	// time when something that may concern the address went away or down. It
	// returns nil when ctx ends.
	follow(ctx context.Context, lost func()) error
}

// An Address is an address of the node for its pods. Its methods may be called
// concurrently.
type Address struct {
	addr    netip.Addr
	system  system
	metrics *metrics

	mu    sync.Mutex // is held while the system is changed; guards iface
	iface string
}

// New looks at the configuration, of which it reports all that is wrong, and
// registers the metrics; the system it leaves alone.
func New(c Config) (*Address, error) {
	c.Addr = c.Addr.Unmap()
	if c.Interface == "" {
		c.Interface = DefaultInterface
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	m, err := newMetrics(c.Registerer)
	if err != nil {
		return nil, err
	}
	return &Address{addr: c.Addr, system: newSystem(c.Addr, c.Interface), metrics: m}, nil
}

// Ensure returns nil when the address is on an interface that is up. If it is on
// one already, whoever put it there, nothing is done. Otherwise it is put on a
// dummy interface of the configured name, which is made and set up if need be, or
// on lo where the kernel has no dummy interfaces. An interface of that name that
// is something else is an error. Making something takes CAP_NET_ADMIN; the error
// for want of it says what to do by hand.
//
// It does not block for long, ctx is only asked for the logger.
func (a *Address) Ensure(ctx context.Context) error {
	iface, changed, err := a.put()
	if err != nil {
		return fmt.Errorf("link-local address %s: %w", a.addr, err)
	}
	klog.FromContext(ctx).Info("Link-local address is in place", "address", a.addr, "interface", iface, "made", changed)
	return nil
}

// Interface returns the interface that the address was on when Ensure or Run last
// looked; empty: none.
func (a *Address) Interface() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.iface
}

// Remove takes away what Ensure makes, also if another process made it: the
// interface of the configured name if it is a dummy, and the address on lo if it
// looks like ours. All else stays, and what is not there is no error. It is for
// uninstalling: a Run that still goes on would bring the address back.
func (a *Address) Remove() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.system.remove(); err != nil {
		return fmt.Errorf("remove link-local address %s: %w", a.addr, err)
	}
	a.saw("")
	return nil
}

func (a *Address) put() (iface string, changed bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	iface, changed, err = a.system.put() // no interface if it fails
	a.saw(iface)
	return iface, changed, err
}

// saw keeps where the address is; the caller holds mu.
func (a *Address) saw(iface string) {
	a.iface = iface
	a.metrics.present.Set(0)
	if iface != "" {
		a.metrics.present.Set(1)
	}
}
