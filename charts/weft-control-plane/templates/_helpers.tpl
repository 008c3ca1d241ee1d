{{/* Domain of identities. */}}
{{- define "weft.trustDomain" -}}
{{ .Values.identityTrustDomain | default .Values.clusterDomain }}
{{- end }}

{{/* Where a component listens: on every address of its pod, of both families where proxies have both. */}}
{{- define "weft.anyAddress" -}}
{{ ternary "0.0.0.0" "[::]" .Values.disableIPv6 }}
{{- end }}

{{/*
Labels of every object; arguments: root, component, name where it is not the component's, more, a map of others, and own, a map of
others that no value can change.
*/}}
{{- define "weft.labels" -}}
{{- $own := dict "app.kubernetes.io/part-of" "weft" "linkerd.io/control-plane-component" .component "linkerd.io/control-plane-ns" .root.Release.Namespace -}}
{{- $own = mergeOverwrite $own (.own | default dict) -}}
{{ include "weft.standardLabels" (dict "root" .root "name" (.name | default .component) "component" .component "more" .more "own" $own) }}
{{- end }}

{{/* The labels that Linkerd's tools look for; arguments: root, component. */}}
{{- define "weft.componentLabels" -}}
linkerd.io/control-plane-component: {{ .component }}
linkerd.io/control-plane-ns: {{ .root.Release.Namespace }}
{{- end }}

{{/*
Labels and annotations of a control plane pod; arguments: root, component, opaquePorts, checksum of the values that the
pod is restarted for, and own, annotations of this component.
The node agent and the policy controller read those of config.linkerd.io here, as on any meshed pod.
*/}}
{{- define "weft.podMetadata" -}}
{{- $v := .root.Values -}}
{{- $labels := dict "linkerd.io/proxy-deployment" (printf "linkerd-%s" .component) "linkerd.io/workload-ns" .root.Release.Namespace -}}
{{- $annotations := dict
    "linkerd.io/created-by" (printf "weft/helm %s" .root.Chart.Version)
    "linkerd.io/proxy-version" (include "weft.proxyVersion" .root)
    "cluster-autoscaler.kubernetes.io/safe-to-evict" "true"
    "config.linkerd.io/default-inbound-policy" "all-unauthenticated"
    "config.linkerd.io/skip-outbound-ports" ($v.proxyInit.kubeAPIServerPorts | toString) -}}
{{- if not $v.identity.externalCA -}}
{{- $_ := set $annotations "linkerd.io/trust-root-sha256" ($v.identityTrustAnchorsPEM | trim | printf "%s\n" | sha256sum) -}}
{{- end -}}
{{- with .checksum -}}
{{- $_ := set $annotations "checksum/config" . -}}
{{- end -}}
{{- with .opaquePorts -}}
{{- $_ := set $annotations "config.linkerd.io/opaque-ports" . -}}
{{- end -}}
labels:
  {{- include "weft.labels" (dict "root" .root "component" .component "more" $v.podLabels "own" $labels) | nindent 2 }}
annotations:
  {{- /* A component's own annotations come first. */}}
  {{- toYaml (mergeOverwrite $annotations ($v.podAnnotations | default dict) (.own | default dict)) | nindent 2 }}
{{- end }}

{{/* Where Weft's images are: what comes before the name in agent.image.name. */}}
{{- define "weft.registry" -}}
{{- range splitList "@" .Values.agent.image.name | first | splitList "/" | initial -}}
{{ . }}/
{{- end -}}
{{- end }}

{{/* Whether the values name Linkerd's controller, as every copy of Linkerd's values.yaml does. */}}
{{- define "weft.hasLinkerdsController" -}}
{{- if regexMatch "(^|/)linkerd/controller(@|$)" .Values.controllerImage -}}
true
{{- end -}}
{{- end }}

{{/* Whether an image is Linkerd's proxy; argument: its name, which may contain a digest. */}}
{{- define "weft.isLinkerdsProxy" -}}
{{- if regexMatch "(^|/)linkerd/proxy(@|$)" . -}}
true
{{- end -}}
{{- end }}

{{/* Whether the values name Linkerd's proxy without a version or a digest: a copy of the name in Linkerd's values.yaml. */}}
{{- define "weft.hasLinkerdsProxyName" -}}
{{- $image := .Values.proxy.image -}}
{{- if and (include "weft.isLinkerdsProxy" $image.name) (not (contains "@" $image.name)) (not $image.version) -}}
true
{{- end -}}
{{- end }}

{{/* The control plane's image without its tag. */}}
{{- define "weft.controllerName" -}}
{{- if include "weft.hasLinkerdsController" . -}}
{{ include "weft.registry" . }}weft-control-plane
{{- else -}}
{{ .Values.controllerImage }}
{{- end -}}
{{- end }}

