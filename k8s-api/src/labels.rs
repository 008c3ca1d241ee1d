//! Labels, annotations and well-known names.
//!
//! They are Linkerd's (`linkerd2:pkg/k8s/labels.go`), so that dashboards, policies and habits carry over; Weft's own
//! have the prefix `weft.io/`.

/// Name of the proxy's container, read by discovery, by the CLI and by stock tools.
pub const PROXY_CONTAINER: &str = "linkerd-proxy";
/// Name of the init container with which other meshes install iptables rules; Weft never adds one.
pub const INIT_CONTAINER: &str = "linkerd-init";
/// The user id of the proxy, Linkerd's default.
pub const PROXY_UID: i64 = 2102;

/// Port of the proxy's outbound listener.
pub const OUTBOUND_PORT: u16 = 4140;
/// Port of the proxy's inbound listener.
pub const INBOUND_PORT: u16 = 4143;
/// Port of the proxy's tap server.
pub const CONTROL_PORT: u16 = 4190;
/// Port of the proxy's admin server.
pub const ADMIN_PORT: u16 = 4191;

/// The lease whose holder writes the EndpointSlices of ExternalWorkloads, in the control plane's namespace.
pub const ENDPOINT_WRITE_LEASE: &str = "linkerd-destination-endpoint-write";
/// The lease whose holder writes the statuses of routes and policies, in the control plane's namespace.
pub const STATUS_WRITE_LEASE: &str = "policy-controller-write";
/// The Deployment of discovery and policy, in the control plane's namespace.
pub const DESTINATION_DEPLOYMENT: &str = "linkerd-destination";

/// Audience of the projected service-account token that the identity service accepts.
pub const IDENTITY_AUDIENCE: &str = "identity.l5d.io";

/// Pod label: the control plane's namespace; its presence makes a pod meshed.
pub const CONTROL_PLANE_NS: &str = "linkerd.io/control-plane-ns";
/// Pod label: the pod's own namespace.
pub const WORKLOAD_NS: &str = "linkerd.io/workload-ns";
/// Pod label: which part of the control plane a pod is (`destination`, `identity`, ...).
pub const CONTROL_PLANE_COMPONENT: &str = "linkerd.io/control-plane-component";
/// Prefix of the pod label that names the owner, as in `linkerd.io/proxy-deployment: web`.
pub const PROXY_OWNER_PREFIX: &str = "linkerd.io/proxy-";

/// Annotation of pods and namespaces: `enabled`, `disabled` or `ingress`.
pub const INJECT: &str = "linkerd.io/inject";
/// Annotation: who injected the proxy.
pub const CREATED_BY: &str = "linkerd.io/created-by";
/// Annotation: version of the injected proxy.
pub const PROXY_VERSION: &str = "linkerd.io/proxy-version";
/// Annotation: SHA-256 of the proxy's trust anchors, in hexadecimal.
pub const TRUST_ROOT_SHA256: &str = "linkerd.io/trust-root-sha256";

/// Annotation of a webhook's Secret: SHA-256 of the certificate that the control plane generated. A Secret without it,
/// or with the hash of another certificate, belongs to somebody else and is left alone.
pub const GENERATED_CERTIFICATE: &str = "weft.io/generated-certificate";

/// Annotation that [`crate::manifest`] sets, in memory, in what stands for a policy of which a part has the wrong type,
/// or for a Server of which it cannot be read what it selects. Its value is the problem.
pub const UNREADABLE: &str = "weft.io/unreadable";
/// Annotation beside [`UNREADABLE`], if what stands for a Server selects more than what can be read of it.
pub const UNREADABLE_SELECTION: &str = "weft.io/unreadable-selection";

