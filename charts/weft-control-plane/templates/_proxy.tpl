{{/*
The proxy in the control plane's own pods, which start before there is an injector. It equals the proxy that the injector
adds to every other pod (k8s-api/src/inject), except for the addresses of the control plane; arguments:

  root          the root
  native        whether it is a native sidecar, which the containers behind it wait for
  local         names of the services that run in this pod, found on loopback in plain text: destination, policy, identity
  inboundPorts  the pod's ports
  opaquePorts   of these, the ones without protocol detection
  tlsPorts      of these, the ones that refuse plaintext besides those of proxy.requireTLSOnInboundPorts; may be left out
  resources     its own; nothing set: those of every proxy
*/}}
{{- define "weft.proxy" -}}
{{- $v := .root.Values -}}
{{- $proxy := $v.proxy -}}
{{- $ns := .root.Release.Namespace -}}
{{- $svc := printf "%s.svc.%s.:" $ns $v.clusterDomain -}}
{{- $trust := include "weft.trustDomain" .root -}}
{{- $mesh := printf "%s.serviceaccount.identity.%s.%s" $ns $ns $trust -}}
{{- $any := include "weft.anyAddress" .root -}}
{{- $admin := int $proxy.ports.admin -}}
{{- $tlsPorts := list .tlsPorts $proxy.requireTLSOnInboundPorts | compact | join "," -}}
{{- $workers := $proxy.runtime.workers -}}
{{- $cpu := ($proxy.resources).cpu | default dict -}}
{{- $outbound := printf "127.0.0.1:%d" (int $proxy.ports.outbound) -}}
- name: linkerd-proxy
  image: {{ include "weft.image" (dict "root" .root "name" (include "weft.proxyName" .root) "version" (include "weft.proxyVersion" .root)) }}
  imagePullPolicy: {{ $proxy.image.pullPolicy | default $v.imagePullPolicy }}
  {{- if .native }}
  restartPolicy: Always
  {{- end }}
  env:
    - name: _pod_name
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: _pod_ns
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    - name: _pod_uid
      valueFrom: {fieldRef: {fieldPath: metadata.uid}}
    - name: _pod_ip
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    - name: _pod_nodeName
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    - name: _pod_containerName
      value: linkerd-proxy
    {{- with int $proxy.cores }}
    - name: LINKERD2_PROXY_CORES
      value: {{ . | quote }}
    {{- end }}
    {{- with max (int $proxy.cores) (int $workers.minimum) (include "weft.wholeCores" $cpu.request | int) }}
    - name: LINKERD2_PROXY_CORES_MIN
      value: {{ . | quote }}
    {{- end }}
    {{- with int $workers.maximum | default (include "weft.wholeCores" $cpu.limit | int) }}
    - name: LINKERD2_PROXY_CORES_MAX
      value: {{ . | quote }}
    {{- end }}
    {{- with float64 $workers.maximumCPURatio }}
    - name: LINKERD2_PROXY_CORES_MAX_RATIO
      value: {{ . | quote }}
    {{- end }}
    {{- with $tlsPorts }}
    - name: LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS
      value: {{ . | quote }}
    {{- end }}
    - name: LINKERD2_PROXY_SHUTDOWN_ENDPOINT_ENABLED
      value: {{ $proxy.enableShutdownEndpoint | quote }}
    # Headers may contain secrets, so their spans stay off at every level.
    - name: LINKERD2_PROXY_LOG
      value: {{ printf "%s,[{headers}]=off,[{request}]=off" $proxy.logLevel | quote }}
    - name: LINKERD2_PROXY_LOG_FORMAT
      value: {{ $proxy.logFormat }}
    {{- with $proxy.accessLog }}
    - name: LINKERD2_PROXY_ACCESS_LOG
      value: {{ . }}
    {{- end }}
    {{- with $proxy.shutdownGracePeriod }}
    - name: LINKERD2_PROXY_SHUTDOWN_GRACE_PERIOD
      value: {{ . | quote }}
    {{- end }}
    - name: LINKERD2_PROXY_DESTINATION_SVC_ADDR
      value: {{ has "destination" .local | ternary "localhost.:8086" (printf "linkerd-dst-headless.%s8086" $svc) }}
    - name: LINKERD2_PROXY_DESTINATION_PROFILE_NETWORKS
      value: {{ $v.clusterNetworks | quote }}
    - name: LINKERD2_PROXY_POLICY_SVC_ADDR
      value: {{ has "policy" .local | ternary "localhost.:8090" (printf "linkerd-policy.%s8090" $svc) }}
    - name: LINKERD2_PROXY_POLICY_WORKLOAD
      value: {{ `{"ns":"$(_pod_ns)", "pod":"$(_pod_name)"}` | squote }}
    - name: LINKERD2_PROXY_INBOUND_DEFAULT_POLICY
      value: all-unauthenticated
    {{- if has "identity" .local }}
    # The policy controller's proxy gets its certificate through this one, so waiting for its answers would delay both.
    - name: WEFT_PROXY_INBOUND_POLICY_TIMEOUT
      value: "0"
    {{- end }}
    - name: LINKERD2_PROXY_POLICY_CLUSTER_NETWORKS
      value: {{ $v.clusterNetworks | quote }}
    - name: LINKERD2_PROXY_CONTROL_STREAM_INITIAL_TIMEOUT
      value: {{ $proxy.control.streams.initialTimeout | quote }}
    - name: LINKERD2_PROXY_CONTROL_STREAM_IDLE_TIMEOUT
      value: {{ $proxy.control.streams.idleTimeout | quote }}
    - name: LINKERD2_PROXY_CONTROL_STREAM_LIFETIME
      value: {{ $proxy.control.streams.lifetime | quote }}
    - name: LINKERD2_PROXY_INBOUND_CONNECT_TIMEOUT
      value: {{ $proxy.inboundConnectTimeout | default "100ms" }}
    - name: LINKERD2_PROXY_OUTBOUND_CONNECT_TIMEOUT
      value: {{ $proxy.outboundConnectTimeout | default "1000ms" }}
    - name: LINKERD2_PROXY_OUTBOUND_DISCOVERY_IDLE_TIMEOUT
      value: {{ $proxy.outboundDiscoveryCacheUnusedTimeout | default "5s" }}
    - name: LINKERD2_PROXY_INBOUND_DISCOVERY_IDLE_TIMEOUT
      value: {{ $proxy.inboundDiscoveryCacheUnusedTimeout | default "90s" }}
    {{- if $proxy.disableOutboundProtocolDetectTimeout }}
    - name: LINKERD2_PROXY_OUTBOUND_DETECT_TIMEOUT
      value: 365d
    {{- end }}
    {{- if $proxy.disableInboundProtocolDetectTimeout }}
    - name: LINKERD2_PROXY_INBOUND_DETECT_TIMEOUT
      value: 365d
    {{- end }}
    - name: LINKERD2_PROXY_CONTROL_LISTEN_ADDR
      value: {{ printf "%s:%d" $any (int $proxy.ports.control) | quote }}
    - name: LINKERD2_PROXY_ADMIN_LISTEN_ADDR
      value: {{ printf "%s:%d" $any $admin | quote }}
    - name: LINKERD2_PROXY_OUTBOUND_LISTEN_ADDR
      value: {{ $outbound | quote }}
    - name: LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS
      value: {{ $v.disableIPv6 | ternary $outbound (printf "%s,[::1]:%d" $outbound (int $proxy.ports.outbound)) | quote }}
    - name: LINKERD2_PROXY_INBOUND_LISTEN_ADDR
      value: {{ printf "%s:%d" $any (int $proxy.ports.inbound) | quote }}
    - name: LINKERD2_PROXY_INBOUND_IPS
      valueFrom: {fieldRef: {fieldPath: status.podIPs}}
    - name: LINKERD2_PROXY_INBOUND_PORTS
      value: {{ .inboundPorts | quote }}
    - name: LINKERD2_PROXY_DESTINATION_PROFILE_SUFFIXES
      value: svc.{{ $v.clusterDomain }}.
    - name: LINKERD2_PROXY_INBOUND_ACCEPT_KEEPALIVE
      value: 10000ms
    - name: LINKERD2_PROXY_OUTBOUND_CONNECT_KEEPALIVE
      value: 10000ms
    - name: LINKERD2_PROXY_INBOUND_ACCEPT_USER_TIMEOUT
      value: 30s
    - name: LINKERD2_PROXY_OUTBOUND_CONNECT_USER_TIMEOUT
      value: 30s
    {{- range $side := list "inbound" "outbound" }}
    {{- range $name, $value := (get $proxy $side).server.http2 }}
    - name: LINKERD2_PROXY_{{ upper $side }}_SERVER_HTTP2_{{ snakecase $name | upper }}
      value: {{ $value | quote }}
    {{- end }}
    {{- end }}
    - name: LINKERD2_PROXY_INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION
      value: {{ .opaquePorts | quote }}
    - name: LINKERD2_PROXY_DESTINATION_CONTEXT
      value: {{ `{"ns":"$(_pod_ns)", "nodeName":"$(_pod_nodeName)", "pod":"$(_pod_name)"}` | squote }}
    - name: _pod_sa
      valueFrom: {fieldRef: {fieldPath: spec.serviceAccountName}}
    - name: _l5d_ns
      value: {{ $ns }}
    - name: _l5d_trustdomain
      value: {{ $trust }}
    - name: LINKERD2_PROXY_IDENTITY_DIR
      value: /var/run/linkerd/identity/end-entity
    - name: LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS
      valueFrom:
        configMapKeyRef:
          name: linkerd-identity-trust-roots
          key: ca-bundle.crt
    - name: LINKERD2_PROXY_IDENTITY_TOKEN_FILE
      value: /var/run/secrets/tokens/linkerd-identity-token
    - name: LINKERD2_PROXY_IDENTITY_SVC_ADDR
      value: {{ has "identity" .local | ternary "localhost.:8080" (printf "linkerd-identity-headless.%s8080" $svc) }}
    - name: LINKERD2_PROXY_IDENTITY_LOCAL_NAME
      value: $(_pod_sa).$(_pod_ns).serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)
    - name: LINKERD2_PROXY_IDENTITY_SVC_NAME
      value: linkerd-identity.{{ $mesh }}
    - name: LINKERD2_PROXY_DESTINATION_SVC_NAME
      value: linkerd-destination.{{ $mesh }}
    - name: LINKERD2_PROXY_POLICY_SVC_NAME
      value: linkerd-destination.{{ $mesh }}
    {{- with $proxy.tap }}
    {{- if and .serviceAccountName .namespace }}
    - name: LINKERD2_PROXY_TAP_SVC_NAME
      value: {{ .serviceAccountName }}.{{ .namespace }}.serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)
    {{- end }}
    {{- end }}
    {{- with $proxy.tracing }}
    {{- if .enabled }}
    {{- $identity := .collector.meshIdentity }}
    {{- $attributes := dict "k8s.pod.ip" "$(_pod_ip)" "k8s.pod.uid" "$(_pod_uid)" "k8s.container.name" "$(_pod_containerName)" }}
    {{- range $name, $value := .labels }}
    {{- if not (has $value (list nil "")) }}
    {{- $_ := set $attributes $name $value }}
    {{- end }}
    {{- end }}
    - name: LINKERD2_PROXY_TRACE_ATTRIBUTES_PATH
      value: /var/run/linkerd/podinfo/labels
    - name: LINKERD2_PROXY_TRACE_COLLECTOR_SVC_ADDR
      value: {{ .collector.endpoint | quote }}
    {{- if and $identity.serviceAccountName $identity.namespace }}
    - name: LINKERD2_PROXY_TRACE_COLLECTOR_SVC_NAME
      value: {{ $identity.serviceAccountName }}.{{ $identity.namespace }}.serviceaccount.identity.$(_l5d_ns).$(_l5d_trustdomain)
    {{- end }}
    - name: LINKERD2_PROXY_TRACE_SERVICE_NAME
      value: {{ .traceServiceName | default "linkerd-proxy" | quote }}
    - name: LINKERD2_PROXY_TRACE_EXTRA_ATTRIBUTES
      value: |
        {{- range $name, $value := $attributes }}
        {{ $name }}={{ $value }}
        {{- end }}
    {{- end }}
    {{- end }}
    # The streams of all proxies end here; docs/scale.md says what one client may take.
    - name: LINKERD2_PROXY_INBOUND_MAX_IN_FLIGHT
      value: "1048576"
    - name: WEFT_PROXY_INBOUND_MAX_IN_FLIGHT_PER_CLIENT
      value: "16384"
    {{- with $proxy.additionalEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $proxy.experimentalEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    # Not ready before the kernel attests that the redirect is in force.
    - name: WEFT_PROXY_REQUIRE_REDIRECT
      value: "true"
  ports:
    - name: linkerd-proxy
      containerPort: {{ int $proxy.ports.inbound }}
    - name: linkerd-admin
      containerPort: {{ $admin }}
  livenessProbe:
    {{- include "weft.probe" (dict "path" "/live" "port" $admin "values" $proxy.livenessProbe
        "default" (dict "initialDelaySeconds" 10)) | nindent 4 }}
  readinessProbe:
    {{- /* An ordinary container has no startup probe, and the other containers wait until this one is ready. */}}
    {{- $timing := ternary (dict) (dict "periodSeconds" 2 "failureThreshold" 7) .native }}
    {{- include "weft.probe" (dict "path" "/ready" "port" $admin "values" $proxy.readinessProbe "default" $timing) | nindent 4 }}
  {{- if .native }}
  startupProbe:
    {{- include "weft.probe" (dict "path" "/ready" "port" $admin "values" $proxy.startupProbe
        "default" (dict "periodSeconds" 1 "failureThreshold" 120)) | nindent 4 }}
  {{- end }}
  {{- with (include "weft.resources" .resources | trim) | default (include "weft.resources" $proxy.resources | trim) }}
  resources:
    {{- . | nindent 4 }}
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    capabilities:
      drop: [ALL]
    privileged: false
    readOnlyRootFilesystem: true
    runAsNonRoot: true
    runAsUser: {{ int $proxy.uid }}
    {{- if ge (int $proxy.gid) 0 }}
    runAsGroup: {{ int $proxy.gid }}
    {{- end }}
    seccompProfile:
      type: RuntimeDefault
  terminationMessagePolicy: FallbackToLogsOnError
  {{- /* No longer than the pod's termination may take, Kubernetes' default. */}}
  {{- with min (int $proxy.waitBeforeExitSeconds) 30 }}
  lifecycle:
    preStop:
      sleep:
        seconds: {{ . }}
  {{- end }}
  volumeMounts:
    - name: linkerd-identity-end-entity
      mountPath: /var/run/linkerd/identity/end-entity
    - name: linkerd-identity-token
      mountPath: /var/run/secrets/tokens
    {{- if $proxy.tracing.enabled }}
    - name: linkerd-podinfo
      mountPath: /var/run/linkerd/podinfo
    {{- end }}
{{- end }}

{{/* Volumes of the proxy. */}}
{{- define "weft.proxyVolumes" -}}
- name: linkerd-identity-end-entity
  emptyDir:
    medium: Memory
- name: linkerd-identity-token
  projected:
    sources:
      - serviceAccountToken:
          audience: identity.l5d.io
          expirationSeconds: 86400
          path: linkerd-identity-token
{{- if .Values.proxy.tracing.enabled }}
- name: linkerd-podinfo
  downwardAPI:
    items:
      - path: labels
        fieldRef:
          fieldPath: metadata.labels
{{- end }}
{{- end }}

{{/* A quantity of CPU in whole processors, rounded up, at least 1; nothing for none. */}}
{{- define "weft.wholeCores" -}}
{{- with . -}}
{{- $cores := toString . -}}
{{- range $suffix, $parts := dict "n" 1e9 "u" 1e6 "m" 1e3 -}}
{{- if hasSuffix $suffix (toString $) -}}
{{- $cores = divf (trimSuffix $suffix $cores) $parts -}}
{{- end -}}
{{- end -}}
{{- max 1 (ceil $cores) -}}
{{- end -}}
{{- end }}
