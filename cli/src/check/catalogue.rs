//! Every check, in a sensible order for reading. Names and descriptions are Linkerd's
//! (`linkerd2:pkg/healthcheck/healthcheck.go`) if Linkerd has the same check; `weft-` categories are ours.

use super::{
    agents, data_plane, extensions,
    facts::Mode,
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
        applies: |_| true,
        checks: &[
            Check::new("can initialize the client", Fatal, kubernetes::client),
            Check::new("can query the Kubernetes API", Fatal, kubernetes::answers),
        ],
    },
    Category {
        name: "kubernetes-version",
        applies: |_| true,
        checks: &[Check::new("is running the minimum Kubernetes API version", Error, kubernetes::version)],
    },
    Category {
        name: "pre-kubernetes-setup",
        applies: |mode| mode == Mode::Pre,
        checks: &[
            Check::new("control plane is not already installed", Error, kubernetes::not_installed),
            Check::new("control plane namespace admits the agent", Error, kubernetes::pod_security),
            Check::new("can create non-namespaced resources", Error, kubernetes::may_create_cluster_wide),
            Check::new("can create namespaced resources", Error, kubernetes::may_create_namespaced),
            Check::new("no clock skew detected", Warning, kubernetes::clock),
            Check::new("nodes have a kernel that the agent supports", Error, kubernetes::kernels),
        ],
    },
    Category {
        name: "gateway-api-crd",
        applies: |mode| installed_at_all(mode) || mode == Mode::Definitions,
        checks: &[Check::new("Gateway API CRDs are of a known version", Warning, kubernetes::gateway_crds)],
    },
    Category {
        name: "linkerd-crd",
        applies: |mode| installed_at_all(mode) || mode == Mode::Definitions,
        checks: &[Check::new("control plane CustomResourceDefinitions exist", Error, kubernetes::crds)],
    },
    Category {
        name: "linkerd-existence",
        applies: installed_at_all,
        checks: &[
            Check::new("control plane namespace exists", Fatal, installed::namespace),
            Check::new("'linkerd-config' config map exists", Fatal, installed::config),
            Check::new("'linkerd-config' config map can be read", Error, installed::config_parses),
            Check::new("control plane replica sets are ready", Waits, installed::replica_sets),
            Check::new("no unschedulable pods", Waits, installed::scheduled),
            Check::new("control plane pods are ready", Waits, installed::control_pods),
            Check::new("cluster networks contains all node podCIDRs", Error, installed::node_networks),
            Check::new("cluster networks contains all pods", Error, installed::pod_networks),
            Check::new("cluster networks contains all services", Error, installed::service_networks),
        ],
    },
    Category {
        name: "linkerd-config",
        applies: installed_at_all,
        checks: &[
            Check::new("control plane ClusterRoles exist", Error, installed::cluster_roles),
            Check::new("control plane ClusterRoleBindings exist", Error, installed::cluster_role_bindings),
            Check::new("control plane ServiceAccounts exist", Error, installed::service_accounts),
            Check::new("control plane MutatingWebhookConfigurations exist", Error, webhooks::mutating_exist),
            Check::new("control plane ValidatingWebhookConfigurations exist", Error, webhooks::validating_exist),
        ],
    },
    Category {
        name: "weft-agent",
        applies: installed_at_all,
        checks: &[
            Check::new("agent DaemonSet exists", Error, agents::exists),
            Check::new("agent runs on all nodes", Waits, agents::on_all_nodes),
            Check::new("agent pods are ready", Waits, agents::ready),
            Check::new("agents answer", Waits, agents::answer),
            Check::new("agents run one version of the programs", Warning, agents::one_version),
            Check::new("programs are attached to the pods' cgroup", Warning, agents::below_the_root),
            Check::new("every redirected connection was announced", Warning, agents::no_misses),
        ],
    },
    Category {
        name: "linkerd-identity",
        applies: installed_at_all,
        checks: &[
            Check::new("certificate config is valid", Error, identity::config_is_valid),
            Check::new("trust anchors are using supported crypto algorithm", Error, identity::anchors_supported),
            Check::new("trust anchors are within their validity period", Error, identity::anchors_valid),
            Check::new("trust anchors are valid for at least 60 days", Warning, identity::anchors_last),
            Check::new("issuer cert is using supported crypto algorithm", Error, identity::issuer_supported),
            Check::new("issuer cert is within its validity period", Error, identity::issuer_valid),
            Check::new("issuer cert is valid for at least 60 days", Warning, identity::issuer_lasts),
            Check::new("issuer cert is issued by the trust anchor", Error, identity::issuer_is_ours),
        ],
    },
    Category {
        name: "linkerd-webhooks-and-apisvc-tls",
        applies: installed_at_all,
        checks: &[
            Check::new("proxy-injector webhook has valid cert", Waits, webhooks::injector_valid),
            Check::new("proxy-injector cert is not about to expire", Warning, webhooks::injector_lasts),
            Check::new("sp-validator webhook has valid cert", Waits, webhooks::sp_validator_valid),
            Check::new("sp-validator cert is not about to expire", Warning, webhooks::sp_validator_lasts),
            Check::new("policy-validator webhook has valid cert", Waits, webhooks::policy_validator_valid),
            Check::new("policy-validator cert is not about to expire", Warning, webhooks::policy_validator_lasts),
            Check::new("webhook services have endpoints", Waits, webhooks::have_endpoints),
        ],
    },
    Category {
        name: "linkerd-identity-data-plane",
        applies: |mode| mode == Mode::Proxy,
        checks: &[Check::new("data plane proxies certificate match CA", Warning, identity::proxies_trust_it)],
    },
    Category {
        name: "linkerd-version",
        applies: |mode| mode != Mode::Viz,
        checks: &[Check::new("cli is up-to-date", Warning, versions::cli_is_expected)],
    },
    Category {
        name: "control-plane-version",
        applies: installed_at_all,
        checks: &[
            Check::new("control plane is up-to-date", Warning, versions::control_plane_is_expected),
            Check::new("control plane and cli versions match", Warning, versions::control_plane_matches_cli),
        ],
    },
    Category {
        name: "linkerd-control-plane-proxy",
        applies: installed_at_all,
        checks: &[
            Check::new("control plane proxies are healthy", Waits, data_plane::control_plane_healthy),
            Check::new("control plane proxies are up-to-date", Warning, data_plane::control_plane_up_to_date),
            Check::new(
                "control plane proxies are redirected to by their node's agent",
                Waits,
                data_plane::control_plane_enrolled,
            ),
        ],
    },
    Category {
        name: "linkerd-data-plane",
        applies: |mode| mode == Mode::Proxy,
        checks: &[
            Check::new("data plane namespace exists", Fatal, data_plane::namespace_exists),
            Check::new("annotations of namespaces, workloads and pods can be read", Error, data_plane::annotations),
            Check::new("pods of injected namespaces have a proxy", Warning, data_plane::have_a_proxy),
            Check::new("data plane proxies are ready", Waits, data_plane::proxies_ready),
            Check::new("data plane proxies are up-to-date", Warning, data_plane::proxies_up_to_date),
            Check::new("data plane pods are redirected by their node's agent", Waits, data_plane::proxies_enrolled),
            Check::new("data plane pod labels are configured correctly", Warning, placement::pod_labels),
            Check::new("data plane service labels are configured correctly", Warning, placement::service_labels),
            Check::new(
                "data plane service annotations are configured correctly",
                Warning,
                placement::service_annotations,
            ),
        ],
    },
    Category {
        name: "linkerd-opaque-ports-definition",
        applies: |mode| mode == Mode::Proxy,
        checks: &[Check::new("opaque ports are properly annotated", Warning, opaque_ports::agree)],
    },
    Category {
        name: "linkerd-ha-checks",
        applies: installed_at_all,
        checks: &[Check::new("multiple replicas of control plane pods", Warning, high_availability::replicas)],
    },
    Category {
        name: "linkerd-extension-checks",
        applies: installed_at_all,
        checks: &[Check::new("namespace configuration for extensions", Warning, extensions::namespaces)],
    },
    Category {
        name: "weft-viz",
        applies: |mode| installed_at_all(mode) || mode == Mode::Viz,
        checks: &[
            Check::new("component is installed", Fatal, viz::installed),
            Check::new("component pods are ready", Waits, viz::ready),
            Check::new("component pods have a proxy", Error, viz::meshed),
            Check::new("proxies serve tap to the component", Warning, viz::taps),
            Check::new("component answers this user", Waits, viz::answers),
            Check::new("component and cli versions match", Warning, viz::version),
        ],
    },
    Category {
        name: "linkerd-unsupported",
        applies: installed_at_all,
        checks: &[
            Check::new("resources are acted upon", Warning, unsupported::resources),
            Check::new("annotations of services are acted upon", Warning, unsupported::services),
            Check::new("annotations of pods are acted upon", Warning, unsupported::pods),
        ],
    },
    Category {
        name: "weft-events",
        applies: installed_at_all,
        checks: &[Check::new("no part of the mesh warns", Warning, data_plane::no_warnings)],
    },
];

