// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// changedSysctls are the kernel parameters that the kubelet and the CNI bridge
// plugin set.
var changedSysctls = []string{
	"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
	"kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes", "net/ipv4/ip_forward",
}

func readSysctls() (map[string]string, error) {
	values := map[string]string{}
	for _, name := range changedSysctls {
		b, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			return nil, err
		}
		values[name] = string(b)
	}
	return values, nil
}

// writeSysctls writes back what has changed.
func writeSysctls(values map[string]string) error {
	var errs []error
	for name, v := range values {
		b, err := os.ReadFile("/proc/sys/" + name)
		if err == nil && string(b) != v {
			err = os.WriteFile("/proc/sys/"+name, []byte(v), 0)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// unmountBelow undoes all mounts below dir, the innermost first.
func unmountBelow(dir string) error {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	var points []string
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		fields := strings.Fields(s.Text())
		if len(fields) > 1 && strings.HasPrefix(fields[1], dir+"/") {
			points = append(points, fields[1])
		}
	}
	var errs []error
	for _, p := range slices.Backward(points) {
		if err := unix.Unmount(p, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("unmount %s: %w", p, err))
		}
	}
	return errors.Join(errs...)
}

// removeLogLinks removes the links to logs below dir, which the kubelet makes for
// collectors of logs.
func removeLogLinks(dir string) error {
	links, err := filepath.Glob("/var/log/containers/*.log")
	errs := []error{err}
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil && strings.HasPrefix(target, dir+"/") {
			errs = append(errs, os.Remove(l))
		}
	}
	return errors.Join(errs...)
}

// cgroupParents returns where a kubelet's own cgroup is: the root, with version 2, or
// that of every controller with version 1.
func cgroupParents() ([]string, error) {
	const root = "/sys/fs/cgroup"
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return nil, fmt.Errorf("%s: %w", root, err)
	}
	if st.Type == unix.CGROUP2_SUPER_MAGIC {
		return []string{root}, nil
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	var parents []string
	for _, e := range entries { // links are second names
		if e.IsDir() {
			parents = append(parents, filepath.Join(root, e.Name()))
		}
	}
	return parents, nil
}

// makeCgroup makes an empty cgroup for a kubelet, in which it keeps those of its
// pods: it kills what it does not know there, another kubelet's pods included.
func makeCgroup(name string) error {
	parents, err := cgroupParents()
	errs := []error{err}
	for _, p := range parents {
		errs = append(errs, os.MkdirAll(filepath.Join(p, name), 0o755))
	}
	return errors.Join(errs...)
}

// removeCgroup removes a kubelet's cgroup and those in it; one that holds a
// process stays, and is an error.
func removeCgroup(name string) error {
	parents, err := cgroupParents()
	errs := []error{err}
	for _, p := range parents {
		root := filepath.Join(p, name)
		var dirs []string
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			if errors.Is(err, fs.ErrNotExist) { // the runtime removes some, too
				return nil
			}
			return err
		})
		errs = append(errs, err)
		for _, d := range slices.Backward(dirs) {
			if err := unix.Rmdir(d); err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("remove cgroup %s: %w", d, err))
			}
		}
	}
	return errors.Join(errs...)
}
