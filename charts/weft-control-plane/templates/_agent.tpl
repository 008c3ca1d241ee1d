{{/*
The node agent: its account, its rights and the DaemonSet. Arguments:

  root                 the root of the chart
  name                 of the objects
  labels               of every object, YAML
  selector             labels by which the DaemonSet selects its pods, YAML; they are among the pods' labels
  podLabels            labels of the pods, YAML
  podAnnotations       further annotations of the pods, a map
  config               name of the ConfigMap whose key `values` has the settings of redirection
  checksum             of these settings: an agent reads them once, when it starts
  controllerNamespace  namespaces of the control planes whose pods are enrolled, separated by commas; empty: of any
  noSelfEnrol          whether the kernel enrols no pod by itself: proxies of other meshes may have the same user
  imagePullPolicy      of an image without its own
  imagePullSecrets     a list
  agent                the agent's values, as in values.yaml of weft-control-plane
*/}}
{{- define "weft.agent" -}}
{{- $namespace := .root.Release.Namespace -}}
{{- $createdBy := printf "weft/helm %s" .root.Chart.Version -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  namespace: {{ $namespace }}
  labels:
    {{- .labels | nindent 4 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ .name }}
  labels:
    {{- .labels | nindent 4 }}
rules:
  # Pods of its node.
  - apiGroups: [""]
    resources: [pods]
    verbs: [list, watch]
  - apiGroups: [events.k8s.io]
    resources: [events]
    verbs: [create, patch]
  # To detect that the mesh is being removed.
  - apiGroups: [""]
    resources: [namespaces]
    resourceNames: ["{{ $namespace }}"]
    verbs: [get]
---
{{ include "weft.binding" (dict "root" .root "kind" "ClusterRole" "name" .name "account" .name "labels" .labels) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ .name }}
  namespace: {{ $namespace }}
  labels:
    {{- .labels | nindent 4 }}
rules:
  # Its own pod, and through it the DaemonSet: an agent whose DaemonSet is deleted unloads the programs.
  - apiGroups: [""]
    resources: [pods]
    verbs: [get]
  - apiGroups: [apps]
    resources: [daemonsets]
    resourceNames: [{{ .name }}]
    verbs: [get, list, watch]
---
{{ include "weft.binding" (dict "root" .root "kind" "Role" "name" .name "account" .name "labels" .labels) }}
---
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ .name }}
  namespace: {{ $namespace }}
  labels:
    {{- .labels | nindent 4 }}
  annotations:
    linkerd.io/created-by: {{ $createdBy }}
