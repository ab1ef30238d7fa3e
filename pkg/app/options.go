// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/edgehub/edgehub/pkg/cache"
	"github.com/edgehub/edgehub/pkg/cmdline"
	"github.com/edgehub/edgehub/pkg/linklocal"
)

// Options are what the command line says. DefaultOptions has the defaults.
type Options struct {
	ServerURLs   []string
	ServerCAFile string
	ClientCAFile string
	NodeCertFile string
	NodeKeyFile  string

	DataDir           string
	EncryptionKeyFile string
	EncryptAll        bool

	ListenAddress        string
	LinkLocalAddress     string
	LinkLocalInterface   string
	MetricsListenAddress string
	AllowNonLocalListen  bool
	ServingCertificate   string // servingLocal or servingBySigner
	ServingNames         []string

	CacheMaxBytes           int64
	CacheMaxScopes          int
	CacheMaxObjectsPerScope int
	FeedLinger              time.Duration
	SharedResources         []string // resource[.group]
	StrictInitialList       bool

	MaxRequestsInFlight  int
	MaxStreamsInFlight   int
	MaxBodyBytes         int64
	RequestTimeout       time.Duration
	ShutdownDrainTimeout time.Duration

	TokenAudiences       []string
	OfflineMaxAge        map[string]string // durations by class, see ageClasses
	OfflineTokenMaxAge   time.Duration
	OfflineVerdictMaxAge time.Duration

	FilterConfig    string
	ConfigNamespace string

	OutboxMaxEvents int
	OutboxMaxBytes  int64
	AuditLog        bool
}

// What ServingCertificate may be.
const (
	servingLocal    = "local"
	servingBySigner = "csr"
)

// ageClasses are the classes of --offline-max-age with their defaults; 0 is without end.
var ageClasses = map[string]time.Duration{"node": 0, "serviceaccount": 24 * time.Hour, "user": 24 * time.Hour}

// DefaultOptions fit a node that kubeadm has set up; --server-url has none.
func DefaultOptions() Options {
	return Options{
		ServerCAFile:            "/etc/kubernetes/pki/ca.crt",
		ClientCAFile:            "/etc/kubernetes/pki/ca.crt",
		NodeCertFile:            "/var/lib/kubelet/pki/kubelet-client-current.pem",
		NodeKeyFile:             "/var/lib/kubelet/pki/kubelet-client-current.pem",
		DataDir:                 "/var/lib/edgehub",
		ListenAddress:           "127.0.0.1:10268",
		LinkLocalInterface:      linklocal.DefaultInterface,
		MetricsListenAddress:    "127.0.0.1:10267",
		ServingCertificate:      servingLocal,
		CacheMaxBytes:           1 << 30,
		CacheMaxScopes:          2000,
		CacheMaxObjectsPerScope: 50000,
		FeedLinger:              10 * time.Minute,
		SharedResources:         []string{"services", "endpointslices.discovery.k8s.io"},
		MaxRequestsInFlight:     400,
		MaxStreamsInFlight:      4000,
		MaxBodyBytes:            3 << 20,
		RequestTimeout:          60 * time.Second,
		ShutdownDrainTimeout:    10 * time.Second,
		OfflineTokenMaxAge:      24 * time.Hour,
		OfflineVerdictMaxAge:    24 * time.Hour,
		OutboxMaxEvents:         2000,
		OutboxMaxBytes:          8 << 20,
		AuditLog:                true,
	}
}

