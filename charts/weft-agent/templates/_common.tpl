{{/* What every chart of Weft needs. */}}

{{/* An image by its name and tag, or by its digest, which may be in either of them; arguments: root, name, version. */}}
{{- define "weft.image" -}}
{{- $version := .version | default .root.Chart.AppVersion -}}
{{- if contains "@" .name -}}
{{ .name }}
{{- else if hasPrefix "sha256:" $version -}}
{{ .name }}@{{ $version }}
{{- else -}}
{{ .name }}:{{ $version }}
{{- end -}}
{{- end }}

{{/* A log level; levels that only Linkerd has become the nearest one. */}}
{{- define "weft.logLevel" -}}
{{ get (dict "panic" "error" "fatal" "error" "warning" "warn") . | default . }}
{{- end }}

{{/*
A Kubernetes ResourceRequirements, from one or from Linkerd's {cpu: {limit, request}, memory: {...}}; empty if nothing
is set.
*/}}
{{- define "weft.resources" -}}
{{- $all := dict -}}
{{- range $name, $value := . -}}
{{- if has $name (list "limits" "requests" "claims") -}}
{{- with $value -}}
{{- $_ := set $all $name . -}}
{{- end -}}
{{- else -}}
{{- range $kind := list "limit" "request" -}}
{{- with get ($value | default dict) $kind -}}
{{- $plural := printf "%ss" $kind -}}
{{- $_ := set $all $plural (set (get $all $plural | default dict) $name (toString .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $all -}}
{{- toYaml $all -}}
{{- end -}}
{{- end }}

{{/*
Labels of every object; arguments: root, name, component, more, a map of a value that takes precedence over `commonLabels`, and
own, a map of those that Linkerd's tools and our selectors look for, which no value can change. None of the others is ever selected
by: they change with the chart's version. One map, because YAML with a key twice is invalid.
*/}}
{{- define "weft.standardLabels" -}}
{{- $labels := dict
    "app.kubernetes.io/name" .name
    "app.kubernetes.io/instance" .root.Release.Name
    "app.kubernetes.io/component" .component
    "app.kubernetes.io/part-of" "weft"
    "app.kubernetes.io/version" .root.Chart.AppVersion
    "app.kubernetes.io/managed-by" .root.Release.Service
    "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- toYaml (mergeOverwrite $labels (.root.Values.commonLabels | default dict) (.more | default dict) .own) -}}
{{- end }}

{{/*
A RoleBinding or ClusterRoleBinding of a role to an account of this release; arguments: root, kind (Role or ClusterRole), name, role
where its name is another one, account, and labels, YAML.
*/}}
{{- define "weft.binding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ .name }}
  {{- if eq .kind "Role" }}
  namespace: {{ .root.Release.Namespace }}
  {{- end }}
  labels:
    {{- .labels | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .role | default .name }}
subjects:
  - kind: ServiceAccount
    name: {{ .account }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}
