// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"encoding/json"
	"errors"
	"net/http"
	"sync"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	kjson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// nodeOverlay is the own Node as kubelet's status patches make it while nobody can
// be told. It stands on one recorded Node and falls with it: kubelet sends the
// whole difference again once the link is back.
type nodeOverlay struct {
	mu   sync.Mutex // guards what follows, and orders patches
	base string     // resourceVersion of the recorded Node under it
	node []byte     // JSON; nil: there is no overlay
}

func (o *nodeOverlay) drop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.base, o.node = "", nil
}

const nodeWarning = "the link to the API server is down: the status of the Node is kept on this node only and is not sent later"

// getNode shows the overlay in place of the recorded Node under it.
func (c *Contract) getNode(req *http.Request) (*http.Response, error) {
	resp, err := c.cfg.Next.RoundTrip(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		return resp, err
	}
	if online(resp) {
		c.node.drop()
		return resp, nil
	}
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	if c.node.node == nil {
		return resp, nil
	}
	body, err := readBody(resp, maxObjectBytes)
	if err != nil {
		return nil, err
	}
	recorded, err := nodeJSON(resp.Header.Get("Content-Type"), body)
	if err != nil { // a Table or the metadata alone: shown as recorded
		return resp, nil
	}
	overlay := c.node.over(recorded)
	if overlay == nil {
		return resp, nil
	}
	if local := nodeAnswer(req, overlay); local != nil {
		return local, nil
	}
	return resp, nil
}

// over returns the overlay, unless what is recorded is newer than what it stands on: then
// it falls. In another representation the record may be older. The caller holds mu.
func (o *nodeOverlay) over(recorded []byte) []byte {
	if o.node == nil {
		return nil
	}
	if order, err := resourceversion.CompareResourceVersion(resourceVersion(recorded), o.base); err != nil || order > 0 {
		o.base, o.node = "", nil
	}
	return o.node
}

// patchNodeStatus merges a status patch that cannot be sent. Without an answer to
// it kubelet would mount no attachable volume after a reboot.
func (c *Contract) patchNodeStatus(req *http.Request) (*http.Response, error) {
	req, patch, err := buffer(req, maxReviewBytes)
	if err != nil {
		return nil, err
	}
	resp, err := c.cfg.Next.RoundTrip(req)
	if err == nil && resp.StatusCode == http.StatusOK {
		c.node.drop()
	}
	merge, ok := merges[types.PatchType(mediaType(req.Header.Get("Content-Type")))]
	if !c.unavailable(err) || !ok || patch == nil {
		return resp, err
	}
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	recorded, ok := c.recordedNode(req)
	if !ok {
		return nil, err
	}
	base, current := resourceVersion(recorded), recorded
	if overlay := c.node.over(recorded); overlay != nil {
		base, current = c.node.base, overlay
	}
	patched, patchErr := patchStatus(current, patch, merge)
	if patchErr == nil && len(patched) > c.maxNodeBytes {
		patchErr = apierrors.NewRequestEntityTooLargeError("the patched Node is too large")
	}
	if patchErr != nil {
		return nil, patchErr
	}
	local := nodeAnswer(req, patched)
	if local == nil {
		return nil, err
	}
	c.node.base, c.node.node = base, patched
	c.metrics.answers.WithLabelValues("node_status").Inc()
	return local, nil
}

// recordedNode is the own Node as JSON, as Next has recorded it.
func (c *Contract) recordedNode(req *http.Request) ([]byte, bool) {
	info, _ := request.RequestInfoFrom(req.Context())
	resp, err := c.get(req, "/api/v1/nodes/"+info.Name, info)
	if err != nil {
		return nil, false
	}
	body, err := readBody(resp, maxObjectBytes)
	if err != nil || resp.StatusCode != http.StatusOK {
		return nil, false
	}
	node, err := nodeJSON(resp.Header.Get("Content-Type"), body)
	return node, err == nil
}

type mergeFunc func(original, patch []byte) ([]byte, error)

var merges = map[types.PatchType]mergeFunc{
	types.MergePatchType: jsonpatch.MergePatch,
	types.StrategicMergePatchType: func(original, patch []byte) ([]byte, error) {
		return strategicpatch.StrategicMergePatch(original, patch, corev1.Node{})
	},
}

// patchStatus does what the API server does for the status subresource: the spec
// stays, and so does what identifies the object; a uid or resourceVersion in the
// patch is a condition.
func patchStatus(node, patch []byte, merge mergeFunc) ([]byte, error) {
	merged, err := merge(node, patch)
	if err != nil {
		return nil, apierrors.NewBadRequest("the patch cannot be applied to the Node: " + err.Error())
	}
	var before, after map[string]any
	if err := errors.Join(kjson.Unmarshal(node, &before), kjson.Unmarshal(merged, &after)); err != nil || before == nil || after == nil {
		return nil, apierrors.NewBadRequest("the patch makes the Node no object")
	}
	metaBefore, _ := before["metadata"].(map[string]any)
	metaAfter, _ := after["metadata"].(map[string]any)
	if metaBefore == nil || metaAfter == nil {
		return nil, apierrors.NewBadRequest("the patch removes the metadata")
	}
	for _, key := range []string{"uid", "resourceVersion"} {
		if metaAfter[key] != metaBefore[key] {
			return nil, apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, metaString(metaBefore, "name"),
				errors.New("the patch was made for another "+key))
		}
	}
	for _, key := range []string{"name", "creationTimestamp", "deletionTimestamp", "generation", "managedFields"} {
		keep(metaAfter, metaBefore, key)
	}
	for _, key := range []string{"apiVersion", "kind", "spec"} {
		keep(after, before, key)
	}
	patched, err := json.Marshal(after)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	if err := kjson.Unmarshal(patched, &corev1.Node{}); err != nil {
		return nil, apierrors.NewBadRequest("the patch makes a Node that is none: " + err.Error())
	}
	return patched, nil
}

func keep(after, before map[string]any, key string) {
	if v, ok := before[key]; ok {
		after[key] = v
	} else {
		delete(after, key)
	}
}

func metaString(meta map[string]any, key string) string {
	s, _ := meta[key].(string)
	return s
}

func resourceVersion(node []byte) string {
	var object struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if err := kjson.Unmarshal(node, &object); err != nil {
		return ""
	}
	return object.Metadata.ResourceVersion
}

// nodeJSON gives a Node as JSON. What came as JSON keeps fields that this binary
// does not know.
func nodeJSON(contentType string, body []byte) ([]byte, error) {
	var node corev1.Node
	if err := decode(contentType, body, nodeKind, &node); err != nil {
		return nil, err
	}
	if mediaType(contentType) == mediaJSON {
		return body, nil
	}
	node.SetGroupVersionKind(nodeKind)
	return encodeJSON(&node)
}

// nodeAnswer gives a Node in the form that the client asked for, nil if the client
// takes no whole object.
func nodeAnswer(req *http.Request, nodeJSON []byte) *http.Response {
	accepted := acceptable(req)
	if len(accepted) == 0 {
		return nil
	}
	body := append(nodeJSON[:len(nodeJSON):len(nodeJSON)], '\n')
	if accepted[0] == mediaProtobuf {
		var node corev1.Node
		if err := kjson.Unmarshal(nodeJSON, &node); err != nil {
			return nil
		}
		var err error
		if body, err = encodeProtobuf(nodeKind, &node); err != nil {
			return nil
		}
	}
	return answer(req, http.StatusOK, accepted[0], body, sourceLocal, nodeWarning)
}