// AddFlags adds a flag for each option, with the options' values as defaults, and
// klog's -v and --vmodule.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&o.ServerURLs, "server-url", o.ServerURLs, "API server as https://host:port, the preferred one first; repeat it for more. Required.")
	fs.StringVar(&o.ServerCAFile, "server-ca-file", o.ServerCAFile, "PEM file with the authorities that may have signed the API servers' certificates.")
	fs.StringVar(&o.ClientCAFile, "client-ca-file", o.ClientCAFile, "PEM file with the authorities whose client certificates are accepted; read again when it changes.")
	fs.StringVar(&o.NodeCertFile, "node-cert-file", o.NodeCertFile, "PEM file with the node's client certificate, the one that kubelet uses; read again when it changes.")
	fs.StringVar(&o.NodeKeyFile, "node-key-file", o.NodeKeyFile, "PEM file with the key of the node's client certificate; may be the same file.")

	fs.StringVar(&o.DataDir, "data-dir", o.DataDir, "Directory for what is recorded (journal/) and for the serving certificate (pki/; pki/ca.crt is what clients must trust).")
	fs.StringVar(&o.EncryptionKeyFile, "encryption-key-file", o.EncryptionKeyFile, "File with the keys for what is encrypted at rest, 32 bytes in base64 on each line: the first encrypts, all decrypt. Made when it is missing. Empty: the systemd credential edgehub.encryption-key if there is one, else encryption.key in --data-dir, which protects copies of journal/ only.")
	fs.BoolVar(&o.EncryptAll, "encrypt-all", o.EncryptAll, "Encrypt at rest all that is recorded, not only Secrets, tokens and verdicts. Names stay readable.")

	fs.StringVar(&o.ListenAddress, "listen-address", o.ListenAddress, "Address and port for clients on the host, HTTPS.")
	fs.StringVar(&o.LinkLocalAddress, "link-local-address", o.LinkLocalAddress, "Link-local address and port for pods with a network of their own, HTTPS, such as 169.254.2.1:10268. Empty: none.")
	fs.StringVar(&o.LinkLocalInterface, "link-local-interface", o.LinkLocalInterface, "Dummy interface that is made for --link-local-address unless that is on another one, and made again when it is removed; lo where the kernel has no dummy interfaces. Empty: the address must be there.")
	fs.StringVar(&o.MetricsListenAddress, "metrics-listen-address", o.MetricsListenAddress, "Address and port for /metrics, /livez, /readyz?verbose and /debug/pool, plain HTTP. Empty: none.")
	fs.BoolVar(&o.AllowNonLocalListen, "allow-non-local-listen", o.AllowNonLocalListen, "Allow addresses to listen on that other machines can reach.")
	fs.StringVar(&o.ServingCertificate, "serving-certificate", o.ServingCertificate, "Who signs the certificate that clients check edgehub by: local, a CA of this node alone (pki/ca.crt in --data-dir), or csr, the cluster's signer kubernetes.io/kubelet-serving, once somebody has approved the request; until then local.")

	fs.StringSliceVar(&o.ServingNames, "serving-names", o.ServingNames, "Further DNS names and IP addresses that the serving certificate is for, such as those of the API server that pods use, which filters lead to edgehub.")

	fs.Int64Var(&o.CacheMaxBytes, "cache-max-bytes", o.CacheMaxBytes, "Most bytes that records may take on disk; beyond, the least recently used go.")
	fs.IntVar(&o.CacheMaxScopes, "cache-max-scopes", o.CacheMaxScopes, "Most scopes (what one list or watch asked for, by whom) that are recorded.")
	fs.IntVar(&o.CacheMaxObjectsPerScope, "cache-max-objects-per-scope", o.CacheMaxObjectsPerScope, "Most objects of one scope that are recorded; a larger list passes by unrecorded.")
	fs.DurationVar(&o.FeedLinger, "feed-linger", o.FeedLinger, "How long a watch upstream outlives the last watch on the node that it feeds.")
	fs.StringSliceVar(&o.SharedResources, "shared-resources", o.SharedResources, "Resources, each as resource or resource.group, of which one watch of the node's own serves every client on the node that the API server allows to read them. Empty: none.")
	fs.BoolVar(&o.StrictInitialList, "strict-initial-list", o.StrictInitialList, "Send a WatchList without a resourceVersion to the API server while the link is up, for a state as consistent as a list's; else it begins with the state of a live watch.")

	fs.IntVar(&o.MaxRequestsInFlight, "max-requests-in-flight", o.MaxRequestsInFlight, "Most requests served at once per address, without watches, logs and upgrades; one more gets 429.")
	fs.IntVar(&o.MaxStreamsInFlight, "max-streams-in-flight", o.MaxStreamsInFlight, "Most watches, logs and upgrades served at once per address; one more gets 429.")
	fs.Int64Var(&o.MaxBodyBytes, "max-body-bytes", o.MaxBodyBytes, "Most bytes of a request's body; a larger one gets 413.")
	fs.DurationVar(&o.RequestTimeout, "request-timeout", o.RequestTimeout, "Longest time to answer a request that is no watch, log or upgrade.")
	fs.DurationVar(&o.ShutdownDrainTimeout, "shutdown-drain-timeout", o.ShutdownDrainTimeout, "How long requests under way may go on at shutdown; watches end after them.")

	fs.StringSliceVar(&o.TokenAudiences, "token-audiences", o.TokenAudiences, "Audiences that a ServiceAccount's token must be for to be accepted while the link is down without having been seen before: the API server's --api-audiences. Empty: the issuer.")
	fs.StringToStringVar(&o.OfflineMaxAge, "offline-max-age", o.OfflineMaxAge, "How long after the API server last showed something to a client it is shown to that client while the link is down, by class of client: "+ageDefaults()+". 0 is without end.")
	fs.DurationVar(&o.OfflineTokenMaxAge, "offline-token-max-age", o.OfflineTokenMaxAge, "How long after it was last verified a bearer token without an expiry is accepted while the link is down.")
	fs.DurationVar(&o.OfflineVerdictMaxAge, "offline-verdict-max-age", o.OfflineVerdictMaxAge, "How long the API server's yes to kubelet's TokenReviews and SubjectAccessReviews counts while the link is down.")

	fs.IntVar(&o.OutboxMaxEvents, "outbox-max-events", o.OutboxMaxEvents, "Most Events of kubelet's that wait for the link; beyond, the oldest go.")
	fs.Int64Var(&o.OutboxMaxBytes, "outbox-max-bytes", o.OutboxMaxBytes, "Most bytes of Events that wait for the link; beyond, the oldest go.")
	fs.BoolVar(&o.AuditLog, "audit-log", o.AuditLog, "Log a line for each request that is answered from this node or refused; of those that say the same of the same user 2 a second, after the first 50.")

	fs.StringVar(&o.FilterConfig, "filter-config", o.FilterConfig, "YAML file that says which filters are in force, and for whom; read again when it changes. Empty: none, and the defaults are in force.")
	fs.StringVar(&o.ConfigNamespace, "config-namespace", o.ConfigNamespace, "Namespace of the ConfigMap edgehub-config, whose config.yaml takes the place of --filter-config as long as it is there; the node must be allowed to watch it. Empty: none.")

	cmdline.AddLogFlags(fs)
}

