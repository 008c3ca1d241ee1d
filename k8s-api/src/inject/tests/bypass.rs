//! What annotations may lift of the redirection, where the administrator limits it.

use super::*;

#[test]
fn an_annotation_does_not_lift_what_the_administrator_enforces() {
    let rules = ExemptionRules { default: Exemption::Cgroup, enforced: true, bypass_allowed: false };
    let config = InjectConfig { exemption: rules, ..config() };
    let defaults = RedirectionDefaults { rules, ..RedirectionDefaults::default() };
    for (annotation, value, forbidden) in [
        ("weft.io/proxy-exemption", "user", Some(Forbidden::Exemption)),
        ("weft.io/proxy-exemption", "cgroup", None),
        ("weft.io/bypass", "true", Some(Forbidden::Bypass)),
        ("weft.io/bypass", "false", None),
    ] {
        let pod = pod(json!({"linkerd.io/inject": "enabled", annotation: value}), json!({}));
        let refusal = forbidden.clone().map(Refusal::Forbidden);
        assert_eq!(inject(&pod, None, &config).err(), refusal, "{annotation}: {value}");
        // Set on a running pod, which no webhook sees.
        let redirection = Redirection::of(&pod, &defaults).unwrap();
        assert_eq!((redirection.exemption, redirection.bypass), (Exemption::Cgroup, false), "{annotation}: {value}");
        assert_eq!(redirection.forbidden, Vec::from_iter(forbidden), "{annotation}: {value}");
        let lax = Redirection::of(&pod, &RedirectionDefaults::default()).unwrap();
        assert_eq!(lax.bypass, annotation == "weft.io/bypass" && value == "true");
    }
    // Enforcement is a lower bound: a pod may always be stricter.
    let lower = ExemptionRules { default: Exemption::User, enforced: true, bypass_allowed: true };
    assert_eq!(lower.exemption(Some(Exemption::Cgroup)), Exemption::Cgroup);
}

