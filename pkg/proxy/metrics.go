// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

type metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	inFlight *prometheus.GaugeVec
	refused  *prometheus.CounterVec
	bytes    prometheus.Counter
	panics   prometheus.Counter
	stalled  prometheus.Counter

	auditSuppressed prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_proxy_requests_total",
			Help: "Requests answered, by where the answer came from: upstream, feed (a live copy), replay (a record, the link is down) or local (made here). Code aborted: the stream was broken off.",
		}, []string{"verb", "resource", "code", "source"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "edgehub_proxy_request_duration_seconds",
			Help:    "Time to answer requests that end by themselves (no watches, logs, upgrades).",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"verb", "source"}),
		inFlight: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "edgehub_proxy_requests_in_flight",
			Help: "Requests being served: kind request ends by itself, kind stream lasts as long as the client wants.",
		}, []string{"kind"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_proxy_refused_total",
			Help: "Requests refused before they were looked at: not_canonical (path, query or headers with more than one meaning), requests_limit and streams_limit (too many in flight).",
		}, []string{"reason"}),
		bytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_proxy_response_bytes_total",
			Help: "Bytes of response bodies sent to clients, without upgraded connections.",
		}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_proxy_panics_total",
			Help: "Panics while serving that were caught. Each is a bug.",
		}),
		stalled: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_proxy_stalled_total",
			Help: "Responses that were ended because the client took nothing of them for too long.",
		}),
	}
	m.auditSuppressed = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "edgehub_proxy_audit_suppressed_total",
		Help: "Audit lines that were not written because there were too many at once.",
	})
	if reg != nil {
		reg.MustRegister(m.auditSuppressed, m.requests, m.duration, m.inFlight, m.refused, m.bytes, m.panics, m.stalled)
	}
	return m
}

func (m *metrics) observeRefused() { m.refused.WithLabelValues("not_canonical").Inc() }

// WithMetrics counts what passes. It needs the RequestInfo, and sees the status
// code that the client sees, also that of an aborted stream.
func WithMetrics(m *metrics) Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			r, ok := w.(*response)
			if !ok {
				r = &response{ResponseWriter: w}
			}
			kind := "request"
			if isLongRunning(req) {
				kind = "stream"
			}
			inFlight := m.inFlight.WithLabelValues(kind)
			inFlight.Inc()
			start, finished := time.Now(), false
			defer func() {
				inFlight.Dec()
				code := "aborted"
				if finished {
					code = codeLabel(r.code)
				}
				verb, resource := labels(infoFrom(req))
				m.requests.WithLabelValues(verb, resource, code, r.sourceLabel()).Inc()
				if kind == "request" {
					m.duration.WithLabelValues(verb, r.sourceLabel()).Observe(time.Since(start).Seconds())
				}
				m.bytes.Add(float64(r.bytes))
			}()
			next.ServeHTTP(r, req.WithContext(withResponse(req.Context(), r)))
			finished = true
		})
	}
}

// accessLogLevel is the verbosity that WithAccessLog needs.
const accessLogLevel = 3

// WithAccessLog logs, at verbosity 3, who asked what and from where it was
// answered: a request that ends by itself when it is over ("Answered"), a stream
// also when its answer begins ("Streaming"). Of the request it tells what the path
// names and the first word of the User-Agent; never a body, a query or a
// credential. It must be inside WithMetrics and outside WithUser.
func WithAccessLog() Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			logger, r := klog.FromContext(req.Context()).V(accessLogLevel), responseFrom(req.Context())
			if !logger.Enabled() || r == nil {
				next.ServeHTTP(w, req)
				return
			}
			start, finished := time.Now(), false
			log := func(message, code string) {
				logger.Info(message, append(accessValues(req, r), "code", code, "duration", time.Since(start))...)
			}
			if isLongRunning(req) {
				audited := r.onBegin
				r.onBegin = func() {
					if audited != nil {
						audited()
					}
					log("Streaming", codeLabel(r.code))
				}
			}
			defer func() {
				code := "aborted"
				if finished {
					code = codeLabel(r.code)
				}
				log("Answered", code)
			}()
			next.ServeHTTP(w, req)
			finished = true
		})
	}
}

func accessValues(req *http.Request, r *response) []any {
	info := infoFrom(req)
	resource := info.Resource
	if info.Subresource != "" {
		resource += "/" + info.Subresource
	}
	if !info.IsResourceRequest {
		resource = info.Path
	}
	return []any{"verb", info.Verb, "resource", resource, "namespace", info.Namespace, "name", info.Name,
		"user", r.user, "client", program(req.UserAgent()), "source", r.sourceLabel()}
}

// program is the name of the program in a User-Agent such as
// "kubelet/v1.36.0 (linux/amd64) kubernetes/1234567".
func program(userAgent string) string {
	const longest = 64 // the client chooses it
	name, _, _ := strings.Cut(userAgent, "/")
	name, _, _ = strings.Cut(name, " ")
	return name[:min(len(name), longest)]
}

