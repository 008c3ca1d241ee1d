//! Values of a chart: its own, those of files, and those of `--set` and its relatives, in helm's order and syntax.

use std::{fs, iter::Peekable, str::Chars};

use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value};

use crate::manifest::{document, source::Source};

/// Largest index of a list in `--set`, helm's bound.
const LARGEST_INDEX: usize = 65_536;

/// What a person sets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Values that come before all others, such as those of the installation.
    pub(crate) base: Option<Value>,
    /// Files, in their order.
    pub(crate) files: Vec<Source>,
    /// `--set`.
    pub(crate) set: Vec<String>,
    /// `--set-string`.
    pub(crate) set_string: Vec<String>,
    /// `--set-file`.
    pub(crate) set_file: Vec<String>,
}

impl Settings {
    /// The chart's `defaults` with these settings.
    ///
    /// # Errors
    /// When a file or a setting cannot be read; the error names it.
    pub(crate) fn onto(&self, defaults: &Value) -> Result<Value> {
        let mut over = self.base.clone().unwrap_or_else(|| Value::Object(Map::new()));
        for file in &self.files {
            merge(&mut over, parsed(&file.text).with_context(|| file.name.to_string())?);
        }
        for (flag, settings) in
            [("--set", &self.set), ("--set-string", &self.set_string), ("--set-file", &self.set_file)]
        {
            for setting in settings {
                apply(&mut over, setting, flag).with_context(|| format!("{flag} {setting}"))?;
            }
        }
        let mut values = defaults.clone();
        overlay(&mut values, over);
        Ok(values)
    }
}

/// The values in a text.
///
/// # Errors
/// When it is not a YAML mapping.
pub(crate) fn parsed(text: &str) -> Result<Value> {
    match serde_json::to_value(document::parse_yaml(text)?)? {
        Value::Null => Ok(Value::Object(Map::new())),
        values @ Value::Object(_) => Ok(values),
        _ => bail!("expected values, such as `proxy: {{logLevel: info}}`"),
    }
}

/// Puts `over` into `values`, maps key by key. A null is a value like others here: [`overlay`] reads it.
pub(crate) fn merge(values: &mut Value, over: Value) {
    combine(values, over, false);
}

/// Puts `over` into a chart's values, maps key by key. As for helm, null removes a value of the chart; where the chart
/// has none it stays, so that the schema refuses a name that does not exist (`helm:pkg/chartutil/coalesce.go`).
pub(crate) fn overlay(values: &mut Value, over: Value) {
    combine(values, over, true);
}

fn combine(values: &mut Value, over: Value, null_removes: bool) {
    match (values, over) {
        (Value::Object(known), Value::Object(over)) => {
            for (key, value) in over {
                match known.get_mut(&key) {
                    Some(_) if null_removes && value.is_null() => {
                        known.remove(&key);
                    }
                    Some(known) => combine(known, value, null_removes),
                    None => {
                        known.insert(key, value);
                    }
                }
            }
        }
        (values, over) => *values = over,
    }
}

/// Sets a value by its dotted path.
///
/// # Errors
/// When the path leads through a list.
pub(crate) fn put(values: &mut Value, path: &str, value: Value) -> Result<()> {
    let steps: Vec<_> = path.split('.').map(|key| Step::Key(key.to_owned())).collect();
    *place(values, &steps)? = value;
    Ok(())
}

/// A step to a value.
#[derive(Debug, PartialEq)]
enum Step {
    Key(String),
    Index(usize),
}

/// Applies `a.b[0]=c,d={x,y}`.
fn apply(values: &mut Value, setting: &str, flag: &str) -> Result<()> {
    let mut chars = setting.chars().peekable();
    loop {
        let path = path(&mut chars)?;
        let value = if flag != "--set-file" && chars.next_if_eq(&'{').is_some() {
            Value::Array(elements(&mut chars, flag)?)
        } else {
            scalar(&word(&mut chars, &[',']), flag)?
        };
        *place(values, &path)? = value;
        match chars.next() {
            None => return Ok(()),
            Some(',') => {}
            Some(c) => bail!("unexpected {c:?}"),
        }
    }
}

/// Up to and including `=`.
fn path(chars: &mut Peekable<Chars>) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    loop {
        let key = word(chars, &['.', '=', '[', ',']);
        if !key.is_empty() {
            steps.push(Step::Key(key));
        }
        match chars.next() {
            Some('.') => {}
            Some('=') if !steps.is_empty() => return Ok(steps),
            Some('[') => {
                let index = word(chars, &[']']);
                let number = index.parse().ok().filter(|index| *index <= LARGEST_INDEX);
                steps.push(Step::Index(number.with_context(|| format!("bad index {index:?}"))?));
                if chars.next() != Some(']') {
                    bail!("] is missing");
                }
            }
            _ => bail!("expected PATH=VALUE, such as proxy.logLevel=info"),
        }
    }
}

/// Up to one of these, which a backslash quotes.
fn word(chars: &mut Peekable<Chars>, ends: &[char]) -> String {
    let mut word = String::new();
    while let Some(c) = chars.next_if(|c| !ends.contains(c)) {
        word.push(if c == '\\' { chars.next().unwrap_or(c) } else { c });
    }
    word
}

