{{/*
Labels of every object; arguments: root, more, a map of others. k8s-app and cni-resource of `own` are those of Linkerd's CNI plugin: its injector leaves such
pods alone.
*/}}
{{- define "weft-agent.labels" -}}
{{- $own := dict "app.kubernetes.io/part-of" "weft" "k8s-app" "linkerd-cni" "linkerd.io/cni-resource" "true" "linkerd.io/control-plane-component" "agent" -}}
{{ include "weft.standardLabels" (dict "root" .root "name" "weft-agent" "component" "agent" "more" .more "own" $own) }}
{{- end }}

{{/* The settings of redirection, in the form of the control plane's values, which the agent reads. */}}
{{- define "weft-agent.settings" -}}
{{- $v := .Values -}}
proxy:
  uid: {{ int $v.proxyUID }}
  gid: {{ int $v.proxyGID }}
  ports:
    admin: {{ int $v.proxyAdminPort }}
    control: {{ int $v.proxyControlPort }}
    inbound: {{ int $v.inboundProxyPort }}
    outbound: {{ int $v.outboundProxyPort }}
proxyInit:
  ignoreInboundPorts: {{ $v.ignoreInboundPorts | toString | quote }}
  ignoreOutboundPorts: {{ $v.ignoreOutboundPorts | toString | quote }}
  kubeAPIServerPorts: {{ $v.kubeAPIServerPorts | toString | quote }}
  skipSubnets: {{ $v.skipSubnets | quote }}
agent:
  proxyExemption: {{ $v.proxyExemption }}
  enforceProxyExemption: {{ $v.enforceProxyExemption }}
  allowBypass: {{ $v.allowBypass }}
{{- end }}

{{/* Checks before anything is installed. Each message names the value and the remedy. */}}
{{- define "weft-agent.require" -}}
{{- $v := .Values -}}
{{- if hasSuffix "linkerd/cni-plugin" (first (splitList "@" $v.image.name)) -}}
{{- fail "\n\nimage.name is Linkerd's CNI plugin, which is not Weft's agent. Add --set image.name=REGISTRY/weft-agent,image.version= after your values file\n" -}}
{{- end -}}
{{- if $v.portsToRedirect -}}
{{- fail "\n\nportsToRedirect is not supported: every inbound port is redirected. Remove it, and list in ignoreInboundPorts what has to bypass the proxy\n" -}}
{{- end -}}
{{- if $v.extraInitContainers -}}
{{- fail "\n\nextraInitContainers is not supported: the agent writes nothing to the node that something would have to wait for. Remove it\n" -}}
{{- end -}}
{{- if not (or $v.allowBypass $v.controllerNamespace) -}}
{{- fail "\n\ncontrollerNamespace is empty and allowBypass is false: any pod may have a control plane's label, whose pods reach kubeAPIServerPorts without their proxies. Name the namespaces of control planes in controllerNamespace\n" -}}
{{- end -}}
{{- if lookup "v1" "Namespace" "" "kube-system" -}}
{{- include "weft.requirePrivilegedNamespace" (dict "root" . "more" "") -}}
{{- include "weft.requireOneAgent" (dict "root" . "name" $v.name "alone" true) -}}
{{- end -}}
{{- end }}
