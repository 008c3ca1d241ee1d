//! Checks of versions: of this program and of the control plane. Nothing asks a server for the latest one.

use k8s_openapi::api::core::v1::Pod;

use super::{
    answer::{Stop, known},
    facts::Facts,
};
use crate::{docs, mesh::pods, problem::Problem};

/// Only with `--expected-version`.
pub(super) fn cli_is_expected(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let expected = facts.expected_version.as_ref().ok_or(Stop::Skip)?;
    if facts.cli_version == *expected {
        return Ok(Vec::new());
    }
    let problem = format!("is {}, and {expected} is expected", facts.cli_version);
    Ok(vec![Problem::new("weft", problem, format!("install weft {expected} ({})", docs::page("installation.md")))])
}

/// Only with `--expected-version`.
pub(super) fn control_plane_is_expected(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let expected = facts.expected_version.as_ref().ok_or(Stop::Skip)?;
    let remedy = format!("upgrade the control plane with weft {expected} ({})", docs::page("installation.md"));
    other_than(facts, expected, &format!("{expected} is expected"), &remedy)
}

pub(super) fn control_plane_matches_cli(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let remedy = "use the command line of the control plane's version, or upgrade the control plane";
    other_than(facts, &facts.cli_version, &format!("this is weft {}", facts.cli_version), remedy)
}

/// Pods of the control plane with another version.
fn other_than(facts: &Facts, version: &str, but: &str, remedy: &str) -> Result<Vec<Problem>, Stop> {
    let all = known("Pods", &facts.cluster()?.mesh.control_pods)?;
    let live = all.iter().filter(|pod| !pods::is_over(pod) && !pods::is_leaving(pod));
    let others = live.filter_map(|pod| Some((pod, pods::own_versions(pod).find(|found| *found != version)?)));
    let problem = |(pod, found): (&Pod, &str)| {
        Problem::new(format!("Pod {}", pods::full_name(pod)), format!("runs {found}, but {but}"), remedy)
    };
    Ok(others.map(problem).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::facts::tests::{check, healthy};

    #[test]
    fn versions_that_differ_are_named_with_both() {
        let mut facts = healthy();
        check(control_plane_matches_cli(&facts), &[]);
        facts.cli_version = "0.2.0".to_owned();
        check(control_plane_matches_cli(&facts), &[("Pod linkerd/weft-agent-1", "runs 0.1.0, but this is weft 0.2.0")]);
    }

    #[test]
    fn an_expected_version_is_compared_with_everything_and_without_one_nothing_is() {
        let mut facts = healthy();
        assert_eq!((cli_is_expected(&facts), control_plane_is_expected(&facts)), (Err(Stop::Skip), Err(Stop::Skip)));
        facts.expected_version = Some("0.1.0".to_owned());
        assert_eq!((cli_is_expected(&facts), control_plane_is_expected(&facts)), (Ok(Vec::new()), Ok(Vec::new())));
        facts.expected_version = Some("0.2.0".to_owned());
        check(cli_is_expected(&facts), &[("weft", "is 0.1.0, and 0.2.0 is expected")]);
        check(control_plane_is_expected(&facts), &[("Pod linkerd/weft-agent-1", "runs 0.1.0, but 0.2.0 is expected")]);
    }
}
