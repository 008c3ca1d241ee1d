//! What a service mirror writes on the endpoints of another cluster's Service
//! (`linkerd2:controller/api/destination/watcher/port_publisher.go`).

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use weft_k8s_api::labels;

use super::annotation;

/// The gateway behind an address that stands for another cluster's Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gateway {
    /// Its mesh identity; `None` means plain text.
    pub identity: Option<String>,
    /// The DNS name by which it knows the Service.
    pub service: Option<String>,
}

impl Gateway {
    /// `None` unless the object is a mirror's.
    pub(super) fn new(metadata: &ObjectMeta) -> Option<Self> {
        let read = |name: &str| annotation(metadata, name).filter(|value| !value.is_empty()).map(str::to_owned);
        let (identity, service) = (read(labels::REMOTE_GATEWAY_IDENTITY), read(labels::REMOTE_SERVICE_NAME));
        (identity.is_some() || service.is_some()).then_some(Self { identity, service })
    }
}

/// Labels of all endpoints of a mirrored Service: its cluster, and its name and namespace there.
pub(super) fn target_labels(metadata: &ObjectMeta) -> BTreeMap<String, String> {
    let Some(cluster) = metadata.labels.as_ref().and_then(|labels| labels.get(labels::MIRRORED_CLUSTER)) else {
        return BTreeMap::new();
    };
    let mut found = BTreeMap::from([("target_cluster".to_owned(), cluster.clone())]);
    let mut parts = annotation(metadata, labels::REMOTE_SERVICE_NAME).unwrap_or_default().split('.');
    if let (Some(service), Some(namespace)) = (parts.next(), parts.next()) {
        found.insert("target_service".to_owned(), service.to_owned());
        found.insert("target_service_namespace".to_owned(), namespace.to_owned());
    }
    found
}
