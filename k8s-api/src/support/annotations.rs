//! Linkerd's annotations of pods, namespaces and Services (`linkerd2:pkg/k8s/labels.go`, `policy-controller/`).
//!
//! What is "passed to the proxy" has an effect in pods with Linkerd's own proxy, which may be injected too.

use super::{
    Setting,
    State::{Meaningless, Unsupported, Works},
};

const DEBUG: &str = "of enable-debug-sidecar";
const NATIVE: &str =
    "the proxy is always a native sidecar, for which Kubernetes starts and stops applications in order";

/// Annotations of pods, and of namespaces for their pods.
pub const POD_ANNOTATIONS: &[Setting] = &[
    // Linkerd's injector skips such pods: it mounts the pod's own token.
    Setting::new(
        "linkerd.io/inject",
        Works,
        "enabled, disabled or ingress; pods with automountServiceAccountToken: false are injected, too",
    ),
    Setting::new("config.linkerd.io/proxy-image", Works, ""),
    Setting::new("config.linkerd.io/proxy-version", Works, ""),
    Setting::new("config.linkerd.io/image-pull-policy", Works, ""),
    Setting::new("config.linkerd.io/debug-image", Works, DEBUG),
    Setting::new("config.linkerd.io/debug-image-version", Works, DEBUG),
    Setting::new("config.linkerd.io/debug-image-pull-policy", Works, DEBUG),
    Setting::new(
        "config.linkerd.io/enable-debug-sidecar",
        Works,
        "its image runs as root; with Pod Security restricted use kubectl debug",
    ),
    Setting::new("config.linkerd.io/control-port", Works, "of the tap server"),
    Setting::new("viz.linkerd.io/disable-tap", Works, "an unreadable value disables tap, too"),
    Setting::new("config.linkerd.io/inbound-port", Works, ""),
    Setting::new("config.linkerd.io/outbound-port", Works, ""),
    Setting::new("config.linkerd.io/admin-port", Works, ""),
    Setting::new("config.linkerd.io/pod-inbound-ports", Works, ""),
    Setting::new("config.linkerd.io/skip-inbound-ports", Works, ""),
    Setting::new("config.linkerd.io/skip-outbound-ports", Works, ""),
    Setting::new("config.linkerd.io/skip-subnets", Works, ""),
    Setting::new("config.linkerd.io/opaque-ports", Works, ""),
    Setting::new("config.linkerd.io/proxy-cpu-request", Works, "also the least number of worker threads, rounded up"),
    Setting::new("config.linkerd.io/proxy-cpu-limit", Works, "also the largest number of worker threads, rounded up"),
    Setting::new(
        "config.linkerd.io/proxy-cpu-ratio-limit",
        Works,
        "of the machine's processors; a limit of CPU counts instead",
    ),
    Setting::new("config.linkerd.io/proxy-memory-request", Works, ""),
    Setting::new("config.linkerd.io/proxy-memory-limit", Works, ""),
    Setting::new("config.linkerd.io/proxy-ephemeral-storage-request", Works, ""),
    Setting::new("config.linkerd.io/proxy-ephemeral-storage-limit", Works, ""),
    Setting::new("config.linkerd.io/proxy-uid", Works, ""),
    Setting::new("config.linkerd.io/proxy-gid", Works, ""),
    Setting::new("config.linkerd.io/proxy-admin-shutdown", Works, ""),
    Setting::new("config.linkerd.io/proxy-await", Meaningless, NATIVE),
    Setting::new("config.linkerd.io/close-wait-timeout", Meaningless, "redirected connections have no conntrack entry"),
    Setting::new("config.linkerd.io/shutdown-grace-period", Works, ""),
    Setting::new("config.linkerd.io/proxy-log-level", Works, ""),
    Setting::new("config.linkerd.io/proxy-log-format", Works, ""),
    Setting::new(
        "config.linkerd.io/proxy-log-http-headers",
        Works,
        "insecure or off, which is the default; they are logged at the level debug",
    ),
    Setting::new("config.linkerd.io/access-log", Works, ""),
    Setting::new("config.linkerd.io/proxy-metrics-hostname-labels", Works, ""),
    Setting::new("config.linkerd.io/enable-external-profiles", Works, ""),
    Setting::new("config.linkerd.io/enable-gateway", Works, "the pod is a multicluster gateway"),
    Setting::new("config.linkerd.io/proxy-require-identity-inbound-ports", Works, ""),
    Setting::new("config.linkerd.io/default-inbound-policy", Works, ""),
    Setting::new("config.linkerd.io/proxy-inbound-connect-timeout", Works, ""),
    Setting::new("config.linkerd.io/proxy-outbound-connect-timeout", Works, ""),
    Setting::new("config.linkerd.io/proxy-inbound-discovery-cache-unused-timeout", Works, ""),
    Setting::new("config.linkerd.io/proxy-outbound-discovery-cache-unused-timeout", Works, ""),
    Setting::new("config.linkerd.io/proxy-disable-inbound-protocol-detect-timeout", Works, ""),
    Setting::new("config.linkerd.io/proxy-disable-outbound-protocol-detect-timeout", Works, ""),
    Setting::new("config.linkerd.io/proxy-enable-native-sidecar", Meaningless, NATIVE),
    Setting::new("config.beta.linkerd.io/proxy-enable-native-sidecar", Meaningless, NATIVE),
    Setting::new("config.alpha.linkerd.io/proxy-enable-native-sidecar", Meaningless, NATIVE),
    Setting::new("config.linkerd.io/proxy-additional-env", Works, ""),
    Setting::new(
        "config.alpha.linkerd.io/proxy-wait-before-exit-seconds",
        Works,
        "at most the pod's terminationGracePeriodSeconds",
    ),
    Setting::new("resource.opentelemetry.io/*", Works, "with proxy.tracing"),
];

/// Of Services, of routes and of EgressNetworks.
pub const SERVICE_ANNOTATIONS: &[Setting] = &[
    Setting::new("config.linkerd.io/opaque-ports", Works, ""),
    Setting::new("balancer.linkerd.io/failure-accrual", Works, ""),
    Setting::new("balancer.linkerd.io/failure-accrual-consecutive-*", Works, ""),
    Setting::new("balancer.alpha.linkerd.io/failure-accrual-*", Works, ""),
    Setting::new("balancer.alpha.linkerd.io/penalize-failures", Works, ""),
    Setting::new("balancer.alpha.linkerd.io/load-biaser-*", Works, ""),
    Setting::new("retry.linkerd.io/*", Works, ""),
    Setting::new("timeout.linkerd.io/*", Works, ""),
    Setting::new("multicluster.linkerd.io/remote-discovery", Works, "with enableRemoteDiscovery"),
    Setting::new("multicluster.linkerd.io/remote-service", Works, "with enableRemoteDiscovery"),
    Setting::new("multicluster.linkerd.io/local-discovery", Works, ""),
    Setting::new("multicluster.linkerd.io/*", Unsupported, "Weft has no service mirror; Linkerd's acts on it"),
    Setting::new(
        "mirror.linkerd.io/exported",
        Unsupported,
        "Weft has no service mirror; Linkerd's in another cluster acts on it",
    ),
    Setting::new("mirror.linkerd.io/*", Works, "of mirrored Services and their EndpointSlices"),
];
