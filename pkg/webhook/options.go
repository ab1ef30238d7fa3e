// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/edgehub/edgehub/pkg/cmdline"
	"github.com/edgehub/edgehub/pkg/webhook/pools"
)

// Who makes the certificate that the API server checks the companion by.
const (
	selfManaged = "self"   // the companion itself, which then also fills in the caBundles
	fromSecret  = "secret" // somebody else, such as cert-manager, into the same Secret
)

// Options are what flags set. The zero value is not valid: begin with DefaultOptions.
type Options struct {
	Kubeconfig string
	Namespace  string

	Admission            bool
	WebhookListenAddress string
	WebhookConfiguration string
	CertDir              string
	Certificates         string
	CertificateSecret    string
	CertificateNames     []string
	CertificateLifetime  time.Duration
	ClientCAFile         string
	ClientNames          []string

	NodePools       string
	Autonomy        bool
	ApproveServing  bool
	APIServerNames  bool
	ServingDNSNames []string
	ServingIPs      []string

	LeaderElect          bool
	MetricsListenAddress string
	ProbeListenAddress   string
}

// DefaultOptions returns the options that hold where no flag says otherwise.
func DefaultOptions() Options {
	return Options{
		Namespace: "edgehub-system", Admission: true,
		WebhookListenAddress: ":9443", WebhookConfiguration: "edgehub", CertDir: "/tmp/edgehub-webhook",
		Certificates: selfManaged, CertificateSecret: "edgehub-webhook-certificate", CertificateLifetime: 365 * 24 * time.Hour,
		NodePools: pools.Auto, Autonomy: true, ApproveServing: true,
		LeaderElect: true, MetricsListenAddress: ":8080", ProbeListenAddress: ":8081",
	}
}

// AddFlags adds a flag for each option, with the options' values as defaults, and
// klog's -v and --vmodule.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Kubeconfig, "kubeconfig", o.Kubeconfig, "File with the API server's address and a credential. Empty: those of the pod.")
	fs.StringVar(&o.Namespace, "namespace", o.Namespace, "Namespace of the companion: of its leader election and of its certificate's Secret.")

	fs.BoolVar(&o.Admission, "admission", o.Admission, "Serve admission webhooks. Off where admission policies do the same.")
	fs.StringVar(&o.WebhookListenAddress, "webhook-listen-address", o.WebhookListenAddress, "Address and port for the API server's admission requests, HTTPS.")
	fs.StringVar(&o.WebhookConfiguration, "webhook-configuration", o.WebhookConfiguration, "Name of the MutatingWebhookConfiguration whose caBundles are kept with --certificates=self.")
	fs.StringVar(&o.CertDir, "cert-dir", o.CertDir, "Directory, of this process alone, for the certificate that is served, taken from --certificate-secret.")
	fs.StringVar(&o.Certificates, "certificates", o.Certificates, "Who makes and renews the certificate in --certificate-secret: self, the companion, which also keeps the caBundles, or secret, somebody else, such as cert-manager.")
	fs.StringVar(&o.CertificateSecret, "certificate-secret", o.CertificateSecret, "Secret in --namespace with tls.crt and tls.key. It must be there; it may be empty with --certificates=self.")
	fs.StringSliceVar(&o.CertificateNames, "certificate-names", o.CertificateNames, "DNS names that the API server uses for the companion, the Service's first. Required with --certificates=self.")
	fs.DurationVar(&o.CertificateLifetime, "certificate-lifetime", o.CertificateLifetime, "How long a certificate of --certificates=self is valid; it is renewed when a third of that is left. The authority that signs lives ten times as long.")
	fs.StringVar(&o.ClientCAFile, "client-ca-file", o.ClientCAFile, "PEM file with the authorities of the certificates by which the API server shows who it is, as set in its AdmissionConfiguration; all without one are refused. Read at the start. Empty: anyone who reaches the address may ask.")
	fs.StringSliceVar(&o.ClientNames, "client-names", o.ClientNames, "Common names of which a certificate of --client-ca-file must have one. Empty: any.")

	fs.StringVar(&o.NodePools, "nodepools", o.NodePools, "Whether the companion keeps the host-network label of nodes and the status of NodePools: on, off, or auto, on where OpenYurt's yurt-manager is not there to do so.")
	fs.BoolVar(&o.Autonomy, "autonomy", o.Autonomy, "Let pods of NodePools and Nodes with the autonomy annotation stay when their node cannot be reached.")
	fs.BoolVar(&o.ApproveServing, "approve-serving-certificates", o.ApproveServing, "Approve the hubs' requests for serving certificates (edgehub --serving-certificate=csr).")
	fs.BoolVar(&o.APIServerNames, "approve-api-server-names", o.APIServerNames, "Let a hub's serving certificate be for the names and cluster IPs by which pods call the API server, which the hub's filters masterservice and forwardkubesvctraffic may lead to it. Whoever takes over a node can then be the API server to pods whose traffic it reaches.")
	fs.StringSliceVar(&o.ServingDNSNames, "serving-dns-names", o.ServingDNSNames, "Further DNS names that a hub's serving certificate may be for.")
	fs.StringSliceVar(&o.ServingIPs, "serving-ips", o.ServingIPs, "Further IP addresses that a hub's serving certificate may be for.")

	fs.BoolVar(&o.LeaderElect, "leader-elect", o.LeaderElect, "Let only one replica, the leader, write to the cluster. All replicas answer admission requests.")
	fs.StringVar(&o.MetricsListenAddress, "metrics-listen-address", o.MetricsListenAddress, "Address and port for /metrics, plain HTTP. Empty: none.")
	fs.StringVar(&o.ProbeListenAddress, "probe-listen-address", o.ProbeListenAddress, "Address and port for /livez and /readyz, plain HTTP. Empty: none.")

	cmdline.AddLogFlags(fs)
}