// Parse takes a command line, without the program's name, and returns all that is
// wrong with it; Validate need not be called after it. Help is printed and
// pflag.ErrHelp.
func (o *Options) Parse(args []string) error {
	fs := pflag.NewFlagSet("edgehub", pflag.ContinueOnError)
	o.AddFlags(fs)
	// What was not understood has its default, or nothing: no words about that.
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
	if len(o.ServerURLs) == 0 {
		wrong("server-url", "required: where the API server is, such as https://10.0.0.1:6443")
	}
	for _, s := range o.ServerURLs {
		u, err := url.Parse(s)
		if err != nil || u.Scheme != "https" || u.Hostname() == "" || (u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.User != nil {
			wrong("server-url", "%q is not of the form https://host:port", s)
		}
	}
	for flag, file := range map[string]string{"server-ca-file": o.ServerCAFile, "client-ca-file": o.ClientCAFile, "node-cert-file": o.NodeCertFile, "node-key-file": o.NodeKeyFile} {
		if file == "" {
			wrong(flag, "required")
		}
	}
	if !filepath.IsAbs(o.DataDir) {
		wrong("data-dir", "%q is not an absolute path", o.DataDir)
	}
	for _, r := range o.SharedResources {
		if msgs := validation.IsDNS1123Subdomain(r); len(msgs) > 0 {
			wrong("shared-resources", "%q is not of the form resource or resource.group, such as endpointslices.discovery.k8s.io", r)
		}
	}
	for flag, n := range map[string]int64{
		"cache-max-bytes": o.CacheMaxBytes, "cache-max-scopes": int64(o.CacheMaxScopes), "cache-max-objects-per-scope": int64(o.CacheMaxObjectsPerScope),
		"outbox-max-events": int64(o.OutboxMaxEvents), "outbox-max-bytes": o.OutboxMaxBytes,
		"max-requests-in-flight": int64(o.MaxRequestsInFlight), "max-streams-in-flight": int64(o.MaxStreamsInFlight), "max-body-bytes": o.MaxBodyBytes,
	} {
		if n <= 0 {
			wrong(flag, "%d is not a limit; it must be above 0", n)
		}
	}
	for flag, d := range map[string]time.Duration{
		"feed-linger": o.FeedLinger, "request-timeout": o.RequestTimeout, "shutdown-drain-timeout": o.ShutdownDrainTimeout,
		"offline-token-max-age": o.OfflineTokenMaxAge, "offline-verdict-max-age": o.OfflineVerdictMaxAge,
	} {
		if d <= 0 {
			wrong(flag, "%v is not a time to wait; it must be above 0", d)
		}
	}
	if o.ServingCertificate != servingLocal && o.ServingCertificate != servingBySigner {
		wrong("serving-certificate", "%q is neither %s nor %s", o.ServingCertificate, servingLocal, servingBySigner)
	}
	for _, name := range o.ServingNames {
		if _, err := netip.ParseAddr(name); err != nil && validation.IsDNS1123Subdomain(name) != nil {
			wrong("serving-names", "%q is neither a DNS name nor an IP address", name)
		}
	}
	if o.FilterConfig != "" && !filepath.IsAbs(o.FilterConfig) {
		wrong("filter-config", "%q is not an absolute path", o.FilterConfig)
	}
	if msgs := validation.IsDNS1123Label(o.ConfigNamespace); o.ConfigNamespace != "" && len(msgs) > 0 {
		wrong("config-namespace", "%q is not the name of a namespace: %s", o.ConfigNamespace, strings.Join(msgs, "; "))
	}
	for class, text := range o.OfflineMaxAge {
		if _, ok := ageClasses[class]; !ok {
			wrong("offline-max-age", "%q is no class; there are %s", class, ageDefaults())
		}
		if d, err := time.ParseDuration(text); err != nil || d < 0 {
			wrong("offline-max-age", "%s=%s is not a time such as 24h, or 0 for without end", class, text)
		}
	}
	return errors.Join(append(sorted(problems), o.validateAddresses()...)...)
}

func (o *Options) validateAddresses() (problems []error) {
	flagOf := map[string]string{}
	for _, a := range []struct{ flag, value string }{
		{"listen-address", o.ListenAddress}, {"link-local-address", o.LinkLocalAddress}, {"metrics-listen-address", o.MetricsListenAddress},
	} {
		if a.value == "" && a.flag != "listen-address" {
			continue
		}
		if err := validateAddress(a.value, a.flag == "link-local-address", o.AllowNonLocalListen); err != nil {
			problems = append(problems, fmt.Errorf("--%s: %w", a.flag, err))
		} else if first, taken := flagOf[a.value]; taken {
			problems = append(problems, fmt.Errorf("--%s: %s is --%s's already", a.flag, a.value, first))
		}
		flagOf[a.value] = a.flag
	}
	return problems
}

func validateAddress(address string, linkLocal, anywhere bool) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%q is not of the form address:port", address)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return fmt.Errorf("%q: the port is not a number from 1 to 65535", address)
	}
	if n == 0 {
		return fmt.Errorf("%q: 0 is not a port; it would be a random one that no client knows. Name one from 1 to 65535", address)
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return fmt.Errorf("%q: %q is not an IP address", address, host)
	}
	switch {
	case linkLocal && ip.Is6() && ip.IsLinkLocalUnicast():
		return fmt.Errorf("%s: pods do not reach link-local addresses of IPv6; take one of fc00::/7", ip)
	case anywhere, ip.IsLinkLocalUnicast(), linkLocal && ip.Is6() && ip.IsPrivate(), !linkLocal && ip.IsLoopback():
		return nil
	case linkLocal:
		return fmt.Errorf("%s is not link-local (169.254.0.0/16, or fc00::/7 in IPv6); --allow-non-local-listen allows it", ip)
	}
	return fmt.Errorf("%s can be reached from other machines; --allow-non-local-listen allows it", ip)
}

