{{/*
Checks before anything is installed. Each message names the value and the remedy.
*/}}
{{- define "weft.require" -}}
{{- include "weft.requireTrustAnchors" . -}}
{{- include "weft.requireIssuer" . -}}
{{- range $name, $webhook := dict "proxyInjector" .Values.proxyInjector "profileValidator" .Values.profileValidator "policyValidator" .Values.policyValidator -}}
{{- if and $webhook.externalSecret (not (or $webhook.caBundle $webhook.injectCaFrom $webhook.injectCaFromSecret)) -}}
{{- fail (printf "\n\n%s.externalSecret is true, so say who signed that certificate: set %s.caBundle, .injectCaFrom or .injectCaFromSecret\n" $name $name) -}}
{{- end -}}
{{- end -}}
{{- with include "weft.differs" (dict "root" . "supported" false) | fromYamlArray -}}
{{- fail (printf "\n\nvalues of Linkerd that Weft does not support yet, remove them:\n  %s\n" (join "\n  " .)) -}}
{{- end -}}
{{- if and (not .Values.disableIPv6) (not .Values.enableEndpointSlices) -}}
{{- fail "\n\nenableEndpointSlices is false, but disableIPv6 is too: Endpoints have only one address of a pod. Set disableIPv6=true, or enableEndpointSlices=true\n" -}}
{{- end -}}
{{- include "weft.requireTracing" . -}}
{{- include "weft.requireCluster" . -}}
{{- end }}

{{/*
Values of Linkerd that differ from Linkerd's default and have no effect here, a YAML list of texts; arguments: root, and
supported: true for those that have no meaning, false for those that are not supported yet.
*/}}
{{- define "weft.differs" -}}
{{- $root := .root -}}
{{- $supported := .supported -}}
{{- $found := list -}}
{{- range $row := $root.Files.Get "files/linkerd-values.json" | fromJsonArray -}}
{{- if eq $row.supported $supported -}}
{{- $at := $root.Values -}}
{{- range $key := splitList "." $row.path -}}
{{- $at = ternary (get ($at | default dict) $key) nil (and (kindIs "map" $at) (hasKey ($at | default dict) $key)) -}}
{{- end -}}
{{- $value := $at -}}
{{- if and (kindIs "map" $at) (kindIs "map" $row.default) -}}
{{- $value = mergeOverwrite (deepCopy $row.default) (deepCopy $at) -}}
{{- end -}}
{{- $unset := or (kindIs "invalid" $at) (and (not (kindIs "bool" $at)) (empty $at)) -}}
{{- if not (or $unset (eq (toJson $value) (toJson $row.default))) -}}
{{- $found = append $found (printf "%s: %s: %s" $row.path (ternary "no meaning here" "not supported yet" $supported) $row.note) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $found -}}
{{- toYaml $found -}}
{{- end -}}
{{- end }}

