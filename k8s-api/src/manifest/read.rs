//! From the text of one document to a typed object.

use std::{path::Path, sync::Arc};

use serde::{Deserialize, de::DeserializeOwned};

use super::{
    Ignored, Kind, Located, ManifestError, Manifests, Object, ObjectRef, Problem, Unreadable, check, documents, locate,
    object::{self, Reader},
    restrictive::{restrictive, stand_in},
};
use crate::field::FieldPath;

/// Namespace of objects without one, Kubernetes' own default.
const DEFAULT_NAMESPACE: &str = "default";

/// Parses every document of `text`. `file` is only used in errors, and its extension says whether the text is JSON.
pub fn parse(file: &Path, text: &str) -> Manifests {
    let json = file.extension().is_some_and(|extension| extension == "json");
    let mut out = Manifests::default();
    let file: Arc<Path> = file.into();
    if json {
        Document { file, json, text, lines_before: 0 }.read(&mut out);
        return out;
    }
    for document in documents::split(text) {
        Document { file: file.clone(), json, text: document.text, lines_before: document.lines_before }.read(&mut out);
    }
    out
}

/// Parses an object from the Kubernetes API: complete, valid by its schema, and without a kind if it is part of a
/// list.
///
/// # Errors
/// Lists every field that cannot be used. [`Unreadable::restrictive`] is for readers that must fail closed.
pub fn from_api(kind: Kind, value: serde_json::Value) -> Result<Object, Unreadable> {
    let item = Item(value);
    let object = object::read(kind, &item).map_err(|failure| {
        let reference = reference(kind, &item.metadata());
        let restrictive = reference.and_then(|reference| restrictive(&reference, &item.0, failure.text()));
        Unreadable {
            problems: vec![Problem { field: failure.field, problem: failure.problem }],
            restrictive: restrictive.map(Box::new),
            is_stand_in: true,
        }
    })?;
    let problems: Vec<_> = check::check(&object)
        .into_iter()
        .map(|invalid| Problem { field: invalid.field.to_string(), problem: invalid.problem })
        .collect();
    if problems.is_empty() {
        return Ok(object);
    }
    let stand_in = stand_in(&object);
    let is_stand_in = stand_in.is_some();
    Err(Unreadable { problems, restrictive: Some(Box::new(stand_in.unwrap_or(object))), is_stand_in })
}

/// The part of every object that identifies it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: Option<HeaderMetadata>,
    items: Option<serde::de::IgnoredAny>,
}

#[derive(Default, Deserialize)]
struct HeaderMetadata {
    name: Option<String>,
    namespace: Option<String>,
}

/// A `List`, as written by `kubectl get -o yaml`.
#[derive(Deserialize)]
struct List {
    items: Vec<serde_json::Value>,
}

struct Document<'a> {
    file: Arc<Path>,
    json: bool,
    text: &'a str,
    lines_before: usize,
}

/// A failed parse: position, field and message.
struct Failure {
    at: Option<(usize, usize)>,
    field: String,
    problem: String,
}

impl Reader for Document<'_> {
    type Error = Failure;

    fn read<K: DeserializeOwned>(&self) -> Result<K, Failure> {
        if self.json {
            let mut deserializer = serde_json::Deserializer::from_str(self.text);
            let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
                let inner = error.inner();
                let suffix = format!(" at line {} column {}", inner.line(), inner.column());
                Failure::new(
                    Some((inner.line(), inner.column())),
                    error.path().to_string(),
                    &inner.to_string(),
                    &suffix,
                )
            })?;
            return match deserializer.end() {
                Ok(()) => Ok(value),
                Err(error) => Err(Failure {
                    at: Some((error.line(), error.column())),
                    field: String::new(),
                    problem: "text after the object, expected one JSON value".to_owned(),
                }),
            };
        }
        serde_path_to_error::deserialize(serde_yaml_ng::Deserializer::from_str(self.text)).map_err(|error| {
            let at = error.inner().location().map(|location| (location.line(), location.column()));
            let suffix = at.map_or_else(String::new, |(line, column)| format!(" at line {line} column {column}"));
            Failure::new(at, error.path().to_string(), &error.inner().to_string(), &suffix)
        })
    }
}

/// Reads from a value that is already parsed: an item of a list.
struct Item(serde_json::Value);

impl Reader for Item {
    type Error = Failure;

    fn read<K: DeserializeOwned>(&self) -> Result<K, Failure> {
        serde_path_to_error::deserialize(self.0.clone())
            .map_err(|error| Failure::new(None, error.path().to_string(), &error.inner().to_string(), ""))
    }
}

impl Item {
    fn text(&self, pointer: &str) -> Option<String> {
        self.0.pointer(pointer).and_then(|value| value.as_str()).map(str::to_owned)
    }

    fn metadata(&self) -> HeaderMetadata {
        HeaderMetadata { name: self.text("/metadata/name"), namespace: self.text("/metadata/namespace") }
    }
}

impl Failure {
    /// Strips from the parser's message the parts that have their own fields.
    fn new(at: Option<(usize, usize)>, path: String, message: &str, suffix: &str) -> Self {
        let field = if path == "." { String::new() } else { path };
        let message = message.strip_suffix(suffix).unwrap_or(message);
        let problem = message.strip_prefix(&format!("{field}: ")).unwrap_or(message);
        Self { at, field, problem: problem.to_owned() }
    }

    fn text(&self) -> String {
        if self.field.is_empty() { self.problem.clone() } else { format!("{}: {}", self.field, self.problem) }
    }
}

