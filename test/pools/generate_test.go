// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"fmt"
	"math/rand/v2"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// A generator makes pods of many kinds, of which an API server may still refuse some.
type generator struct {
	*rand.Rand
}

func (g generator) chance(percent int) bool { return g.IntN(100) < percent }

// texts are what is written in more than one way in JSON.
var texts = []string{
	"", "plain", "true", "<a href=\"x\">&amp;</a>", "tab\tnewline\nreturn\r", "ünïcode \u2028 \U0001F600", `{"spec":{"containers":[{"name":"c"}]},"items":[]}`, "back\\slash", "\u007f\u0001", strings.Repeat("long ", 400),
}

func (g generator) text() string { return texts[g.IntN(len(texts))] }

func (g generator) pod(namespace, name, node string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": fmt.Sprint("a", g.IntN(5))}, Annotations: map[string]string{}}}
	s := &p.Spec
	s.NodeName, s.HostNetwork = node, g.chance(50)
	g.meta(&p.ObjectMeta)
	g.placement(s)
	g.environment(s)
	g.volumes(s)
	ports := g.Perm(60) // host ports that other pods want, too, and no container of this one
	for i := range 1 + g.IntN(3) {
		s.Containers = append(s.Containers, g.container(fmt.Sprintf("c%d", i), s, &ports))
	}
	for i := range g.IntN(3) {
		c := g.container(fmt.Sprintf("i%d", i), s, &ports)
		if g.chance(50) {
			c.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
		} else {
			c.Lifecycle, c.LivenessProbe, c.ReadinessProbe, c.StartupProbe = nil, nil, nil, nil
		}
		s.InitContainers = append(s.InitContainers, c)
	}
	return p
}

func (g generator) meta(m *metav1.ObjectMeta) {
	for _, name := range []string{"example.com/unknown", "example.com/" + g.name(), "kubernetes.io/config.source", "apps.openyurt.io/something"} {
		if g.chance(50) {
			m.Annotations[name] = g.text()
		}
	}
	if g.chance(30) {
		m.Annotations[excludeAnnotation] = []string{"true", "True", "false", ""}[g.IntN(4)]
	}
	if g.chance(20) {
		m.OwnerReferences = []metav1.OwnerReference{{APIVersion: "example.com/v1", Kind: "Thing", Name: g.name(), UID: types.UID(g.name()), BlockOwnerDeletion: new(g.chance(50))}}
	}
	if g.chance(10) {
		m.Labels["example.com/"+g.name()] = ""
	}
}

func (g generator) name() string { return fmt.Sprintf("n%x", g.Uint32()) }

func (g generator) placement(s *corev1.PodSpec) {
	if g.chance(30) {
		term := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: poolLabel, Operator: corev1.NodeSelectorOpIn, Values: []string{"host", g.name()}}}}
		s.Affinity = &corev1.Affinity{
			NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution:  &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}},
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 1 + g.Int32N(100), Preference: term}},
			},
			PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
				LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a1"}}, TopologyKey: "kubernetes.io/hostname", Namespaces: []string{"a"},
			}}},
		}
	}
	for _, effect := range []corev1.TaintEffect{"", corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute} {
		if g.chance(30) {
			s.Tolerations = append(s.Tolerations, corev1.Toleration{Key: g.name(), Operator: corev1.TolerationOpExists, Effect: effect})
		}
	}
	if g.chance(20) {
		s.NodeSelector = map[string]string{hostNetworkLabel: "true"}
	}
	if g.chance(20) {
		s.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: "zone", WhenUnsatisfiable: corev1.ScheduleAnyway, LabelSelector: &metav1.LabelSelector{}}}
	}
	if g.chance(10) {
		s.PriorityClassName = "system-node-critical"
	}
	if g.chance(10) {
		s.SchedulerName = "example.com-" + g.name()
	}
}

func (g generator) environment(s *corev1.PodSpec) {
	s.RestartPolicy = []corev1.RestartPolicy{"", corev1.RestartPolicyAlways, corev1.RestartPolicyNever, corev1.RestartPolicyOnFailure}[g.IntN(4)]
	if g.chance(30) {
		s.SecurityContext = &corev1.PodSecurityContext{
			RunAsUser: new(g.Int64N(2000)), FSGroup: new(int64(7)), SupplementalGroups: []int64{1, 2},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		}
		if !s.HostNetwork {
			s.SecurityContext.Sysctls = []corev1.Sysctl{{Name: "kernel.shm_rmid_forced", Value: "1"}}
		}
	}
	if g.chance(30) {
		s.HostAliases = []corev1.HostAlias{{IP: "192.0.2.1", Hostnames: []string{"a.example.com", "b"}}}
	}
	if g.chance(30) {
		s.DNSPolicy, s.DNSConfig = corev1.DNSNone, &corev1.PodDNSConfig{Nameservers: []string{"192.0.2.53"}, Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: new("2")}, {Name: "rotate"}}}
	}
	if g.chance(30) {
		s.Hostname, s.Subdomain, s.SetHostnameAsFQDN = "h", "sub", new(g.chance(50))
	}
	if g.chance(20) {
		s.AutomountServiceAccountToken = new(false)
	}
	if g.chance(20) {
		s.HostPID, s.OS = true, &corev1.PodOS{Name: corev1.Linux}
	}
	if g.chance(20) {
		s.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "example.com/ready"}}
	}
	if g.chance(20) {
		s.TerminationGracePeriodSeconds, s.ActiveDeadlineSeconds = new(g.Int64N(100)), new(1+g.Int64N(1e6))
	}
	if g.chance(20) {
		s.ImagePullSecrets, s.EnableServiceLinks = []corev1.LocalObjectReference{{Name: "s"}}, new(false)
	}
}