/// Prefix of Weft's own annotations.
pub const OWN_PREFIX: &str = "weft.io/";
/// Prefixes of the annotations that a pod takes over from its namespace.
pub const INHERITED_PREFIXES: [&str; 3] = ["config.linkerd.io/", "config.alpha.linkerd.io/", OWN_PREFIX];
/// Annotation: ports the proxies treat as opaque TCP (numbers, ranges, port names).
pub const OPAQUE_PORTS: &str = "config.linkerd.io/opaque-ports";
/// Annotation: ports whose inbound connections bypass the proxy.
pub const SKIP_INBOUND_PORTS: &str = "config.linkerd.io/skip-inbound-ports";
/// Annotation: ports whose outbound connections bypass the proxy.
pub const SKIP_OUTBOUND_PORTS: &str = "config.linkerd.io/skip-outbound-ports";
/// Annotation: source networks whose inbound connections bypass the proxy.
pub const SKIP_SUBNETS: &str = "config.linkerd.io/skip-subnets";
/// Annotation: policy for ports that no Server selects.
pub const DEFAULT_INBOUND_POLICY: &str = "config.linkerd.io/default-inbound-policy";
/// Annotation: ports that only mesh identities may use under the default policy.
pub const REQUIRE_IDENTITY_PORTS: &str = "config.linkerd.io/proxy-require-identity-inbound-ports";
/// Annotation: replaces the list of the pod's inbound ports.
pub const POD_INBOUND_PORTS: &str = "config.linkerd.io/pod-inbound-ports";
/// Annotation: the proxy's image.
pub const PROXY_IMAGE: &str = "config.linkerd.io/proxy-image";
/// Annotation: the proxy's version (image tag).
pub const CONFIG_PROXY_VERSION: &str = "config.linkerd.io/proxy-version";
/// Annotation: pull policy of the proxy's image.
pub const IMAGE_PULL_POLICY: &str = "config.linkerd.io/image-pull-policy";
/// Annotation: user id of the proxy.
pub const PROXY_UID_ANNOTATION: &str = "config.linkerd.io/proxy-uid";
/// Annotation: group id of the proxy.
pub const PROXY_GID_ANNOTATION: &str = "config.linkerd.io/proxy-gid";
/// Annotation: how the kernel recognises the proxy, whose connections it does not redirect. `user`: by user and group.
/// `cgroup`: by the proxy's container alone, so that an application that runs as the proxy's user is redirected like
/// any other.
pub const PROXY_EXEMPTION: &str = "weft.io/proxy-exemption";
/// Annotation: `true` switches the pod's redirection off, in both directions, while the pod runs.
pub const BYPASS: &str = "weft.io/bypass";
/// Annotation of pods and namespaces: with `true`, the proxy refuses connections to endpoints without an identity
/// instead of sending plaintext. Of Services, which inherit it from the namespace: the proxies of all clients refuse
/// such connections to the Service and to the addresses of its pods.
pub const REQUIRE_MTLS: &str = "weft.io/require-mtls";
/// Annotation: port of the tap server.
pub const CONTROL_PORT_ANNOTATION: &str = "config.linkerd.io/control-port";
/// Annotation of pods and namespaces, of Linkerd's tap injector: `true` lets nobody watch the pods' requests over the
/// network.
pub const DISABLE_TAP: &str = "viz.linkerd.io/disable-tap";
/// Annotation: port of the inbound listener.
pub const INBOUND_PORT_ANNOTATION: &str = "config.linkerd.io/inbound-port";
/// Annotation: port of the outbound listener.
pub const OUTBOUND_PORT_ANNOTATION: &str = "config.linkerd.io/outbound-port";
/// Annotation: port of the admin server.
pub const ADMIN_PORT_ANNOTATION: &str = "config.linkerd.io/admin-port";
/// Annotation: the proxy's log filter.
pub const LOG_LEVEL: &str = "config.linkerd.io/proxy-log-level";
/// Annotation: the proxy's log format, `plain` or `json`.
pub const LOG_FORMAT: &str = "config.linkerd.io/proxy-log-format";
/// Annotation: access log, `apache` or `json`.
pub const ACCESS_LOG: &str = "config.linkerd.io/access-log";
/// Annotation: serve `/shutdown` on the admin port.
pub const ADMIN_SHUTDOWN: &str = "config.linkerd.io/proxy-admin-shutdown";
/// Annotation: how long a draining proxy waits.
pub const SHUTDOWN_GRACE_PERIOD: &str = "config.linkerd.io/shutdown-grace-period";
/// Annotation: how long the proxy tries to reach the application.
pub const INBOUND_CONNECT_TIMEOUT: &str = "config.linkerd.io/proxy-inbound-connect-timeout";
/// Annotation: how long the proxy tries to reach another endpoint.
pub const OUTBOUND_CONNECT_TIMEOUT: &str = "config.linkerd.io/proxy-outbound-connect-timeout";
/// Annotation: idle time after which inbound policies are forgotten.
pub const INBOUND_CACHE_TIMEOUT: &str = "config.linkerd.io/proxy-inbound-discovery-cache-unused-timeout";
/// Annotation: idle time after which outbound discovery is forgotten.
pub const OUTBOUND_CACHE_TIMEOUT: &str = "config.linkerd.io/proxy-outbound-discovery-cache-unused-timeout";
/// Annotation: wait for inbound protocol detection without limit.
pub const DISABLE_INBOUND_DETECT_TIMEOUT: &str = "config.linkerd.io/proxy-disable-inbound-protocol-detect-timeout";
/// Annotation: wait for outbound protocol detection without limit.
pub const DISABLE_OUTBOUND_DETECT_TIMEOUT: &str = "config.linkerd.io/proxy-disable-outbound-protocol-detect-timeout";
/// Annotation: profile lookups for every name, not only those of the cluster.
pub const ENABLE_EXTERNAL_PROFILES: &str = "config.linkerd.io/enable-external-profiles";
/// Annotation: whether the proxy is a native sidecar; Linkerd reads each of these names.
pub const NATIVE_SIDECAR: [&str; 3] = [
    "config.linkerd.io/proxy-enable-native-sidecar",
    "config.beta.linkerd.io/proxy-enable-native-sidecar",
    "config.alpha.linkerd.io/proxy-enable-native-sidecar",
];
/// Annotation: CPU request of the proxy.
pub const PROXY_CPU_REQUEST: &str = "config.linkerd.io/proxy-cpu-request";
/// Annotation: CPU limit of the proxy.
pub const PROXY_CPU_LIMIT: &str = "config.linkerd.io/proxy-cpu-limit";
/// Annotation: memory request of the proxy.
pub const PROXY_MEMORY_REQUEST: &str = "config.linkerd.io/proxy-memory-request";
/// Annotation: memory limit of the proxy.
pub const PROXY_MEMORY_LIMIT: &str = "config.linkerd.io/proxy-memory-limit";
/// Annotation: ephemeral storage request of the proxy.
pub const PROXY_STORAGE_REQUEST: &str = "config.linkerd.io/proxy-ephemeral-storage-request";
/// Annotation: ephemeral storage limit of the proxy.
pub const PROXY_STORAGE_LIMIT: &str = "config.linkerd.io/proxy-ephemeral-storage-limit";
/// Annotation: worker threads of the proxy as a fraction of the machine's processors.
pub const PROXY_CPU_RATIO_LIMIT: &str = "config.linkerd.io/proxy-cpu-ratio-limit";
/// Annotation: `enabled` or `disabled`, whether the application waits for the proxy.
pub const PROXY_AWAIT: &str = "config.linkerd.io/proxy-await";
/// Annotation: how many seconds the proxy keeps running after the pod's termination begins.
pub const WAIT_BEFORE_EXIT: &str = "config.alpha.linkerd.io/proxy-wait-before-exit-seconds";
/// Annotation: `insecure` also logs headers of HTTP requests, `off` never does.
pub const LOG_HTTP_HEADERS: &str = "config.linkerd.io/proxy-log-http-headers";
/// Annotation: the label `hostname` in the proxy's outbound metrics.
pub const METRICS_HOSTNAME_LABELS: &str = "config.linkerd.io/proxy-metrics-hostname-labels";
/// Annotation: the proxy forwards to other Services of the cluster, for multicluster.
pub const ENABLE_GATEWAY: &str = "config.linkerd.io/enable-gateway";
/// Annotation: adds a container with debugging tools.
pub const ENABLE_DEBUG_SIDECAR: &str = "config.linkerd.io/enable-debug-sidecar";
/// Annotation: image of that container.
pub const DEBUG_IMAGE: &str = "config.linkerd.io/debug-image";
/// Annotation: version of that image.
pub const DEBUG_IMAGE_VERSION: &str = "config.linkerd.io/debug-image-version";
/// Annotation: pull policy of that image.
pub const DEBUG_IMAGE_PULL_POLICY: &str = "config.linkerd.io/debug-image-pull-policy";
/// Name of the container with debugging tools.
pub const DEBUG_CONTAINER: &str = "linkerd-debug";
/// Prefix of annotations that become attributes of traces, OpenTelemetry's.
pub const TRACE_ATTRIBUTE_PREFIX: &str = "resource.opentelemetry.io/";
/// Annotation: further environment of the proxy, a JSON list of Kubernetes `EnvVar`s.
pub const PROXY_ADDITIONAL_ENV: &str = "config.linkerd.io/proxy-additional-env";

