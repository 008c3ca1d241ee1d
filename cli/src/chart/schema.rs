//! The chart's JSON schema: as much of draft 7 as it uses. An unknown keyword is an error, never left out.

use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value};

use super::pattern;

/// Keywords that constrain nothing.
const ANNOTATIONS: [&str; 6] = ["$schema", "$comment", "title", "description", "definitions", "default"];
/// Deepest nesting of schemas; references may be circular.
const DEEPEST: usize = 64;

/// Every mistake in `values`, with its path.
///
/// # Errors
/// When the schema itself cannot be used.
pub(super) fn mistakes(schema: &Value, values: &Value) -> Result<Vec<String>> {
    let mut check = Check { root: schema, mistakes: Vec::new(), depth: 0 };
    check.value("", schema, values)?;
    Ok(check.mistakes)
}

struct Check<'a> {
    root: &'a Value,
    mistakes: Vec<String>,
    depth: usize,
}

impl<'a> Check<'a> {
    fn value(&mut self, path: &str, schema: &'a Value, value: &Value) -> Result<()> {
        let keywords = match schema {
            Value::Bool(true) => return Ok(()),
            Value::Object(keywords) => keywords,
            _ => bail!("the schema of {path:?} is {schema}"),
        };
        self.depth += 1;
        if self.depth > DEEPEST {
            bail!("schemas are nested more than {DEEPEST} deep, at {path:?}");
        }
        for (keyword, rule) in keywords {
            let good = self.keyword(path, keywords, keyword, value);
            if good.with_context(|| format!("keyword {keyword} of {path:?} in the schema: {rule}"))? {
                continue;
            }
            // A description says more to a reader than a regular expression.
            let expected = match keywords.get("description").and_then(Value::as_str) {
                Some(description) => description.to_owned(),
                None => format!("{keyword} {rule}"),
            };
            self.mistakes.push(format!("value {path}: {value}, expected {expected}"));
        }
        self.depth -= 1;
        Ok(())
    }

    /// Whether a value is right by one keyword of a schema. Mistakes inside the value are added.
    fn keyword(&mut self, path: &str, schema: &'a Map<String, Value>, keyword: &str, value: &Value) -> Result<bool> {
        let rule = &schema[keyword];
        match (keyword, value) {
            ("$ref" | "allOf" | "anyOf", _) => return self.combined(path, keyword, rule, value),
            ("properties" | "additionalProperties" | "required", Value::Object(values)) => {
                self.object(path, schema, keyword, values)?;
            }
            ("items", Value::Array(items)) => {
                for (index, item) in items.iter().enumerate() {
                    self.value(&format!("{path}[{index}]"), rule, item)?;
                }
            }
            // These are about values of other types.
            ("properties" | "additionalProperties" | "required" | "items", _) => {}
            _ => return scalar(keyword, rule, value),
        }
        Ok(true)
    }

    /// Keywords that refer to other schemas of the same value.
    fn combined(&mut self, path: &str, keyword: &str, rule: &'a Value, value: &Value) -> Result<bool> {
        match keyword {
            "$ref" => {
                let pointer = rule.as_str().and_then(|rule| rule.strip_prefix('#')).context("not a reference")?;
                let schema = self.root.pointer(pointer).context("a reference to nothing")?;
                self.value(path, schema, value)?;
                Ok(true)
            }
            "allOf" => {
                for schema in rule.as_array().context("not a list")? {
                    self.value(path, schema, value)?;
                }
                Ok(true)
            }
            _ => {
                let mut any = false;
                for schema in rule.as_array().context("not a list")? {
                    let mut inner = Check { root: self.root, mistakes: Vec::new(), depth: self.depth };
                    inner.value(path, schema, value)?;
                    any |= inner.mistakes.is_empty();
                }
                Ok(any)
            }
        }
    }

    /// Keywords about objects.
    fn object(
        &mut self,
        path: &str,
        schema: &'a Map<String, Value>,
        keyword: &str,
        values: &Map<String, Value>,
    ) -> Result<()> {
        let rule = &schema[keyword];
        match keyword {
            "properties" => {
                for (name, schema) in rule.as_object().context("not a mapping")? {
                    if let Some(value) = values.get(name) {
                        self.value(&below(path, name), schema, value)?;
                    }
                }
            }
            "required" => {
                for name in rule.as_array().context("not a list")?.iter().filter_map(Value::as_str) {
                    if !values.contains_key(name) {
                        self.mistakes.push(format!("value {}: missing", below(path, name)));
                    }
                }
            }
            _ => {
                let known = schema.get("properties").and_then(Value::as_object);
                for (name, value) in values {
                    if known.is_some_and(|known| known.contains_key(name)) {
                        continue;
                    }
                    let path = below(path, name);
                    match rule {
                        Value::Bool(false) => {
                            self.mistakes.push(format!("value {path}: unknown, not a value of this chart"));
                        }
                        schema => self.value(&path, schema, value)?,
                    }
                }
            }
        }
        Ok(())
    }
}

