//! JSON patches (RFC 6902) for injection.
//!
//! A patch contains only additions. A diff of the two objects would also rewrite, element by element, a list with a
//! new first element, and would lose fields of these elements that this version does not know.

use std::collections::BTreeMap;

use json_patch::{AddOperation, Patch, PatchOperation, jsonptr::PointerBuf};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde::Serialize;
use serde_json::{Value, json};
use weft_k8s_api::inject::Additions;

/// The patch that turns `before` into `after`, the result of injection: annotations, labels, volumes and containers
/// after the others, init containers before the others.
pub(crate) fn pod(before: &Pod, after: &Pod) -> Patch {
    let added = Additions::between(before, after);
    let spec = before.spec.as_ref();
    let mut operations = Vec::new();
    map(&mut operations, "annotations", before.metadata.annotations.is_none(), &added.annotations);
    map(&mut operations, "labels", before.metadata.labels.is_none(), &added.labels);
    let absent = spec.is_none_or(|spec| spec.volumes.is_none());
    list(&mut operations, "volumes", absent, &added.volumes, |_| "-".to_owned());
    let absent = spec.is_none_or(|spec| spec.init_containers.is_none());
    list(&mut operations, "initContainers", absent, &added.init_containers, |index| index.to_string());
    list(&mut operations, "containers", false, &added.containers, |_| "-".to_owned());
    Patch(operations)
}

/// Adds those of these annotations that have a value.
pub(super) fn annotations<const N: usize>(metadata: &ObjectMeta, values: [(&str, Option<String>); N]) -> Patch {
    let mut operations = Vec::new();
    let added: BTreeMap<_, _> =
        values.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    map(&mut operations, "annotations", metadata.annotations.is_none(), &added);
    Patch(operations)
}

fn map(operations: &mut Vec<PatchOperation>, name: &str, absent: bool, added: &BTreeMap<String, String>) {
    if absent && !added.is_empty() {
        return operations.push(add(&["metadata", name], json!(added)));
    }
    for (key, value) in added {
        operations.push(add(&["metadata", name, key], json!(value)));
    }
}

fn list<T: Serialize>(
    operations: &mut Vec<PatchOperation>,
    name: &str,
    absent: bool,
    added: &[T],
    place: impl Fn(usize) -> String,
) {
    if absent && !added.is_empty() {
        operations.push(add(&["spec", name], json!([])));
    }
    for (index, element) in added.iter().enumerate() {
        operations.push(add(&["spec", name, &place(index)], json!(element)));
    }
}

/// An `add` operation, which also replaces the value of an existing key.
fn add(path: &[&str], value: Value) -> PatchOperation {
    PatchOperation::Add(AddOperation { path: PointerBuf::from_tokens(path.iter().copied()), value })
}
