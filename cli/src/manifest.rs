//! Manifests on the command line: read from files, folders, URLs and standard input; written as YAML or JSON.
//!
//! ```text
//! path | URL | - ──source──> text ──document──> Document ── changed by the command ──> print
//! ```
//!
//! Fields keep their order; what is not changed is written as it was read, comments included. Scalars are read and
//! written as kubectl reads them (YAML 1.1: `0644` is octal, `yes` is a boolean, the text "yes" needs quotes).

pub(crate) mod document;
mod download;
pub(crate) mod source;

use anyhow::{Context as _, Result, anyhow};
use clap::ValueEnum;
use document::{Document, Unusable};
use serde_yaml_ng::Value;

/// Output formats of manifests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ManifestFormat {
    /// Documents that `---` separates
    #[default]
    Yaml,
    /// One object after the other
    Json,
}

/// Every document of every source: files, folders, URLs, and `-` for standard input.
///
/// # Errors
/// When a source cannot be read, or documents of them; the error names each with its line.
pub(crate) async fn read(from: &[String]) -> Result<Vec<Document>> {
    source::check_stdin(from)?;
    let (mut documents, mut errors) = (Vec::new(), Vec::new());
    for from in from {
        for source in source::read(from).await? {
            match document::parse(&source.name, &source.text) {
                Ok(found) => documents.extend(found),
                Err(found) => errors.extend(found),
            }
        }
    }
    if errors.is_empty() { Ok(documents) } else { Err(refused(&errors)) }
}

/// The error of a command that cannot use all that it was given, with a line for each.
pub(crate) fn refused(errors: &[Unusable]) -> anyhow::Error {
    let lines: Vec<_> = errors.iter().map(ToString::to_string).collect();
    anyhow!("nothing is printed:\n{}", lines.join("\n"))
}

/// An object's text, which ends with a line break.
pub(crate) fn text(value: &Value, format: ManifestFormat) -> Result<String> {
    let mut text = match format {
        // Long lines are not folded, so that manifests can be compared line by line.
        ManifestFormat::Yaml => {
            let options = serde_saphyr::ser_options! { folded_wrap_chars: 1 << 30 };
            serde_saphyr::to_string_with_options(value, options).context("write YAML")?
        }
        ManifestFormat::Json => serde_json::to_string_pretty(value).context("write JSON")?,
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

/// Appends an object's text to a stream of them.
pub(crate) fn push(stream: &mut String, text: &str, format: ManifestFormat) {
    stream.push_str(text);
    if !text.ends_with('\n') {
        stream.push('\n');
    }
    if format == ManifestFormat::Yaml {
        stream.push_str("---\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Value {
        document::parse_yaml(text).unwrap()
    }

    /// What kubectl would read differently has quotes.
    #[test]
    fn texts_stay_texts_for_kubectl() {
        for tricky in
            ["yes", "on", "y", "N", "0644", "1_000", "1e3", "null", "~", "12:30", "0x1F", "2001-01-01", "", "a: b", "#"]
        {
            let object = Value::Mapping([(Value::from("value"), Value::from(tricky))].into_iter().collect());
            let text = text(&object, ManifestFormat::Yaml).unwrap();
            let scalar = text.trim_end().strip_prefix("value: ").unwrap();
            assert!(scalar.starts_with(['\'', '"']), "{tricky}: {text}");
            assert_eq!(value(&text), object, "{text}");
        }
    }

    #[test]
    fn numbers_and_booleans_are_read_as_kubectl_does() {
        let read = value("mode: 0644\non: yes\ntext: \"0644\"\n");
        assert_eq!(read["mode"], Value::from(420));
        assert_eq!(read["text"], Value::from("0644"));
        assert!(text(&read, ManifestFormat::Json).unwrap().contains("true"));
    }

    #[test]
    fn order_and_blocks_are_kept() {
        let yaml = "z: 1\na:\n- name: b\n  script: |\n    one\n    two\nm: {}\n";
        assert_eq!(text(&value(yaml), ManifestFormat::Yaml).unwrap(), yaml);
        let json = text(&value(yaml), ManifestFormat::Json).unwrap();
        assert!(json.find("\"z\"") < json.find("\"a\"") && json.find("\"a\"") < json.find("\"m\""), "{json}");
    }

    #[test]
    fn long_lines_are_not_folded() {
        let long = "word ".repeat(60);
        let object = Value::Mapping([(Value::from("value"), Value::from(long.trim_end()))].into_iter().collect());
        let text = text(&object, ManifestFormat::Yaml).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}
