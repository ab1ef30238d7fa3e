{{/*
Copyright The edgehub Authors.
SPDX-License-Identifier: Apache-2.0
*/}}

{{/* The chart's name, or the one that replaces it. */}}
{{- define "edgehub.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 43 | trimSuffix "-" -}}
{{- end -}}

{{/* The name of what is one of a release: 43 characters, since "-webhook-certificate" has 20. */}}
{{- define "edgehub.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 43 | trimSuffix "-" -}}
{{- else if contains (include "edgehub.name" .) .Release.Name -}}
{{- .Release.Name | trunc 43 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "edgehub.name" .) | trunc 43 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of everything: include "edgehub.labels" . */}}
{{- define "edgehub.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "edgehub.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: edgehub
{{- end -}}

{{/* Labels that select pods: include "edgehub.selectorLabels" (list . "webhook"). They must never change. */}}
{{- define "edgehub.selectorLabels" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: {{ include "edgehub.name" $ }}
app.kubernetes.io/instance: {{ $.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of a component's pods: without the chart's version, which need not restart them. */}}
{{- define "edgehub.podLabels" -}}
{{ include "edgehub.selectorLabels" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/part-of: edgehub
{{- end -}}

{{/* Labels of what belongs to one component: include "edgehub.componentLabels" (list . "webhook"). */}}
{{- define "edgehub.componentLabels" -}}
{{ include "edgehub.labels" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The image's reference; a digest goes before the tag. */}}
{{- define "edgehub.image" -}}
{{- $name := .Values.image.repository -}}
{{- with .Values.image.registry -}}{{- $name = printf "%s/%s" (trimSuffix "/" .) $name -}}{{- end -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $name .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The companion's name: of its Deployment, Service, ServiceAccount. */}}
{{- define "edgehub.webhookName" -}}
{{- printf "%s-webhook" (include "edgehub.fullname" .) -}}
{{- end -}}

{{/* "true" if the companion answers admission requests. */}}
{{- define "edgehub.servesAdmission" -}}
{{- if and .Values.webhook.enabled (ne .Values.admission.mode "policy") -}}true{{- end -}}
{{- end -}}

{{/* Affinity of pods that must not be on edge nodes. */}}
{{- define "edgehub.cloudAffinity" -}}
{{- if .Values.webhook.affinity -}}
{{- toYaml .Values.webhook.affinity -}}
{{- else -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions:
          - key: openyurt.io/is-edge-worker
            operator: NotIn
            values: ["true"]
{{- end -}}
{{- end -}}

{{/* The name of what is on edge nodes: DaemonSet, ServiceAccount. */}}
{{- define "edgehub.hubName" -}}
{{- printf "%s-hub" (include "edgehub.fullname" .) -}}
{{- end -}}

{{/* A number of values.yaml is a float, which would print 1e+09. */}}
{{- define "edgehub.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* The hub's flags as a YAML list of name=value, but for those that an installer finds out itself. */}}
{{- define "edgehub.hubFlags" -}}
{{- with .Values.hub -}}
- {{ printf "listen-address=127.0.0.1:%d" (int .port) | quote }}
- {{ printf "metrics-listen-address=%s:%d" ($.Values.metrics.exposeHub | ternary "0.0.0.0" "127.0.0.1") (int .metricsPort) | quote }}
{{- if and $.Values.metrics.exposeHub (not (hasKey .flags "allow-non-local-listen")) }}
- "allow-non-local-listen=true"
{{- end }}
- {{ printf "config-namespace=%s" $.Release.Namespace | quote }}
{{- range $name, $value := .flags }}
{{- if kindIs "slice" $value }}
{{- $all := list -}}
{{- range $value }}{{ $all = append $all (include "edgehub.scalar" .) }}{{ end }}
- {{ printf "%s=%s" $name (join "," $all) | quote }}
{{- else }}
- {{ printf "%s=%s" $name (include "edgehub.scalar" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Annotations of what runs before the release is removed: include "edgehub.retireHook" WEIGHT. */}}
{{- define "edgehub.retireHook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* The selector of edge nodes in kubectl's form. */}}
{{- define "edgehub.edgeNodes" -}}
{{- $all := list -}}
{{- range $k, $v := .Values.hub.nodeSelector -}}{{- $all = append $all (printf "%s=%s" $k $v) -}}{{- end -}}
{{- join " " $all -}}
{{- end -}}
