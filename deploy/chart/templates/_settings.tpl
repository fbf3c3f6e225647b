{{/* The settings of each service, by name, before its own `settings` change them; take the root. */}}

{{- define "specrej.settings.common" -}}
host: 0.0.0.0
private_network: true
metrics_port: 9464
health_port: 9465
log_format: json
drain_s: 5
grace_s: {{ .Values.deadlineSeconds }}
{{- with .Values.monitoring.otlpEndpoint }}
otlp_endpoint: {{ . }}
{{- end }}
{{- if .Values.tls.enabled }}
tls_cert: /tls/tls.crt
tls_key: /tls/tls.key
{{- end }}
{{- end }}

{{- define "specrej.settings.gateway" -}}
port: 8000
deadline_s: {{ .Values.deadlineSeconds }}
orchestrator_address: {{ include "specrej.name" (list . "orchestrator") }}:50050
{{- if not .Values.tokens.existingSecret }}
allow_anonymous: true
{{- else if not .Values.tls.enabled }}
orchestrator_allow_plaintext_token: true
{{- end }}
{{- if .Values.tls.enabled }}
orchestrator_tls_ca: /tls/ca.crt
{{- end }}
{{- end }}

{{- define "specrej.settings.orchestrator" -}}
port: 50050
deadline_s: {{ .Values.deadlineSeconds }}
generator_address: {{ include "specrej.name" (list . "generator") }}:50051
reward_address: {{ include "specrej.name" (list . "reward") }}:50052
{{- if .Values.tokens.existingSecret }}
tokens_file: /tokens/tokens.jsonl
{{- else }}
allow_anonymous: true
{{- end }}
{{- if .Values.tls.enabled }}
reflection: false
backend_tls_ca: /tls/ca.crt
backend_tls_cert: /tls/tls.crt
backend_tls_key: /tls/tls.key
{{- end }}
{{- if or .Values.redis.enabled .Values.redis.url }}
redis_url: {{ .Values.redis.url | default (printf "redis://%s:6379/0" (include "specrej.name" (list . "redis"))) }}
redis_password_file: /redis/password
cache_secret_file: /redis/cache-secret
{{- end }}
{{- end }}

{{/* Of generator and reward; takes [root, values of the service]. */}}
{{- define "specrej.settings.backend" -}}
{{- /* Whole CPUs; without a limit the service chooses. */}}
{{- with (index . 1).resources.limits.cpu }}
threads: {{ ternary 1 (floor (toString .) | int | max 1) (hasSuffix "m" (toString .)) }}
{{- end }}
{{- if (index . 0).Values.tls.enabled }}
reflection: false
tls_client_ca: /tls/ca.crt
allowed_clients: orchestrator
{{- else }}
allow_anonymous: true
{{- end }}
{{- if (index . 1).gpus }}
device: cuda
{{- end }}
{{- end }}

{{- define "specrej.settings.generator" -}}
port: 50051
{{- include "specrej.settings.backend" (list . .Values.generator) | nindent 0 }}
{{- if .Values.generator.endpoint.url }}
engine: remote
remote_url: {{ .Values.generator.endpoint.url }}
model: {{ required "generator.endpoint.model: the endpoint's name of the model" .Values.generator.endpoint.model }}
{{- if .Values.generator.endpoint.existingSecret }}
remote_key_file: /endpoint/api-key
{{- end }}
{{- else if .Values.models.generator }}
model: {{ .Values.models.generator }}
{{- end }}
{{- end }}

{{- define "specrej.settings.reward" -}}
port: 50052
{{- include "specrej.settings.backend" (list . .Values.reward) | nindent 0 }}
{{- if .Values.reward.rewards }}
rewards:
  {{- toYaml .Values.reward.rewards | nindent 2 }}
{{- else if .Values.models.reward }}
rewards:
  - {name: helpful, kind: classifier, directory: {{ .Values.models.reward }}}
{{- end }}
{{- end }}

{{/* All of a service's, as YAML; takes [root, service]. */}}
{{- define "specrej.settings" -}}
{{- $root := index . 0 }}
{{- $common := include "specrej.settings.common" $root | fromYaml }}
{{- $own := include (printf "specrej.settings.%s" (index . 1)) $root | fromYaml }}
{{- /* Not merge, for which a false or a 0 of the values is as if absent. */}}
{{- toYaml (mergeOverwrite $common $own (deepCopy (get $root.Values (index . 1)).settings)) }}
{{- end }}

{{/* A setting as the value of a variable: lists and objects as JSON, whole numbers without an exponent. */}}
{{- define "specrej.value" -}}
{{- if or (kindIs "map" .) (kindIs "slice" .) }}{{ toJson . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}
{{- else }}{{ toString . }}
{{- end }}
{{- end }}