func (g generator) volumes(s *corev1.PodSpec) {
	ref := corev1.LocalObjectReference{Name: "r"}
	field := []corev1.DownwardAPIVolumeFile{{Path: "a/b", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.annotations"}, Mode: new(int32(0o400))}}
	for i, source := range []corev1.VolumeSource{
		{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: new(resource.MustParse("1.5Gi"))}},
		{EmptyDir: &corev1.EmptyDirVolumeSource{}},
		{HostPath: &corev1.HostPathVolumeSource{Path: "/x", Type: new(corev1.HostPathDirectoryOrCreate)}},
		{Secret: &corev1.SecretVolumeSource{SecretName: "s", DefaultMode: new(int32(0o444)), Optional: new(true)}},
		{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: ref, Items: []corev1.KeyToPath{{Key: "k", Path: "p"}}}},
		{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: field}},
		{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: "x", ExpirationSeconds: new(int64(3600)), Path: "t"}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: field}}, {Secret: &corev1.SecretProjection{LocalObjectReference: ref}},
		}}},
		{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c", ReadOnly: true}},
		{NFS: &corev1.NFSVolumeSource{Server: "nfs.example.com", Path: "/p"}},
		{ISCSI: &corev1.ISCSIVolumeSource{TargetPortal: "192.0.2.1:3260", IQN: "iqn.2001-04.com.example:storage.disk1", Lun: 1}},
		{CSI: &corev1.CSIVolumeSource{Driver: "csi.example.com", VolumeAttributes: map[string]string{"b": "1", "a": g.text()}}},
		{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		}}}},
		{Image: &corev1.ImageVolumeSource{Reference: "example.invalid/volume:1"}},
	} {
		if g.chance(20) {
			s.Volumes = append(s.Volumes, corev1.Volume{Name: fmt.Sprintf("v%d", i), VolumeSource: source})
		}
	}
}

func (g generator) container(name string, s *corev1.PodSpec, ports *[]int) corev1.Container {
	c := corev1.Container{Name: name, Image: "example.invalid/none:1", ImagePullPolicy: corev1.PullIfNotPresent}
	for _, v := range s.Volumes {
		if g.chance(50) {
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: v.Name, MountPath: "/m/" + v.Name, ReadOnly: true})
		}
	}
	for range g.IntN(3) {
		c.Ports = append(c.Ports, g.port(s.HostNetwork, ports))
	}
	if g.chance(40) {
		c.Env = []corev1.EnvVar{
			{Name: "KUBERNETES_SERVICE_HOST", Value: "192.0.2.1"}, {Name: "TEXT", Value: g.text()}, {Name: "TEXT", Value: "twice"},
			{Name: "IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
			{Name: "SECRET", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "s"}, Key: "k", Optional: new(false)}}},
		}
		c.EnvFrom = []corev1.EnvFromSource{{Prefix: "P_", ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "m"}}}}
	}
	if g.chance(40) {
		c.Resources = corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("0.1"), corev1.ResourceMemory: resource.MustParse("1e6")},
			Limits:   corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1500m"), corev1.ResourceMemory: resource.MustParse("128Mi")},
		}
	}
	if g.chance(40) {
		c.LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/x", Port: intstr.FromInt32(80), HTTPHeaders: []corev1.HTTPHeader{{Name: "X-Y", Value: "z"}}}}}
		c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"sh", "-c", g.text()}}}, PeriodSeconds: 3}
		c.StartupProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: 81, Service: new("svc")}}}
		c.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 1}}}
	}
	if g.chance(30) {
		c.SecurityContext = &corev1.SecurityContext{Privileged: new(true), Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"NET_ADMIN"}}}
		c.Command, c.Args, c.TTY, c.Stdin = []string{"/x"}, []string{g.text(), ""}, true, g.chance(50)
	}
	return c
}

// port is one that no other container of the pod has.
func (g generator) port(hostNetwork bool, ports *[]int) corev1.ContainerPort {
	n := int32(20000 + (*ports)[0])
	*ports = (*ports)[1:]
	p := corev1.ContainerPort{
		ContainerPort: n, Protocol: []corev1.Protocol{"", corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}[g.IntN(4)], HostIP: []string{"", "", "0.0.0.0", "10.0.0.1", "::"}[g.IntN(5)],
	}
	switch g.IntN(3) {
	case 0:
		p.HostPort = n
	case 1: // none, or what the API server makes of it on the host network
	default:
		if !hostNetwork {
			p.HostPort, p.ContainerPort = n, 80+n%1000
		}
	}
	return p
}
