// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/pkg/codec"
)

// NodeKnows reports whether an object, by its uid, is in what the node itself was last
// told of a resource as a whole, or by fields: of pods, those of the node. An object
// that is on its way out still is.
func (c *Cache) NodeKnows(gvr schema.GroupVersionResource, namespace, name, uid string) bool {
	n := c.node()
	l := c.logIfKnown(logName{User: n.user.GetName(), Identity: n.identity, Group: gvr.Group, Version: gvr.Version, Resource: gvr.Resource})
	if l == nil || uid == "" {
		return false
	}
	key := objectKey(namespace, name)
	l.mu.RLock()
	var in *scope // the newest whole state: it says what is gone, too
	for _, s := range l.scopes {
		if s.complete && s.key.Namespace == "" && s.key.Name == "" && s.key.LabelSelector == "" && (in == nil || compareRV(s.rv, in.rv) > 0) {
			in = s
		}
	}
	var o *object
	if in != nil {
		o = in.objects[key]
	}
	l.mu.RUnlock()
	if o == nil {
		return false
	}
	bare, err := in.read(o)
	if err != nil {
		return false
	}
	m, err := codec.ReadMeta(in.key.Representation, bare)
	return err == nil && m.UID == uid
}
