{{/*
Copyright The edgehub Authors.
SPDX-License-Identifier: Apache-2.0

The rule of pkg/webhook/exclude in CEL. What is changed here must be changed there.
*/}}

{{/* The annotation's value, "" without: include "edgehub.cel.value" "object.metadata". */}}
{{- define "edgehub.cel.value" -}}
{{ . }}.?annotations[?"apps.openyurt.io/exclude-host-network-pool"].orValue("")
{{- end -}}

{{/*
The same of the pod template in an object: its own, that of a CronJob's job template, or
that of the one template in a template that some kinds of OpenKruise have.
*/}}
{{- define "edgehub.cel.template" -}}
{{ . }}.?spec.?jobTemplate.?spec.?template
{{- range list "jobTemplate" "broadcastJobTemplate" "statefulSetTemplate" "advancedStatefulSetTemplate" "cloneSetTemplate" "deploymentTemplate" }}
  .or({{ $ }}.?spec.?template.?{{ . }}.?spec.?template)
{{- end }}
  .or({{ . }}.?spec.?template)
{{- end -}}

{{- define "edgehub.cel.templateValue" -}}
{{ include "edgehub.cel.value" (printf "%s\n  .?metadata" (include "edgehub.cel.template" .)) }}
{{- end -}}

{{/* Whether nobody expects an effect of a value: include "edgehub.cel.silent" "variables.value". */}}
{{- define "edgehub.cel.silent" -}}
{{ . }}.lowerAscii().trim() in ["", "false", "f", "no", "n", "off", "0", "disabled"]
{{- end -}}

{{/* Whether a Pod only shows a static pod of a kubelet's. */}}
{{- define "edgehub.cel.mirror" -}}
object.metadata.?annotations[?"kubernetes.io/config.mirror"].hasValue()
{{- end -}}

{{/* Whether a DaemonSet made the Pod for its node. */}}
{{- define "edgehub.cel.ofDaemonSet" -}}
object.metadata.?ownerReferences.orValue([]).exists(r, r.?controller.orValue(false) && r.kind == "DaemonSet" &&
  (r.apiVersion.startsWith("apps/") || r.apiVersion.startsWith("apps.kruise.io/")))
{{- end -}}

{{/* Whether the affinity of a Pod may still be changed and counts: on its way to the scheduler. */}}
{{- define "edgehub.cel.placeable" -}}
(request.operation == "CREATE" || size(oldObject.spec.?schedulingGates.orValue([])) > 0) &&
object.spec.?nodeName.orValue("") == "" &&
!{{ include "edgehub.cel.ofDaemonSet" . }}
{{- end -}}

{{/* Whether a Pod gets the node affinity. */}}
{{- define "edgehub.cel.injectsPod" -}}
{{ include "edgehub.cel.value" "object.metadata" }} == "true" &&
!{{ include "edgehub.cel.mirror" . }} &&
{{ include "edgehub.cel.placeable" . }}
{{- end -}}

{{/* Whether the template of a DaemonSet gets it: never if the request leaves the template alone. */}}
{{- define "edgehub.cel.injectsDaemonSet" -}}
{{ include "edgehub.cel.value" "object.?spec.?template.?metadata" }} == "true" &&
object.?spec.?template.?spec.orValue(null) != null &&
(request.operation == "CREATE" || object.?spec.?template != oldObject.?spec.?template)
{{- end -}}

{{/* Whether there may be something to warn of: it is new, and nobody has been told yet. */}}
{{- define "edgehub.cel.noteworthy" -}}
(request.operation == "CREATE" ||
  {{ include "edgehub.cel.value" "object.metadata" }} != {{ include "edgehub.cel.value" "oldObject.metadata" }} ||
  request.resource.resource != "pods" && object.?spec != oldObject.?spec) &&
(!({{ include "edgehub.cel.value" "object.metadata" | include "edgehub.cel.silent" }}) ||
  !({{ include "edgehub.cel.templateValue" "object" | nindent 2 | trim | include "edgehub.cel.silent" }}) ||
  request.operation == "UPDATE" && request.resource.resource == "daemonsets" &&
  {{ include "edgehub.cel.value" "oldObject.?spec.?template.?metadata" }} == "true") &&
(request.resource.resource == "pods" ?
  !{{ include "edgehub.cel.mirror" . }} :
  request.resource.resource == "daemonsets" || !object.metadata.?ownerReferences.orValue([]).exists(r, r.?controller.orValue(false)))
{{- end -}}

{{/* Everything that has pods, as rules of a webhook or a policy. */}}
{{- define "edgehub.admission.workloads" -}}
- apiGroups: [""]
  apiVersions: [v1]
  operations: [CREATE, UPDATE]
  resources: [pods, replicationcontrollers]
- apiGroups: [apps]
  apiVersions: [v1]
  operations: [CREATE, UPDATE]
  resources: [daemonsets, deployments, replicasets, statefulsets]
- apiGroups: [batch]
  apiVersions: [v1]
  operations: [CREATE, UPDATE]
  resources: [cronjobs, jobs]
- apiGroups: [apps.kruise.io]
  apiVersions: ["*"]
  operations: [CREATE, UPDATE]
  resources: [advancedcronjobs, broadcastjobs, clonesets, daemonsets, statefulsets, uniteddeployments]
{{- end -}}

{{- define "edgehub.admission.pods" -}}
- apiGroups: [""]
  apiVersions: [v1]
  operations: [CREATE, UPDATE]
  resources: [pods]
{{- end -}}

{{- define "edgehub.admission.daemonsets" -}}
- apiGroups: [apps]
  apiVersions: [v1]
  operations: [CREATE, UPDATE]
  resources: [daemonsets]
- apiGroups: [apps.kruise.io]
  apiVersions: [v1alpha1, v1beta1]
  operations: [CREATE, UPDATE]
  resources: [daemonsets]
{{- end -}}

{{/* All namespaces but those that must work without the companion. */}}
{{- define "edgehub.admission.namespaces" -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values:
      {{- concat (list "kube-system" .Release.Namespace) .Values.admission.exemptNamespaces | uniq | toYaml | nindent 6 }}
{{- end -}}
