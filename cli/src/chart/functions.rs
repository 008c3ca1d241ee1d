//! Functions of templates: those of Go's text/template, sprig and helm that the charts use.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, anyhow, bail};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use sha2::{Digest as _, Sha256};

use super::{
    pattern,
    value::{Map, Value},
};
use crate::manifest::{self, ManifestFormat, document};

/// Calls a function.
///
/// # Errors
/// When there is no such function, its arguments have other types, or it is `fail` or `required`; the error is then the
/// chart's own.
pub(super) fn call(name: &str, arguments: &[Value]) -> Result<Value> {
    let result = text(name, arguments)
        .or_else(|| collection(name, arguments))
        .or_else(|| decision(name, arguments))
        .or_else(|| format(name, arguments));
    result.unwrap_or_else(|| Err(anyhow!("function {name} is not supported with {} arguments", arguments.len())))
}

/// Functions whose arguments are printed first.
const TEXTS: [&str; 20] = [
    "trim",
    "replace",
    "trimSuffix",
    "upper",
    "snakecase",
    "toString",
    "contains",
    "hasPrefix",
    "hasSuffix",
    "regexMatch",
    "splitList",
    "nindent",
    "indent",
    "quote",
    "squote",
    "sha256sum",
    "b64enc",
    "printf",
    "fail",
    "required",
];

/// Functions of texts; nothing if `name` is none of them.
fn text(name: &str, arguments: &[Value]) -> Option<Result<Value>> {
    if !TEXTS.contains(&name) {
        return None;
    }
    let all: Vec<String> = arguments.iter().map(ToString::to_string).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let value = match (name, all.as_slice()) {
        ("trim", [text]) => Value::text(text.trim()),
        ("replace", [old, new, text]) => Value::text(text.replace(old, new)),
        ("trimSuffix", [suffix, text]) => Value::text(text.strip_suffix(suffix).unwrap_or(text)),
        ("upper", [text]) => Value::text(text.to_uppercase()),
        ("snakecase", [text]) => Value::text(snake_case(text)),
        ("toString", [text]) => Value::text(*text),
        ("contains", [part, text]) => Value::Bool(text.contains(part)),
        ("hasPrefix", [part, text]) => Value::Bool(text.starts_with(part)),
        ("hasSuffix", [part, text]) => Value::Bool(text.ends_with(part)),
        ("regexMatch", [pattern, text]) => return Some(matches(pattern, text).map(Value::Bool)),
        ("splitList", [separator, text]) => Value::list(text.split(separator).map(Value::text).collect()),
        ("nindent", [count, text]) => return Some(indented(count, text).map(|text| Value::text(format!("\n{text}")))),
        ("indent", [count, text]) => return Some(indented(count, text).map(Value::text)),
        ("quote", texts) => joined(arguments, texts, |text| format!("{text:?}")),
        ("squote", texts) => joined(arguments, texts, |text| format!("'{text}'")),
        ("sha256sum", [text]) => {
            let digest = Sha256::digest(text.as_bytes());
            Value::text(digest.iter().fold(String::new(), |mut hex, byte| {
                let _ = write!(hex, "{byte:02x}");
                hex
            }))
        }
        ("b64enc", [text]) => Value::text(STANDARD.encode(text)),
        ("printf", [_, ..]) => return Some(print(arguments)),
        ("fail", [message]) => return Some(Err(anyhow!("{}", message.trim()))),
        ("required", [message, _]) => match &arguments[1] {
            Value::Nil => return Some(Err(anyhow!("{}", message.trim()))),
            Value::Text(text) if text.is_empty() => return Some(Err(anyhow!("{}", message.trim()))),
            value => value.clone(),
        },
        _ => return None,
    };
    Some(Ok(value))
}

/// sprig takes a pattern that it cannot read for one that matches nothing; here it is an error that names it.
fn matches(pattern: &str, text: &str) -> Result<bool> {
    pattern::is_match(pattern, text).context("regexMatch")
}

fn joined(arguments: &[Value], texts: &[&str], each: impl Fn(&str) -> String) -> Value {
    let given = arguments.iter().zip(texts).filter(|(value, _)| !matches!(value, Value::Nil));
    Value::text(given.map(|(_, text)| each(text)).collect::<Vec<_>>().join(" "))
}

