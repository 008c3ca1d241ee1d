//! Settings that the mesh's owner chooses for all injected pods.

use ipnet::IpNet;
use k8s_openapi::api::core::v1::EnvVar;

use super::{bypass::Skips, exemption::ExemptionRules, tuning::ProxyTuning};
use crate::{
    labels,
    policy::DefaultPolicy,
    ports::{PortSet, default_opaque_ports},
};

/// Settings of injection, the part of Helm values that concerns the proxy.
#[derive(Clone, Debug, PartialEq)]
pub struct InjectConfig {
    /// Image of the proxy.
    pub proxy_image: String,
    /// Version of the proxy, for annotations.
    pub proxy_version: String,
    /// Command of the container; empty means the image's entry point.
    pub proxy_command: Vec<String>,
    /// Arguments of the container.
    pub proxy_args: Vec<String>,
    /// Pull policy of the image.
    pub image_pull_policy: String,
    /// User id of the proxy, above 0.
    pub proxy_uid: i64,
    /// Group id of the proxy; none leaves it to the image.
    pub proxy_gid: Option<i64>,
    /// What the cluster's administrator allows pods to exempt from redirection.
    pub exemption: ExemptionRules,
    /// What bypasses the proxy; a pod may have others, unless the administrator forbids that.
    pub skips: Skips,
    /// Ports of the proxy's listeners.
    pub ports: ProxyPorts,
    /// Resources that the proxy requests, and their limits.
    pub resources: ProxyResources,
    /// Whether the proxy is not ready before the kernel attests the redirect.
    pub require_redirect: bool,
    /// Namespace of the control plane.
    pub control_plane_namespace: String,
    /// Domain of the cluster's DNS names.
    pub cluster_domain: String,
    /// Trust domain of identities.
    pub trust_domain: String,
    /// Trust anchors, PEM.
    pub trust_anchors_pem: String,
    /// Addresses of the control plane.
    pub control_plane: ControlPlaneAddrs,
    /// Who may watch the requests of pods over the network; `None` starts no tap server.
    pub tap: Option<TapClient>,
    /// Networks in which destinations are looked up, and that the `cluster-*` policies admit.
    pub cluster_networks: Vec<IpNet>,
    /// Policy of ports without a Server, if the pod has no annotation.
    pub default_inbound_policy: DefaultPolicy,
    /// Ports that are opaque unless an annotation says otherwise.
    pub default_opaque_ports: PortSet,
    /// Whether the proxy also listens on IPv6.
    pub ipv6: bool,
    /// The proxy's log filter.
    pub log_level: String,
    /// The proxy's log format, `plain` or `json`.
    pub log_format: String,
    /// How the proxy works, where no annotation says otherwise.
    pub tuning: ProxyTuning,
    /// Additional environment variables, after all others.
    pub extra_env: Vec<EnvVar>,
}

/// Ports of a proxy's listeners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyPorts {
    /// Outbound connections are redirected here.
    pub outbound: u16,
    /// Inbound connections are redirected here.
    pub inbound: u16,
    /// Tap server.
    pub control: u16,
    /// Probes and metrics.
    pub admin: u16,
}

impl Default for ProxyPorts {
    /// Linkerd's ports.
    fn default() -> Self {
        Self {
            outbound: labels::OUTBOUND_PORT,
            inbound: labels::INBOUND_PORT,
            control: labels::CONTROL_PORT,
            admin: labels::ADMIN_PORT,
        }
    }
}

/// Kubernetes quantities for the proxy's container; `None` leaves one out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyResources {
    /// CPU request.
    pub cpu_request: Option<String>,
    /// CPU limit.
    pub cpu_limit: Option<String>,
    /// Memory request.
    pub memory_request: Option<String>,
    /// Memory limit.
    pub memory_limit: Option<String>,
    /// Ephemeral storage request.
    pub storage_request: Option<String>,
    /// Ephemeral storage limit.
    pub storage_limit: Option<String>,
}

/// The ServiceAccount whose mesh identity may tap proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapClient {
    /// Name of the ServiceAccount.
    pub service_account: String,
    /// Namespace of the ServiceAccount.
    pub namespace: String,
}

