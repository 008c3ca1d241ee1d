//! One document of a manifest: its place, its text, and its fields in their order.

use std::{fmt, sync::Arc};

use serde::de::Error as _;
use serde_yaml_ng::Value;
use weft_k8s_api::{
    field::FieldPath,
    manifest::{locate, split},
};

/// A document that is not empty.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    /// File, URL or `standard input`.
    pub(crate) source: Arc<str>,
    /// Its number in that source, from 1, empty ones included.
    pub(crate) number: usize,
    /// Its text as it was read.
    pub(crate) text: String,
    /// The parsed text; not necessarily an object of Kubernetes.
    pub(crate) value: Value,
    lines_before: usize,
    json: bool,
}

/// Something in a document that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unusable {
    source: Arc<str>,
    document: usize,
    line: usize,
    /// Such as `deployment/web`; empty if it is not known.
    object: String,
    /// Field, and what is wrong with it.
    problem: String,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: document {}: ", self.source, self.line, self.document)?;
        if !self.object.is_empty() {
            write!(f, "{}: ", self.object)?;
        }
        f.write_str(&self.problem)
    }
}

impl Document {
    /// A problem of `field` of `object`.
    pub(crate) fn unusable(&self, object: &str, field: &FieldPath, problem: impl fmt::Display) -> Unusable {
        let found = locate(&self.text, self.json, field);
        let line = found.map_or_else(|| first_line(&self.text), |(line, _)| line) + self.lines_before;
        let problem = if field.0.is_empty() { problem.to_string() } else { format!("{field}: {problem}") };
        Unusable { source: self.source.clone(), document: self.number, line, object: object.to_owned(), problem }
    }
}

/// Every document of a text that is not empty.
///
/// # Errors
/// Every document that cannot be parsed.
pub(crate) fn parse(source: &Arc<str>, text: &str) -> Result<Vec<Document>, Vec<Unusable>> {
    let mut reading = Reading { source, documents: Vec::new(), errors: Vec::new() };
    if text.trim_start().starts_with('{') {
        reading.json(text);
    } else {
        reading.yaml(text);
    }
    if reading.errors.is_empty() { Ok(reading.documents) } else { Err(reading.errors) }
}

/// The items of a list, else the object.
pub(crate) fn objects(value: &Value) -> Vec<&Value> {
    match is_list(value) {
        true => value["items"].as_sequence().into_iter().flatten().collect(),
        false => vec![value],
    }
}

/// Whether it is a list of objects, such as `kubectl get -o yaml` prints.
pub(crate) fn is_list(value: &Value) -> bool {
    value["kind"].as_str().is_some_and(|kind| kind.ends_with("List")) && value["items"].is_sequence()
}

/// Reads one document, as kubectl does.
pub(crate) fn parse_yaml(text: &str) -> Result<Value, serde_saphyr::Error> {
    let options = serde_saphyr::options! { legacy_octal_numbers: true, with_snippet: false };
    serde_saphyr::from_str_with_options(text, options)
}

struct Reading<'a> {
    source: &'a Arc<str>,
    documents: Vec<Document>,
    errors: Vec<Unusable>,
}

