// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"
)

// A placement is a way for the hub to run on the node. Its methods are steps: they may be
// repeated.
type placement interface {
	// render returns what says how the hub is to run, for a hash that it is to answer with.
	render(s hubSpec, hash string) ([]byte, error)
	// placed returns what is there now; nil: nothing.
	placed() ([]byte, error)
	// place puts it there and starts it, if that is not the case yet.
	place(ctx context.Context, content []byte) error
	// prune removes what none of these versions needs.
	prune(kept [][]byte) error
	// remove stops it, and removes all versions.
	remove(ctx context.Context) error
}

// A version of the hub on this node. Equal hashes mean equal content.
type version struct {
	hash    string
	content []byte
	at      hubAt
}

// A storedVersion is a version on the disk.
type storedVersion struct {
	At      hubAt  `json:"at"`
	Content string `json:"content"`
}

// placedVariable is the environment variable that tells a hub the hash of its version, see
// Placed.
const placedVariable = "EDGEHUB_PLACED"

// wanted is the version that the options and kubelet's kubeconfig make.
func (i *installer) wanted(k *kubelet) (version, error) {
	spec := hubSpec{node: k.node, servers: i.o.ServerURLs, dataDir: i.o.DataDir, flags: i.o.HubFlags}
	plain, err := i.placement.render(spec, "")
	if err != nil {
		return version{}, err
	}
	sum := sha256.Sum256(plain)
	v := version{hash: hex.EncodeToString(sum[:8]), at: i.o.hubAt()}
	v.content, err = i.placement.render(spec, v.hash)
	return v, err
}

// stored is a version that was placed earlier.
func (i *installer) stored(hash string) (version, error) {
	file := i.inState(versionsDir, hash)
	b, err := i.host.read(file)
	if err != nil {
		return version{}, err
	}
	var s storedVersion
	if err := json.Unmarshal(b, &s); err != nil {
		return version{}, fmt.Errorf("%s: %w", file, err)
	}
	return version{hash, []byte(s.Content), s.At}, nil
}

// A hubSpec is what a hub is started with.
type hubSpec struct {
	node    node
	servers []string // nil: the node's
	dataDir string
	flags   []string
}

// fileFlags are flags of the hub whose value is a path on the host.
var fileFlags = map[string]bool{"client-ca-file": true, "filter-config": true, "encryption-key-file": true}

// args are the command line. What the flags say goes last, and so before what kubelet's
// kubeconfig says.
func (s hubSpec) args() []string {
	servers := s.servers
	if len(servers) == 0 {
		servers = []string{s.node.server}
	}
	var args []string
	for _, u := range servers {
		args = append(args, "--server-url="+u)
	}
	args = append(args, "--server-ca-file="+s.node.caFile)
	if _, given := hubFlagValue(s.flags, "client-ca-file"); !given {
		args = append(args, "--client-ca-file="+s.node.caFile)
	}
	args = append(args, "--node-cert-file="+s.node.certFile, "--node-key-file="+s.node.keyFile, "--data-dir="+s.dataDir)
	for _, f := range s.flags {
		args = append(args, "--"+f)
	}
	return args
}

// needsNetAdmin says whether the hub puts an address into place.
func (s hubSpec) needsNetAdmin() bool {
	address, _ := hubFlagValue(s.flags, "link-local-address")
	of, given := hubFlagValue(s.flags, "link-local-interface")
	return address != "" && (!given || of != "")
}

func (s hubSpec) needsLowPort() bool {
	for _, f := range s.flags {
		if name, value, _ := strings.Cut(f, "="); strings.HasSuffix(name, "-address") {
			if _, port, err := net.SplitHostPort(value); err == nil {
				if n, err := strconv.Atoi(port); err == nil && n < 1024 {
					return true
				}
			}
		}
	}
	return false
}

// A staticPod is run by kubelet from a manifest, also while there is no API server.
type staticPod struct {
	i *installer
}

var _ placement = staticPod{}

const podName = "edgehub"

// placedAnnotation tells an installer's static pod, and which version it is.
const placedAnnotation = "edgehub.io/placed"

func (s staticPod) file() string { return filepath.Join(s.i.o.StaticPodDir, podName+".yaml") }

func (s staticPod) placed() ([]byte, error) { return s.i.placedFile(s.file()) }

func (s staticPod) place(_ context.Context, content []byte) error {
	return s.i.step("Place the static pod: "+s.file(), func() error { return s.i.host.replace(s.file(), content, 0o600) })
}

func (staticPod) prune([][]byte) error { return nil } // kubelet removes images

func (s staticPod) remove(context.Context) error {
	return s.i.step("Remove the static pod: "+s.file(), func() error { return s.i.host.remove(s.file()) })
}