fn installed_at_all(mode: Mode) -> bool {
    matches!(mode, Mode::Installed | Mode::Proxy)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{
        super::{facts::tests::healthy, outcome::Outcome},
        *,
    };

    #[test]
    fn a_healthy_cluster_passes_every_check_of_every_mode() {
        for mode in [Mode::Pre, Mode::Definitions, Mode::Installed, Mode::Proxy] {
            let mut facts = healthy();
            facts.mode = mode;
            let cluster = facts.cluster.as_mut().unwrap();
            if mode == Mode::Pre {
                cluster.config = Ok(None);
            }
            let outcome = Outcome::of(CATEGORIES, &facts);
            let failed: Vec<_> = outcome.checks().filter(|check| !check.problems.is_empty()).collect();
            assert!(outcome.success && failed.is_empty(), "{mode:?}: {failed:#?}");
        }
    }

    #[test]
    fn nothing_is_judged_of_a_cluster_that_does_not_answer() {
        let mut facts = healthy();
        facts.cluster = Err("connection refused".to_owned());
        let outcome = Outcome::of(CATEGORIES, &facts);
        assert!(!outcome.success);
        let names: Vec<_> = outcome.categories.iter().map(|category| category.category_name).collect();
        assert_eq!(names, ["kubernetes-api"]);
    }

    #[test]
    fn what_may_not_be_read_ends_nothing_and_what_is_not_there_does() {
        let last = |facts: &super::super::facts::Facts| {
            Outcome::of(CATEGORIES, facts).categories.last().unwrap().category_name
        };
        let mut facts = healthy();
        facts.cluster.as_mut().unwrap().namespaces = Err("namespaces is forbidden".to_owned());
        assert_eq!(last(&facts), "weft-events");
        facts.cluster.as_mut().unwrap().namespaces = Ok(Vec::new());
        assert_eq!(last(&facts), "linkerd-existence");
    }

    #[test]
    fn only_the_definitions_are_checked_on_request() {
        let mut facts = healthy();
        facts.mode = Mode::Definitions;
        let cluster = facts.cluster.as_mut().unwrap();
        (cluster.namespaces, cluster.config) = (Ok(Vec::new()), Ok(None));
        let outcome = Outcome::of(CATEGORIES, &facts);
        let names: Vec<_> = outcome.categories.iter().map(|category| category.category_name).collect();
        assert_eq!(names, ["kubernetes-api", "kubernetes-version", "gateway-api-crd", "linkerd-crd"]);
        assert!(outcome.success, "{outcome:#?}");
        facts.cluster.as_mut().unwrap().crds.as_mut().unwrap().remove("servers.policy.linkerd.io");
        assert!(!Outcome::of(CATEGORIES, &facts).success);
    }

    #[test]
    fn descriptions_are_unique_within_a_category() {
        for category in CATEGORIES {
            let unique: BTreeSet<_> = category.checks.iter().map(|check| check.description).collect();
            assert_eq!(unique.len(), category.checks.len(), "{}", category.name);
        }
    }
}
