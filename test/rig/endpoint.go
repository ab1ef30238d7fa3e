// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"

	"k8s.io/client-go/rest"
)

// The representations that clients ask for.
const (
	JSON             = "application/json"
	Protobuf         = "application/vnd.kubernetes.protobuf"
	MetadataProtobuf = Protobuf + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	MetadataJSON     = JSON + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

// WatchList asks for all that there is, and then for what changes.
const WatchList = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=3000"

// WatchAccept is the Accept of a watch of what accept lists: its frames hold
// single objects.
func WatchAccept(accept string) string {
	return strings.ReplaceAll(accept, "PartialObjectMetadataList", "PartialObjectMetadata")
}

// With adds parameters to a path.
func With(path, parameters string) string {
	if strings.Contains(path, "?") {
		return path + "&" + parameters
	}
	return path + "?" + parameters
}

// An Endpoint is the API server, or the hub in front of it, for one identity.
type Endpoint struct {
	URL    string
	Client *http.Client
}

// NewEndpoint makes an endpoint that uses client-go's transport.
func NewEndpoint(c *rest.Config) (*Endpoint, error) {
	rt, err := rest.TransportFor(c)
	if err != nil {
		return nil, err
	}
	return &Endpoint{URL: c.Host, Client: &http.Client{Transport: rt}}, nil
}

// Direct is an endpoint of the API server itself.
func (r *Rig) Direct(c *rest.Config) *Endpoint {
	r.T.Helper()
	e, err := NewEndpoint(c)
	r.Must(err)
	return e
}

// Through is an endpoint of the hub with the credentials of c. The hub must have
// been started once.
func (r *Rig) Through(c *rest.Config) *Endpoint {
	r.T.Helper()
	return r.Direct(r.Hub.Through(c))
}

// Do sends a request; the answer's body is the caller's to close.
func (e *Endpoint) Do(ctx context.Context, method, path string, header http.Header, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, e.URL+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	return e.Client.Do(req)
}

// Get sends a GET; the body is the caller's to close.
func (e *Endpoint) Get(ctx context.Context, path, accept string) (*http.Response, error) {
	return e.Do(ctx, http.MethodGet, path, http.Header{"Accept": {accept}}, nil)
}

// Fetch sends a GET and reads the whole answer.
func (e *Endpoint) Fetch(ctx context.Context, path, accept string) (int, []byte, error) {
	resp, err := e.Get(ctx, path, accept)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, b, err
}

// List sends a GET and reads a list of 200; any other status is not an error.
func (e *Endpoint) List(ctx context.Context, path, accept string) (List, int, error) {
	status, body, err := e.Fetch(ctx, path, accept)
	if err != nil || status != http.StatusOK {
		return List{}, status, err
	}
	l, err := ReadList(body)
	return l, status, err
}
