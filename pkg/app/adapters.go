// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"time"

	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/edgehub/edgehub/pkg/cache"
	"github.com/edgehub/edgehub/pkg/identity"
	"github.com/edgehub/edgehub/pkg/proxy/contract"
	"github.com/edgehub/edgehub/pkg/upstream"
)

// Each package names what it needs by an interface of its own; here they meet.
var (
	_ contract.Responses = responses{}
	_ identity.Verdicts  = verdicts{}
	_ cache.Upstream     = (*upstream.Upstream)(nil)
)

// responses lets the offline contract keep answers in the cache.
type responses struct{ cache *cache.Cache }

func (r responses) PutResponse(u user.Info, class, key string, v contract.Response) {
	r.cache.PutResponse(u, class, key, cache.Response{ContentType: v.ContentType, Body: v.Body, Time: v.Time})
}

func (r responses) Response(u user.Info, class, key string) (contract.Response, bool) {
	v, ok := r.cache.Response(u, class, key)
	return contract.Response{ContentType: v.ContentType, Body: v.Body, Time: v.Time}, ok
}

// verdictClass is the class of identity's verdicts in the cache.
const verdictClass = "verdict"

// verdicts lets identity keep what it was told about tokens in the cache, among
// the records of the node.
type verdicts struct {
	cache *cache.Cache
	node  func() user.Info
}

// A verdict is stored behind one byte: the cache keeps no empty body, and an
// empty verdict has a meaning.
const verdictPrefix = '\x01'

func (v verdicts) Load(key string) ([]byte, bool) {
	r, ok := v.cache.Response(v.node(), verdictClass, key)
	if !ok || len(r.Body) == 0 || r.Body[0] != verdictPrefix {
		return nil, false
	}
	return r.Body[1:], true
}

func (v verdicts) Store(key string, verdict []byte) {
	v.cache.PutResponse(v.node(), verdictClass, key, cache.Response{ContentType: "application/json", Body: append([]byte{verdictPrefix}, verdict...), Time: time.Now()})
}
