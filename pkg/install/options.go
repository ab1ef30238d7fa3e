// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
)

// What Mode may be.
const (
	ModeStaticPod = "static-pod"
	ModeSystemd   = "systemd"
)

// What KubeletRestart may be.
const (
	restartBySystemd = "systemd"
	restartByHand    = "none"
)

// Options are what the command line says. DefaultOptions has the defaults. Paths are the
// host's, without Root.
type Options struct {
	Mode       string
	Root       string // where the host's file system is
	Image      string
	HubFlags   []string // name=value or name
	ServerURLs []string // nil: that of kubelet's kubeconfig

	KubeletKubeconfig string
	KubeletRestart    string
	KubeletUnit       string
	SystemBusSocket   string
	StaticPodDir      string
	UnitDir           string
	BinDir            string
	StateDir          string
	DataDir           string // the hub's

	CPURequest, MemoryRequest, MemoryLimit string // of the static pod

	ReadyTimeout  time.Duration
	SkipCandidate bool
	Retry         bool
	DryRun        bool
	Purge         bool

	Watch              bool
	Interval           time.Duration
	FallbackAfter      time.Duration
	LeaveTimeout       time.Duration
	DaemonSet          string // namespace/name
	Kubeconfig         string
	ProbeListenAddress string

	// Executable is the program that is run as candidate, and copied to the node. Empty:
	// this very one.
	Executable string
	// Progress is told of every step before it is taken. nil: it is printed.
	Progress func(step string) `json:"-"`
	// CheckHubFlags says what is wrong with a command line of the hub. nil: nothing is.
	CheckHubFlags func(args []string) error `json:"-"`
}

// DefaultOptions fit a node that kubeadm has set up. Image has no default.
func DefaultOptions() Options {
	return Options{
		Mode:              ModeStaticPod,
		Root:              "/",
		KubeletKubeconfig: "/etc/kubernetes/kubelet.conf",
		KubeletRestart:    restartBySystemd,
		KubeletUnit:       "kubelet.service",
		SystemBusSocket:   "/run/dbus/system_bus_socket",
		StaticPodDir:      "/etc/kubernetes/manifests",
		UnitDir:           "/etc/systemd/system",
		BinDir:            "/usr/local/bin",
		StateDir:          "/var/lib/edgehub-install",
		DataDir:           defaultDataDir,
		CPURequest:        "50m",
		MemoryRequest:     "48Mi",
		MemoryLimit:       "256Mi",
		ReadyTimeout:      2 * time.Minute,
		Interval:          30 * time.Second,
		FallbackAfter:     5 * time.Minute,
		LeaveTimeout:      110 * time.Second,
	}
}

// AddFlags adds the flags of a command: install, uninstall or rollback.
func (o *Options) AddFlags(fs *pflag.FlagSet, command string) {
	fs.BoolVar(&o.DryRun, "dry-run", o.DryRun, "Say what would be done, and do nothing.")
	fs.StringVar(&o.Root, "root", o.Root, "Where the host's file system is, such as /host in a pod. All other paths are the host's, without it.")
	fs.StringVar(&o.KubeletRestart, "kubelet-restart", o.KubeletRestart, "How kubelet is restarted: systemd, by D-Bus, or none: somebody does it when told so.")
	fs.StringVar(&o.SystemBusSocket, "system-bus-socket", o.SystemBusSocket, "Socket of the system's D-Bus, for systemd.")
	fs.StringVar(&o.StateDir, "state-dir", o.StateDir, "Directory for the backup of kubelet's kubeconfig, and for what else is remembered.")
	fs.DurationVar(&o.ReadyTimeout, "ready-timeout", o.ReadyTimeout, "How long the hub may take to get ready, and kubelet to come through it, each.")
	if command == "uninstall" {
		fs.BoolVar(&o.Purge, "purge", o.Purge, "Remove what the hub has recorded, too.")
	}
	if command != "install" {
		return
	}
	fs.StringVar(&o.Mode, "mode", o.Mode, "How the hub runs on the node: static-pod or systemd.")
	fs.StringVar(&o.Image, "image", o.Image, "Image of the static pod. Required for --mode=static-pod.")
	fs.StringArrayVar(&o.HubFlags, "hub-flag", o.HubFlags, "Flag of the hub, without its dashes: name=value. Repeat it for more.")
	fs.StringSliceVar(&o.ServerURLs, "server-url", o.ServerURLs, "API server as https://host:port for the hub, the preferred one first; repeat it for more. Empty: the one of kubelet's kubeconfig.")
	fs.StringVar(&o.DataDir, "data-dir", o.DataDir, "The hub's --data-dir.")
	fs.StringVar(&o.KubeletKubeconfig, "kubelet-kubeconfig", o.KubeletKubeconfig, "kubelet's --kubeconfig.")
	fs.StringVar(&o.KubeletUnit, "kubelet-unit", o.KubeletUnit, "kubelet's unit of systemd.")
	fs.StringVar(&o.StaticPodDir, "static-pod-dir", o.StaticPodDir, "kubelet's staticPodPath.")
	fs.StringVar(&o.UnitDir, "unit-dir", o.UnitDir, "Where units of systemd are put.")
	fs.StringVar(&o.BinDir, "bin-dir", o.BinDir, "Where the program is put in mode systemd.")
	fs.StringVar(&o.CPURequest, "cpu-request", o.CPURequest, "The static pod's request of CPU.")
	fs.StringVar(&o.MemoryRequest, "memory-request", o.MemoryRequest, "The static pod's request of memory.")
	fs.StringVar(&o.MemoryLimit, "memory-limit", o.MemoryLimit, "The static pod's limit of memory. Empty: none.")
	fs.BoolVar(&o.SkipCandidate, "skip-candidate", o.SkipCandidate, "Place the hub without having tried this program beside it first, such as when --image holds another one.")
	fs.BoolVar(&o.Retry, "retry", o.Retry, "Try again what has failed on this node before.")
	fs.BoolVar(&o.Watch, "watch", o.Watch, "Go on after that: look at --interval, and put right what somebody has changed.")
	fs.DurationVar(&o.Interval, "interval", o.Interval, "With --watch: time between two looks.")
	fs.DurationVar(&o.FallbackAfter, "fallback-after", o.FallbackAfter, "With --watch: how long the hub may be silent until kubelet is pointed at the API server again.")
	fs.StringVar(&o.DaemonSet, "daemonset", o.DaemonSet, "With --watch: the DaemonSet that this pod is of, as namespace/name. At SIGTERM all is undone if it is gone, or does not want this node any more. Empty: nothing is undone then.")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", o.Kubeconfig, "With --daemonset: how to reach the API server to ask for it. Empty: as this pod's ServiceAccount.")
	fs.DurationVar(&o.LeaveTimeout, "leave-timeout", o.LeaveTimeout, "With --daemonset: how long undoing may take at SIGTERM; less than the pod's terminationGracePeriodSeconds.")
	fs.StringVar(&o.ProbeListenAddress, "probe-listen-address", o.ProbeListenAddress, "With --watch: address and port for /readyz, /livez and /metrics of this process, plain HTTP. Empty: none.")
}

