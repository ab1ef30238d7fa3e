// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
)

const (
	// auditPerSecond and auditBurst bound the lines that say the same of the same user:
	// what somebody does must not be hidden by what it, or another, does often.
	auditPerSecond = 2
	auditBurst     = 50
	// auditAllPerSecond and auditAllBurst bound all lines of a kind: a flood must not fill
	// the disk.
	auditAllPerSecond = 200
	auditAllBurst     = 2000
	// maxAuditSubjects is how many different lines are told apart.
	maxAuditSubjects = 2000
	// maxAuditValue bounds what a client chooses in a line.
	maxAuditValue = 256
)

// An audit writes down what the API server's own audit log cannot know: what was
// answered from this node, and what was refused here.
type audit struct {
	metrics           *metrics
	answered, refused auditKind
}

// An auditKind is bounded by itself.
type auditKind struct {
	message    string
	all        *rate.Limiter
	suppressed atomic.Int64 // since the last line

	mu       sync.Mutex // guards what follows
	subjects map[auditSubject]*rate.Limiter
}

// An auditSubject is what makes lines the same: all from closed sets but the user.
type auditSubject struct{ user, verb, resource, code string }

// allow reports whether another line may be written.
func (k *auditKind) allow(s auditSubject) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.subjects[s]
	if l == nil {
		if len(k.subjects) >= maxAuditSubjects {
			clear(k.subjects)
		}
		l = rate.NewLimiter(auditPerSecond, auditBurst)
		k.subjects[s] = l
	}
	return l.Allow() && k.all.Allow()
}

func newAudit(m *metrics) *audit {
	a := &audit{metrics: m}
	a.answered.message, a.refused.message = "Audit: answered from this node", "Audit: refused"
	for _, k := range []*auditKind{&a.answered, &a.refused} {
		k.all, k.subjects = rate.NewLimiter(auditAllPerSecond, auditAllBurst), map[auditSubject]*rate.Limiter{}
	}
	return a
}

// WithAudit logs one line for each request that was answered from the cache or by the
// offline contract, or refused here: who asked for what and what became of it; never a
// query, a body or a credential. A stream's line comes when its answer begins. What the
// API server answered, it audits itself. nil: nothing is logged.
func WithAudit(a *audit) Middleware {
	return func(next http.Handler) http.Handler {
		if a == nil {
			return next
		}
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			r, ok := w.(*response)
			if !ok {
				r = &response{ResponseWriter: w}
			}
			told := false
			tell := func(code string) {
				if !told {
					told = true
					a.tell(req, r, code)
				}
			}
			r.onBegin = func() {
				if r.long {
					tell(codeLabel(r.code))
				}
			}
			finished := false
			defer func() {
				if code := "aborted"; !finished {
					tell(code)
				}
			}()
			next.ServeHTTP(r, req)
			finished = true
			tell(codeLabel(r.code))
		})
	}
}

// kind is that of the line for a response; nil if there is none to be written.
func (a *audit) kind(r *response) *auditKind {
	switch {
	case r.source == "feed", r.source == "replay", r.source == "local":
		return &a.answered
	case r.source == "" && r.code >= http.StatusBadRequest:
		return &a.refused // nobody was asked, or nobody answered
	}
	return nil
}

func (a *audit) tell(req *http.Request, r *response, code string) {
	k := a.kind(r)
	if k == nil {
		return
	}
	subject := auditSubject{user: r.user, code: code}
	if r.info != nil {
		subject.verb, subject.resource = labels(r.info)
	}
	if !k.allow(subject) {
		k.suppressed.Add(1)
		a.metrics.auditSuppressed.Inc()
		return
	}
	host, _, _ := net.SplitHostPort(req.RemoteAddr) // "" for what is none
	values := []any{"user", r.user, "from", host, "client", program(req.UserAgent()), "method", bounded(req.Method)}
	if info := r.info; info != nil {
		resource := info.Resource
		if info.Subresource != "" {
			resource += "/" + info.Subresource
		}
		if info.IsResourceRequest {
			values = append(values, "verb", bounded(info.Verb), "group", bounded(info.APIGroup), "resource", bounded(resource), "namespace", bounded(info.Namespace), "name", bounded(info.Name))
		} else {
			values = append(values, "verb", bounded(info.Verb), "path", bounded(info.Path))
		}
	}
	values = append(values, "source", r.sourceLabel(), "code", code)
	if n := k.suppressed.Swap(0); n > 0 {
		values = append(values, "suppressed", n)
	}
	klog.FromContext(req.Context()).Info(k.message, values...)
}

func bounded(s string) string { return s[:min(len(s), maxAuditValue)] }