fn indented(count: &str, text: &str) -> Result<String> {
    let count: usize = count.parse().with_context(|| format!("indent: {count:?} is not a number"))?;
    let blanks = " ".repeat(count);
    Ok(format!("{blanks}{}", text.replace('\n', &format!("\n{blanks}"))))
}

/// `keepAliveInterval` becomes `keep_alive_interval`.
fn snake_case(text: &str) -> String {
    let mut snake = String::new();
    for c in text.chars() {
        if c.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(c.to_lowercase());
    }
    snake
}

/// Go's verbs that charts use.
fn print(arguments: &[Value]) -> Result<Value> {
    let (Some(Value::Text(format)), mut rest) = (arguments.first(), arguments.iter().skip(1)) else {
        bail!("printf needs a format")
    };
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let verb = chars.next().context("printf: the format ends with %")?;
        if verb == '%' {
            text.push('%');
            continue;
        }
        let value = rest.next().with_context(|| format!("printf: no argument for %{verb}"))?;
        match (verb, value) {
            ('s' | 'v', value) => text.push_str(&value.to_string()),
            ('t', Value::Bool(is)) => text.push_str(&is.to_string()),
            ('d', Value::Int(number)) => text.push_str(&number.to_string()),
            ('q', Value::Text(quoted)) => text.push_str(&format!("{quoted:?}")),
            (verb, value) => bail!("printf: %{verb} of {}", value.kind()),
        }
    }
    match rest.next() {
        None => Ok(Value::text(text)),
        Some(value) => bail!("printf: unused argument {value}"),
    }
}

/// Functions of lists and maps.
fn collection(name: &str, arguments: &[Value]) -> Option<Result<Value>> {
    let value = match (name, arguments) {
        ("list", items) => Value::list(items.to_vec()),
        ("append", [Value::List(items), last]) => {
            Value::list(items.iter().chain(std::iter::once(last)).cloned().collect())
        }
        ("concat", lists) => {
            let mut all = Vec::new();
            for list in lists {
                match list {
                    Value::List(items) => all.extend(items.iter().cloned()),
                    other => return Some(Err(anyhow!("concat of {}, expected lists", other.kind()))),
                }
            }
            Value::list(all)
        }
        ("compact", [Value::List(items)]) => Value::list(items.iter().filter(|item| item.is_true()).cloned().collect()),
        ("first", [Value::List(items)]) => items.first().cloned().unwrap_or_default(),
        ("initial", [Value::List(items)]) => {
            Value::list(items.split_last().map(|(_, items)| items.to_vec()).unwrap_or_default())
        }
        ("join", [separator, Value::List(items)]) => {
            let texts = items.iter().filter(|item| !matches!(item, Value::Nil)).map(ToString::to_string);
            Value::text(texts.collect::<Vec<_>>().join(&separator.to_string()))
        }
        ("has", [needle, Value::List(items)]) => Value::Bool(items.iter().any(|item| item.json() == needle.json())),
        ("has", [_, Value::Nil]) => Value::Bool(false),
        ("dict", entries) => return Some(dictionary(entries)),
        ("get", [Value::Map(map), Value::Text(key)]) => {
            map.borrow().get(key.as_ref()).cloned().unwrap_or_else(|| Value::text(""))
        }
        ("hasKey", [Value::Map(map), Value::Text(key)]) => Value::Bool(map.borrow().contains_key(key.as_ref())),
        ("set", [Value::Map(map), Value::Text(key), value]) => {
            map.borrow_mut().insert(key.to_string(), value.clone());
            Value::Map(map.clone())
        }
        ("unset", [Value::Map(map), Value::Text(key)]) => {
            map.borrow_mut().remove(key.as_ref());
            Value::Map(map.clone())
        }
        ("deepCopy", [value]) => value.deep(),
        ("mergeOverwrite", [Value::Map(onto), all @ ..]) => {
            for over in all {
                match over {
                    Value::Map(over) => merge(onto, over),
                    other => return Some(Err(anyhow!("mergeOverwrite of {}, expected maps", other.kind()))),
                }
            }
            Value::Map(onto.clone())
        }
        // There is no cluster, as for `helm template`.
        ("lookup", [_, _, _, _]) => Value::map(std::collections::BTreeMap::new()),
        _ => return None,
    };
    Some(Ok(value))
}

fn dictionary(entries: &[Value]) -> Result<Value> {
    let mut map = std::collections::BTreeMap::new();
    for entry in entries.chunks(2) {
        let [key, value] = entry else { bail!("dict: a key has no value") };
        map.insert(key.to_string(), value.clone());
    }
    Ok(Value::map(map))
}

