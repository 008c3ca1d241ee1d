//! Checks of the namespaces of extensions, Linkerd's and others'.

use std::collections::BTreeMap;

use kube::ResourceExt as _;

use super::{
    answer::{Stop, known},
    facts::Facts,
};
use crate::problem::Problem;

/// Label of a namespace: the extension that is installed there. Tools look it up by this label alone.
const EXTENSION: &str = "linkerd.io/extension";

/// An extension is in one namespace: tools would find one of several.
pub(super) fn namespaces(facts: &Facts) -> Result<Vec<Problem>, Stop> {
    let mut extensions: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for namespace in known("Namespaces", &facts.cluster()?.namespaces)? {
        if let Some(extension) = namespace.labels().get(EXTENSION) {
            extensions.entry(extension).or_default().push(namespace.name_any());
        }
    }
    let mut found = Vec::new();
    for (extension, mut names) in extensions {
        names.sort();
        let [first, others @ ..] = names.as_slice() else { continue };
        for name in others {
            let object = format!("Namespace {name}, metadata.labels[\"{EXTENSION}\"]");
            let problem = format!("is {extension}, as that of namespace {first}: an extension is in one namespace");
            let remedy = format!("kubectl label namespace {name} {EXTENSION}-, or remove the other installation");
            found.push(Problem::new(object, problem, remedy));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::check::facts::tests::{check, healthy, object};

    #[test]
    fn an_extension_in_two_namespaces_is_named() {
        let mut facts = healthy();
        let all = facts.cluster.as_mut().unwrap().namespaces.as_mut().unwrap();
        let labelled =
            |name: &str, extension: &str| object(json!({"metadata": {"name": name, "labels": {EXTENSION: extension}}}));
        all.extend([labelled("viz-two", "viz"), labelled("linkerd-viz", "viz"), labelled("links", "multicluster")]);
        let field = format!("Namespace viz-two, metadata.labels[\"{EXTENSION}\"]");
        check(namespaces(&facts), &[(&field, "as that of namespace linkerd-viz")]);
        facts.cluster.as_mut().unwrap().namespaces.as_mut().unwrap().retain(|it| it.name_any() != "viz-two");
        check(namespaces(&facts), &[]);
    }
}
