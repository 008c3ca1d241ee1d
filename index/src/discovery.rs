//! Where the endpoints of a Service are: in this cluster, in a linked one, or in several
//! (`linkerd2:controller/api/destination/federated_service_watcher.go`).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use weft_k8s_api::labels;

/// The most linked Services of a federated one: each of its streams follows all of them.
const MAX_MEMBERS: usize = 64;

/// Where the endpoints of a Service are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Discovery {
    /// They are the Service's own.
    Local,
    /// They are those of a Service in a linked cluster, in the namespace of the same name.
    Linked {
        /// Name of the linked cluster, from the Service's label.
        cluster: String,
        /// The Service there; `None` if the label is missing.
        service: Option<String>,
    },
    /// They are those of several Services, in the namespaces of the same name.
    Federated {
        /// The member in this cluster.
        local: Option<String>,
        /// Members in linked clusters, in the order of the annotation.
        linked: Vec<LinkedService>,
    },
}

/// A Service in a linked cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkedService {
    /// Name of the linked cluster, from the annotation.
    pub cluster: String,
    /// The Service's name.
    pub service: String,
}

impl Discovery {
    /// Reads a Service's labels and annotations.
    pub(super) fn new(metadata: &ObjectMeta, problems: &mut Vec<String>) -> Self {
        let annotation = |name: &str| metadata.annotations.as_ref()?.get(name).map(|value| value.trim());
        let label = |name: &str| metadata.labels.as_ref()?.get(name).cloned();
        let (local, linked) = (annotation(labels::LOCAL_DISCOVERY), annotation(labels::REMOTE_DISCOVERY));
        if local.is_some() || linked.is_some() {
            let local = local.filter(|name| !name.is_empty()).map(str::to_owned);
            return Self::Federated { local, linked: members(linked.unwrap_or_default(), problems) };
        }
        match label(labels::REMOTE_DISCOVERY) {
            Some(cluster) => Self::Linked { cluster, service: label(labels::REMOTE_SERVICE) },
            None => Self::Local,
        }
    }
}

/// The members that can be read, each once.
fn members(text: &str, problems: &mut Vec<String>) -> Vec<LinkedService> {
    let mut found = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let names = part
            .split_once('@')
            .filter(|(service, cluster)| !service.is_empty() && !cluster.is_empty() && !cluster.contains('@'));
        let problem = match names {
            None => format!("{part:?} is left out, expected service@cluster"),
            Some(_) if found.len() == MAX_MEMBERS => format!("only the first {MAX_MEMBERS} members count"),
            Some((service, cluster)) => {
                let member = LinkedService { cluster: cluster.to_owned(), service: service.to_owned() };
                if !found.contains(&member) {
                    found.push(member);
                }
                continue;
            }
        };
        let problem = format!("annotation {}: {problem}", labels::REMOTE_DISCOVERY);
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(metadata: Value) -> (Discovery, Vec<String>) {
        let mut problems = Vec::new();
        (Discovery::new(&serde_json::from_value(metadata).unwrap(), &mut problems), problems)
    }

    fn at(cluster: &str, service: &str) -> LinkedService {
        LinkedService { cluster: cluster.to_owned(), service: service.to_owned() }
    }

    #[test]
    fn labels_name_a_linked_service() {
        assert_eq!(read(json!({})), (Discovery::Local, vec![]));
        let cluster = "multicluster.linkerd.io/remote-discovery";
        let linked = |service: Option<&str>| Discovery::Linked {
            cluster: "east".to_owned(),
            service: service.map(str::to_owned),
        };
        assert_eq!(read(json!({"labels": {cluster: "east"}})).0, linked(None));
        let both = json!({"labels": {cluster: "east", "multicluster.linkerd.io/remote-service": "web"}});
        assert_eq!(read(both).0, linked(Some("web")));
    }

    #[test]
    fn annotations_make_a_service_federated() {
        let (remote, local) = ("multicluster.linkerd.io/remote-discovery", "multicluster.linkerd.io/local-discovery");
        let annotated = |remote_value: &str| json!({"annotations": {remote: remote_value, local: "web"}, "labels": {remote: "west"}});
        let federated =
            |linked: &[LinkedService]| Discovery::Federated { local: Some("web".to_owned()), linked: linked.to_vec() };
        let (east, north) = (at("east", "web"), at("north", "api"));
        assert_eq!(read(annotated("web@east,api@north")), (federated(&[east.clone(), north]), vec![]));
        assert_eq!(read(annotated(" web@east , web@east,")), (federated(&[east]), vec![]), "each once");
        assert_eq!(read(annotated("")), (federated(&[]), vec![]));
        let only_local = json!({"annotations": {local: ""}});
        assert_eq!(read(only_local).0, Discovery::Federated { local: None, linked: vec![] });
    }

    #[test]
    fn a_member_that_cannot_be_read_is_left_out_and_named() {
        let name = "multicluster.linkerd.io/remote-discovery";
        for bad in ["web", "web@", "@east", "web@east@north"] {
            let (found, problems) = read(json!({"annotations": {name: format!("{bad},api@west")}}));
            assert_eq!(found, Discovery::Federated { local: None, linked: vec![at("west", "api")] });
            assert!(problems.len() == 1 && problems[0].contains(&format!("{bad:?}")), "{problems:?}");
        }
        let many: Vec<_> = (0..100).map(|number| format!("web-{number}@east")).collect();
        let (found, problems) = read(json!({"annotations": {name: many.join(",")}}));
        let Discovery::Federated { linked, .. } = found else { panic!("{found:?}") };
        assert_eq!((linked.len(), problems.len()), (MAX_MEMBERS, 1));
    }
}