/// Puts `over` into `onto`, maps key by key.
fn merge(onto: &Map, over: &Map) {
    // A copy of the entries: the two may be one map.
    let over = over.borrow().clone();
    for (key, value) in over {
        let known = onto.borrow().get(&key).cloned();
        match (known, &value) {
            (Some(Value::Map(onto)), Value::Map(over)) => merge(&onto, over),
            _ => {
                onto.borrow_mut().insert(key, value);
            }
        }
    }
}

/// Functions of any value.
fn decision(name: &str, arguments: &[Value]) -> Option<Result<Value>> {
    let value = match (name, arguments) {
        ("not", [value]) => Value::Bool(!value.is_true()),
        ("empty", [value]) => Value::Bool(!value.is_true()),
        ("default", [default, value]) => either(value.is_true(), value, default),
        ("ternary", [yes, no, condition]) => either(condition.is_true(), yes, no),
        ("kindIs", [Value::Text(kind), value]) => Value::Bool(kind.as_ref() == value.kind()),
        ("eq", [value, others @ ..]) if !others.is_empty() => {
            Value::Bool(others.iter().any(|other| value.json() == other.json()))
        }
        ("ne", [one, other]) => Value::Bool(one.json() != other.json()),
        ("ge", [Value::Int(one), Value::Int(other)]) => Value::Bool(one >= other),
        ("gt", [Value::Int(one), Value::Int(other)]) => Value::Bool(one > other),
        ("int", [value]) => return Some(integer(value).map(Value::Int)),
        ("float64", [value]) => return Some(number(value).map(Value::Float)),
        ("ceil", [value]) => return Some(number(value).map(|number| Value::Float(number.ceil()))),
        ("divf", [dividend, divisors @ ..]) => return Some(quotient(dividend, divisors).map(Value::Float)),
        ("max" | "min", [_, ..]) => {
            let all: Result<Vec<_>> = arguments.iter().map(integer).collect();
            let one = all.map(|all| if name == "max" { all.into_iter().max() } else { all.into_iter().min() });
            return Some(one.map(|one| Value::Int(one.unwrap_or_default())));
        }
        _ => return None,
    };
    Some(Ok(value))
}

fn either(is: bool, yes: &Value, no: &Value) -> Value {
    if is { yes.clone() } else { no.clone() }
}

/// sprig takes what is no number for zero; here it is an error that names it.
fn number(value: &Value) -> Result<f64> {
    Ok(match value {
        Value::Nil => 0.0,
        Value::Bool(is) => f64::from(u8::from(*is)),
        Value::Int(number) => *number as f64,
        Value::Float(number) => *number,
        Value::Text(text) if text.is_empty() => 0.0,
        Value::Text(text) => text.parse().with_context(|| format!("{text:?} is not a number"))?,
        other => bail!("a number is expected, not {}", other.kind()),
    })
}

fn quotient(dividend: &Value, divisors: &[Value]) -> Result<f64> {
    let mut quotient = number(dividend)?;
    for divisor in divisors {
        match number(divisor)? {
            0.0 => bail!("divf: {dividend} is divided by zero"),
            divisor => quotient /= divisor,
        }
    }
    Ok(quotient)
}

fn integer(value: &Value) -> Result<i64> {
    match value {
        Value::Int(number) => Ok(*number),
        value => number(value).map(|number| number as i64),
    }
}

/// Functions that read and write formats.
fn format(name: &str, arguments: &[Value]) -> Option<Result<Value>> {
    let [value] = arguments else { return None };
    Some(match (name, value) {
        ("toJson", value) => Ok(Value::text(value.json().to_string())),
        ("toYaml", value) => yaml(value).map(Value::text),
        ("fromJsonArray" | "fromYamlArray", Value::Text(text)) => list(text),
        _ => return None,
    })
}

fn yaml(value: &Value) -> Result<String> {
    let text = manifest::text(&serde_yaml_ng::to_value(value.json())?, ManifestFormat::Yaml)?;
    Ok(text.trim_end_matches('\n').to_owned())
}

