//! Tests of all checks together: a healthy cluster, and the documents.

use std::collections::BTreeSet;

use super::{
    super::{
        facts::{Facts, tests::healthy},
        outcome::Outcome,
    },
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
    let last = |facts: &Facts| Outcome::of(CATEGORIES, facts).categories.last().unwrap().category_name;
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

#[test]
fn every_check_is_explained_where_its_hint_leads() {
    let document = include_str!("../../../../docs/troubleshooting.md");
    let checks = || CATEGORIES.iter().flat_map(|category| category.checks);
    for check in checks() {
        let line = format!("- <a id=\"{}\"></a>**{}**: ", check.anchor, check.description);
        assert!(document.lines().any(|it| it.starts_with(&line)), "docs/troubleshooting.md lacks a line {line:?}");
    }
    let anchors: BTreeSet<_> = checks().map(|check| check.anchor).collect();
    assert_eq!(anchors.len(), checks().count(), "two checks have one anchor");
    let explained = document.lines().filter_map(|line| line.strip_prefix("- <a id=\"")?.split('"').next());
    let stale: Vec<_> = explained.filter(|anchor| !anchors.contains(anchor)).collect();
    assert!(stale.is_empty(), "docs/troubleshooting.md explains checks that are gone: {stale:?}");
}

#[test]
fn every_category_is_in_the_guide() {
    let guide = include_str!("../../../../docs/cli.md");
    for category in CATEGORIES {
        let cell = format!("`{}`", category.name);
        let is_there = guide.lines().any(|line| line.split('|').nth(1).is_some_and(|first| first.contains(&cell)));
        assert!(is_there, "the table in docs/cli.md lacks {cell}");
    }
}
