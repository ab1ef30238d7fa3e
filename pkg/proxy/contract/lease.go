// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"net/http"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
)

const (
	leaseNamespace = "kube-node-lease"
	leasePath      = "/apis/coordination.k8s.io/v1/namespaces/" + leaseNamespace + "/leases/"
)

// leaseCopy is the own Lease as kubelet last wrote it while nobody could be told.
// It is gone as soon as the API server answers about the Lease again.
type leaseCopy struct {
	mu          sync.Mutex // guards what follows
	contentType string
	body        []byte // nil: there is none
}

func (l *leaseCopy) set(contentType string, body []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.contentType, l.body = contentType, body
}

func (l *leaseCopy) load() (contentType string, body []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.contentType, l.body
}

const leaseWarning = "the link to the API server is down: the Lease is kept on this node only and is not sent later"

// getLease answers from the copy on this node, or else from the record.
func (c *Contract) getLease(req *http.Request) (*http.Response, error) {
	resp, err := c.cfg.Next.RoundTrip(req)
	if err == nil && online(resp) {
		c.lease.set("", nil)
		return resp, nil
	}
	if err != nil && !c.offline(err) {
		return nil, err
	}
	contentType, body := c.lease.load()
	if body == nil {
		return resp, err
	}
	local := leaseAnswer(req, contentType, body)
	if local == nil {
		return resp, err
	}
	if resp != nil {
		resp.Body.Close()
	}
	c.metrics.answers.WithLabelValues("lease").Inc()
	return local, nil
}

// updateLease acknowledges an update that cannot be sent: the body comes back as
// it was, resourceVersion included, so that the next update after the outage is
// accepted upstream if nobody else wrote in between, and conflicts otherwise.
func (c *Contract) updateLease(req *http.Request) (*http.Response, error) {
	req, body, err := buffer(req, maxReviewBytes)
	if err != nil {
		return nil, err
	}
	resp, err := c.cfg.Next.RoundTrip(req)
	if err == nil && resp.StatusCode == http.StatusOK {
		c.lease.set("", nil)
		c.metrics.leases.Inc()
	}
	if !c.unavailable(err) || body == nil {
		return resp, err
	}
	contentType := req.Header.Get("Content-Type")
	info, _ := request.RequestInfoFrom(req.Context())
	var lease coordinationv1.Lease
	if decode(contentType, body, leaseKind, &lease) != nil || lease.Name != info.Name || (lease.Namespace != "" && lease.Namespace != info.Namespace) {
		return nil, err
	}
	local := leaseAnswer(req, contentType, body)
	if local == nil {
		return nil, err
	}
	c.lease.set(contentType, body)
	c.metrics.answers.WithLabelValues("lease").Inc()
	return local, nil
}

func leaseAnswer(req *http.Request, contentType string, body []byte) *http.Response {
	return localAnswer(req, http.StatusOK, written{contentType, body, leaseKind, &coordinationv1.Lease{}}, leaseWarning)
}
