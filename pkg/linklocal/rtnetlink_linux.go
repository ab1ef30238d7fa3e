// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	dummy    = "dummy"
	loopback = "lo"
	// maxDumps bounds how often a list is asked for that changed under the kernel's
	// hands.
	maxDumps = 10
)

// errOverflow ends a subscription that was told more than it could keep.
var errOverflow = errors.New("too many changes at once")

// rtnetlink is the kernel's network configuration.
type rtnetlink struct {
	addr netip.Addr
	name string
	kind string // dummy; tests take what their kernel has, or has not
}

func newSystem(addr netip.Addr, name string) system {
	return &rtnetlink{addr: addr, name: name, kind: dummy}
}

func (r *rtnetlink) put() (string, bool, error) {
	if holder, err := r.holder(); err != nil || holder != "" {
		return holder, false, err
	}
	iface, err := r.add()
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w: CAP_NET_ADMIN is missing; by hand: %s", err, r.byHand())
	}
	return iface, err == nil, err
}

// holder is the interface that has the address and is up; empty: there is none.
func (r *rtnetlink) holder() (string, error) {
	addrs, err := r.list(nil)
	if err != nil {
		return "", err
	}
	for _, a := range addrs {
		link, err := netlink.LinkByIndex(a.LinkIndex)
		if isNotFound(err) {
			continue // it has just gone
		}
		if err != nil {
			return "", fmt.Errorf("look up interface %d: %w", a.LinkIndex, err)
		}
		if link.Attrs().Flags&net.FlagUp != 0 {
			return link.Attrs().Name, nil
		}
	}
	return "", nil
}

// list returns where the address is, on link or, if it is nil, on any.
func (r *rtnetlink) list(link netlink.Link) ([]netlink.Addr, error) {
	family := netlink.FAMILY_V4
	if r.addr.Is6() {
		family = netlink.FAMILY_V6
	}
	var addrs []netlink.Addr
	var err error = netlink.ErrDumpInterrupted
	for n := 0; n < maxDumps && errors.Is(err, netlink.ErrDumpInterrupted); n++ {
		addrs, err = netlink.AddrList(link, family)
	}
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return slices.DeleteFunc(addrs, func(a netlink.Addr) bool {
		ip, _ := netip.AddrFromSlice(a.IP)
		return ip.Unmap() != r.addr
	}), nil
}

// add puts the address on the interface that it returns.
func (r *rtnetlink) add() (string, error) {
	link, err := r.link()
	if err != nil {
		return "", err
	}
	name := link.Attrs().Name
	// First: the address of an interface that is down may not outlast its way up.
	if err := netlink.LinkSetUp(link); err != nil {
		return "", fmt.Errorf("set interface %s up: %w", name, err)
	}
	if err := netlink.AddrAdd(link, r.on(name)); err != nil && !errors.Is(err, unix.EEXIST) {
		return "", fmt.Errorf("add address to %s: %w", name, err)
	}
	return name, nil
}

// link returns the dummy interface, which it makes if need be, or lo where the
// kernel has no dummy interfaces.
func (r *rtnetlink) link() (netlink.Link, error) {
	link, err := netlink.LinkByName(r.name)
	if isNotFound(err) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = r.name
		err = netlink.LinkAdd(&netlink.GenericLink{LinkAttrs: attrs, LinkType: r.kind})
		switch {
		case errors.Is(err, unix.EOPNOTSUPP):
			link, err = netlink.LinkByName(loopback)
			if err != nil {
				return nil, fmt.Errorf("look up interface %s: %w", loopback, err)
			}
			return link, nil
		case err != nil && !errors.Is(err, unix.EEXIST):
			return nil, fmt.Errorf("add interface %s: %w", r.name, err)
		}
		link, err = netlink.LinkByName(r.name)
	}
	if err != nil {
		return nil, fmt.Errorf("look up interface %s: %w", r.name, err)
	}
	if link.Type() != r.kind {
		return nil, fmt.Errorf("interface %s is there and is no %s but %s", r.name, r.kind, link.Type())
	}
	return link, nil
}