// response notes what is sent. Everything else goes to the writer below it.
type response struct {
	http.ResponseWriter
	code    int
	bytes   int64
	source  string
	user    string               // empty: nobody that is known
	info    *request.RequestInfo // nil: the request was refused before
	long    bool                 // it is a stream
	onBegin func()               // called once code is set; nil: nobody wants to know

	stalls  *stalls      // nil: nobody looks
	writing atomic.Int64 // the look before the Write under way began; 0: none is
	ending  sync.Mutex   // guards ended
	ended   bool         // by its handler, or because it stalled
}

func (r *response) begin(code int) {
	r.code = code
	if r.onBegin != nil {
		r.onBegin()
	}
}

// Unwrap is for http.ResponseController, which sets deadlines through it.
func (r *response) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func (r *response) begun() bool { return r.code != 0 }

func (r *response) sourceLabel() string {
	if r.source == "" {
		return "local" // no transport was asked
	}
	return r.source
}

func (r *response) WriteHeader(code int) {
	if r.code == 0 && code >= 200 { // 1xx: the answer is still to come
		r.begin(code)
	}
	r.ResponseWriter.WriteHeader(code)
}

func (r *response) Write(p []byte) (int, error) {
	if r.code == 0 {
		r.begin(http.StatusOK)
	}
	r.beginWriting()
	n, err := r.ResponseWriter.Write(p)
	r.endWriting()
	r.bytes += int64(n)
	return n, err
}

// FlushError is for http.ResponseController.
func (r *response) FlushError() error {
	r.beginWriting()
	defer r.endWriting()
	return http.NewResponseController(r.ResponseWriter).Flush()
}

// Hijack is what ReverseProxy does with an upgraded connection; its 101 does not
// pass WriteHeader.
func (r *response) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(r.ResponseWriter).Hijack()
	if err == nil {
		r.begin(http.StatusSwitchingProtocols)
	}
	return conn, rw, err
}

type responseKey struct{}

func withResponse(ctx context.Context, r *response) context.Context {
	return context.WithValue(ctx, responseKey{}, r)
}

// responseFrom is the response under way, or nil outside WithMetrics.
func responseFrom(ctx context.Context) *response {
	r, _ := ctx.Value(responseKey{}).(*response)
	return r
}

func codeLabel(code int) string {
	switch {
	case code == 0:
		return "200" // net/http's, for a handler that wrote nothing
	case code < 100 || code > 599:
		return "other"
	}
	return strconv.Itoa(code)
}

// labels are from closed sets: what a client can make up becomes "other".
func labels(info *request.RequestInfo) (verb, resource string) {
	verb, resource = info.Verb, info.Resource
	if !knownVerbs.Has(verb) {
		verb = "other"
	}
	switch {
	case !info.IsResourceRequest:
		resource = "none"
	case !knownResources.Has(resource):
		resource = "other"
	}
	return verb, resource
}

var knownVerbs = sets.New("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "proxy", "post", "put", "head", "options")

// knownResources are Kubernetes' own by name, whatever their group, and the
// NodePools. Custom resources are "other".
var knownResources = sets.New(
	"apiservices", "bindings", "certificatesigningrequests", "clusterrolebindings", "clusterroles", "clustertrustbundles", "componentstatuses",
	"configmaps", "controllerrevisions", "cronjobs", "csidrivers", "csinodes", "csistoragecapacities", "customresourcedefinitions", "daemonsets",
	"deployments", "deviceclasses", "devicetaintrules", "endpoints", "endpointslices", "events", "flowschemas", "horizontalpodautoscalers",
	"ingressclasses", "ingresses", "ipaddresses", "jobs", "leasecandidates", "leases", "limitranges", "localsubjectaccessreviews",
	"mutatingadmissionpolicies", "mutatingadmissionpolicybindings", "mutatingwebhookconfigurations", "namespaces", "networkpolicies", "nodepools",
	"nodes", "persistentvolumeclaims", "persistentvolumes", "podcertificaterequests", "poddisruptionbudgets", "pods", "podtemplates",
	"priorityclasses", "prioritylevelconfigurations", "replicasets", "replicationcontrollers", "resourceclaims", "resourceclaimtemplates",
	"resourcequotas", "resourceslices", "rolebindings", "roles", "runtimeclasses", "secrets", "selfsubjectaccessreviews", "selfsubjectreviews",
	"selfsubjectrulesreviews", "serviceaccounts", "servicecidrs", "services", "statefulsets", "storageclasses", "storageversionmigrations",
	"storageversions", "subjectaccessreviews", "tokenreviews", "validatingadmissionpolicies", "validatingadmissionpolicybindings",
	"validatingwebhookconfigurations", "volumeattachments", "volumeattributesclasses", "workloads",
)
