//! Label selectors: the meaning of Kubernetes' `LabelSelector` on one set of labels.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::{Schema, SchemaGenerator, json_schema};

/// Whether `selector` selects an object with `labels`. An empty selector selects everything; an unknown operator
/// selects nothing.
pub fn selects(selector: &LabelSelector, labels: Option<&BTreeMap<String, String>>) -> bool {
    let value = |key: &str| labels.and_then(|labels| labels.get(key));
    let pairs = selector.match_labels.iter().flatten().all(|(key, wanted)| value(key) == Some(wanted));
    pairs
        && selector.match_expressions.iter().flatten().all(|rule| {
            let listed = |found: &String| rule.values.iter().flatten().any(|wanted| wanted == found);
            match rule.operator.as_str() {
                "In" => value(&rule.key).is_some_and(listed),
                "NotIn" => !value(&rule.key).is_some_and(listed),
                "Exists" => value(&rule.key).is_some(),
                "DoesNotExist" => value(&rule.key).is_none(),
                _ => false,
            }
        })
}

/// Whether all operators of `selector` are known. Of another one it cannot be said what it selects.
pub fn is_readable(selector: &LabelSelector) -> bool {
    let mut rules = selector.match_expressions.iter().flatten();
    rules.all(|rule| matches!(rule.operator.as_str(), "In" | "NotIn" | "Exists" | "DoesNotExist"))
}

/// The schema of a label selector in a custom resource definition.
pub(super) fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "nullable": true,
        "properties": {
            "matchLabels": { "type": "object", "additionalProperties": { "type": "string" } },
            "matchExpressions": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": { "type": "string" },
                        "operator": { "type": "string", "enum": ["In", "NotIn", "Exists", "DoesNotExist"] },
                        "values": { "type": "array", "items": { "type": "string" } }
                    }
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(selector: serde_json::Value, expected: bool) {
        let selector_typed: LabelSelector = serde_json::from_value(selector.clone()).unwrap();
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned()), ("tier".to_owned(), "front".to_owned())]);
        assert_eq!(selects(&selector_typed, Some(&labels)), expected, "{selector}");
    }

    #[test]
    fn selects_by_labels_and_expressions() {
        check(json!({}), true);
        check(json!({"matchLabels": {"app": "web"}}), true);
        check(json!({"matchLabels": {"app": "web", "tier": "back"}}), false);
        for (operator, values, expected) in [
            ("In", vec!["web", "api"], true),
            ("In", vec!["api"], false),
            ("NotIn", vec!["api"], true),
            ("NotIn", vec!["web"], false),
            ("Exists", vec![], true),
            ("DoesNotExist", vec![], false),
            ("Like", vec!["web"], false),
        ] {
            check(json!({"matchExpressions": [{"key": "app", "operator": operator, "values": values}]}), expected);
        }
        check(json!({"matchExpressions": [{"key": "none", "operator": "NotIn", "values": ["x"]}]}), true);
        check(json!({"matchExpressions": [{"key": "none", "operator": "Exists"}]}), false);
    }

    #[test]
    fn a_selector_with_an_unknown_operator_is_not_readable() {
        for (operator, expected) in
            [("In", true), ("NotIn", true), ("Exists", true), ("DoesNotExist", true), ("in", false), ("", false)]
        {
            let rules = json!([{"key": "app", "operator": "Exists"}, {"key": "app", "operator": operator}]);
            let selector: LabelSelector = serde_json::from_value(json!({"matchExpressions": rules})).unwrap();
            assert_eq!(is_readable(&selector), expected, "{operator:?}");
        }
        assert!(is_readable(&LabelSelector::default()));
    }

    #[test]
    fn nothing_but_the_empty_selector_selects_an_unlabelled_object() {
        assert!(selects(&LabelSelector::default(), None));
        let selector: LabelSelector = serde_json::from_value(json!({"matchLabels": {"app": "web"}})).unwrap();
        assert!(!selects(&selector, None));
    }
}