// on is the address as it is put on an interface.
func (r *rtnetlink) on(iface string) *netlink.Addr {
	bits := r.addr.BitLen()
	a := &netlink.Addr{IPNet: &net.IPNet{IP: r.addr.AsSlice(), Mask: net.CIDRMask(bits, bits)}}
	switch {
	case r.addr.Is6():
		a.Flags = unix.IFA_F_NODAD // nobody to ask, and it would delay the address
	case iface == loopback:
		a.Scope = unix.RT_SCOPE_HOST
	default:
		// The kernel must not choose it as the source of what leaves by an interface
		// without an address, as those of pods may be.
		a.Scope = unix.RT_SCOPE_LINK
	}
	return a
}

// byHand is what put does, as commands.
func (r *rtnetlink) byHand() string {
	on := func(iface string) string {
		a := r.on(iface)
		add := fmt.Sprintf("ip addr add %s dev %s", a.IPNet, iface)
		if r.addr.Is6() {
			return add + " nodad"
		}
		return fmt.Sprintf("%s scope %s", add, netlink.Scope(a.Scope))
	}
	return fmt.Sprintf("ip link add %s type %s; ip link set %s up; %s; or, where the kernel has no such interfaces, %s",
		r.name, r.kind, r.name, on(r.name), on(loopback))
}

func (r *rtnetlink) remove() error {
	return errors.Join(r.removeLink(), r.removeFromLoopback())
}

func (r *rtnetlink) removeLink() error {
	link, err := netlink.LinkByName(r.name)
	if isNotFound(err) || err == nil && link.Type() != r.kind {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w: CAP_NET_ADMIN is missing; by hand: ip link del %s", err, r.name)
	}
	if err != nil {
		return fmt.Errorf("delete interface %s: %w", r.name, err)
	}
	return nil
}

func (r *rtnetlink) removeFromLoopback() error {
	link, err := netlink.LinkByName(loopback)
	if err != nil {
		return fmt.Errorf("look up interface %s: %w", loopback, err)
	}
	addrs, err := r.list(link)
	if err != nil {
		return err
	}
	ours := r.on(loopback)
	for _, a := range addrs {
		// The kernel chooses the scope of an IPv6 address.
		if !a.Equal(*ours) || r.addr.Is4() && a.Scope != ours.Scope {
			continue
		}
		err := netlink.AddrDel(link, ours)
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w: CAP_NET_ADMIN is missing; by hand: ip addr del %s dev %s", err, ours.IPNet, loopback)
		}
		if err != nil {
			return fmt.Errorf("delete address on %s: %w", loopback, err)
		}
	}
	return nil
}

func (r *rtnetlink) follow(ctx context.Context, lost func()) error {
	for {
		// A socket that overflowed drops everything, without a further word, until it
		// has been read empty: a new one is told of what comes next.
		if err := subscribe(ctx, lost); !errors.Is(err, errOverflow) {
			return err
		}
	}
}

// subscribe calls lost at the start, and then for what one subscription is told.
func subscribe(ctx context.Context, lost func()) error {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return fmt.Errorf("subscribe to changes of interfaces and addresses: %w", err)
	}
	defer s.Close()
	defer context.AfterFunc(ctx, s.Close)()
	lost() // there was nobody to tell of what happened before
	for {
		messages, _, err := s.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			return errOverflow
		case err != nil:
			return fmt.Errorf("receive changes of interfaces and addresses: %w", err)
		case slices.ContainsFunc(messages, isLoss):
			lost()
		}
	}
}

// isLoss looks at no name: losses are rare, and the address may be anywhere.
func isLoss(m syscall.NetlinkMessage) bool {
	switch m.Header.Type {
	case unix.RTM_DELADDR, unix.RTM_DELLINK:
		return true
	case unix.RTM_NEWLINK: // also for each change
		return len(m.Data) >= unix.SizeofIfInfomsg && nl.DeserializeIfInfomsg(m.Data).Flags&unix.IFF_UP == 0
	}
	return false
}

func isNotFound(err error) bool {
	var notFound netlink.LinkNotFoundError
	return errors.As(err, &notFound)
}