/// EndpointSlice annotation: the mesh identity of the gateway that stands for another cluster's Service.
pub const REMOTE_GATEWAY_IDENTITY: &str = "mirror.linkerd.io/remote-gateway-identity";
/// EndpointSlice annotation: the DNS name of the Service in the other cluster.
pub const REMOTE_SERVICE_NAME: &str = "mirror.linkerd.io/remote-svc-fq-name";
/// EndpointSlice label: the cluster whose Service is mirrored.
pub const MIRRORED_CLUSTER: &str = "mirror.linkerd.io/cluster-name";

/// Service label: the linked cluster whose endpoints the Service has. As an annotation: members of a federated Service,
/// `service@cluster` separated by commas.
pub const REMOTE_DISCOVERY: &str = "multicluster.linkerd.io/remote-discovery";
/// Service label: the name of the Service in the linked cluster.
pub const REMOTE_SERVICE: &str = "multicluster.linkerd.io/remote-service";
/// Service annotation: the Service of this cluster that is a member of a federated one.
pub const LOCAL_DISCOVERY: &str = "multicluster.linkerd.io/local-discovery";
/// Type of the Secrets that link clusters; their key `kubeconfig` says how to read the other cluster's objects.
pub const LINK_SECRET_TYPE: &str = "mirror.linkerd.io/remote-kubeconfig";
/// Secret label: the linked cluster's name.
pub const LINK_CLUSTER: &str = "multicluster.linkerd.io/cluster-name";
/// Secret annotation: the trust domain of identities in the linked cluster.
pub const LINK_TRUST_DOMAIN: &str = "multicluster.linkerd.io/trust-domain";
/// Secret annotation: the domain of DNS names in the linked cluster.
pub const LINK_CLUSTER_DOMAIN: &str = "multicluster.linkerd.io/cluster-domain";

/// EndpointSlice label that names the Service, `discovery.k8s.io`'s.
pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Pod label that distinguishes the ReplicaSets of one Deployment.
pub const POD_TEMPLATE_HASH: &str = "pod-template-hash";
/// Node label with the node's zone.
pub const ZONE: &str = "topology.kubernetes.io/zone";