fn elements(chars: &mut Peekable<Chars>, flag: &str) -> Result<Vec<Value>> {
    let mut elements = Vec::new();
    loop {
        let element = word(chars, &[',', '}']);
        match chars.next() {
            Some('}') if element.is_empty() && elements.is_empty() => return Ok(elements),
            Some(end @ (',' | '}')) => {
                elements.push(scalar(&element, flag)?);
                if end == '}' {
                    return Ok(elements);
                }
            }
            _ => bail!("}} is missing"),
        }
    }
}

/// A value as helm types it (`helm:pkg/strvals/parser.go`, `typedVal`).
fn scalar(text: &str, flag: &str) -> Result<Value> {
    let is = |word: &str| text.eq_ignore_ascii_case(word);
    Ok(match (flag, text) {
        ("--set-file", file) => Value::from(fs::read_to_string(file).with_context(|| file.to_owned())?),
        ("--set-string", text) => Value::from(text),
        _ if is("true") => Value::Bool(true),
        _ if is("false") => Value::Bool(false),
        _ if is("null") => Value::Null,
        // 0123 is a text, such as a port range or a mode.
        (_, text) if text != "0" && text.starts_with('0') => Value::from(text),
        (_, text) => text.parse::<i64>().map_or_else(|_| Value::from(text), Value::from),
    })
}

/// The place of a value, which is made if it is not there.
fn place<'a>(values: &'a mut Value, path: &[Step]) -> Result<&'a mut Value> {
    let mut value = values;
    for step in path {
        value = match step {
            Step::Key(key) => {
                if !value.is_object() {
                    *value = Value::Object(Map::new());
                }
                let Value::Object(map) = value else { bail!("{key}: not in a map") };
                map.entry(key.clone()).or_insert(Value::Null)
            }
            Step::Index(index) => {
                if !value.is_array() {
                    *value = Value::Array(Vec::new());
                }
                let Value::Array(items) = value else { bail!("[{index}]: not in a list") };
                if items.len() <= *index {
                    items.resize(index + 1, Value::Null);
                }
                &mut items[*index]
            }
        };
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn set(setting: &str) -> Result<Value> {
        let mut values = Value::Object(Map::new());
        apply(&mut values, setting, "--set").map(|()| values)
    }

    /// Each row is what helm makes of it (`helm:pkg/strvals`).
    #[test]
    fn settings_are_helms() {
        for (setting, expected) in [
            ("a=1", json!({"a": 1})),
            ("a.b=x,a.c=true", json!({"a": {"b": "x", "c": true}})),
            ("a[1].b=x", json!({"a": [null, {"b": "x"}]})),
            ("a={x,1}", json!({"a": ["x", 1]})),
            ("a={}", json!({"a": []})),
            ("a=x\\,y", json!({"a": "x,y"})),
            ("a\\.b=c", json!({"a.b": "c"})),
            ("a=", json!({"a": ""})),
            ("a=0123,b=0,c=1.5", json!({"a": "0123", "b": 0, "c": "1.5"})),
            ("a=null", json!({"a": null})),
            ("a=True,b=FALSE,c=Null,d=Truer", json!({"a": true, "b": false, "c": null, "d": "Truer"})),
            ("a=b=c", json!({"a": "b=c"})),
        ] {
            assert_eq!(set(setting).unwrap(), expected, "{setting}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (setting, words) in [
            ("a", "PATH=VALUE"),
            ("=x", "PATH=VALUE"),
            ("a[x]=1", "bad index"),
            ("a[99999999]=1", "bad index"),
            ("a={x", "}"),
        ] {
            assert!(format!("{:#}", set(setting).unwrap_err()).contains(words), "{setting}");
        }
        let settings = Settings { set_file: vec!["a=nowhere.pem".to_owned()], ..Settings::default() };
        let error = format!("{:#}", settings.onto(&json!({})).unwrap_err());
        assert!(error.contains("--set-file a=nowhere.pem") && error.contains("No such file"), "{error}");
    }

    #[test]
    fn the_last_setting_wins_and_null_removes() {
        let text = "a: {b: 2, c: 2, d: null, e: null}\nl: [9]\n".to_owned();
        let settings = Settings {
            base: Some(json!({"a": {"b": 1, "d": 1}})),
            files: vec![Source { name: "values.yaml".into(), text }],
            set: vec!["a.c=3,gone=null".to_owned()],
            set_string: vec!["s=1".to_owned()],
            set_file: Vec::new(),
        };
        let defaults = json!({"a": {"b": 0, "d": 0, "e": 0, "f": 0}, "l": [1, 2], "gone": {"x": 1}});
        let values = settings.onto(&defaults).unwrap();
        assert_eq!(values, json!({"a": {"b": 2, "c": 3, "f": 0}, "l": [9], "s": "1"}));
    }

    /// Otherwise no schema would refuse it.
    #[test]
    fn null_for_a_name_that_the_chart_does_not_have_stays() {
        let settings =
            Settings { base: Some(json!({"x": null, "a": {"y": null}, "b": {"z": null}})), ..Settings::default() };
        let values = settings.onto(&json!({"a": {"c": 1}, "b": "text"})).unwrap();
        assert_eq!(values, json!({"x": null, "a": {"c": 1, "y": null}, "b": {"z": null}}));
    }
}
