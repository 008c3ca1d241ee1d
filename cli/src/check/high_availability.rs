//! Checks of a control plane with several replicas.

use kube::ResourceExt as _;
use serde::Deserialize;

use super::{
    answer::{Stop, known},
    facts::{ClusterFacts, Facts},
};
use crate::{mesh::DEPLOYMENTS, problem::Problem};

/// The values that ask for several replicas; the second is Linkerd's.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct HighAvailability {
    controller_replicas: Option<i64>,
    high_availability: Option<bool>,
}

/// Fewer than two available replicas of a component, where several were asked for.
pub(super) fn replicas(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let cluster = facts.cluster()?;
    let deployments = known("Deployments", &cluster.mesh.deployments)?;
    let of = |name: &str| deployments.iter().find(|deployment| deployment.name_any() == name);
    let scaled = || DEPLOYMENTS.iter().filter_map(|name| of(name)?.spec.replicas).any(|replicas| replicas > 1);
    if !is_configured(cluster) && !scaled() {
        return Err(Stop::Skip);
    }
    // Another check reports a Deployment that does not exist.
    let few = DEPLOYMENTS.iter().filter_map(|name| {
        let deployment = of(name)?;
        let available = deployment.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0);
        if available > 1 {
            return None;
        }
        let wanted = deployment.spec.replicas.unwrap_or(1);
        let remedy = if wanted > 1 {
            format!("kubectl -n {} describe deployment {name}", facts.namespace)
        } else {
            facts.upgrade("--set controllerReplicas=3")
        };
        let problem =
            format!("{available} of {wanted} replicas are available, and high availability needs two or more");
        Some(Problem::new(facts.named("Deployment", name), problem, remedy))
    });
    Ok(few.collect())
}

fn is_configured(cluster: &ClusterFacts) -> bool {
    let parsed = cluster.config_yaml().and_then(|yaml| serde_yaml_ng::from_str::<HighAvailability>(yaml).ok());
    let values = parsed.unwrap_or_default();
    values.controller_replicas.is_some_and(|replicas| replicas > 1) || values.high_availability == Some(true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::check::facts::tests::{check, healthy, object};

    /// A mesh with these values and, for each Deployment, these wanted and available replicas.
    fn facts(values: &str, replicas: [(i32, i32); 3]) -> Facts {
        let mut facts = healthy();
        let cluster = facts.cluster.as_mut().unwrap();
        cluster.config = Ok(Some(object(json!({"data": {"values": values}}))));
        let all = cluster.mesh.deployments.as_mut().unwrap().iter_mut();
        for (deployment, (wanted, available)) in all.zip(replicas) {
            deployment.spec.replicas = Some(wanted);
            deployment.status = Some(object(json!({"availableReplicas": available})));
        }
        facts
    }

    #[test]
    fn one_replica_is_enough_where_no_more_were_asked_for() {
        let one = facts("controllerReplicas: 1\n", [(1, 1), (1, 1), (1, 0)]);
        assert_eq!(replicas(&one), Err(Stop::Skip));
    }

    #[test]
    fn a_component_with_one_replica_is_named_where_more_were_asked_for() {
        check(replicas(&facts("controllerReplicas: 3\n", [(3, 3), (3, 2), (3, 3)])), &[]);
        let few = facts("controllerReplicas: 3\n", [(3, 3), (1, 1), (3, 1)]);
        let expected = [
            ("Deployment linkerd/linkerd-identity", "1 of 1"),
            ("Deployment linkerd/linkerd-proxy-injector", "1 of 3"),
        ];
        check(replicas(&few), &expected);
        assert!(replicas(&few).unwrap()[0].remedy.contains("controllerReplicas=3"));
        let expected = DEPLOYMENTS.map(|name| format!("Deployment linkerd/{name}"));
        let linkerds = replicas(&facts("highAvailability: true\n", [(1, 1); 3])).unwrap();
        assert_eq!(linkerds.into_iter().map(|problem| problem.object).collect::<Vec<_>>(), expected);
        // Scaled by hand.
        check(
            replicas(&facts("{}", [(2, 2), (2, 2), (1, 1)])),
            &[("Deployment linkerd/linkerd-proxy-injector", "1 of 1")],
        );
    }
}
