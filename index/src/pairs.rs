//! Names by label pair: which Servers may select a workload, and which workloads a Server may select, without a look at
//! all of them.
//!
//! A selector is found by one pair that it requires, a workload by each pair that it has. What is found are
//! candidates: the rest of the selector is still to be checked.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::records::Key;

type Labels = BTreeMap<String, String>;

/// Names by label key, then by value.
#[derive(Debug, Default)]
struct Pairs(HashMap<String, HashMap<String, BTreeSet<String>>>);

/// Selectors of one namespace, each under the pair that fewest others are under.
#[derive(Debug, Default)]
pub(super) struct Selectors {
    pairs: Pairs,
    /// Those that require no pair.
    rest: BTreeSet<String>,
    /// The pair of each that is not in `rest`.
    placed: HashMap<String, (String, String)>,
}

/// Workloads of one kind, by namespace.
#[derive(Debug, Default)]
pub(super) struct Members(HashMap<String, Namespace>);

/// Workloads of one namespace.
#[derive(Debug, Default)]
struct Namespace {
    pairs: Pairs,
    all: BTreeSet<String>,
}

impl Pairs {
    fn insert(&mut self, key: &str, value: &str, name: &str) {
        let values = self.0.entry(key.to_owned()).or_default();
        values.entry(value.to_owned()).or_default().insert(name.to_owned());
    }

    fn remove(&mut self, key: &str, value: &str, name: &str) {
        let Some(values) = self.0.get_mut(key) else { return };
        if let Some(names) = values.get_mut(value) {
            names.remove(name);
            if names.is_empty() {
                values.remove(value);
            }
        }
        if values.is_empty() {
            self.0.remove(key);
        }
    }

    fn names(&self, key: &str, value: &str) -> Option<&BTreeSet<String>> {
        self.0.get(key)?.get(value)
    }

    fn count(&self, key: &str, value: &str) -> usize {
        self.names(key, value).map_or(0, BTreeSet::len)
    }
}

impl Selectors {
    /// Adds a selector, or replaces the one of this name; a name without a selector selects nothing.
    pub(super) fn insert(&mut self, name: &str, selector: Option<&LabelSelector>) {
        self.remove(name);
        let Some(selector) = selector else { return };
        match required(selector).min_by_key(|(key, value)| self.pairs.count(key, value)) {
            Some((key, value)) => {
                self.pairs.insert(key, value, name);
                self.placed.insert(name.to_owned(), (key.to_owned(), value.to_owned()));
            }
            None => {
                self.rest.insert(name.to_owned());
            }
        }
    }

    pub(super) fn remove(&mut self, name: &str) {
        match self.placed.remove(name) {
            Some((key, value)) => self.pairs.remove(&key, &value, name),
            None => {
                self.rest.remove(name);
            }
        }
    }

    /// Names of selectors that may select an object with these labels, each once.
    pub(super) fn candidates<'a>(&'a self, labels: &'a Labels) -> impl Iterator<Item = &'a String> {
        let by_pair = labels.iter().filter_map(|(key, value)| self.pairs.names(key, value));
        by_pair.flatten().chain(&self.rest)
    }
}

impl Members {
    pub(super) fn insert(&mut self, key: &Key, labels: &Labels) {
        let members = self.0.entry(key.namespace.clone()).or_default();
        labels.iter().for_each(|(label, value)| members.pairs.insert(label, value, &key.name));
        members.all.insert(key.name.clone());
    }

    /// Removes a workload, with the labels that it was added with.
    pub(super) fn remove(&mut self, key: &Key, labels: &Labels) {
        let Some(members) = self.0.get_mut(&key.namespace) else { return };
        labels.iter().for_each(|(label, value)| members.pairs.remove(label, value, &key.name));
        members.all.remove(&key.name);
        if members.all.is_empty() {
            self.0.remove(&key.namespace);
        }
    }

    /// Workloads of a namespace that a selector may select, each once; none without a selector.
    pub(super) fn candidates<'a>(
        &'a self,
        namespace: &'a str,
        selector: Option<&'a LabelSelector>,
    ) -> impl Iterator<Item = Key> + use<'a> {
        let names = self.0.get(namespace).zip(selector).and_then(|(members, selector)| {
            match required(selector).min_by_key(|(key, value)| members.pairs.count(key, value)) {
                Some((key, value)) => members.pairs.names(key, value),
                None => Some(&members.all),
            }
        });
        names.into_iter().flatten().map(move |name| Key::new(namespace, name))
    }
}