impl Reading<'_> {
    fn yaml(&mut self, text: &str) {
        for (index, part) in split(text).into_iter().enumerate() {
            if part.text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with(['#', '%'])) {
                continue;
            }
            match parse_yaml(part.text) {
                Ok(value) => self.push(index + 1, part.text, part.lines_before, false, value),
                Err(error) => {
                    let location = error.location();
                    let line = location.map_or_else(|| first_line(part.text), |at| at.line() as usize);
                    let problem = without_location(&error.without_snippet().to_string()).to_owned();
                    self.fail(index + 1, part.lines_before + line, format!("cannot be read: {problem}"));
                }
            }
        }
    }

    fn json(&mut self, text: &str) {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
        let (mut start, mut number) = (0, 0);
        loop {
            let lines_before = text[..start].matches('\n').count();
            number += 1;
            match values.next() {
                None => return,
                Some(Ok(value)) => {
                    let end = values.byte_offset();
                    self.push(number, &text[start..end], lines_before, true, value);
                    start = end;
                }
                Some(Err(error)) => {
                    // The parser counts lines from the beginning of the stream.
                    let suffix = format!(" at line {} column {}", error.line(), error.column());
                    let message = error.to_string();
                    let problem = format!("cannot be read: {}", message.strip_suffix(&suffix).unwrap_or(&message));
                    return self.fail(number, error.line(), problem);
                }
            }
        }
    }

    fn push(&mut self, number: usize, text: &str, lines_before: usize, json: bool, value: Value) {
        if value.is_null() {
            return;
        }
        if !value.is_mapping() {
            let found = serde_json::Error::custom(format!("{}, expected a Kubernetes object", kind_of(&value)));
            return self.fail(number, lines_before + first_line(text), found.to_string());
        }
        let source = self.source.clone();
        self.documents.push(Document { source, number, text: text.to_owned(), value, lines_before, json });
    }

    fn fail(&mut self, document: usize, line: usize, problem: String) {
        self.errors.push(Unusable { source: self.source.clone(), document, line, object: String::new(), problem });
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Sequence(_) => "a list",
        Value::Null => "nothing",
        _ => "a scalar",
    }
}

/// The parser's message without the position, which is printed before it.
fn without_location(message: &str) -> &str {
    let message = message.split(" at line ").next().unwrap_or(message);
    message.rsplit_once(": line ").map_or(message, |(before, _)| before).trim_end()
}

/// Number of the first line with something in it, from 1.
fn first_line(text: &str) -> usize {
    text.lines().take_while(|line| line.trim().is_empty() || line.trim_start().starts_with('#')).count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Document>, Vec<Unusable>> {
        parse(&"web.yaml".into(), text)
    }

    #[test]
    fn documents_keep_their_text_and_number() {
        let documents = read("# nothing\n---\na: 1 # one\n---\n\n---\nb: 2\n").unwrap();
        let found: Vec<_> = documents.iter().map(|document| (document.number, document.text.as_str())).collect();
        assert_eq!(found, [(2, "a: 1 # one\n"), (4, "b: 2\n")]);
    }

    #[test]
    fn json_may_be_a_stream() {
        let documents = read("{\"a\": 1}\n{\"b\":\n 2}").unwrap();
        assert_eq!(documents.len(), 2);
        assert_eq!(documents[1].unusable("", &FieldPath::of("b"), "no").line, 3);
    }

    #[test]
    fn a_field_is_found_by_line() {
        let documents = read("---\na: 1\n---\nkind: Pod\nspec:\n  containers:\n  - name: 5\n").unwrap();
        let field = FieldPath::of("spec.containers").index(0).key("name");
        let said = documents[1].unusable("pod/web", &field, "expected a text").to_string();
        assert_eq!(said, "web.yaml:7: document 3: pod/web: spec.containers[0].name: expected a text");
    }

    #[test]
    fn what_cannot_be_read_is_named_with_its_line() {
        for (text, line, words) in [
            ("a: 1\n---\nb: [1\nc: 2\n", 3..=5, "document 2"),
            ("a: 1\na: 2\n", 1..=2, "document 1"),
            ("{\"a\": 1}\n{\"a\" 2}", 2..=2, "document 2"),
            ("- a\n- b\n", 1..=1, "a list, expected a Kubernetes object"),
        ] {
            let errors = read(text).unwrap_err();
            let said = errors[0].to_string();
            assert!(line.contains(&errors[0].line) && said.contains(words), "{text:?}: {said}");
        }
    }

    #[test]
    fn every_broken_document_is_reported() {
        assert_eq!(read("a: [\n---\nb: 1\n---\nc: {\n").unwrap_err().len(), 2);
    }

    #[test]
    fn merge_keys_are_resolved() {
        let documents = read("base: &base {a: 1}\nderived:\n  <<: *base\n  b: 2\n").unwrap();
        assert_eq!(documents[0].value["derived"]["a"], Value::from(1));
        assert_eq!(documents[0].value["derived"]["b"], Value::from(2));
    }
}