{{/* Its tag. */}}
{{- define "weft.controllerVersion" -}}
{{- if include "weft.hasLinkerdsController" . -}}
{{ .Chart.AppVersion }}
{{- else -}}
{{ .Values.controllerImageVersion | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Image of the control plane. */}}
{{- define "weft.controllerImage" -}}
{{ include "weft.image" (dict "root" . "name" (include "weft.controllerName" .) "version" (include "weft.controllerVersion" .)) }}
{{- end }}

{{/* The proxy's image without its tag. */}}
{{- define "weft.proxyName" -}}
{{- if include "weft.hasLinkerdsProxyName" . -}}
{{ include "weft.registry" . }}weft-proxy
{{- else -}}
{{ .Values.proxy.image.name }}
{{- end -}}
{{- end }}

{{/* Its tag. */}}
{{- define "weft.proxyVersion" -}}
{{ .Values.proxy.image.version | default .Chart.AppVersion }}
{{- end }}

{{/*
A Service of a component; arguments: root, component, name, port (name, port and targetPort), headless (whether clients
get the addresses of the pods), annotations.
*/}}
{{- define "weft.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "weft.labels" (dict "root" .root "component" .component) | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: ClusterIP
  {{- if .headless }}
  clusterIP: None
  {{- end }}
  selector:
    linkerd.io/control-plane-component: {{ .component }}
  ports:
    {{- toYaml (list .port) | nindent 4 }}
{{- end }}

{{/*
A probe; arguments: path, port, values of its timing, and default for what they omit. `merge` would treat a 0 as absent.
*/}}
{{- define "weft.probe" -}}
{{- $timing := deepCopy .default -}}
{{- range $key, $value := .values -}}
{{- $_ := set $timing $key $value -}}
{{- end -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
{{- with $timing }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Common part of every Deployment of the control plane; arguments: root, component. */}}
{{- define "weft.deployment" -}}
{{- $v := .root.Values -}}
replicas: {{ int $v.controllerReplicas }}
revisionHistoryLimit: {{ int $v.revisionHistoryLimit }}
{{- with $v.deploymentStrategy }}
strategy:
  {{- toYaml . | nindent 2 }}
{{- end }}
selector:
  matchLabels:
    {{- include "weft.componentLabels" . | nindent 4 }}
    linkerd.io/proxy-deployment: linkerd-{{ .component }}
{{- end }}

{{/* Common part of every pod of a control plane Deployment; arguments: root, component. */}}
{{- define "weft.podSpec" -}}
{{- $v := .root.Values -}}
serviceAccountName: linkerd-{{ .component }}
automountServiceAccountToken: true
{{- with $v.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if or $v.enablePodAntiAffinity $v.nodeAffinity }}
affinity:
{{- end }}
{{- with $v.nodeAffinity }}
  nodeAffinity:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- if $v.enablePodAntiAffinity }}
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        # Only pods of the same revision count: with as many replicas as nodes, a new pod would find no node otherwise.
        matchLabelKeys: [pod-template-hash]
        labelSelector:
          matchLabels:
            {{- include "weft.componentLabels" . | nindent 12 }}
topologySpreadConstraints:
  - topologyKey: topology.kubernetes.io/zone
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels:
        {{- include "weft.componentLabels" . | nindent 8 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* Security context of a control plane container. */}}
{{- define "weft.securityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: {{ int .Values.controllerUID }}
{{- if ge (int .Values.controllerGID) 0 }}
runAsGroup: {{ int .Values.controllerGID }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/*
One container of the control plane; arguments:

  root       the root
  name       of the container and of the subcommand that it runs
  args       its own flags, a list
  ports      a list of {name, containerPort}, without the admin port
  admin      the admin port, {name, containerPort}
  logLevel   nothing: that of every container
  resources  nothing set: those of every container
  mounts     a list
  webhook    whether it serves one
  component  the values with its probes, its environment and further flags; absent from those of an older release
*/}}
{{- define "weft.container" -}}
{{- $v := .root.Values -}}
{{- $component := .component | default dict -}}
{{- $args := concat
    (list
      .name
      (printf "--controller-namespace=%s" .root.Release.Namespace)
      (printf "--log-format=%s" $v.controllerLogFormat))
    .args
    (list
      (printf "--admin-addr=%s:%d" (include "weft.anyAddress" .root) .admin.containerPort)
      (printf "--log-level=%s" (include "weft.logLevel" (.logLevel | default $v.controllerLogLevel))))
    ($component.additionalArgs | default list) ($component.experimentalArgs | default list) -}}
{{- $mounts := .mounts | default list -}}
{{- if and .webhook $v.webhookClientCA -}}
{{- $args = append $args "--webhook-client-ca=/var/run/linkerd/webhook/client-ca.crt" -}}
{{- $mounts = append $mounts (dict "name" "webhook-client-ca" "mountPath" "/var/run/linkerd/webhook" "readOnly" true) -}}
{{- end -}}
- name: {{ .name }}
  image: {{ include "weft.controllerImage" .root }}
  imagePullPolicy: {{ $v.imagePullPolicy }}
  args:
    {{- range $args }}
    - {{ . | quote }}
    {{- end }}
  env:
    # Identity of the lease holder, and subject of Events.
    - name: HOSTNAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    {{- with concat ($component.additionalEnv | default list) ($component.experimentalEnv | default list) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    {{- toYaml (append .ports .admin) | nindent 4 }}
  livenessProbe:
    {{- include "weft.probe" (dict "path" "/live" "port" .admin.name "values" $component.livenessProbe
        "default" (dict "initialDelaySeconds" 10)) | nindent 4 }}
  readinessProbe:
    {{- include "weft.probe" (dict "path" "/ready" "port" .admin.name "values" $component.readinessProbe
        "default" (dict "periodSeconds" 2 "failureThreshold" 7)) | nindent 4 }}
  {{- with (include "weft.resources" .resources | trim) | default (include "weft.resources" $v.controllerResources | trim) }}
  resources:
    {{- . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "weft.securityContext" .root | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  {{- with $mounts }}
  volumeMounts:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Volumes of pods that serve webhooks. */}}
{{- define "weft.webhookVolumes" -}}
{{- if .Values.webhookClientCA -}}
- name: webhook-client-ca
  configMap:
    name: linkerd-webhook-client-ca
{{- end -}}
{{- end }}

{{/* Flags of the parts that need the mesh settings; argument: the root. */}}
{{- define "weft.clusterArgs" -}}
- --trust-domain={{ include "weft.trustDomain" . }}
- --cluster-domain={{ .Values.clusterDomain }}
- --cluster-networks={{ .Values.clusterNetworks }}
- --default-opaque-ports={{ .Values.proxy.opaquePorts | toString }}
{{- end }}

{{/*
The values that an agent reads, once, when it starts: its checksum restarts the agents of all nodes when one of them changes, and for
no other value.
*/}}
{{- define "weft.redirectionValues" -}}
{{- $proxy := .Values.proxy -}}
{{- $init := .Values.proxyInit -}}
{{- $agent := .Values.agent -}}
{{- list $proxy.uid $proxy.gid $proxy.ports
    ($init.ignoreInboundPorts | toString) ($init.ignoreOutboundPorts | toString) ($init.kubeAPIServerPorts | toString) $init.skipSubnets
    $agent.proxyExemption $agent.enforceProxyExemption $agent.allowBypass | toJson -}}
{{- end }}

{{/*
The values that an injector reads. It reads webhookClientCA when it starts; it follows the others without a restart, but only when
the kubelet has delivered them, a minute later: restarted, it injects with them when the upgrade is over.
*/}}
{{- define "weft.injectionValues" -}}
{{- $v := .Values -}}
{{- list (include "weft.redirectionValues" .) $v.proxy $v.debugContainer $v.clusterDomain $v.identityTrustDomain $v.clusterNetworks
    $v.disableIPv6 $v.imagePullPolicy $v.linkerdVersion $v.webhookClientCA | toJson -}}
{{- end }}

{{/*
The values as the injector, the agent and the CLI read them: complete, and without the issuer's key.
*/}}
{{- define "weft.configValues" -}}
{{- $values := deepCopy .Values -}}
{{- $_ := unset $values "global" -}}
{{- $_ := unset $values.identity.issuer.tls "keyPEM" -}}
{{- /* Whatever the values say: there is no heartbeat, and `linkerd check` need not look for one. */}}
{{- $_ := set $values "disableHeartBeat" true -}}
{{- $_ := set $values "identityTrustDomain" (include "weft.trustDomain" .) -}}
{{- $_ := set $values "controllerImage" (include "weft.controllerName" .) -}}
{{- $_ := set $values "controllerImageVersion" (include "weft.controllerVersion" .) -}}
{{- $_ := set $values.proxy.image "name" (include "weft.proxyName" .) -}}
{{- range list $values.proxy.image $values.agent.image -}}
{{- $_ := set . "version" (.version | default $.Chart.AppVersion) -}}
{{- $_ := set . "pullPolicy" (.pullPolicy | default $values.imagePullPolicy) -}}
{{- end -}}
{{- /* A list given as one number, such as --set proxyInit.ignoreInboundPorts=4567, must be a string too. */ -}}
{{- $_ := set $values.proxy "requireIdentityOnInboundPorts" ($values.proxy.requireIdentityOnInboundPorts | default "" | toString) -}}
{{- range $key := list "ignoreInboundPorts" "ignoreOutboundPorts" "kubeAPIServerPorts" -}}
{{- $_ := set $values.proxyInit $key (get $values.proxyInit $key | toString) -}}
{{- end -}}
{{- $_ := set $values.proxy "opaquePorts" ($values.proxy.opaquePorts | toString) -}}
{{- toYaml $values | trim -}}
{{- end }}
