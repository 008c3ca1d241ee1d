//! Kinds of resources that Linkerd reads, and those of their fields that differ from the kind
//! (`linkerd2:charts/linkerd-crds`, `policy-controller/`).

use super::{
    Field,
    State::{Meaningless, Unsupported, Works},
};

const POLICY: &str = "policy.linkerd.io";
const GATEWAY: &str = "gateway.networking.k8s.io";
const NO_FILTER: &str = "the proxy has no such filter: requests of a rule with it fail";
/// Kinds, and fields that deserve a row of their own.
pub const FIELDS: &[Field] = &[
    Field::kind(POLICY, "Server", Works, ""),
    Field::kind(POLICY, "ServerAuthorization", Works, ""),
    Field::kind(POLICY, "AuthorizationPolicy", Works, "of a Server, of a Server's route, or of a Namespace"),
    Field::value(POLICY, "AuthorizationPolicy", "spec.targetRef.kind", "HTTPRoute", Works, ""),
    Field::value(POLICY, "AuthorizationPolicy", "spec.targetRef.kind", "GRPCRoute", Works, ""),
    Field::kind(POLICY, "MeshTLSAuthentication", Works, ""),
    Field::kind(POLICY, "NetworkAuthentication", Works, ""),
    Field::kind(POLICY, "HTTPLocalRateLimitPolicy", Works, "of HTTP Servers; those of gRPC have none, as with Linkerd"),
    Field::kind(POLICY, "EgressNetwork", Works, ""),
    Field::kind(POLICY, "HTTPRoute", Works, ""),
    Field::part(
        POLICY,
        "HTTPRoute",
        "spec.rules.timeouts.backendRequest",
        Unsupported,
        "as with Linkerd; annotate the route with retry.linkerd.io/timeout",
    ),
    Field::kind(GATEWAY, "HTTPRoute", Works, ""),
    Field::value(GATEWAY, "HTTPRoute", "spec.rules.filters.type", "RequestMirror", Unsupported, NO_FILTER),
    Field::value(GATEWAY, "HTTPRoute", "spec.rules.filters.type", "URLRewrite", Unsupported, NO_FILTER),
    Field::value(GATEWAY, "HTTPRoute", "spec.rules.filters.type", "CORS", Unsupported, NO_FILTER),
    Field::value(GATEWAY, "HTTPRoute", "spec.rules.filters.type", "ExternalAuth", Unsupported, NO_FILTER),
    Field::value(GATEWAY, "HTTPRoute", "spec.rules.filters.type", "ExtensionRef", Unsupported, NO_FILTER),
    Field::part(GATEWAY, "HTTPRoute", "spec.rules.retry", Unsupported, "as with Linkerd; annotate the route"),
    Field::part(
        GATEWAY,
        "HTTPRoute",
        "spec.rules.timeouts.backendRequest",
        Unsupported,
        "as with Linkerd; annotate the route with retry.linkerd.io/timeout",
    ),
    Field::part(GATEWAY, "HTTPRoute", "spec.rules.sessionPersistence", Unsupported, "as with Linkerd"),
    Field::kind(GATEWAY, "GRPCRoute", Works, ""),
    Field::value(GATEWAY, "GRPCRoute", "spec.rules.filters.type", "ResponseHeaderModifier", Unsupported, NO_FILTER),
    Field::value(GATEWAY, "GRPCRoute", "spec.rules.filters.type", "RequestMirror", Unsupported, NO_FILTER),
    Field::value(GATEWAY, "GRPCRoute", "spec.rules.filters.type", "ExtensionRef", Unsupported, NO_FILTER),
    Field::part(GATEWAY, "GRPCRoute", "spec.rules.sessionPersistence", Unsupported, "as with Linkerd"),
    Field::kind(GATEWAY, "TLSRoute", Works, ""),
    Field::kind(GATEWAY, "TCPRoute", Works, ""),
    Field::kind("linkerd.io", "ServiceProfile", Works, "retries and timeouts in the client's proxy"),
    Field::part(
        "linkerd.io",
        "ServiceProfile",
        "spec.opaquePorts",
        Meaningless,
        "as with Linkerd; annotate the Service",
    ),
    Field::kind("workload.linkerd.io", "ExternalWorkload", Works, ""),
    Field::kind("multicluster.linkerd.io", "Link", Unsupported, "no multicluster"),
];
