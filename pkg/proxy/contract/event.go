// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/klog/v2"
)

// maxEventBytes bounds an Event that may wait: it has some kilobytes.
const maxEventBytes = 1 << 20

// Outbox keeps the node's Events until they can be sent. Implementations are safe for
// concurrent use.
type Outbox interface {
	// Put keeps e, durably once it returns nil; after an error it does not. One of the
	// same namespace and name takes the place of the one that waits. The body is the
	// implementation's after the call.
	Put(ctx context.Context, e Event) error
	// Holds reports whether an Event waits.
	Holds(namespace, name string) bool
	// Empty reports whether none does.
	Empty() bool
}

// An Event is a request to create one, as it came but for a name that was generated.
type Event struct {
	Group, Namespace, Name string
	ContentType            string
	Body                   []byte
}

// noOutbox is the Outbox of a Config without any.
type noOutbox struct{}

func (noOutbox) Put(context.Context, Event) error { return errNoOutbox }
func (noOutbox) Holds(string, string) bool        { return false }
func (noOutbox) Empty() bool                      { return true }

var errNoOutbox = newUnavailable("edgehub: the API server cannot be reached, and Events are not kept")

const eventWarning = "the Event is kept on this node and is sent once the API server can be reached"

// createEvent keeps an Event that cannot be sent now, or has to wait for those before
// it.
func (c *Contract) createEvent(req *http.Request) (*http.Response, error) {
	req, body, err := buffer(req, maxEventBytes)
	if err != nil {
		return nil, err
	}
	if !c.cfg.Outbox.Empty() {
		if resp := c.keepEvent(req, body); resp != nil {
			return resp, nil
		}
	}
	resp, err := c.cfg.Next.RoundTrip(req)
	if c.unavailable(err) {
		if kept := c.keepEvent(req, body); kept != nil {
			return kept, nil
		}
	}
	return resp, err
}

// keepEvent returns nil for what it cannot keep or not answer with.
func (c *Contract) keepEvent(req *http.Request, body []byte) *http.Response {
	info, _ := request.RequestInfoFrom(req.Context())
	contentType := req.Header.Get("Content-Type")
	kind := schema.GroupVersionKind{Group: info.APIGroup, Version: "v1", Kind: "Event"}
	var event object = &corev1.Event{}
	if info.APIGroup != "" {
		event = &eventsv1.Event{}
	}
	if body == nil || decode(contentType, body, kind, event) != nil {
		return nil
	}
	meta, ok := event.(metav1.Object)
	if !ok || meta.GetNamespace() != "" && meta.GetNamespace() != info.Namespace {
		return nil
	}
	if meta.GetName() == "" {
		if body = named(contentType, kind, event, meta); body == nil {
			return nil
		}
	}
	resp := localAnswer(req, http.StatusCreated, written{contentType, body, kind, event}, eventWarning)
	if resp == nil {
		return nil
	}
	e := Event{Group: info.APIGroup, Namespace: info.Namespace, Name: meta.GetName(), ContentType: contentType, Body: body}
	if err := c.cfg.Outbox.Put(req.Context(), e); err != nil {
		klog.FromContext(req.Context()).V(2).Info("Event cannot be kept", "namespace", info.Namespace, "name", e.Name, "reason", err)
		return nil
	}
	c.metrics.answers.WithLabelValues("event_create").Inc()
	return resp
}

// named gives an Event the name that the API server would, now: sent twice it must be
// the same one. Nil if it wants none.
func named(contentType string, kind schema.GroupVersionKind, event object, meta metav1.Object) []byte {
	if meta.GetGenerateName() == "" {
		return nil
	}
	meta.SetName(names.SimpleNameGenerator.GenerateName(meta.GetGenerateName()))
	event.GetObjectKind().SetGroupVersionKind(kind)
	encode := func() ([]byte, error) { return encodeJSON(event) }
	if mediaType(contentType) == mediaProtobuf {
		encode = func() ([]byte, error) { return encodeProtobuf(kind, event) }
	}
	body, err := encode()
	if err != nil {
		return nil
	}
	return body
}

// patchEvent lets client-go create an Event whose PATCH nobody can answer, or which
// has not been sent yet.
func (c *Contract) patchEvent(req *http.Request) (*http.Response, error) {
	info, _ := request.RequestInfoFrom(req.Context())
	missing := c.cfg.Outbox.Holds(info.Namespace, info.Name)
	var resp *http.Response
	var err error
	if !missing {
		resp, err = c.cfg.Next.RoundTrip(req)
		missing = c.unavailable(err)
	}
	if missing {
		c.metrics.answers.WithLabelValues("event_patch").Inc()
		return nil, apierrors.NewNotFound(schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}, info.Name)
	}
	return resp, err
}
