// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
)

// auditPolicy has everything logged, but the arrival of a request.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
`

// ErrNoAudit means that Config.Audit is not set.
var ErrNoAudit = errors.New("audit is off in controlplane.Config")

func (cp *ControlPlane) auditLog() string { return filepath.Join(cp.dir, "audit.log") }

// Requests returns the requests that have reached the API server at since or
// later (zero: ever), in the order of their first answer, one event each, the
// last one logged: stage ResponseStarted is a long-running request (a watch)
// that still runs, ResponseComplete one that is over. A request may be logged a
// moment after its client has the answer, so wait for what must be there.
func (cp *ControlPlane) Requests(since time.Time) ([]auditv1.Event, error) {
	if !cp.config.Audit {
		return nil, ErrNoAudit
	}
	f, err := os.Open(cp.auditLog())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var events []auditv1.Event
	index := map[string]int{} // by audit ID
	for r := bufio.NewReaderSize(f, 1<<20); ; {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return events, nil // a line without an end is still being written
		}
		if err != nil {
			return nil, err
		}
		var e auditv1.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("%s: %w", cp.auditLog(), err)
		}
		if e.RequestReceivedTimestamp.Time.Before(since) {
			continue
		}
		if i, ok := index[string(e.AuditID)]; ok {
			events[i] = e
			continue
		}
		index[string(e.AuditID)] = len(events)
		events = append(events, e)
	}
}

// Count returns how many of the requests are the user's, with this verb (get,
// list, watch, create, ...) and this resource ("pods", "nodes/status"). "" is
// any.
func Count(requests []auditv1.Event, user, verb, resource string) int {
	n := 0
	for _, e := range requests {
		if (user == "" || e.User.Username == user) && (verb == "" || e.Verb == verb) &&
			(resource == "" || resource == resourceOf(e)) {
			n++
		}
	}
	return n
}

// resourceOf returns the resource, and the subresource if there is one.
func resourceOf(e auditv1.Event) string {
	switch {
	case e.ObjectRef == nil:
		return ""
	case e.ObjectRef.Subresource == "":
		return e.ObjectRef.Resource
	default:
		return e.ObjectRef.Resource + "/" + e.ObjectRef.Subresource
	}
}