spec:
  selector:
    matchLabels:
      {{- .selector | nindent 6 }}
  {{- with .agent.revisionHistoryLimit }}
  revisionHistoryLimit: {{ int . }}
  {{- end }}
  {{- with .agent.updateStrategy }}
  updateStrategy:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  template:
    metadata:
      labels:
        {{- .podLabels | nindent 8 }}
      annotations:
        {{- $annotations := dict "linkerd.io/created-by" $createdBy "linkerd.io/inject" "disabled" "checksum/config" .checksum }}
        {{- toYaml (mergeOverwrite $annotations (.podAnnotations | default dict)) | nindent 8 }}
    spec:
      serviceAccountName: {{ .name }}
      automountServiceAccountToken: true
      # To attach programs to the pods' cgroup, and to find the network namespaces of the node's pods.
      hostNetwork: true
      hostPID: true
      # The agent uses the API server's address, because it may have to start before the cluster's DNS.
      dnsPolicy: Default
      {{- with .agent.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      terminationGracePeriodSeconds: 30
      {{- with .imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .agent.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .agent.nodeAffinity }}
      affinity:
        nodeAffinity:
          {{- toYaml . | nindent 10 }}
      {{- end }}
      {{- with .agent.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: agent
          image: {{ include "weft.image" (dict "root" .root "name" .agent.image.name "version" .agent.image.version) }}
          imagePullPolicy: {{ .agent.image.pullPolicy | default .imagePullPolicy }}
          args:
            - run
            - --node-name=$(NODE_NAME)
            - --pod-name=$(POD_NAME)
            - --pod-namespace=$(POD_NAMESPACE)
            - --pod-uid=$(POD_UID)
            {{- with .controllerNamespace }}
            - --controller-namespace={{ . }}
            {{- end }}
            {{- if .noSelfEnrol }}
            - --no-self-enrol
            {{- end }}
            - --values=/var/run/linkerd/config/values
            - --cgroup-root=/host/cgroup
            # Probes and Prometheus use the node's address, port-forwards its loopback.
            - --metrics-addr=$(HOST_IP):{{ int .agent.adminPort }}
            - --metrics-addr=127.0.0.1:{{ int .agent.adminPort }}
            - --log-level={{ include "weft.logLevel" .agent.logLevel }}
            - --log-format={{ .agent.logFormat }}
          env:
            - name: NODE_NAME
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            - name: HOST_IP
              valueFrom: {fieldRef: {fieldPath: status.hostIP}}
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: POD_NAMESPACE
              valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
            - name: POD_UID
              valueFrom: {fieldRef: {fieldPath: metadata.uid}}
          ports:
            - name: agent-admin
              containerPort: {{ int .agent.adminPort }}
          livenessProbe:
            httpGet:
              path: /live
              port: agent-admin
            initialDelaySeconds: 10
          readinessProbe:
            httpGet:
              path: /ready
              port: agent-admin
            periodSeconds: 2
          {{- with include "weft.resources" .agent.resources | trim }}
          resources:
            {{- . | nindent 12 }}
          {{- end }}
          securityContext:
            privileged: false
            readOnlyRootFilesystem: true
            runAsUser: 0
            capabilities:
              drop: [ALL]
              # SYS_ADMIN: enter pods' network namespaces; in the kernel it includes BPF and PERFMON, for the programs.
              # NET_ADMIN: maps of sockets, before Linux 6.6. SYS_PTRACE: open processes' namespaces and duplicate their
              # listeners. SYS_CHROOT: mount a bpffs on a node that has none.
              add: [NET_ADMIN, SYS_ADMIN, SYS_CHROOT, SYS_PTRACE]
            seccompProfile:
              type: RuntimeDefault
            # The runtimes' default profiles forbid writing to a bpffs.
            appArmorProfile:
              type: Unconfined
            seLinuxOptions:
              type: spc_t
          terminationMessagePolicy: FallbackToLogsOnError
          volumeMounts:
            - name: bpffs
              mountPath: /sys/fs/bpf
            - name: cgroup
              mountPath: /host/cgroup
              readOnly: true
            # The agent's API is only this unix socket: `weft` connects with `weft-agent connect` (pods/exec).
            - name: run
              mountPath: /run/weft
            - name: config
              mountPath: /var/run/linkerd/config
              readOnly: true
      volumes:
        - name: bpffs
          hostPath:
            path: {{ .agent.bpffs }}
            type: Directory
        - name: cgroup
          hostPath:
            path: {{ .agent.cgroupRoot }}
            type: Directory
        - name: run
          emptyDir: {}
        - name: config
          configMap:
            name: {{ .config }}
{{- end }}

{{/*
Refuses where this cluster has another agent than the one of this release, by its labels: a node takes one, because two
want the same port and the same programs. Arguments: root, name of this release's DaemonSet, and alone, whether it
enrols Linkerd's pods.
*/}}
{{- define "weft.requireOneAgent" -}}
{{- $here := . -}}
{{- range get (lookup "apps/v1" "DaemonSet" "" "" | default dict) "items" | default list -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $isAgent := and (eq (get $labels "app.kubernetes.io/part-of" | toString) "weft") (eq (get $labels "linkerd.io/control-plane-component" | toString) "agent") -}}
{{- $isAlone := hasKey $labels "linkerd.io/cni-resource" -}}
{{- $isOwn := and (eq .metadata.namespace $here.root.Release.Namespace) (eq .metadata.name $here.name) (eq $isAlone $here.alone) -}}
{{- if and $isAgent (not $isOwn) -}}
{{- if $isAlone -}}
{{- $release := get (.metadata.annotations | default dict) "meta.helm.sh/release-name" | default "weft-agent" -}}
{{- fail (printf "\n\nDaemonSet %s of namespace %s is Weft's agent alone, for Linkerd, and a node takes one agent. Upgrade Linkerd with cniEnabled=false, restart the meshed workloads, and only then remove it, as docs/migration.md says:\n  helm uninstall %s --namespace %s\n" .metadata.name .metadata.namespace $release .metadata.namespace) -}}
{{- end -}}
{{- fail (printf "\n\nDaemonSet %s of namespace %s enrols this cluster's pods already: it is a part of weft-control-plane, and a node takes one agent\n" .metadata.name .metadata.namespace) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
Refuses a namespace whose Pod Security refuses the agent; arguments: root, and more, a sentence for the end of the message.
*/}}
{{- define "weft.requirePrivilegedNamespace" -}}
{{- $name := .root.Release.Namespace -}}
{{- $namespace := lookup "v1" "Namespace" "" $name -}}
{{- if $namespace -}}
{{- $enforced := get ($namespace.metadata.labels | default dict) "pod-security.kubernetes.io/enforce" -}}
{{- if and $enforced (ne $enforced "privileged") -}}
{{- fail (printf "\n\nnamespace %s enforces Pod Security %q, which refuses the node agent (host network, host PID namespace, capabilities for eBPF):\n  kubectl label --overwrite namespace %s pod-security.kubernetes.io/enforce=privileged\n%s" $name $enforced $name .more) -}}
{{- end -}}
{{- end -}}
{{- end }}
