// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"net/http"

	"k8s.io/apimachinery/pkg/types"
)

// writes are requests that change something, and have no rule. Most are such as the
// operator may make; with dryRun=All they do nothing online.
var writes = []ask{
	post(configMapsA, `{"metadata":{"name":"new"}}`),
	post(configMapsA, `{"metadata":{"generateName":"new-"}}`),
	put(configMapsA+"/o-0", `{"metadata":{"name":"o-0"},"data":{"x":"y"}}`),
	patch(configMapsA+"/o-0", types.MergePatchType, []byte(`{"data":{"x":"y"}}`)),
	patch(configMapsA+"/o-0", types.StrategicMergePatchType, []byte(`{"data":{"x":"y"}}`)),
	patch(configMapsA+"/o-0", types.JSONPatchType, []byte(`[{"op":"add","path":"/data/x","value":"y"}]`)),
	patch(configMapsA+"/applied?fieldManager=x", types.ApplyYAMLPatchType, []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"applied"}}`)),
	del(configMapsA + "/o-0"),
	del(configMapsA), // all of them
	del(configMapsA + "?labelSelector=n%3D1"),
	post("/api/v1/namespaces/a/secrets", `{"metadata":{"name":"new"}}`),
	del("/api/v1/namespaces/a/secrets/o-0"),
	post("/api/v1/namespaces/a/serviceaccounts", `{"metadata":{"name":"new"}}`),
	post("/api/v1/namespaces", `{"metadata":{"name":"new"}}`),
	del("/api/v1/namespaces/b"),
	put("/api/v1/namespaces/a/finalize", `{"metadata":{"name":"a"},"spec":{"finalizers":["kubernetes"]}}`),

	post("/api/v1/namespaces/a/pods", `{"metadata":{"name":"new"},"spec":{"containers":[{"name":"c","image":"example.invalid/none:1"}]}}`),
	post("/api/v1/namespaces/a/pods", `{"metadata":{"name":"static","annotations":{"kubernetes.io/config.mirror":"x","kubernetes.io/config.source":"file"}},`+
		`"spec":{"nodeName":"n1","containers":[{"name":"c","image":"example.invalid/none:1"}]}}`),
	put("/api/v1/namespaces/a/pods/p/status", `{"metadata":{"name":"p"},"status":{"phase":"Failed"}}`),
	patch("/api/v1/namespaces/a/pods/p/status", types.StrategicMergePatchType, []byte(`{"status":{"phase":"Failed"}}`)),
	patch("/api/v1/namespaces/a/pods/p", types.MergePatchType, []byte(`{"metadata":{"labels":{"x":"y"}}}`)),
	patch("/api/v1/namespaces/a/pods/p/ephemeralcontainers", types.StrategicMergePatchType, []byte(`{"spec":{"ephemeralContainers":[{"name":"e","image":"example.invalid/none:1"}]}}`)),
	post("/api/v1/namespaces/a/pods/p/binding", `{"metadata":{"name":"p"},"target":{"kind":"Node","name":"n2"}}`),
	post("/api/v1/namespaces/a/bindings", `{"metadata":{"name":"p"},"target":{"kind":"Node","name":"n2"}}`),
	post("/api/v1/namespaces/a/pods/p/eviction", `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"p","namespace":"a"}}`),
	del("/api/v1/namespaces/a/pods/p"),
	del("/api/v1/namespaces/a/pods/p?gracePeriodSeconds=0"),
	del("/api/v1/namespaces/a/pods"),

	put(ownNode, `{"metadata":{"name":"n1","labels":{"x":"y"}}}`),
	put(ownNode+"/status", `{"metadata":{"name":"n1"},"status":{"phase":"Running"}}`),
	patch(ownNode, types.StrategicMergePatchType, []byte(`{"metadata":{"labels":{"x":"y"}}}`)),
	patch(ownNode, types.MergePatchType, []byte(`{"spec":{"taints":[{"key":"x","effect":"NoExecute"}]}}`)),
	del(ownNode),
	del("/api/v1/nodes"),
	post("/api/v1/nodes", `{"metadata":{"name":"n9"}}`),
	patch("/api/v1/nodes/n2/status", types.StrategicMergePatchType, []byte(`{"status":{"phase":"Running"}}`)),
	patch("/api/v1/nodes/n2", types.MergePatchType, []byte(`{"metadata":{"labels":{"x":"y"}}}`)),
	del("/api/v1/nodes/n2"),

	post(leases, `{"metadata":{"name":"n2"}}`),
	patch(leases+"/n2", types.MergePatchType, []byte(`{"spec":{"leaseDurationSeconds":41}}`)),
	del(leases),
	post("/apis/coordination.k8s.io/v1/namespaces/a/leases", `{"metadata":{"name":"leader"}}`),
	post("/apis/coordination.k8s.io/v1/namespaces/a/leases", `{"metadata":{"name":"n1"}}`),
	del(ownCSINode),
	patch(ownCSINode, types.MergePatchType, []byte(`{"metadata":{"labels":{"x":"y"}}}`)),
	post("/apis/storage.k8s.io/v1/csinodes", `{"metadata":{"name":"n9"}}`),

	post("/apis/apps/v1/namespaces/a/deployments", `{"metadata":{"name":"new"},"spec":{"selector":{"matchLabels":{"x":"y"}},`+
		`"template":{"metadata":{"labels":{"x":"y"}},"spec":{"containers":[{"name":"c","image":"example.invalid/none:1"}]}}}}`),
	patch("/apis/apps/v1/namespaces/a/deployments/none/scale", types.MergePatchType, []byte(`{"spec":{"replicas":1}}`)),
	post("/apis/certificates.k8s.io/v1/certificatesigningrequests", `{"metadata":{"name":"new"},"spec":{"signerName":"example.com/x","usages":["client auth"],"request":"eA=="}}`),
	post("/apis/example.com/v1/namespaces/a/widgets", `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"new"}}`),
	patch("/apis/example.com/v1/namespaces/a/widgets/w", types.MergePatchType, []byte(`{"spec":{"color":"blue"}}`)),
	del("/apis/example.com/v1/namespaces/a/widgets"),
	del(coreEvents),
}

func post(path, body string) ask { return ask{method: http.MethodPost, path: path, body: []byte(body)} }
func put(path, body string) ask  { return ask{method: http.MethodPut, path: path, body: []byte(body)} }
func del(path string) ask        { return ask{method: http.MethodDelete, path: path} }
