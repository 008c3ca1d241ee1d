{{/* Labels by which the Deployment selects its pods. */}}
{{- define "weft-viz.selector" -}}
app.kubernetes.io/name: weft-viz
app.kubernetes.io/part-of: weft
{{- end }}

{{/* Labels of every object. */}}
{{- define "weft-viz.labels" -}}
{{ include "weft-viz.labelsWith" (dict "root" .) }}
{{- end }}

{{/* Labels of every object, and those of a value; arguments: root, more. */}}
{{- define "weft-viz.labelsWith" -}}
{{- $own := dict "app.kubernetes.io/name" "weft-viz" "app.kubernetes.io/part-of" "weft" -}}
{{ include "weft.standardLabels" (dict "root" .root "name" "weft-viz" "component" "metrics" "more" .more "own" $own) }}
{{- end }}

{{/* What follows the names of objects without a namespace, so that releases in several namespaces have their own. */}}
{{- define "weft-viz.suffix" -}}
{{- if ne .Release.Namespace "linkerd-viz" -}}
-{{ .Release.Namespace }}
{{- end -}}
{{- end }}