fn list(text: &str) -> Result<Value> {
    if text.trim().is_empty() {
        return Ok(Value::list(Vec::new()));
    }
    let value = serde_json::to_value(document::parse_yaml(text)?)?;
    if !value.is_array() {
        bail!("{text:?} is not a list");
    }
    Ok(Value::from(value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn called(name: &str, arguments: serde_json::Value) -> Result<serde_json::Value> {
        let Value::List(arguments) = Value::from(arguments) else { panic!("a list of arguments") };
        call(name, &arguments).map(|value| value.json())
    }

    /// Each row is what helm gives.
    #[test]
    fn results_are_helms() {
        for (name, arguments, expected) in [
            ("nindent", json!([2, "a\nb"]), json!("\n  a\n  b")),
            ("quote", json!(["a\"b", null, 5]), json!("\"a\\\"b\" \"5\"")),
            ("squote", json!(["a"]), json!("'a'")),
            ("snakecase", json!(["keepAliveInterval"]), json!("keep_alive_interval")),
            ("printf", json!(["%s-%v: %q %%", "a", true, "c"]), json!("a-true: \"c\" %")),
            ("splitList", json!([".", "a.b"]), json!(["a", "b"])),
            ("replace", json!(["+", "_", "1+2+3"]), json!("1_2_3")),
            ("trimSuffix", json!(["m", "10mm"]), json!("10m")),
            ("trimSuffix", json!(["m", "10"]), json!("10")),
            ("regexMatch", json!(["(^|/)a(@|$)", "x/a@b"]), json!(true)),
            ("regexMatch", json!(["(^|/)a(@|$)", "xa"]), json!(false)),
            ("initial", json!([["a", "b", "c"]]), json!(["a", "b"])),
            ("initial", json!([[]]), json!([])),
            ("ceil", json!(["1.001"]), json!(2)),
            ("ceil", json!([-1.5]), json!(-1)),
            ("divf", json!(["1500", 1000]), json!(1.5)),
            ("divf", json!([10, 2, 4]), json!(1.25)),
            ("default", json!(["d", ""]), json!("d")),
            ("default", json!(["d", false]), json!("d")),
            ("ternary", json!(["y", "n", false]), json!("n")),
            ("get", json!([{"a": 1}, "b"]), json!("")),
            ("join", json!([",", ["a", null, 2]]), json!("a,2")),
            ("compact", json!([["", "a", null, 0]]), json!(["a"])),
            ("concat", json!([[1], [2, 3]]), json!([1, 2, 3])),
            ("mergeOverwrite", json!([{"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}]), json!({"a": {"b": 1, "c": 3}})),
            ("mergeOverwrite", json!([{}, {"a": 1, "b": 2}, {"b": ""}]), json!({"a": 1, "b": ""})),
            ("kindIs", json!(["invalid", null]), json!(true)),
            ("eq", json!(["a", "b", "a"]), json!(true)),
            ("int", json!(["12"]), json!(12)),
            ("int", json!([12.9]), json!(12)),
            ("max", json!([1, 3, 2]), json!(3)),
            ("min", json!([1, 3, 2]), json!(1)),
            ("toYaml", json!([{"b": [1], "a": "yes"}]), json!("a: \"yes\"\nb:\n- 1")),
            ("toJson", json!([{"b": 1.0, "a": []}]), json!("{\"a\":[],\"b\":1}")),
            ("fromYamlArray", json!(["- a\n- b"]), json!(["a", "b"])),
            ("b64enc", json!(["a\n"]), json!("YQo=")),
            ("has", json!(["a", ["b"]]), json!(false)),
            ("unset", json!([{"a": 1, "b": 2}, "a"]), json!({"b": 2})),
            ("required", json!(["no", "x"]), json!("x")),
        ] {
            assert_eq!(called(name, arguments.clone()).unwrap(), expected, "{name} {arguments}");
        }
    }

    #[test]
    fn the_charts_words_are_the_error() {
        assert_eq!(called("fail", json!(["\n\nno\n"])).unwrap_err().to_string(), "no");
        assert_eq!(called("required", json!(["a is missing", ""])).unwrap_err().to_string(), "a is missing");
        for (name, arguments, words) in [
            ("int", json!(["many"]), "many"),
            ("ceil", json!(["4k"]), "4k"),
            ("divf", json!([1, 0]), "divided by zero"),
            ("regexMatch", json!(["[", "a"]), "\"[\""),
            ("mergeOverwrite", json!([{}, "a"]), "expected maps"),
        ] {
            let error = format!("{:#}", called(name, arguments).unwrap_err());
            assert!(error.contains(words), "{name}: {error}");
        }
        assert!(called("nosuch", json!([1])).unwrap_err().to_string().contains("nosuch"));
    }
}