/// Keywords about a value itself, not about what it contains.
fn scalar(keyword: &str, rule: &Value, value: &Value) -> Result<bool> {
    let length = |text: &str| u64::try_from(text.chars().count()).unwrap_or(u64::MAX);
    let whole = || rule.as_u64().context("not a number");
    Ok(match (keyword, value) {
        ("type", _) => match rule {
            Value::String(name) => is_a(name, value)?,
            Value::Array(names) => {
                let kinds: Result<Vec<_>> =
                    names.iter().map(|name| is_a(name.as_str().context("not a type")?, value)).collect();
                kinds?.contains(&true)
            }
            _ => bail!("not a type"),
        },
        ("enum", _) => rule.as_array().context("not a list")?.contains(value),
        ("const", _) => rule == value,
        ("minItems", Value::Array(items)) => u64::try_from(items.len()).unwrap_or(u64::MAX) >= whole()?,
        ("pattern", Value::String(text)) => pattern::is_match(rule.as_str().context("not a text")?, text)?,
        ("minLength", Value::String(text)) => length(text) >= whole()?,
        ("maxLength", Value::String(text)) => length(text) <= whole()?,
        ("minimum", Value::Number(number)) => number.as_f64() >= rule.as_f64(),
        ("maximum", Value::Number(number)) => number.as_f64() <= rule.as_f64(),
        // These are about values of other types.
        ("minItems" | "pattern" | "minLength" | "maxLength" | "minimum" | "maximum", _) => true,
        _ if ANNOTATIONS.contains(&keyword) => true,
        _ => bail!("not supported"),
    })
}

fn is_a(name: &str, value: &Value) -> Result<bool> {
    Ok(match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0),
        _ => bail!("unknown type {name:?}"),
    })
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A schema, a value that it admits, and one that it refuses.
    #[test]
    fn every_keyword_admits_and_refuses() {
        for (schema, good, bad) in [
            (json!({"type": "integer"}), json!(1), json!(1.5)),
            (json!({"type": ["string", "null"]}), json!(null), json!(1)),
            (json!({"enum": ["a", ""]}), json!(""), json!("b")),
            (json!({"const": 1}), json!(1), json!(2)),
            (json!({"properties": {"a": {"type": "string"}}}), json!({"b": 1}), json!({"a": 1})),
            (json!({"properties": {"a": true}, "additionalProperties": false}), json!({"a": 1}), json!({"b": 1})),
            (json!({"additionalProperties": {"type": "string"}}), json!({"a": "b"}), json!({"a": 1})),
            (json!({"required": ["a"]}), json!({"a": null}), json!({})),
            (json!({"items": {"type": "string"}}), json!(["a"]), json!(["a", 1])),
            (json!({"minItems": 1}), json!([1]), json!([])),
            (json!({"pattern": "^a+$"}), json!("aa"), json!("ab")),
            (json!({"minLength": 2, "maxLength": 3}), json!("äö"), json!("abcd")),
            (json!({"minimum": 1, "maximum": 2}), json!(2), json!(0)),
            (json!({"anyOf": [{"type": "string"}, {"const": 1}]}), json!(1), json!(2)),
            (json!({"allOf": [{"type": "string"}, {"minLength": 2}]}), json!("ab"), json!("a")),
            (json!({"$ref": "#/definitions/d", "definitions": {"d": {"type": "string"}}}), json!("a"), json!(1)),
        ] {
            assert_eq!(mistakes(&schema, &good).unwrap(), Vec::<String>::new(), "{schema}");
            assert_eq!(mistakes(&schema, &bad).unwrap().len(), 1, "{schema}");
        }
    }

    #[test]
    fn what_is_not_known_is_an_error() {
        for schema in
            [json!({"oneOf": []}), json!({"$ref": "#/definitions/none"}), json!({"type": "text"}), json!({"$ref": "#"})]
        {
            assert!(mistakes(&schema, &json!("a")).is_err(), "{schema}");
        }
    }

    #[test]
    fn a_mistake_has_its_path_and_what_is_expected() {
        let schema = json!({"properties": {"a": {"properties": {"b": {"description": "a CIDR", "pattern": "/"}}}}});
        assert_eq!(mistakes(&schema, &json!({"a": {"b": "x"}})).unwrap(), ["value a.b: \"x\", expected a CIDR"]);
    }
}