var hubFlag = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)

// chosenHere are flags of the hub that have another source.
var chosenHere = map[string]string{
	"server-url": "--server-url", "data-dir": "--data-dir",
	"server-ca-file": "kubelet's kubeconfig", "node-cert-file": "kubelet's kubeconfig", "node-key-file": "kubelet's kubeconfig",
}

// Validate reports all that is wrong with the values for a command, each problem by its
// flag. It looks at no file.
func (o *Options) Validate(command string) error {
	var problems []error
	wrong := func(flag, format string, args ...any) {
		problems = append(problems, fmt.Errorf("--%s: "+format, append([]any{flag}, args...)...))
	}
	for _, p := range []struct{ flag, path string }{
		{"root", o.Root}, {"kubelet-kubeconfig", o.KubeletKubeconfig}, {"system-bus-socket", o.SystemBusSocket}, {"static-pod-dir", o.StaticPodDir},
		{"unit-dir", o.UnitDir}, {"bin-dir", o.BinDir}, {"state-dir", o.StateDir}, {"data-dir", o.DataDir},
	} {
		switch {
		case !filepath.IsAbs(p.path) || filepath.Clean(p.path) != strings.TrimSuffix(p.path, "/") && p.path != "/":
			wrong(p.flag, "%q is not an absolute path in its shortest form", p.path)
		case p.path == "/" && p.flag != "root":
			wrong(p.flag, "/ is the whole file system")
		}
	}
	if o.KubeletRestart != restartBySystemd && o.KubeletRestart != restartByHand {
		wrong("kubelet-restart", "%q is neither %s nor %s", o.KubeletRestart, restartBySystemd, restartByHand)
	}
	if o.ReadyTimeout <= 0 {
		wrong("ready-timeout", "%v is not a time to wait; it must be above 0", o.ReadyTimeout)
	}
	if inside(o.StateDir, o.DataDir) || inside(o.DataDir, o.StateDir) {
		wrong("state-dir", "%s and --data-dir %s are inside each other", o.StateDir, o.DataDir)
	}
	if command == "install" {
		problems = append(problems, o.validateInstall()...)
	}
	return errors.Join(problems...)
}