impl Default for TapClient {
    /// That of chart `weft-viz`, in the namespace of Linkerd's extension.
    fn default() -> Self {
        Self { service_account: "weft-viz".to_owned(), namespace: "linkerd-viz".to_owned() }
    }
}

/// Addresses of the control plane's services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlPlaneAddrs {
    /// Destination service.
    pub destination: ControlService,
    /// Policy service.
    pub policy: ControlService,
    /// Identity service.
    pub identity: ControlService,
}

/// One control plane service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlService {
    /// `host:port` that the proxy dials; a loopback host is dialled in plain text.
    pub addr: String,
    /// Mesh identity of the server.
    pub name: String,
}

impl ControlPlaneAddrs {
    /// The addresses in a cluster: headless Services, and identities of the ServiceAccounts behind them.
    pub fn in_cluster(namespace: &str, cluster_domain: &str, trust_domain: &str) -> Self {
        let service = |service: &str, port: u16, account: &str| ControlService {
            addr: format!("{service}.{namespace}.svc.{cluster_domain}.:{port}"),
            name: format!("{account}.{namespace}.serviceaccount.identity.{namespace}.{trust_domain}"),
        };
        Self {
            destination: service("linkerd-dst-headless", 8086, "linkerd-destination"),
            policy: service("linkerd-policy", 8090, "linkerd-destination"),
            identity: service("linkerd-identity-headless", 8080, "linkerd-identity"),
        }
    }

    /// The same services in the pod's own network namespace, for the control plane's own proxies.
    #[must_use]
    pub fn on_localhost(&self) -> Self {
        let local = |service: &ControlService| ControlService {
            addr: format!("localhost.:{}", service.addr.rsplit(':').next().unwrap_or_default()),
            name: service.name.clone(),
        };
        Self { destination: local(&self.destination), policy: local(&self.policy), identity: local(&self.identity) }
    }
}

impl InjectConfig {
    /// Linkerd's Helm defaults, for a control plane in namespace `linkerd` of a `cluster.local` cluster.
    pub fn new(
        proxy_image: impl Into<String>,
        proxy_version: impl Into<String>,
        trust_anchors_pem: impl Into<String>,
    ) -> Self {
        Self {
            proxy_image: proxy_image.into(),
            proxy_version: proxy_version.into(),
            proxy_command: Vec::new(),
            proxy_args: Vec::new(),
            image_pull_policy: "IfNotPresent".to_owned(),
            proxy_uid: labels::PROXY_UID,
            proxy_gid: None,
            exemption: ExemptionRules::default(),
            skips: Skips::default(),
            ports: ProxyPorts::default(),
            resources: ProxyResources::default(),
            require_redirect: false,
            control_plane_namespace: "linkerd".to_owned(),
            cluster_domain: "cluster.local".to_owned(),
            trust_domain: "cluster.local".to_owned(),
            trust_anchors_pem: trust_anchors_pem.into(),
            control_plane: ControlPlaneAddrs::in_cluster("linkerd", "cluster.local", "cluster.local"),
            tap: None,
            cluster_networks: default_cluster_networks(),
            default_inbound_policy: DefaultPolicy::AllUnauthenticated,
            default_opaque_ports: default_opaque_ports(),
            ipv6: false,
            log_level: "warn,linkerd=info,hickory=error".to_owned(),
            log_format: "plain".to_owned(),
            tuning: ProxyTuning::default(),
            extra_env: Vec::new(),
        }
    }
}

/// Linkerd's default cluster networks: the private ranges (RFC 1918), carrier-grade NAT (RFC 6598), and `fd00::/8`.
pub fn default_cluster_networks() -> Vec<IpNet> {
    use std::net::{Ipv4Addr, Ipv6Addr};
    [
        IpNet::new_assert(Ipv4Addr::new(10, 0, 0, 0).into(), 8),
        IpNet::new_assert(Ipv4Addr::new(100, 64, 0, 0).into(), 10),
        IpNet::new_assert(Ipv4Addr::new(172, 16, 0, 0).into(), 12),
        IpNet::new_assert(Ipv4Addr::new(192, 168, 0, 0).into(), 16),
        IpNet::new_assert(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0).into(), 8),
    ]
    .to_vec()
}
