{{/* Account, Service, budget and pods of a component. Takes root, name, values, port, container, volumes, user; and
kind, headless, autoscaled, annotations (of pods), initContainers, grace, strategy where they differ. */}}
{{- define "specrej.component" -}}
{{- $own := list .root .name }}
{{- $kind := .kind | default "Deployment" }}
{{- $service := .values.service | default dict }}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "specrej.metadata" $own | nindent 2 }}
automountServiceAccountToken: false
---
apiVersion: v1
kind: Service
metadata:
  {{- include "specrej.metadata" $own | nindent 2 }}
  {{- with $service.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if .headless }}
  # The name resolves to every ready pod; connections are long-lived, and clients balance over all.
  clusterIP: None
  {{- else }}
  type: {{ $service.type | default "ClusterIP" }}
  {{- end }}
  publishNotReadyAddresses: false
  selector:
    {{- include "specrej.selector" $own | nindent 4 }}
  ports:
    {{- toYaml .ports | nindent 4 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "specrej.metadata" $own | nindent 2 }}
spec:
  maxUnavailable: 1
  # An unhealthy pod does not block the drain of a node.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "specrej.selector" $own | nindent 6 }}
---
apiVersion: apps/v1
kind: {{ $kind }}
metadata:
  {{- include "specrej.metadata" $own | nindent 2 }}
spec:
  {{- if not .autoscaled }}
  replicas: {{ .values.replicas | default 1 }}
  {{- end }}
  revisionHistoryLimit: 3
  {{- if and .headless (ne .name "redis") }}
  # Wait before replacing the next pod: clients discover this one by DNS lookups at intervals.
  minReadySeconds: 30
  {{- end }}
  {{- if eq $kind "StatefulSet" }}
  serviceName: {{ include "specrej.name" $own }}
  podManagementPolicy: Parallel
  {{- else }}
  # Readiness waits for models, or for the services behind this one.
  progressDeadlineSeconds: 2400
  strategy:
    {{- .strategy | default "rollingUpdate: {maxUnavailable: 0, maxSurge: 1}" | nindent 4 }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "specrej.selector" $own | nindent 6 }}
  template:
    {{- include "specrej.pod" . | nindent 4 }}
{{- end }}

{{/* A template of pods; takes what specrej.component does, and restartPolicy. */}}
{{- define "specrej.pod" -}}
{{- $root := .root }}
{{- $values := .values }}
{{- $gpus := int ($values.gpus | default 0) }}
metadata:
  labels:
    {{- include "specrej.labels" (list .root .name) | nindent 4 }}
    {{- with $root.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := merge dict $root.Values.podAnnotations (.annotations | default dict) }}
  {{- if and $root.Values.monitoring.annotations .metrics }}
  {{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/port" "9464" "prometheus.io/path" "/metrics") }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "specrej.name" (list .root .name) }}
  automountServiceAccountToken: false
  # Kubernetes' service variables, such as REDIS_PORT, are not used and resemble settings.
  enableServiceLinks: false
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ .grace | default 30 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ first .user }}
    runAsGroup: {{ last .user }}
    fsGroup: {{ last .user }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with concat ($values.tolerations | default list) (ternary (list (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule")) list (gt $gpus 0)) }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if not .restartPolicy }}
  topologySpreadConstraints:
    {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - topologyKey: {{ . }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      nodeTaintsPolicy: Honor
      # Pods of the old revision do not count.
      matchLabelKeys: [{{ ternary "controller-revision-hash" "pod-template-hash" (eq ($.kind | default "") "StatefulSet") }}]
      labelSelector:
        matchLabels:
          {{- include "specrej.selector" (list $root $.name) | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- with .initContainers }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .name }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- .container | nindent 6 }}
      resources:
        requests:
          {{- toYaml $values.resources.requests | nindent 10 }}
        limits:
          {{- toYaml $values.resources.limits | nindent 10 }}
          {{- if $gpus }}
          {{ $values.gpuResource }}: {{ $gpus | quote }}
          {{- end }}
      securityContext:
        {{- include "specrej.restricted" . | nindent 8 }}
  volumes:
    {{- .volumes | nindent 4 }}
{{- end }}