// sorted puts the problems into the order of their texts, since maps have none.
func sorted(problems []error) []error {
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return problems
}

func (o *Options) sharedResources() []schema.GroupResource {
	all := make([]schema.GroupResource, 0, len(o.SharedResources))
	for _, r := range o.SharedResources {
		all = append(all, schema.ParseGroupResource(r))
	}
	return all
}

func (o *Options) encryptionKeyFile() string {
	if o.EncryptionKeyFile != "" {
		return o.EncryptionKeyFile
	}
	// What systemd has decrypted for this service alone, see LoadCredentialEncrypted=.
	if dir := os.Getenv("CREDENTIALS_DIRECTORY"); dir != "" {
		file := filepath.Join(dir, "edgehub.encryption-key")
		if _, err := os.Stat(file); err == nil {
			return file
		}
	}
	return filepath.Join(o.DataDir, "encryption.key")
}

// maxAges are the classes that were named, and the defaults of the others.
func (o *Options) maxAges() cache.MaxAges {
	of := func(class string) time.Duration {
		if d, err := time.ParseDuration(o.OfflineMaxAge[class]); err == nil {
			return d
		}
		return ageClasses[class]
	}
	return cache.MaxAges{Node: of("node"), ServiceAccount: of("serviceaccount"), User: of("user")}
}

func ageDefaults() string {
	var all []string
	for _, class := range slices.Sorted(maps.Keys(ageClasses)) {
		all = append(all, class+"="+ageClasses[class].String())
	}
	return strings.Join(all, ", ")
}

// hosts are the names and addresses that clients reach the proxy by.
func (o *Options) hosts() (hosts []string) {
	for _, address := range o.addresses() {
		if a, err := netip.ParseAddrPort(address); err == nil { // as Validate has seen
			hosts = append(hosts, a.Addr().String())
		}
	}
	return append(hosts, o.ServingNames...)
}

// hubForPods is where pods with a network of their own reach the proxy, else where the host
// does, which filters refuse.
func (o *Options) hubForPods() netip.AddrPort {
	addresses := o.addresses()
	at, _ := netip.ParseAddrPort(addresses[len(addresses)-1]) // as Validate has seen
	return at
}

// addresses are those of the proxy.
func (o *Options) addresses() []string {
	if o.LinkLocalAddress == "" {
		return []string{o.ListenAddress}
	}
	return []string{o.ListenAddress, o.LinkLocalAddress}
}
