//! `-o jsonpath=TEMPLATE`: text, and between braces paths as kubectl writes them, `{.a.b}`.
//!
//! Owns kubectl's form, which is older than RFC 9535: the root needs no `$`, a backslash makes a dot part of a name,
//! and names may contain hyphens. Refuses `range`: every event is an object of its own.

use jsonpath_rust::{
    parser::{model::JpQuery, parse_json_path},
    query::js_path_process,
};
use serde_json::Value;
use weft_k8s_api::printable;

/// A template that was read.
#[derive(Clone, Debug)]
pub(super) struct Template(Vec<Part>);

#[derive(Clone, Debug)]
enum Part {
    Text(String),
    Path(JpQuery),
}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// For people: what is wrong with it.
    pub(super) fn read(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            let end = closing(after, '}').ok_or_else(|| format!("{{{after} has no closing brace"))?;
            parts.push(Part::read(after[..end].trim())?);
            rest = &after[end + 1..];
        }
        if !parts.iter().any(|part| matches!(part, Part::Path(_))) {
            return Err("there is no path in it: write {.requestInitEvent.path}".to_owned());
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        Ok(Self(parts))
    }

    /// The line of an object; `None` if no path leads to anything in it.
    pub(super) fn line(&self, object: &Value) -> Option<String> {
        let mut line = String::new();
        let mut is_found = false;
        for part in &self.0 {
            match part {
                Part::Text(text) => line.push_str(text),
                Part::Path(path) => {
                    // A path that was read fails nowhere; one that leads nowhere finds nothing.
                    let found = js_path_process(path, object).unwrap_or_default();
                    is_found |= !found.is_empty();
                    let found: Vec<_> = found.into_iter().map(|found| shown(found.val())).collect();
                    line.push_str(&found.join(" "));
                }
            }
        }
        is_found.then_some(line)
    }
}

impl Part {
    fn read(expression: &str) -> Result<Self, String> {
        if let Some(quote @ ('"' | '\'')) = expression.chars().next() {
            let text =
                expression[1..].strip_suffix(quote).ok_or_else(|| format!("{expression} has no closing quote"))?;
            return Ok(Self::Text(unescaped(text)));
        }
        if expression == "end" || expression.starts_with("range ") {
            return Err(format!("{{{expression}}}: every event is an object of its own, there is nothing to repeat"));
        }
        let path = standard(expression)?;
        parse_json_path(&path).map(Self::Path).map_err(|error| format!("{{{expression}}}: {error}"))
    }
}

/// A path of kubectl as RFC 9535 has it.
fn standard(path: &str) -> Result<String, String> {
    let mut rest = path.strip_prefix(['$', '@']).unwrap_or(path);
    let mut standard = "$".to_owned();
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('[') {
            let end = closing(after, ']').ok_or_else(|| format!("{{{path}}}: [{after} has no closing bracket"))?;
            standard.push_str(&rest[..end + 2]);
            rest = &after[end + 1..];
            continue;
        }
        let after = match rest.strip_prefix("..") {
            Some(after) => {
                standard.push_str("..");
                after
            }
            None => rest.strip_prefix('.').ok_or_else(|| format!("{{{path}}}: a path begins with a dot"))?,
        };
        let (name, after) = name(after);
        match name.as_str() {
            // Before a bracket, or the root itself.
            "" => {}
            "*" => standard.push_str("[*]"),
            name => standard.push_str(&format!("['{}']", name.replace('\\', "\\\\").replace('\'', "\\'"))),
        }
        rest = after;
    }
    Ok(standard)
}

/// The name at the beginning, and what follows it.
fn name(path: &str) -> (String, &str) {
    let mut name = String::new();
    let mut characters = path.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '.' | '[' => return (name, &path[at..]),
            '\\' => name.extend(characters.next().map(|(_, escaped)| escaped)),
            other => name.push(other),
        }
    }
    (name, "")
}