impl Document<'_> {
    fn read(self, out: &mut Manifests) {
        if !self.json && self.text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
            return;
        }
        let header = match Reader::read::<Option<Header>>(&self) {
            Ok(Some(header)) => header,
            Ok(None) => return,
            Err(failure) => return out.errors.push(self.error(failure, None)),
        };
        let missing = |field: &str| Failure {
            at: None,
            field: field.to_owned(),
            problem: "missing, expected a Kubernetes object with apiVersion and kind".to_owned(),
        };
        let Some(api_version) = header.api_version else {
            return out.errors.push(self.error(missing("apiVersion"), None));
        };
        let Some(kind) = header.kind else { return out.errors.push(self.error(missing("kind"), None)) };
        if kind == "List" && header.items.is_some() {
            return self.read_list(out);
        }
        let group = group_of(&api_version);
        let metadata = header.metadata.unwrap_or_default();
        let Some(known) = Kind::of(group, &kind) else {
            let (file, line) = (self.file.clone(), self.first_line());
            return out.ignored.push(Ignored { api_version, kind, name: metadata.name, file, line });
        };
        let reference = reference(known, &metadata);
        let read = object::read(known, &self);
        self.finish(read, reference, None, out);
    }

    /// Items have no text of their own, so their errors have the list's position.
    fn read_list(&self, out: &mut Manifests) {
        let list = match Reader::read::<List>(self) {
            Ok(list) => list,
            Err(failure) => return out.errors.push(self.error(failure, None)),
        };
        for (index, item) in list.items.into_iter().enumerate() {
            let under = FieldPath::of("items").index(index);
            let item = Item(item);
            let (Some(api_version), Some(kind)) = (item.text("/apiVersion"), item.text("/kind")) else {
                let problem = "missing apiVersion or kind, expected a Kubernetes object".to_owned();
                out.errors
                    .push(self.error(Failure { at: self.locate(&under), field: under.to_string(), problem }, None));
                continue;
            };
            let metadata = item.metadata();
            let Some(known) = Kind::of(group_of(&api_version), &kind) else {
                let (file, line) = (self.file.clone(), self.first_line());
                out.ignored.push(Ignored { api_version, kind, name: metadata.name, file, line });
                continue;
            };
            let reference = reference(known, &metadata);
            let read = object::read(known, &item);
            self.finish(read, reference, Some((under, item)), out);
        }
    }

    fn finish(
        &self,
        read: Result<Object, Failure>,
        reference: Option<ObjectRef>,
        item: Option<(FieldPath, Item)>,
        out: &mut Manifests,
    ) {
        let (outer, item) = item.map_or_else(Default::default, |(under, item)| (under, Some(item)));
        let mut object = match read {
            Ok(object) => object,
            Err(mut failure) => {
                let restrictive = reference.as_ref().and_then(|reference| {
                    let item = item.or_else(|| Reader::read(self).ok().map(Item))?;
                    restrictive(reference, &item.0, failure.text())
                });
                if !outer.0.is_empty() {
                    failure.at = self.locate(&outer);
                    failure.field = format!("{outer}.{}", failure.field);
                }
                let mut error = self.error(failure, reference);
                error.restrictive = restrictive.map(Box::new);
                return out.errors.push(error);
            }
        };
        let Some(reference) = reference else {
            let field = FieldPath::of("metadata.name").under(outer);
            let problem = "missing, expected the object's name".to_owned();
            return out
                .errors
                .push(self.error(Failure { at: self.locate(&field), field: field.to_string(), problem }, None));
        };
        object.metadata_mut().namespace.clone_from(&reference.namespace);
        let found = check::check(&object);
        if found.is_empty() {
            return out.objects.push(Located { object, file: self.file.clone(), line: self.first_line() });
        }
        let restrictive = stand_in(&object).unwrap_or(object);
        for invalid in found {
            let field = invalid.field.under(outer.clone());
            let failure = Failure { at: self.locate(&field), field: field.to_string(), problem: invalid.problem };
            let mut error = self.error(failure, Some(reference.clone()));
            error.restrictive = Some(Box::new(restrictive.clone()));
            out.errors.push(error);
        }
    }

    fn locate(&self, field: &FieldPath) -> Option<(usize, usize)> {
        locate::locate(self.text, self.json, field)
    }

    fn first_line(&self) -> usize {
        let leading =
            self.text.lines().take_while(|line| line.trim().is_empty() || line.trim_start().starts_with('#')).count();
        self.lines_before + leading + 1
    }

    fn error(&self, failure: Failure, object: Option<ObjectRef>) -> ManifestError {
        let line = failure.at.map_or_else(|| self.first_line(), |(line, _)| line + self.lines_before);
        ManifestError {
            file: self.file.clone(),
            line: Some(line),
            column: failure.at.map(|(_, column)| column),
            object,
            field: failure.field,
            problem: failure.problem,
            restrictive: None,
        }
    }
}

fn group_of(api_version: &str) -> &str {
    api_version.split_once('/').map_or("", |(group, _)| group)
}

fn reference(kind: Kind, metadata: &HeaderMetadata) -> Option<ObjectRef> {
    let namespace = || {
        metadata
            .namespace
            .clone()
            .filter(|namespace| !namespace.is_empty())
            .unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned())
    };
    let name = metadata.name.clone().filter(|name| !name.is_empty())?;
    Some(ObjectRef { kind, namespace: kind.is_namespaced().then(namespace), name })
}
