#!/bin/sh
# Install what the tests with a real kubelet need on Debian and Ubuntu: containerd,
# runc, the CNI plugins, iproute2; and dbus, for those of the installer. Does nothing where they are installed. The tests
# run a containerd of their own; the distribution's is installed but not used.
# usage: test/install-containerd.sh      as root
set -eu
say() { echo "install-containerd: $*" >&2; }

missing=
for p in containerd:containerd runc:runc ip:iproute2 dbus-daemon:dbus /usr/lib/cni/bridge:containernetworking-plugins; do
	command -v "${p%%:*}" >/dev/null || missing="$missing ${p#*:}"
done
if [ -z "$missing" ]; then
	say "nothing to do: $(containerd --version), $(runc --version | head -n 1)"
	exit 0
fi
if [ "$(id -u)" != 0 ]; then
	say "missing:$missing; run me as root"
	exit 1
fi
if ! command -v apt-get >/dev/null; then
	say "missing:$missing; no apt-get here, install them yourself"
	exit 1
fi
say "apt-get install$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086 # a list of names
apt-get install -q -y --no-install-recommends $missing
say "done: $(containerd --version), $(runc --version | head -n 1)"