// inside says whether path is dir or below it.
func inside(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

func (o *Options) validateInstall() (problems []error) {
	wrong := func(flag, format string, args ...any) {
		problems = append(problems, fmt.Errorf("--%s: "+format, append([]any{flag}, args...)...))
	}
	switch o.Mode {
	case ModeStaticPod:
		if o.Image == "" {
			wrong("image", "required for --mode=%s", ModeStaticPod)
		} else if strings.ContainsAny(o.Image, " \t\n") {
			wrong("image", "%q is not the reference of an image", o.Image)
		}
	case ModeSystemd:
	default:
		wrong("mode", "%q is neither %s nor %s", o.Mode, ModeStaticPod, ModeSystemd)
	}
	for _, q := range []struct{ flag, value string }{{"cpu-request", o.CPURequest}, {"memory-request", o.MemoryRequest}, {"memory-limit", o.MemoryLimit}} {
		if _, err := resource.ParseQuantity(q.value); err != nil && (q.value != "" || q.flag != "memory-limit") {
			wrong(q.flag, "%q is not a quantity such as 64Mi", q.value)
		}
	}
	problems = append(problems, o.validateHub()...)
	if !o.Watch {
		return problems
	}
	for _, d := range []struct {
		flag  string
		value time.Duration
	}{{"interval", o.Interval}, {"fallback-after", o.FallbackAfter}, {"leave-timeout", o.LeaveTimeout}} {
		if d.value <= 0 {
			wrong(d.flag, "%v is not a time to wait; it must be above 0", d.value)
		}
	}
	if namespace, name, ok := strings.Cut(o.DaemonSet, "/"); o.DaemonSet != "" && (!ok || namespace == "" || name == "" || strings.Contains(name, "/")) {
		wrong("daemonset", "%q is not of the form namespace/name", o.DaemonSet)
	}
	if _, _, err := net.SplitHostPort(o.ProbeListenAddress); o.ProbeListenAddress != "" && err != nil {
		wrong("probe-listen-address", "%q is not of the form address:port", o.ProbeListenAddress)
	}
	return problems
}

func (o *Options) validateHub() (problems []error) {
	wrong := func(flag, format string, args ...any) {
		problems = append(problems, fmt.Errorf("--%s: "+format, append([]any{flag}, args...)...))
	}
	for _, s := range o.ServerURLs {
		if err := checkServer(s); err != nil {
			wrong("server-url", "%w", err)
		}
	}
	seen := map[string]bool{}
	for _, f := range o.HubFlags {
		name, value, _ := strings.Cut(f, "=")
		switch source, ours := chosenHere[name]; {
		case !hubFlag.MatchString(name):
			wrong("hub-flag", "%q is not of the form name=value, without dashes", f)
		case ours:
			wrong("hub-flag", "%s comes from %s", name, source)
		case seen[name] && addressFlags[name] != "":
			wrong("hub-flag", "%s is given twice", name)
		case fileFlags[name] && (!filepath.IsAbs(value) || filepath.Dir(filepath.Clean(value)) == "/"):
			wrong("hub-flag", "%s: %q is not an absolute path below a directory", name, value)
		case strings.ContainsFunc(f, func(r rune) bool { return r < ' ' || r == 0x7f }):
			wrong("hub-flag", "%s: there is a control character in it", name)
		}
		seen[name] = true
	}
	for _, name := range []string{"listen-address", "metrics-listen-address"} {
		at, err := netip.ParseAddrPort(o.hubAddress(name))
		if err != nil || at.Port() == 0 || at.Addr().IsUnspecified() && name == "listen-address" {
			wrong("hub-flag", "%s: %q is not an address:port that can be connected to", name, o.hubAddress(name))
		}
	}
	if len(problems) == 0 && o.CheckHubFlags != nil {
		example := hubSpec{node: node{server: "https://127.0.0.1:6443", caFile: "/ca.crt", certFile: "/node.pem", keyFile: "/node.pem"}, dataDir: o.DataDir, servers: o.ServerURLs, flags: o.HubFlags}
		if err := o.CheckHubFlags(example.args()); err != nil {
			wrong("hub-flag", "%w", err)
		}
	}
	return problems
}

// checkServer wants the form that the hub takes.
func checkServer(server string) error {
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || (u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return fmt.Errorf("%q is not of the form https://host:port", server)
	}
	return nil
}

// addressFlags are the hub's addresses that are needed here, and their defaults.
var addressFlags = map[string]string{"listen-address": "127.0.0.1:10268", "metrics-listen-address": "127.0.0.1:10267"}

func (o *Options) hubAddress(flag string) string {
	if v, ok := hubFlagValue(o.HubFlags, flag); ok {
		return v
	}
	return addressFlags[flag]
}

// hubAt is where a hub with these options is.
func (o *Options) hubAt() hubAt {
	certificate, _ := hubFlagValue(o.HubFlags, "serving-certificate")
	return hubAt{
		URL: "https://" + o.hubAddress("listen-address"), Metrics: "http://" + o.hubMetricsAddress().String(), DataDir: o.DataDir, ByCSR: certificate == "csr",
	}
}

func (o *Options) paths() paths {
	return paths{o.KubeletKubeconfig, o.KubeletUnit, o.StaticPodDir, o.UnitDir, o.BinDir}
}

// hubMetricsAddress is one to connect to.
func (o *Options) hubMetricsAddress() netip.AddrPort {
	at, _ := netip.ParseAddrPort(o.hubAddress("metrics-listen-address")) // as Validate has seen
	switch at.Addr() {
	case netip.IPv4Unspecified():
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), at.Port())
	case netip.IPv6Unspecified():
		return netip.AddrPortFrom(netip.IPv6Loopback(), at.Port())
	}
	return at
}

func hubFlagValue(flags []string, name string) (string, bool) {
	i := slices.IndexFunc(flags, func(f string) bool { n, _, _ := strings.Cut(f, "="); return n == name })
	if i < 0 {
		return "", false
	}
	_, value, _ := strings.Cut(flags[i], "=")
	return value, true
}
