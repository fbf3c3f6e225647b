{{/* The name of a component's objects; takes [root, component]. */}}
{{- define "specrej.name" -}}
{{- printf "%s-%s" (index . 0).Release.Name (index . 1) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Labels that select a component's pods. */}}
{{- define "specrej.selector" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{- define "specrej.labels" -}}
{{ include "specrej.selector" . }}
app.kubernetes.io/part-of: specrej
{{- end }}

{{- define "specrej.metadata" -}}
name: {{ include "specrej.name" . }}
labels:
  {{- include "specrej.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
  helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{/* An image of ours; takes [root, name]. */}}
{{- define "specrej.image" -}}
{{- $image := (index . 0).Values.image }}
{{- printf "%s/%s:%s" $image.registry (index . 1) ($image.tag | default (index . 0).Chart.AppVersion) }}
{{- end }}

{{- define "specrej.secret.tls" -}}
{{- $root := index . 0 }}
{{- get $root.Values.tls.existingSecrets (index . 1) | default (printf "%s-tls" (include "specrej.name" .)) }}
{{- end }}

{{- define "specrej.secret.redis" -}}
{{- .Values.redis.existingSecret | default (include "specrej.name" (list . "redis")) }}
{{- end }}

{{- define "specrej.claim" -}}
{{- .Values.models.volume.existingClaim | default (include "specrej.name" (list . "models")) }}
{{- end }}

{{/* What Kubernetes' restricted profile demands of a container. */}}
{{- define "specrej.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* A rule of egress to the cluster's DNS. */}}
{{- define "specrej.dns" -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
      podSelector:
        matchExpressions:
          - {key: k8s-app, operator: In, values: [kube-dns, node-local-dns]}
    # NodeLocal DNSCache.
    - ipBlock: {cidr: 169.254.20.10/32}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}
