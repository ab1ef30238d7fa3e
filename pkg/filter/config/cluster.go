// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/follow"
)

const (
	configMapName = "edgehub-config"
	configMapKey  = "config.yaml"
)

// cluster is the ConfigMap as the cluster has it.
type cluster struct {
	table *follow.Table[row]
	seen  *row  // what was looked at last
	err   error // or why it could not be
}

// A row is what the ConfigMap says. The zero one is none.
type row struct {
	exists, hasKey bool
	document       string
}

func followConfigMap(source follow.Source, namespace string) *cluster {
	query := follow.Query{GroupVersionResource: schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}, Namespace: namespace, Name: configMapName}
	return &cluster{table: follow.New(source, query, func(shape codec.Shape, bare []byte) (row, bool, error) {
		cm, err := filter.As[corev1.ConfigMap](filter.NewObject(shape, bare))
		if err != nil {
			return row{}, false, err
		}
		document, ok := cm.Data[configMapKey]
		return row{exists: true, hasKey: ok, document: document}, true, nil
	})}
}

var errNoKey = errors.New("has no key " + configMapKey)

func (k *Keeper) lookAtConfigMap(ctx context.Context, c *cluster) {
	if err := c.table.Err(); err != nil {
		k.unreadable(ctx, c, err)
		return
	}
	now, _ := c.table.Get(k.options.Namespace, configMapName)
	if c.seen != nil && *c.seen == now {
		return
	}
	c.seen, c.err = &now, nil
	switch {
	case !now.exists:
		klog.FromContext(ctx).V(2).Info("There is no ConfigMap with a configuration of filters", "name", k.configMap.name)
		k.withdraw(ctx, k.configMap)
	case !now.hasKey:
		k.offer(ctx, k.configMap, nil, fmt.Errorf("%s: %w", k.configMap.name, errNoKey))
	default:
		k.offer(ctx, k.configMap, []byte(now.document), nil)
	}
}

// unreadable notes why nothing is known of the ConfigMap. Only a no is worth a line: what
// else fails, does so while the link is down or the API server is not well.
func (k *Keeper) unreadable(ctx context.Context, c *cluster, err error) {
	var no *follow.Refusal
	code := 0
	if errors.As(err, &no) {
		code = no.Code
	}
	switch code {
	case http.StatusForbidden:
		err = fmt.Errorf("%s: the node may not get, list and watch it (403)", k.configMap.name)
	case http.StatusNotFound:
		err = fmt.Errorf("%s: is not there (404)", k.configMap.name)
	default:
		err = fmt.Errorf("%s: %w", k.configMap.name, err)
	}
	if c.err != nil && c.err.Error() == err.Error() {
		return
	}
	if code == http.StatusForbidden || code == http.StatusNotFound {
		klog.FromContext(ctx).Error(err, "ConfigMap with the configuration of filters cannot be read")
		set(k.metrics.valid, k.configMap.kind, false)
	}
	c.err, k.configMap.err = err, err
	k.publish()
}