/// Label pairs that every selected object has.
fn required(selector: &LabelSelector) -> impl Iterator<Item = (&str, &str)> {
    let listed = selector.match_labels.iter().flatten().map(|(key, value)| (key.as_str(), value.as_str()));
    let rules = selector.match_expressions.iter().flatten().filter(|rule| rule.operator == "In");
    let single = rules.filter_map(|rule| match rule.values.as_deref() {
        Some([value]) => Some((rule.key.as_str(), value.as_str())),
        _ => None,
    });
    listed.chain(single)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn selector(json: serde_json::Value) -> LabelSelector {
        serde_json::from_value(json).unwrap()
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_selector_is_found_by_one_pair_and_only_once() {
        let mut selectors = Selectors::default();
        selectors.insert("both", Some(&selector(json!({"matchLabels": {"app": "web", "tier": "front"}}))));
        selectors.insert("any", Some(&selector(json!({}))));
        selectors.insert(
            "single",
            Some(&selector(json!({"matchExpressions": [
            {"key": "app", "operator": "In", "values": ["api"]}]}))),
        );
        selectors.insert(
            "several",
            Some(&selector(json!({"matchExpressions": [
            {"key": "app", "operator": "In", "values": ["api", "web"]}]}))),
        );
        selectors.insert("nothing", None);
        let found = |selectors: &Selectors, pairs: &[(&str, &str)]| {
            let labels = labels(pairs);
            let mut found: Vec<_> = selectors.candidates(&labels).cloned().collect();
            found.sort_unstable();
            found.join(" ")
        };
        assert_eq!(found(&selectors, &[("app", "web"), ("tier", "front")]), "any both several");
        assert_eq!(found(&selectors, &[("app", "api")]), "any several single");
        assert_eq!(found(&selectors, &[]), "any several");
        selectors.insert("both", Some(&selector(json!({"matchLabels": {"app": "api"}}))));
        assert_eq!(found(&selectors, &[("app", "web"), ("tier", "front")]), "any several");
        for name in ["both", "any", "single", "several", "nothing"] {
            selectors.remove(name);
        }
        assert!(selectors.pairs.0.is_empty() && selectors.rest.is_empty() && selectors.placed.is_empty());
    }

    #[test]
    fn seven_hundred_servers_with_a_common_label_are_told_apart_by_the_other() {
        let mut selectors = Selectors::default();
        for number in 0..700 {
            let all = json!({"matchLabels": {"app": format!("app-{number}"), "part-of": "shop"}});
            selectors.insert(&format!("server-{number}"), Some(&selector(all)));
        }
        let labels = labels(&[("app", "app-7"), ("part-of", "shop")]);
        assert!(selectors.candidates(&labels).count() <= 2, "{}", selectors.candidates(&labels).count());
    }

    #[test]
    fn a_selector_looks_at_the_workloads_with_its_rarest_pair() {
        let mut members = Members::default();
        let key = |name: &str| Key::new("shop", name);
        members.insert(&key("web-1"), &labels(&[("app", "web"), ("tier", "front")]));
        members.insert(&key("web-2"), &labels(&[("app", "web")]));
        members.insert(&key("api-1"), &labels(&[("app", "api")]));
        members.insert(&Key::new("ops", "web-9"), &labels(&[("app", "web")]));
        let found = |members: &Members, json: serde_json::Value| {
            members.candidates("shop", Some(&selector(json))).map(|key| key.name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(found(&members, json!({"matchLabels": {"app": "web"}})), "web-1 web-2");
        assert_eq!(found(&members, json!({"matchLabels": {"app": "web", "tier": "front"}})), "web-1");
        assert_eq!(found(&members, json!({"matchLabels": {"app": "none"}})), "");
        assert_eq!(found(&members, json!({})), "api-1 web-1 web-2");
        assert_eq!(members.candidates("shop", None).count(), 0);
        members.remove(&key("web-1"), &labels(&[("app", "web"), ("tier", "front")]));
        assert_eq!(found(&members, json!({"matchLabels": {"tier": "front"}})), "");
        members.remove(&key("web-2"), &labels(&[("app", "web")]));
        members.remove(&key("api-1"), &labels(&[("app", "api")]));
        assert_eq!(members.candidates("shop", Some(&selector(json!({})))).count(), 0);
        members.remove(&Key::new("ops", "web-9"), &labels(&[("app", "web")]));
        assert!(members.0.is_empty());
    }
}