// Parse takes a command line, without the program's name, and returns all that is
// wrong with it. Help is printed and pflag.ErrHelp.
func (o *Options) Parse(args []string) error {
	fs := pflag.NewFlagSet("edgehub-webhook", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := cmdline.Parse(fs, args); err != nil {
		return err
	}
	return o.Validate()
}

// Validate reports all that is wrong with the values, each problem by its flag. It
// looks at no file.
func (o *Options) Validate() error {
	var problems []error
	wrong := func(flag, format string, args ...any) {
		problems = append(problems, fmt.Errorf("--%s: "+format, append([]any{flag}, args...)...))
	}
	if reasons := validation.IsDNS1123Label(o.Namespace); reasons != nil {
		wrong("namespace", "%q: %s", o.Namespace, strings.Join(reasons, "; "))
	}
	oneOf := func(flag, value string, values ...string) {
		if !slices.Contains(values, value) {
			wrong(flag, "%q is none of %s", value, strings.Join(values, ", "))
		}
	}
	oneOf("certificates", o.Certificates, selfManaged, fromSecret)
	oneOf("nodepools", o.NodePools, pools.Auto, pools.On, pools.Off)
	if o.Admission {
		if !filepath.IsAbs(o.CertDir) {
			wrong("cert-dir", "%q is not an absolute path", o.CertDir)
		}
		if o.Certificates == selfManaged && len(o.CertificateNames) == 0 {
			wrong("certificate-names", "required with --certificates=self: the name of the companion's Service, such as edgehub-webhook.%s.svc", o.Namespace)
		}
		for flag, value := range map[string]string{"certificate-secret": o.CertificateSecret, "webhook-configuration": o.WebhookConfiguration} {
			if reasons := validation.IsDNS1123Subdomain(value); reasons != nil {
				wrong(flag, "%q: %s", value, strings.Join(reasons, "; "))
			}
		}
		if o.CertificateLifetime < time.Minute {
			wrong("certificate-lifetime", "%v is less than 1m", o.CertificateLifetime)
		}
	}
	if len(o.ClientNames) > 0 && o.ClientCAFile == "" {
		wrong("client-names", "of no use without --client-ca-file")
	}
	for _, ip := range o.ServingIPs {
		if net.ParseIP(ip) == nil {
			wrong("serving-ips", "%q is no IP address", ip)
		}
	}
	for _, name := range o.ServingDNSNames {
		if reasons := validation.IsDNS1123Subdomain(name); reasons != nil {
			wrong("serving-dns-names", "%q: %s", name, strings.Join(reasons, "; "))
		}
	}
	for _, a := range []struct {
		flag, address string
		needed        bool
	}{
		{"webhook-listen-address", o.WebhookListenAddress, o.Admission},
		{"metrics-listen-address", o.MetricsListenAddress, false},
		{"probe-listen-address", o.ProbeListenAddress, false},
	} {
		if a.address == "" && !a.needed {
			continue
		}
		if _, _, err := splitAddress(a.address); err != nil {
			wrong(a.flag, "%v", err)
		}
	}
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(problems...)
}

// splitAddress takes host:port apart; the host may be empty, the port may not be 0.
func splitAddress(address string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, err
	}
	port, err = strconv.Atoi(p)
	if err != nil || port < 1 || port > 65535 {
		return "", 0, fmt.Errorf("%q: the port is not between 1 and 65535", address)
	}
	return host, port, nil
}