#[test]
fn an_annotation_names_no_other_user_or_group_of_the_proxy_where_no_bypass_is_allowed() {
    let rules = ExemptionRules { bypass_allowed: false, ..ExemptionRules::default() };
    let config = InjectConfig { exemption: rules, proxy_gid: Some(2103), ..config() };
    let defaults = RedirectionDefaults { rules, proxy_gid: Some(2103), ..RedirectionDefaults::default() };
    let lax = RedirectionDefaults { rules: ExemptionRules::default(), ..defaults.clone() };
    let (uid, gid) = (labels::PROXY_UID_ANNOTATION, labels::PROXY_GID_ANNOTATION);
    for (annotation, value, setting, expected, if_allowed) in [
        (uid, "1000", Some("proxy.uid"), (2102, Some(2103)), (1000, Some(2103))),
        (uid, "2102", None, (2102, Some(2103)), (2102, Some(2103))),
        (gid, "1000", Some("proxy.gid"), (2102, Some(2103)), (2102, Some(1000))),
        (gid, "2103", None, (2102, Some(2103)), (2102, Some(2103))),
        (gid, "0", None, (2102, None), (2102, None)),
        (gid, "-1", None, (2102, None), (2102, None)),
    ] {
        let row = format!("{annotation}: {value}");
        let annotated = pod(json!({"linkerd.io/inject": "enabled", annotation: value}), json!({}));
        let forbidden = setting.map(|setting| Forbidden::ProxyId { annotation, id: value.parse().unwrap(), setting });
        let refusal = inject(&annotated, None, &config).err();
        assert_eq!(refusal, forbidden.clone().map(Refusal::Forbidden), "{row}");
        if let Some(refusal) = refusal {
            let text = refusal.to_string();
            let words = [annotation, value, setting.unwrap(), "agent.allowBypass", "weft.io/proxy-exemption: cgroup"];
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
        // Set on a running pod, which no webhook sees.
        let found = Redirection::of(&annotated, &defaults).unwrap();
        assert_eq!((found.proxy_uid, found.proxy_gid), expected, "{row}");
        assert_eq!((found.exemption, found.forbidden), (Exemption::User, Vec::from_iter(forbidden)), "{row}");
        let found = Redirection::of(&annotated, &lax).unwrap();
        assert_eq!((found.proxy_uid, found.proxy_gid, found.forbidden), (if_allowed.0, if_allowed.1, vec![]), "{row}");
        // In a strict pod they exempt nobody.
        let mut strict = annotated.clone();
        let cgroup = [(labels::PROXY_EXEMPTION.to_owned(), "cgroup".to_owned())];
        strict.metadata.annotations.get_or_insert_default().extend(cgroup);
        assert!(inject(&strict, None, &config).is_ok(), "{row}");
        assert_eq!(Redirection::of(&strict, &defaults).unwrap().forbidden, [], "{row}");
    }
}

/// A pod from before the administrator forbade it, or one that was strict when it was created.
#[test]
fn a_proxy_that_runs_as_another_user_is_known_by_its_cgroup_where_no_bypass_is_allowed() {
    let own = json!({"linkerd.io/inject": "enabled", labels::PROXY_UID_ANNOTATION: "1000"});
    let running = injected(&pod(own, json!({})), None);
    let mut unannotated = running.clone();
    unannotated.metadata.annotations.as_mut().unwrap().remove(labels::PROXY_UID_ANNOTATION);
    for (bypass_allowed, exemption) in [(true, Exemption::User), (false, Exemption::Cgroup)] {
        let rules = ExemptionRules { bypass_allowed, ..ExemptionRules::default() };
        let defaults = RedirectionDefaults { rules, ..RedirectionDefaults::default() };
        for (pod, is_forbidden) in [(&running, !bypass_allowed), (&unannotated, false)] {
            let found = Redirection::of(pod, &defaults).unwrap();
            assert_eq!((found.proxy_uid, found.exemption), (1000, exemption), "{bypass_allowed}");
            assert_eq!(found.forbidden.len(), usize::from(is_forbidden), "{bypass_allowed}");
        }
    }
}

#[test]
fn an_annotation_skips_no_more_than_the_administrator_where_no_bypass_is_allowed() {
    let rules = ExemptionRules { bypass_allowed: false, ..ExemptionRules::default() };
    let skips = Skips { subnets: vec!["10.9.0.0/16".parse().unwrap()], ..Skips::default() };
    let config = InjectConfig { exemption: rules, skips: skips.clone(), ..config() };
    let defaults = RedirectionDefaults { rules, skips, ..RedirectionDefaults::default() };
    let skipped = |pod: &Pod, defaults: &RedirectionDefaults| {
        let Redirection { skip_inbound_ports, skip_outbound_ports, skip_subnets, forbidden, .. } =
            Redirection::of(pod, defaults).unwrap();
        let subnets: Vec<_> = skip_subnets.iter().map(ToString::to_string).collect();
        ([skip_inbound_ports.to_string(), skip_outbound_ports.to_string(), subnets.join(",")], forbidden)
    };
    let settings = ["proxyInit.ignoreInboundPorts", "proxyInit.ignoreOutboundPorts", "proxyInit.skipSubnets"];
    let annotations = [labels::SKIP_INBOUND_PORTS, labels::SKIP_OUTBOUND_PORTS, labels::SKIP_SUBNETS];
    for (list, value, is_forbidden) in [
        (0, "1-65535", true),
        (0, "4567,4569", true),
        (0, "4568", false),
        (0, "", false),
        (1, "1-65535", true),
        (1, "4567-4568", false),
        (2, "0.0.0.0/0", true),
        (2, "10.9.1.0/24,::/0", true),
        (2, "10.9.1.0/24", false),
    ] {
        let (annotation, setting) = (annotations[list], settings[list]);
        let pod = pod(json!({"linkerd.io/inject": "enabled", annotation: value}), json!({}));
        let forbidden = Some(Forbidden::Skip { annotation, value: value.to_owned(), setting }).filter(|_| is_forbidden);
        let refusal = inject(&pod, None, &config).err();
        assert_eq!(refusal, forbidden.clone().map(Refusal::Forbidden), "{annotation}: {value}");
        let text = refusal.map(|refusal| refusal.to_string()).unwrap_or_default();
        let words = [annotation, value, setting, "agent.allowBypass"];
        assert_eq!(words.iter().all(|word| text.contains(word)), is_forbidden, "{annotation}: {value}: {text}");
        // Set on a running pod, which no webhook sees.
        let mut expected = ["4567-4568", "4567-4568", "10.9.0.0/16"];
        if !is_forbidden {
            expected[list] = value;
        }
        let expected = (expected.map(str::to_owned), Vec::from_iter(forbidden));
        assert_eq!(skipped(&pod, &defaults), expected, "{annotation}: {value}");
        let (lax, forbidden) = skipped(&pod, &RedirectionDefaults::default());
        assert_eq!((lax[list].as_str(), forbidden), (value, vec![]), "{annotation}: {value}");
    }
}

/// The label of its pods is no secret.
#[test]
fn only_the_control_planes_own_pods_skip_the_api_server_where_no_bypass_is_allowed() {
    let rules = ExemptionRules { bypass_allowed: false, ..ExemptionRules::default() };
    let skips = Skips { api_server_ports: "443,6443".parse().unwrap(), ..Skips::default() };
    let config = InjectConfig { exemption: rules, skips: skips.clone(), ..config() };
    let defaults = RedirectionDefaults {
        rules,
        skips,
        control_plane_namespaces: vec!["linkerd".to_owned(), "linkerd-edge".to_owned()],
        ..RedirectionDefaults::default()
    };
    let unknown = RedirectionDefaults { control_plane_namespaces: Vec::new(), ..defaults.clone() };
    for (namespace, expected) in [("linkerd", Some("443,6443")), ("shop", None)] {
        // As in the chart of the control plane.
        let own = json!({"linkerd.io/inject": "enabled", "config.linkerd.io/skip-outbound-ports": "443,6443"});
        let mut pod = pod(own, json!({}));
        pod.metadata.namespace = Some(namespace.to_owned());
        let label = (labels::CONTROL_PLANE_COMPONENT.to_owned(), "destination".to_owned());
        pod.metadata.labels.get_or_insert_default().extend([label]);
        assert_eq!(inject(&pod, None, &config).is_ok(), expected.is_some(), "{namespace}");
        let redirection = Redirection::of(&pod, &defaults).unwrap();
        assert_eq!(redirection.skip_outbound_ports.to_string(), expected.unwrap_or("4567-4568"), "{namespace}");
        assert_eq!(redirection.forbidden.is_empty(), expected.is_some(), "{namespace}");
        let redirection = Redirection::of(&pod, &unknown).unwrap();
        assert_eq!(redirection.skip_outbound_ports.to_string(), "4567-4568", "{namespace}");
        assert_eq!(redirection.forbidden.len(), 1, "{namespace}");
        // Of an agent that enrols pods of several control planes.
        pod.metadata.namespace = Some("linkerd-edge".to_owned());
        let redirection = Redirection::of(&pod, &defaults).unwrap();
        assert_eq!(redirection.skip_outbound_ports.to_string(), "443,6443");
    }
}