/// Where the character is that ends this; not within quotes or further brackets.
fn closing(text: &str, end: char) -> Option<usize> {
    let mut quote = None;
    let mut depth = 0;
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match (quote, character) {
            (_, '\\') => {
                characters.next();
            }
            (Some(open), character) if open == character => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(character),
            (None, character) if character == end && depth == 0 => return Some(at),
            (None, '[') => depth += 1,
            (None, ']') => depth -= 1,
            (None, _) => {}
        }
    }
    None
}

/// A literal text without its escapes.
fn unescaped(text: &str) -> String {
    let mut unescaped = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        unescaped.extend(match character {
            '\\' => characters.next().map(|escaped| match escaped {
                'n' => '\n',
                't' => '\t',
                other => other,
            }),
            other => Some(other),
        });
    }
    unescaped
}

/// A value as kubectl prints it: texts as they are, everything else as JSON. Clients choose paths and headers: control
/// characters are escaped.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => printable::line(text).into_owned(),
        other => printable::json(&other.to_string()).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(template: &str) -> Option<String> {
        let object = json!({
            "source": {"ip": "10.0.0.1", "port": 4000},
            "sourceMeta": {"labels": {"app.kubernetes.io/name": "web", "pod-template-hash": "7f9"}},
            "requestInitEvent": {"path": "/api", "headers": [
                {"name": "host", "valueStr": "web"}, {"name": "x-id", "valueStr": "it's"},
            ]},
        });
        Template::read(template).unwrap().line(&object)
    }

    #[test]
    fn paths_are_those_of_kubectl() {
        for (template, expected) in [
            ("{.requestInitEvent.path}", "/api"),
            ("{$.requestInitEvent.path}", "/api"),
            ("{ .source.port }", "4000"),
            ("{.source.ip}:{.source.port}", "10.0.0.1:4000"),
            ("path={.requestInitEvent.path}{\"\\t\"}{.source.ip} {'!'}", "path=/api\t10.0.0.1 !"),
            (r"{.sourceMeta.labels.app\.kubernetes\.io/name}", "web"),
            ("{.sourceMeta.labels.pod-template-hash}", "7f9"),
            ("{.sourceMeta.labels['pod-template-hash']}", "7f9"),
            ("{.requestInitEvent.headers[*].name}", "host x-id"),
            ("{.requestInitEvent.headers[1].valueStr}", "it's"),
            ("{.requestInitEvent.headers[?(@.name==\"x-id\")].valueStr}", "it's"),
            ("{..valueStr}", "web it's"),
            ("{.source}", r#"{"ip":"10.0.0.1","port":4000}"#),
            // What one path does not find, another may.
            ("{.requestInitEvent.path}{.responseInitEvent.httpStatus}", "/api"),
        ] {
            assert_eq!(line(template).as_deref(), Some(expected), "{template}");
        }
    }

    #[test]
    fn control_characters_of_a_request_reach_no_terminal() {
        let template = Template::read("{.path}{\"\\n\"}{.all}").unwrap();
        let line = template.line(&json!({"path": "/\u{1b}[2J\n", "all": ["\u{9b}2J"]})).unwrap();
        assert_eq!(line.chars().filter(|character| character.is_control()).collect::<String>(), "\n", "{line:?}");
    }

    #[test]
    fn an_event_in_which_nothing_is_found_has_no_line() {
        assert_eq!(line("status={.responseInitEvent.httpStatus}"), None);
    }

    #[test]
    fn what_is_no_template_says_why() {
        for (template, expected) in [
            ("", "no path"),
            (".requestInitEvent.path", "no path"),
            ("{.requestInitEvent.path", "closing brace"),
            ("{\"x}", "closing brace"),
            ("{.headers[0}", "closing brace"),
            ("{requestInitEvent}", "begins with a dot"),
            ("{range .items[*]}{.a}{end}", "nothing to repeat"),
            ("{.a[?]}", "{.a[?]}"),
        ] {
            let error = Template::read(template).unwrap_err();
            assert!(error.contains(expected), "{template}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[{}\\[\\].$@*?'\"\\\\a ä(=]{0,24}") {
            if let Ok(template) = Template::read(&text) {
                template.line(&json!({"a": [{"a": "x"}]}));
            }
        }
    }
}