// mounts are directories of the host by path: what is in it changes (a rotated certificate
// is another file), and a file that is mounted alone would stay the old one.
func (s staticPod) mounts(spec hubSpec) (readOnly, writable []string, err error) {
	files := []string{spec.node.caFile, spec.node.certFile, spec.node.keyFile}
	writable = []string{spec.dataDir}
	for _, f := range spec.flags {
		switch name, value, _ := strings.Cut(f, "="); {
		case name == "encryption-key-file": // which the hub makes
			writable = append(writable, filepath.Dir(value))
		case fileFlags[name]:
			files = append(files, value)
		}
	}
	for _, f := range files {
		real, err := s.i.host.resolve(f)
		if err != nil {
			return nil, nil, err
		}
		// kubelet-client-current.pem is a link by its full path.
		readOnly = append(readOnly, filepath.Dir(f), filepath.Dir("/"+strings.TrimPrefix(strings.TrimPrefix(real, strings.TrimSuffix(s.i.host.root, "/")), "/")))
	}
	covered := func(dir string, by []string) bool {
		return slices.ContainsFunc(by, func(d string) bool { return inside(dir, d) })
	}
	slices.Sort(readOnly)
	var kept []string
	for _, d := range slices.Compact(readOnly) {
		if !covered(d, kept) && !covered(d, writable) {
			kept = append(kept, d)
		}
	}
	slices.Sort(writable)
	return kept, slices.Compact(writable), nil
}

func (s staticPod) render(spec hubSpec, hash string) ([]byte, error) {
	readOnly, writable, err := s.mounts(spec)
	if err != nil {
		return nil, err
	}
	container := corev1.Container{
		Name: "hub", Image: s.i.o.Image, ImagePullPolicy: corev1.PullIfNotPresent,
		Command: []string{"/edgehub"}, Args: spec.args(), Env: []corev1.EnvVar{{Name: placedVariable, Value: hash}},
		Resources:      s.resources(),
		StartupProbe:   s.probe("/livez", 1, 60),
		LivenessProbe:  s.probe("/livez", 10, 6),
		ReadinessProbe: s.probe("/readyz", 5, 3),
		SecurityContext: &corev1.SecurityContext{
			// Root: the node's key is root's. It needs no right but to read that.
			RunAsUser: new(int64(0)), RunAsGroup: new(int64(0)), ReadOnlyRootFilesystem: new(true), AllowPrivilegeEscalation: new(false),
			Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
	}
	if spec.needsNetAdmin() {
		container.SecurityContext.Capabilities.Add = append(container.SecurityContext.Capabilities.Add, "NET_ADMIN")
	}
	if spec.needsLowPort() {
		container.SecurityContext.Capabilities.Add = append(container.SecurityContext.Capabilities.Add, "NET_BIND_SERVICE")
	}
	pod := corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Name: podName, Namespace: metav1.NamespaceSystem,
			Labels:      map[string]string{"app.kubernetes.io/name": "edgehub", "app.kubernetes.io/component": "hub", "app.kubernetes.io/managed-by": "edgehub-install"},
			Annotations: map[string]string{placedAnnotation: hash},
		},
		Spec: corev1.PodSpec{
			HostNetwork: true, DNSPolicy: corev1.DNSDefault, EnableServiceLinks: new(false), AutomountServiceAccountToken: new(false),
			// No admission fills in the number for kubelet.
			PriorityClassName: "system-node-critical", Priority: new(int32(2000001000)),
			Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			TerminationGracePeriodSeconds: new(int64(20)),
		},
	}
	mount := func(dir string, readOnly bool, as corev1.HostPathType) {
		name := "host-" + strconv.Itoa(len(pod.Spec.Volumes))
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: dir, Type: &as}}})
		container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: dir, ReadOnly: readOnly})
	}
	for _, d := range writable {
		mount(d, false, corev1.HostPathDirectoryOrCreate)
	}
	for _, d := range readOnly {
		mount(d, true, corev1.HostPathDirectory)
	}
	pod.Spec.Containers = []corev1.Container{container}
	return yaml.Marshal(pod)
}

func (s staticPod) resources() corev1.ResourceRequirements {
	r := corev1.ResourceRequirements{Requests: corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse(s.i.o.CPURequest), corev1.ResourceMemory: resource.MustParse(s.i.o.MemoryRequest),
	}}
	if s.i.o.MemoryLimit != "" {
		r.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse(s.i.o.MemoryLimit)}
	}
	return r
}

func (s staticPod) probe(path string, period, failures int32) *corev1.Probe {
	at := s.i.o.hubMetricsAddress()
	return &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Host: at.Addr().String(), Port: intstr.FromInt32(int32(at.Port())), Path: path}},
		PeriodSeconds: period, FailureThreshold: failures, TimeoutSeconds: 3,
	}
}
