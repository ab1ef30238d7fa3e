// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package contract keeps what edgehub promises for requests that are more than
// reading while the link is down: what kubelet must get done so that a node comes
// back after a reboot, and nothing else. It is an http.RoundTripper around the
// cache's; while the API server answers it only records and passes on.
//
//	own Node create       409 AlreadyExists if the Node is recorded
//	own Node status patch merged into a copy on this node; never sent later
//	own Lease get, update answered from a copy on this node; never sent later
//	own CSINode get       the record or 503; never 404, on which kubelet exits
//	TokenRequest          the recorded token of the same question
//	TokenReview, SubjectAccessReview of the node: the recorded yes, for a time
//	own Event create      kept on this node, sent when the link is back
//	own Event patch       404, so that client-go creates the Event anew
//
// Everything else fails with the error of the transport below. "Own" means: the
// caller is the node's identity and the object is the node's.
package contract

import (
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// Responses keeps whole answers, a user's apart from any other's, encrypted, over
// restarts. Implementations are safe for concurrent use, bounded, and own Body
// after the call.
type Responses interface {
	PutResponse(u user.Info, class, key string, r Response)
	Response(u user.Info, class, key string) (Response, bool)
}

// A Response is an answer as it was recorded. One without a ContentType stands for
// "there was one, and it does not hold any more".
type Response struct {
	ContentType string
	Body        []byte
	Time        time.Time
}

// Classes under which answers are kept.
const (
	ClassTokenRequest        = "tokenrequest"
	ClassTokenReview         = "tokenreview"
	ClassSubjectAccessReview = "subjectaccessreview"
)

// Config is what a Contract needs. All but the last three are required.
type Config struct {
	// Next answers while the link is up, and from records for what is read. An
	// apierrors.APIStatus that it returns as an error was made on this node; what
	// the API server says comes as a response.
	Next http.RoundTripper
	// Unavailable reports whether an error of Next means that the link is down
	// and nothing recorded answers.
	Unavailable func(error) bool
	Responses   Responses
	// Node is the node's own identity, system:node:<name>.
	Node func() user.Info
	// Outbox keeps the node's Events. Nil: while the link is down nobody can create one.
	Outbox Outbox
	// MaxVerdictAge is how long a recorded yes of a TokenReview or a
	// SubjectAccessReview counts while the link is down. Default 24 h.
	MaxVerdictAge time.Duration
	// Registerer gets the metrics. Nil: they are counted and not shown.
	Registerer prometheus.Registerer
}

// A Contract is the offline contract of one node. Safe for concurrent use.
type Contract struct {
	cfg     Config
	now     func() time.Time
	metrics *metrics
	lease   leaseCopy
	node    nodeOverlay

	maxNodeBytes int // of the own Node with its overlay, as JSON
}

var _ http.RoundTripper = (*Contract)(nil)

// New makes a Contract. It keeps copies of the own Node and Lease in memory only:
// after a restart they begin again with what is recorded.
func New(cfg Config) (*Contract, error) {
	if cfg.Next == nil || cfg.Unavailable == nil || cfg.Responses == nil || cfg.Node == nil {
		return nil, errors.New("contract: Next, Unavailable, Responses and Node are required")
	}
	if cfg.MaxVerdictAge == 0 {
		cfg.MaxVerdictAge = 24 * time.Hour
	}
	if cfg.Outbox == nil {
		cfg.Outbox = noOutbox{}
	}
	return &Contract{cfg: cfg, now: time.Now, metrics: newMetrics(cfg.Registerer), maxNodeBytes: maxObjectBytes}, nil
}

// RoundTrip answers req by its rule, or passes it on.
func (c *Contract) RoundTrip(req *http.Request) (*http.Response, error) {
	if rule := c.rule(req); rule != nil {
		return rule(req)
	}
	return c.cfg.Next.RoundTrip(req)
}

func isDryRun(u *url.URL) bool { return u.RawQuery != "" && u.Query().Has("dryRun") }

const nodeUserPrefix = "system:node:"

// rule is how a request is treated, nil for one that is passed on. What is asked
// for with dryRun has no effect to record or to stand in for.
func (c *Contract) rule(req *http.Request) func(*http.Request) (*http.Response, error) {
	info, known := request.RequestInfoFrom(req.Context())
	u, authenticated := request.UserFrom(req.Context())
	if !known || !authenticated || !info.IsResourceRequest || req.Method == http.MethodHead || isDryRun(req.URL) {
		return nil
	}
	if info.Verb == "list" || info.Verb == "watch" {
		return nil
	}
	node, ok := c.nodeName(u)
	if !ok && info.Verb != "create" {
		return nil
	}
	what := info.Verb + " " + info.Resource
	if info.Subresource != "" {
		what += "/" + info.Subresource
	}
	if info.APIGroup != "" {
		what += "." + info.APIGroup
	}
	if what == "create serviceaccounts/token" && info.APIVersion == "v1" {
		return c.createTokenRequest // of any user: each has records of its own
	}
	if !ok {
		return nil
	}
	if info.APIVersion != "v1" {
		return nil
	}
	switch what {
	case "create events", "create events.events.k8s.io":
		return c.createEvent
	case "patch events", "patch events.events.k8s.io":
		return c.patchEvent
	case "create tokenreviews.authentication.k8s.io":
		return c.createTokenReview
	case "create subjectaccessreviews.authorization.k8s.io":
		return c.createSubjectAccessReview
	case "create nodes":
		return c.createNode
	case "create csinodes.storage.k8s.io":
		return c.createCSINode
	case "create leases.coordination.k8s.io":
		if info.Namespace == leaseNamespace {
			return c.createLease
		}
	}
	if info.Name != node {
		return nil
	}
	switch what {
	case "get nodes":
		return c.getNode
	case "patch nodes/status":
		return c.patchNodeStatus
	case "get csinodes.storage.k8s.io":
		return c.getCSINode
	}
	if info.Namespace != leaseNamespace {
		return nil
	}
	switch what {
	case "get leases.coordination.k8s.io":
		return c.getLease
	case "update leases.coordination.k8s.io":
		return c.updateLease
	}
	return nil
}

// nodeName is the name of this node, if u is its identity.
func (c *Contract) nodeName(u user.Info) (string, bool) {
	node := c.cfg.Node()
	if node == nil || u.GetName() != node.GetName() || !slices.Contains(u.GetGroups(), user.NodesGroup) {
		return "", false
	}
	return strings.CutPrefix(u.GetName(), nodeUserPrefix)
}

func (c *Contract) createNode(req *http.Request) (*http.Response, error) {
	return c.createOwn(req, "/api/v1/nodes/", nodeKind)
}

func (c *Contract) createCSINode(req *http.Request) (*http.Response, error) {
	return c.createOwn(req, "/apis/storage.k8s.io/v1/csinodes/", csiNodeKind)
}

func (c *Contract) createLease(req *http.Request) (*http.Response, error) {
	return c.createOwn(req, leasePath, leaseKind)
}

// createOwn answers 409 for the creation of an object of the node's own that is
// recorded: kubelet takes it for "it is there" and goes on. path is of the
// object, without its name.
func (c *Contract) createOwn(req *http.Request, path string, kind schema.GroupVersionKind) (*http.Response, error) {
	req, body, err := buffer(req, maxObjectBytes)
	if err != nil {
		return nil, err
	}
	resp, err := c.cfg.Next.RoundTrip(req)
	if !c.unavailable(err) {
		return resp, err
	}
	u, _ := request.UserFrom(req.Context())
	node, _ := c.nodeName(u)
	if name, ok := nameOf(req.Header.Get("Content-Type"), body, kind); !ok || name != node {
		return nil, err
	}
	info, _ := request.RequestInfoFrom(req.Context())
	if !c.recorded(req, path+node, info) {
		return nil, err
	}
	c.metrics.answers.WithLabelValues("create_exists").Inc()
	return nil, apierrors.NewAlreadyExists(schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}, node)
}

// recorded reports whether Next holds the object at path, whose collection info is of.
func (c *Contract) recorded(req *http.Request, path string, info *request.RequestInfo) bool {
	resp, err := c.get(req, path, info)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// getCSINode turns "not recorded" into 503: on a 404 kubelet would create the
// CSINode, fail, and exit.
func (c *Contract) getCSINode(req *http.Request) (*http.Response, error) {
	resp, err := c.cfg.Next.RoundTrip(req)
	missing := err == nil && resp.StatusCode == http.StatusNotFound && !online(resp)
	if missing {
		resp.Body.Close()
	}
	if missing || apierrors.IsNotFound(err) {
		c.metrics.answers.WithLabelValues("csinode_unknown").Inc()
		return nil, newUnavailable("edgehub: the CSINode of this node is not recorded and the API server cannot be reached")
	}
	return resp, err
}

func (c *Contract) unavailable(err error) bool { return err != nil && c.cfg.Unavailable(err) }

func newUnavailable(message string) error {
	s := apierrors.NewServiceUnavailable(message)
	s.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: retrySeconds}
	return s
}

// offline reports whether an error means that nobody was there to ask, and nothing
// recorded answers.
func (c *Contract) offline(err error) bool {
	return c.unavailable(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsNotFound(err)
}
