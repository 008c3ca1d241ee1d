//! Every check, in a sensible order for reading. Names and descriptions are Linkerd's
//! (`linkerd2:pkg/healthcheck/healthcheck.go`) if Linkerd has the same check; `weft-` categories are ours.

use std::collections::BTreeSet;

use super::{
    agents, data_plane, extensions,
    facts::{Mode, Part},
    high_availability, identity, installed, kubernetes, opaque_ports,
    outcome::{
        Category, Check,
        Severity::{Error, Fatal, Waits, Warning},
    },
    placement, unsupported, versions, viz, webhooks,
};

pub(super) const CATEGORIES: &[Category] = &[
    Category {
        name: "kubernetes-api",
        needs: &[],
        applies: |_| true,
        checks: &[
            Check::new("can initialize the client", "k8s-api", Fatal, kubernetes::client),
            Check::new("can query the Kubernetes API", "k8s-api-answers", Fatal, kubernetes::answers),
        ],
    },
    Category {
        name: "kubernetes-version",
        needs: &[],
        applies: |_| true,
        checks: &[Check::new(
            "is running the minimum Kubernetes API version",
            "k8s-version",
            Error,
            kubernetes::version,
        )],
    },
    Category {
        name: "pre-kubernetes-setup",
        needs: &[Part::Access, Part::OtherAgents, Part::Config, Part::Settings, Part::Mesh],
        applies: |mode| mode == Mode::Pre,
        checks: &[
            Check::new("control plane is not already installed", "pre-ns", Error, kubernetes::not_installed),
            Check::new("no other mesh is installed", "weft-pre-other-mesh", Warning, kubernetes::no_other_mesh),
            Check::new(
                "control plane namespace admits the agent",
                "weft-pre-pod-security",
                Error,
                kubernetes::pod_security,
            ),
            Check::new(
                "can create non-namespaced resources",
                "pre-k8s-cluster-k8s",
                Error,
                kubernetes::may_create_cluster_wide,
            ),
            Check::new("can create namespaced resources", "pre-k8s", Error, kubernetes::may_create_namespaced),
            Check::new("services have IPv4 first", "weft-pre-first-family", Warning, kubernetes::first_family),
            Check::new("no clock skew detected", "pre-k8s-clock-skew", Warning, kubernetes::clock),
            Check::new("a node has a kernel that the agent supports", "weft-pre-kernel", Error, kubernetes::one_kernel),
            Check::new("nodes have a kernel that the agent supports", "weft-pre-kernels", Warning, kubernetes::kernels),
            Check::new(
                "no other agent of Weft is installed",
                "weft-pre-other-agent",
                Error,
                kubernetes::no_other_agent,
            ),
        ],
    },
    // The first of an installation, because it decides which of the others apply.
    Category {
        name: "weft-existence",
        needs: &[Part::Config, Part::OtherAgents],
        applies: |mode| installed_at_all(mode) || mode == Mode::AgentAlone,
        checks: &[
            Check::new("control plane is Weft's", "weft-existence-other-mesh", Fatal, installed::is_ours),
            Check::new(
                "agents have a control plane of Weft",
                "weft-existence-agent-alone",
                Warning,
                installed::agents_have_a_control_plane,
            ),
        ],
    },
    Category {
        name: "gateway-api-crd",
        needs: &[Part::Definitions],
        applies: |mode| installed_at_all(mode) || mode == Mode::Definitions,
        checks: &[Check::new(
            "Gateway API CRDs are of a known version",
            "weft-gateway-api-crds",
            Warning,
            kubernetes::gateway_crds,
        )],
    },
    Category {
        name: "linkerd-crd",
        needs: &[Part::Definitions, Part::Config],
        applies: |mode| installed_at_all(mode) || mode == Mode::Definitions,
        checks: &[Check::new(
            "control plane CustomResourceDefinitions exist",
            "l5d-existence-crd",
            Error,
            kubernetes::crds,
        )],
    },
    Category {
        name: "linkerd-existence",
        needs: &[Part::Config, Part::Settings, Part::Inventory, Part::Mesh],
        applies: installed_at_all,
        checks: &[
            Check::new("control plane namespace exists", "l5d-existence-ns", Fatal, installed::namespace),
            Check::new("'linkerd-config' config map exists", "l5d-existence-linkerd-config", Fatal, installed::config),
            Check::new(
                "'linkerd-config' config map can be read",
                "weft-existence-linkerd-config-readable",
                Error,
                installed::config_parses,
            ),
            Check::new(
                "control plane replica sets are ready",
                "l5d-existence-replicasets",
                Waits,
                installed::replica_sets,
            ),
            Check::new("no unschedulable pods", "l5d-existence-unschedulable-pods", Waits, installed::scheduled),
            Check::new("control plane pods are ready", "l5d-api-control-ready", Waits, installed::control_pods),
            Check::new(
                "cluster networks contains all node podCIDRs",
                "l5d-cluster-networks-cidr",
                Error,
                installed::node_networks,
            ),
            Check::new(
                "cluster networks contains all pods",
                "l5d-cluster-networks-pods",
                Error,
                installed::pod_networks,
            ),
            Check::new(
                "cluster networks contains all services",
                "l5d-cluster-networks-services",
                Error,
                installed::service_networks,
            ),
        ],
    },
    Category {
        name: "linkerd-config",
        needs: &[Part::Config, Part::Inventory, Part::Webhooks],
        applies: installed_at_all,
        checks: &[
            Check::new("control plane ClusterRoles exist", "l5d-existence-cr", Error, installed::cluster_roles),
            Check::new(
                "control plane ClusterRoleBindings exist",
                "l5d-existence-crb",
                Error,
                installed::cluster_role_bindings,
            ),
            Check::new("control plane ServiceAccounts exist", "l5d-existence-sa", Error, installed::service_accounts),
            Check::new(
                "control plane MutatingWebhookConfigurations exist",
                "l5d-existence-mwc",
                Error,
                webhooks::mutating_exist,
            ),
            Check::new(
                "control plane ValidatingWebhookConfigurations exist",
                "l5d-existence-vwc",
                Error,
                webhooks::validating_exist,
            ),
        ],
    },
    Category {
        name: "weft-agent",
        needs: &[Part::Config, Part::Mesh, Part::Events],
        applies: |mode| installed_at_all(mode) || mode == Mode::AgentAlone,
        checks: &[
            Check::new("agent DaemonSet exists", "weft-agent-daemonset", Error, agents::exists),
            Check::new("agent runs on all nodes", "weft-agent-nodes", Waits, agents::on_all_nodes),
            Check::new("agent pods are ready", "weft-agent-ready", Waits, agents::ready),
            Check::new("agents answer", "weft-agent-answer", Waits, agents::answer),
            Check::new("agents run one version of the programs", "weft-agent-version", Warning, agents::one_version),
            Check::new(
                "programs are attached to the pods' cgroup",
                "weft-agent-cgroup",
                Warning,
                agents::below_the_root,
            ),
            Check::new("every redirected connection was announced", "weft-agent-misses", Warning, agents::no_misses),
        ],
    },
    Category {
        name: "linkerd-identity",
        needs: &[Part::Config, Part::Settings],
        applies: installed_at_all,
        checks: &[
            Check::new(
                "certificate config is valid",
                "l5d-identity-cert-config-valid",
                Error,
                identity::config_is_valid,
            ),
            Check::new(
                "trust anchors are using supported crypto algorithm",
                "l5d-identity-trustAnchors-use-supported-crypto",
                Error,
                identity::anchors_supported,
            ),
            Check::new(
                "trust anchors are within their validity period",
                "l5d-identity-trustAnchors-are-time-valid",
                Error,
                identity::anchors_valid,
            ),
            Check::new(
                "trust anchors are valid for at least 60 days",
                "l5d-identity-trustAnchors-not-expiring-soon",
                Warning,
                identity::anchors_last,
            ),
            Check::new(
                "issuer cert is using supported crypto algorithm",
                "l5d-identity-issuer-cert-uses-supported-crypto",
                Error,
                identity::issuer_supported,
            ),
            Check::new(
                "issuer cert is within its validity period",
                "l5d-identity-issuer-cert-is-time-valid",
                Error,
                identity::issuer_valid,
            ),
            Check::new(
                "issuer cert is valid for at least 60 days",
                "l5d-identity-issuer-cert-not-expiring-soon",
                Warning,
                identity::issuer_lasts,
            ),
            Check::new(
                "issuer cert is issued by the trust anchor",
                "l5d-identity-issuer-cert-issued-by-trust-anchor",
                Error,
                identity::issuer_is_ours,
            ),
        ],
    },
    Category {
        name: "linkerd-webhooks-and-apisvc-tls",
        needs: &[Part::Config, Part::Webhooks],
        applies: installed_at_all,
        checks: &[
            Check::new(
                "proxy-injector webhook has valid cert",
                "l5d-proxy-injector-webhook-cert-valid",
                Waits,
                webhooks::injector_valid,
            ),
            Check::new(
                "proxy-injector cert is not about to expire",
                "l5d-proxy-injector-webhook-cert-not-expiring-soon",
                Warning,
                webhooks::injector_lasts,
            ),
            Check::new(
                "sp-validator webhook has valid cert",
                "l5d-sp-validator-webhook-cert-valid",
                Waits,
                webhooks::sp_validator_valid,
            ),
            Check::new(
                "sp-validator cert is not about to expire",
                "l5d-sp-validator-webhook-cert-not-expiring-soon",
                Warning,
                webhooks::sp_validator_lasts,
            ),
            Check::new(
                "policy-validator webhook has valid cert",
                "l5d-policy-validator-webhook-cert-valid",
                Waits,
                webhooks::policy_validator_valid,
            ),
            Check::new(
                "policy-validator cert is not about to expire",
                "l5d-policy-validator-webhook-cert-not-expiring-soon",
                Warning,
                webhooks::policy_validator_lasts,
            ),
            Check::new("webhook services have endpoints", "weft-webhook-endpoints", Waits, webhooks::have_endpoints),
        ],
    },
    Category {
        name: "linkerd-identity-data-plane",
        needs: &[Part::Config, Part::Settings, Part::Mesh],
        applies: |mode| mode == Mode::Proxy,
        checks: &[Check::new(
            "data plane proxies certificate match CA",
            "l5d-identity-data-plane-proxies-certs-match-ca",
            Warning,
            identity::proxies_trust_it,
        )],
    },
    Category {
        name: "linkerd-version",
        needs: &[],
        applies: |_| true,
        checks: &[Check::new("cli is up-to-date", "l5d-version-cli", Warning, versions::cli_is_expected)],
    },
    Category {
        name: "control-plane-version",
        needs: &[Part::Mesh],
        applies: installed_at_all,
        checks: &[
            Check::new(
                "control plane is up-to-date",
                "l5d-version-control",
                Warning,
                versions::control_plane_is_expected,
            ),
            Check::new(
                "control plane and cli versions match",
                "weft-version-control-cli",
                Warning,
                versions::control_plane_matches_cli,
            ),
        ],
    },
    Category {
        name: "linkerd-control-plane-proxy",
        needs: &[Part::Config, Part::Settings, Part::Mesh],
        applies: installed_at_all,
        checks: &[
            Check::new(
                "control plane proxies are healthy",
                "l5d-cp-proxy-healthy",
                Waits,
                data_plane::control_plane_healthy,
            ),
            Check::new(
                "control plane proxies are up-to-date",
                "l5d-cp-proxy-version",
                Warning,
                data_plane::control_plane_up_to_date,
            ),
            Check::new(
                "control plane proxies are redirected to by their node's agent",
                "weft-cp-proxy-redirected",
                Waits,
                data_plane::control_plane_enrolled,
            ),
        ],
    },
    Category {
        name: "linkerd-data-plane",
        needs: &[Part::Config, Part::Settings, Part::Inventory, Part::Workloads, Part::Mesh],
        applies: |mode| mode == Mode::Proxy,
        checks: &[
            Check::new("data plane namespace exists", "l5d-data-plane-exists", Fatal, data_plane::namespace_exists),
            Check::new(
                "annotations of namespaces, workloads and pods can be read",
                "weft-data-plane-annotations",
                Error,
                data_plane::annotations,
            ),
            Check::new(
                "pods of injected namespaces have a proxy",
                "weft-data-plane-injected",
                Warning,
                data_plane::have_a_proxy,
            ),
            Check::new("data plane proxies are ready", "l5d-data-plane-ready", Waits, data_plane::proxies_ready),
            Check::new(
                "data plane proxies are up-to-date",
                "l5d-data-plane-version",
                Warning,
                data_plane::proxies_up_to_date,
            ),
            Check::new(
                "data plane pods are redirected by their node's agent",
                "weft-data-plane-redirected",
                Waits,
                data_plane::proxies_enrolled,
            ),
            Check::new(
                "data plane pod labels are configured correctly",
                "l5d-data-plane-pod-labels",
                Warning,
                placement::pod_labels,
            ),
            Check::new(
                "data plane service labels are configured correctly",
                "l5d-data-plane-services-labels",
                Warning,
                placement::service_labels,
            ),
            Check::new(
                "data plane service annotations are configured correctly",
                "l5d-data-plane-services-annotations",
                Warning,
                placement::service_annotations,
            ),
        ],
    },
    Category {
        name: "linkerd-opaque-ports-definition",
        needs: &[Part::Config, Part::Settings, Part::Inventory, Part::Mesh],
        applies: |mode| mode == Mode::Proxy,
        checks: &[Check::new(
            "opaque ports are properly annotated",
            "linkerd-opaque-ports-definition",
            Warning,
            opaque_ports::agree,
        )],
    },
    Category {
        name: "linkerd-ha-checks",
        needs: &[Part::Config, Part::Mesh],
        applies: installed_at_all,
        checks: &[Check::new(
            "multiple replicas of control plane pods",
            "l5d-control-plane-replicas",
            Warning,
            high_availability::replicas,
        )],
    },
    Category {
        name: "linkerd-extension-checks",
        needs: &[Part::Settings],
        applies: installed_at_all,
        checks: &[Check::new(
            "namespace configuration for extensions",
            "l5d-extension-namespaces",
            Warning,
            extensions::namespaces,
        )],
    },
    Category {
        name: "weft-viz",
        needs: &[Part::Config, Part::Mesh, Part::Component],
        applies: |mode| installed_at_all(mode) || mode.is_viz(),
        checks: &[
            Check::new("component is installed", "weft-viz-installed", Fatal, viz::installed),
            Check::new("component pods are ready", "weft-viz-ready", Waits, viz::ready),
            Check::new("component pods have a proxy", "weft-viz-meshed", Error, viz::meshed),
            Check::new("proxies serve tap to the component", "weft-viz-tap", Warning, viz::taps),
            Check::new("component answers this user", "weft-viz-answers", Waits, viz::answers),
            Check::new("component and cli versions match", "weft-viz-version", Warning, viz::version),
        ],
    },
    Category {
        name: "weft-viz-data-plane",
        needs: &[Part::Config, Part::Settings, Part::Mesh, Part::Component],
        applies: |mode| mode == Mode::VizProxy,
        checks: &[
            Check::new(
                "data plane namespace exists",
                "weft-viz-data-plane-exists",
                Fatal,
                data_plane::namespace_exists,
            ),
            Check::new("data plane proxies serve tap", "weft-viz-data-plane-tap", Warning, viz::pods_serve_tap),
        ],
    },
    Category {
        name: "linkerd-unsupported",
        needs: &[Part::Config, Part::Settings, Part::Inventory, Part::Workloads, Part::Objects],
        applies: installed_at_all,
        checks: &[
            Check::new("resources are acted upon", "weft-unsupported-resources", Warning, unsupported::resources),
            Check::new(
                "annotations of services are acted upon",
                "weft-unsupported-services",
                Warning,
                unsupported::services,
            ),
            Check::new("annotations of pods are acted upon", "weft-unsupported-pods", Warning, unsupported::pods),
        ],
    },
    Category {
        name: "weft-events",
        needs: &[Part::Events],
        applies: |mode| installed_at_all(mode) || mode == Mode::AgentAlone,
        checks: &[Check::new("no part of the mesh warns", "weft-events", Warning, data_plane::no_warnings)],
    },
];

/// The facts that the categories of a scope need.
pub(super) fn needs(mode: Mode) -> BTreeSet<Part> {
    of(mode).flat_map(|category| category.needs).copied().collect()
}

/// The categories of a scope, in their order.
pub(super) fn of(mode: Mode) -> impl Iterator<Item = &'static Category> + Clone {
    CATEGORIES.iter().filter(move |category| (category.applies)(mode))
}

fn installed_at_all(mode: Mode) -> bool {
    matches!(mode, Mode::Installed | Mode::Proxy)
}

#[cfg(test)]
mod tests;