{{- define "weft.requireTracing" -}}
{{- with .Values.proxy.tracing -}}
{{- if .enabled -}}
{{- $endpoint := required "\n\nproxy.tracing.enabled is true, so say where spans go: set proxy.tracing.collector.endpoint to HOST:PORT of an OpenTelemetry collector, or remove the value\n" .collector.endpoint -}}
{{- $identity := .collector.meshIdentity -}}
{{- if not (or (and $identity.serviceAccountName $identity.namespace) (regexMatch `^(localhost[.]?|127[.][0-9.]+|\[::1\]):` $endpoint)) -}}
{{- fail (printf "\n\nproxies send spans to %s over mutual TLS: mesh the collector and name its ServiceAccount, by proxy.tracing.collector.meshIdentity.serviceAccountName and .namespace\n" $endpoint) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "weft.requireTrustAnchors" -}}
{{- if not .Values.identity.externalCA -}}
{{- $how := printf "--set-file identityTrustAnchorsPEM=ca.crt, made for example by\n  step certificate create root.linkerd.%s ca.crt ca.key --profile root-ca --no-password --insecure" (include "weft.trustDomain" .) -}}
{{- $pem := required (printf "\n\nidentityTrustAnchorsPEM is missing: the certificate of the mesh's root authority. Add %s\n" $how) .Values.identityTrustAnchorsPEM -}}
{{- if contains "PRIVATE KEY" $pem -}}
{{- fail "\n\nidentityTrustAnchorsPEM contains a private key, and would be readable by every pod: give the root's certificate only\n" -}}
{{- end -}}
{{- if not (contains "-----BEGIN CERTIFICATE-----" $pem) -}}
{{- fail (printf "\n\nidentityTrustAnchorsPEM is not a PEM certificate. Did you mean --set-file instead of --set? %s\n" $how) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "weft.requireIssuer" -}}
{{- if eq .Values.identity.issuer.scheme "linkerd.io/tls" -}}
{{- $tls := .Values.identity.issuer.tls -}}
{{- $how := printf "--set-file identity.issuer.tls.crtPEM=issuer.crt, made for example by\n  step certificate create identity.linkerd.%s issuer.crt issuer.key --profile intermediate-ca --not-after 8760h --ca ca.crt --ca-key ca.key --no-password --insecure" (include "weft.trustDomain" .) -}}
{{- $crt := required (printf "\n\nidentity.issuer.tls.crtPEM is missing: the certificate that signs those of proxies. Add %s\n" $how) $tls.crtPEM -}}
{{- $key := required "\n\nidentity.issuer.tls.keyPEM is missing: the private key of identity.issuer.tls.crtPEM. Add --set-file identity.issuer.tls.keyPEM=issuer.key\n" $tls.keyPEM -}}
{{- if not (contains "-----BEGIN CERTIFICATE-----" $crt) -}}
{{- fail "\n\nidentity.issuer.tls.crtPEM is not a PEM certificate. Did you mean --set-file instead of --set?\n" -}}
{{- end -}}
{{- if contains "PRIVATE KEY" $crt -}}
{{- fail "\n\nidentity.issuer.tls.crtPEM contains a private key, and is stored where everybody who may read ConfigMaps reads it: give the certificate only, and the key as identity.issuer.tls.keyPEM\n" -}}
{{- end -}}
{{- if contains "ENCRYPTED" $key -}}
{{- fail "\n\nidentity.issuer.tls.keyPEM is encrypted with a password: nobody could type it. Make the key with `step certificate create ... --no-password --insecure`\n" -}}
{{- end -}}
{{- if not (contains "PRIVATE KEY-----" $key) -}}
{{- fail "\n\nidentity.issuer.tls.keyPEM is not a PEM private key. Did you mean --set-file instead of --set?\n" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
Checks that need a cluster. `helm template` and a client's dry run have none: there every lookup is empty, even that of a
namespace which every cluster has, and these checks are skipped. The version is checked here and not in Chart.yaml, because
offline it is the version that helm was built with.
*/}}
{{- define "weft.requireCluster" -}}
{{- if lookup "v1" "Namespace" "" "kube-system" -}}
{{- if not (semverCompare ">=1.31.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "\n\nthis cluster runs Kubernetes %s; Weft needs 1.31 or newer, for native sidecars\n" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- range $name, $version := dict "servers.policy.linkerd.io" "v1beta3" "serverauthorizations.policy.linkerd.io" "v1beta1" "authorizationpolicies.policy.linkerd.io" "v1alpha1" "meshtlsauthentications.policy.linkerd.io" "v1alpha1" "networkauthentications.policy.linkerd.io" "v1alpha1" "serviceprofiles.linkerd.io" "v1alpha2" "externalworkloads.workload.linkerd.io" "v1beta1" "httproutes.policy.linkerd.io" "v1beta3" "httplocalratelimitpolicies.policy.linkerd.io" "v1alpha1" "egressnetworks.policy.linkerd.io" "v1alpha1" -}}
{{- $crd := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name -}}
{{- if not $crd -}}
{{- fail (printf "\n\nthe custom resource definition %s is missing in this cluster. Install the chart weft-crds first, from where this chart came:\n  helm install weft-crds CHARTS/weft-crds --namespace %s --wait\n" $name $.Release.Namespace) -}}
{{- end -}}
{{- $served := false -}}
{{- range $crd.spec.versions -}}
{{- if and (eq .name $version) .served -}}
{{- $served = true -}}
{{- end -}}
{{- end -}}
{{- if not $served -}}
{{- fail (printf "\n\nthe custom resource definition %s of this cluster has no version %s: it is too old. Upgrade the chart weft-crds first, from where this chart came:\n  helm upgrade weft-crds CHARTS/weft-crds --namespace %s --wait\n" $name $version $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- include "weft.requireOneAgent" (dict "root" . "name" "weft-agent" "alone" false) -}}
{{- $api := get (lookup "v1" "Service" "default" "kubernetes" | default dict) "spec" | default dict -}}
{{- if and .Values.disableIPv6 (contains ":" (get $api "clusterIP" | default "")) -}}
{{- fail "\n\nthe first address family of this cluster is IPv6, and disableIPv6 is true: neither probes nor proxies would reach the control plane. Set disableIPv6=false\n" -}}
{{- end -}}
{{- include "weft.requirePrivilegedNamespace" (dict "root" . "more" "Namespaces of applications may stay as restricted as they are.\n") -}}
{{- end -}}
{{- end }}
