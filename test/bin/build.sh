#!/bin/sh
# Build the programs that tests and demo run against, once, and print the folder
# that holds them. The folder is named after the hash of go.mod and go.sum, so a
# new version gets a new folder and an old one is used again.
# usage: test/bin/build.sh [NAME ...]     default: all of them
# The helper programs of ./cmd (cri, pause, mkimage) are built again when their
# source is newer.
#   EDGEHUB_BIN          where to keep the folders (default: .bin beside go.mod)
#   KUBEBUILDER_ASSETS   envtest's folder; etcd, kube-apiserver and kubectl are
#                        taken from there when it holds them
set -eu
src=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$src/../.." && pwd)
key=$(cat "$src/go.mod" "$src/go.sum" | sha256sum | cut -c1-12)
out=${EDGEHUB_BIN:-$root/.bin}/$key
mkdir -p "$out"
say() { echo "build: $*" >&2; }

# One build at a time: two would each compile all of Kubernetes.
if command -v flock >/dev/null; then
	exec 9>"$out/.lock"
	flock -n 9 || { say "another build runs; waiting for it"; flock 9; }
fi

kv=$(cd "$src" && go list -m -f '{{.Version}}' k8s.io/kubernetes)
minor=${kv#v1.}
minor=${minor%%.*}
ld="-s -w"
for p in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	ld="$ld -X $p.gitVersion=$kv -X $p.gitMajor=1 -X $p.gitMinor=$minor -X $p.gitTreeState=clean"
	ld="$ld -X $p.gitCommit=${kv#v} -X $p.buildDate=2026-01-01T00:00:00Z"
done

helm=helm.sh/helm/v4/cmd/helm@v4.3.1 # from a module graph of its own, with a Kubernetes of its own

[ $# -gt 0 ] || set -- etcd kube-apiserver kube-controller-manager kube-scheduler kubectl kubemark kubelet helm cri pause mkimage
for name in "$@"; do
	if [ -x "$out/$name" ]; then
		[ -d "$src/cmd/$name" ] && [ -n "$(find "$src/cmd/$name" -newer "$out/$name")" ] || continue
	fi
	if [ -n "${KUBEBUILDER_ASSETS:-}" ] && [ -x "$KUBEBUILDER_ASSETS/$name" ]; then
		ln -s "$(readlink -f "$KUBEBUILDER_ASSETS/$name")" "$out/$name"
		say "$name: from KUBEBUILDER_ASSETS"
		continue
	fi
	case $name in
	etcd) pkg=go.etcd.io/etcd/server/v3 flags="-s -w" ;;
	helm) pkg=$helm flags="-s -w" ;;
	cri | pause | mkimage) pkg=./cmd/$name flags="-s -w" ;;
	kube*) pkg=k8s.io/kubernetes/cmd/$name flags=$ld ;;
	*) say "unknown program: $name"; exit 2 ;;
	esac
	say "$name ($pkg, Kubernetes $kv) from source; the first of Kubernetes takes some minutes on a small machine"
	t0=$(date +%s)
	# Into a name of its own first: a build that is cut off leaves nothing that
	# looks finished.
	if [ "$name" = helm ]; then
		(cd "$src" && GOBIN="$out/.gobin" CGO_ENABLED=0 go install -trimpath -ldflags "$flags" "$pkg")
		mv "$out/.gobin/$name" "$out/.$name"
	else
		(cd "$src" && CGO_ENABLED=0 go build -trimpath -ldflags "$flags" -o "$out/.$name" "$pkg")
	fi
	mv "$out/.$name" "$out/$name"
	say "$name: $(($(date +%s) - t0)) s, $(($(wc -c <"$out/$name") / 1048576)) MiB"
done
echo "$out"
