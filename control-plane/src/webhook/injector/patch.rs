//! JSON patches (RFC 6902) for injection.
//!
//! A patch contains only additions. A diff of the two objects would also rewrite, element by element, a list with a
//! new first element, and would lose fields of these elements that this version does not know.

use std::collections::BTreeMap;

use json_patch::{AddOperation, Patch, PatchOperation, jsonptr::PointerBuf};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde::Serialize;
use serde_json::{Value, json};
use weft_k8s_api::labels;

/// The patch that turns `before` into `after`, the result of injection: annotations, labels, volumes and containers
/// after the others, init containers before the others.
pub(super) fn pod(before: &Pod, after: &Pod) -> Patch {
    let mut operations = Vec::new();
    map(&mut operations, "annotations", before.metadata.annotations.as_ref(), after.metadata.annotations.as_ref());
    map(&mut operations, "labels", before.metadata.labels.as_ref(), after.metadata.labels.as_ref());
    let spec = |pod: &Pod| pod.spec.clone().unwrap_or_default();
    let (before, after) = (spec(before), spec(after));
    let added = after.volumes.iter().flatten().skip(before.volumes.as_ref().map_or(0, Vec::len));
    list(&mut operations, "volumes", before.volumes.is_none(), added, |_| "-".to_owned());
    let count = before.init_containers.as_ref().map_or(0, Vec::len);
    let first = after.init_containers.as_ref().map_or(0, Vec::len).saturating_sub(count);
    let added = after.init_containers.iter().flatten().take(first);
    list(&mut operations, "initContainers", before.init_containers.is_none(), added, |index| index.to_string());
    let added = after.containers.iter().skip(before.containers.len());
    list(&mut operations, "containers", false, added, |_| "-".to_owned());
    Patch(operations)
}

/// Adds the annotation of opaque ports, if there are any.
pub(super) fn opaque_ports(metadata: &ObjectMeta, ports: Option<String>) -> Patch {
    let mut operations = Vec::new();
    if let Some(ports) = ports {
        let mut after = metadata.annotations.clone().unwrap_or_default();
        after.insert(labels::OPAQUE_PORTS.to_owned(), ports);
        map(&mut operations, "annotations", metadata.annotations.as_ref(), Some(&after));
    }
    Patch(operations)
}

type Map = BTreeMap<String, String>;

fn map(operations: &mut Vec<PatchOperation>, name: &str, before: Option<&Map>, after: Option<&Map>) {
    let Some(after) = after else { return };
    let Some(before) = before else { return operations.push(add(&["metadata", name], json!(after))) };
    for (key, value) in after.iter().filter(|(key, value)| before.get(*key) != Some(value)) {
        operations.push(add(&["metadata", name, key], json!(value)));
    }
}

fn list<'a, T: Serialize + 'a>(
    operations: &mut Vec<PatchOperation>,
    name: &str,
    absent: bool,
    added: impl Iterator<Item = &'a T>,
    place: impl Fn(usize) -> String,
) {
    let mut added = added.map(|element| json!(element)).enumerate().peekable();
    if absent && added.peek().is_some() {
        operations.push(add(&["spec", name], json!([])));
    }
    for (index, element) in added {
        operations.push(add(&["spec", name, &place(index)], element));
    }
}

/// An `add` operation, which also replaces the value of an existing key.
fn add(path: &[&str], value: Value) -> PatchOperation {
    PatchOperation::Add(AddOperation { path: PointerBuf::from_tokens(path.iter().copied()), value })
}
