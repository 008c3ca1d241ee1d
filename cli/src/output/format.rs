//! Formats of results: tables for people, JSON and YAML for programs.

use std::borrow::Cow;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde::Serialize;
use weft_k8s_api::printable;

/// Formats of a command whose text has everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    #[default]
    Table,
    /// For programs
    Json,
    /// For programs, and people who read all of it
    Yaml,
}

/// Formats of a command whose table leaves something out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum WideFormat {
    /// For people
    #[default]
    Table,
    /// For people with wide screens
    Wide,
    /// For programs
    Json,
    /// For programs, and people who read all of it
    Yaml,
}

/// Formats that have every field of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    Json,
    Yaml,
}

impl Format {
    /// The format, unless it is for people alone.
    pub(crate) fn data(self) -> Option<Data> {
        match self {
            Self::Table => None,
            Self::Json => Some(Data::Json),
            Self::Yaml => Some(Data::Yaml),
        }
    }
}

impl WideFormat {
    /// The format, unless it is for people alone.
    pub(crate) fn data(self) -> Option<Data> {
        match self {
            Self::Table | Self::Wide => None,
            Self::Json => Some(Data::Json),
            Self::Yaml => Some(Data::Yaml),
        }
    }
}

impl Data {
    /// Prints a value: one line of JSON, or a document of YAML.
    pub(crate) fn print(self, value: &impl Serialize) -> Result<()> {
        Ok(super::styled(&self.text(value)?)?)
    }

    /// Prints one of several values: a line of JSON, or a document of YAML that begins with `---`.
    pub(crate) fn print_next(self, value: &impl Serialize) -> Result<()> {
        Ok(super::styled(&self.next_text(value)?)?)
    }

    /// What [`Self::print`] prints, without the last line feed.
    pub(crate) fn text(self, value: &impl Serialize) -> Result<String> {
        match self {
            Self::Json => Ok(printable::json(&serde_json::to_string(value)?).into_owned()),
            Self::Yaml => {
                // Long lines are not folded, so that outputs can be compared line by line.
                let options = serde_saphyr::ser_options! { folded_wrap_chars: 1 << 30 };
                let text = serde_saphyr::to_string_with_options(value, options).context("write YAML")?;
                match printable::lines(text.trim_end_matches('\n')) {
                    Cow::Borrowed(text) => Ok(text.to_owned()),
                    // JSON is YAML, and has an escape for every character that a terminal would act on.
                    Cow::Owned(_) => Ok(printable::json(&serde_json::to_string_pretty(value)?).into_owned()),
                }
            }
        }
    }

    fn next_text(self, value: &impl Serialize) -> Result<String> {
        let text = self.text(value)?;
        Ok(if self == Self::Yaml { format!("---\n{text}") } else { text })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[derive(Serialize)]
    struct Row<'a> {
        #[serde(flatten)]
        of: Of<'a>,
        zone: Option<&'a str>,
        verdicts: Vec<&'a str>,
        rate: f64,
        cookie: u64,
    }

    #[derive(Serialize)]
    struct Of<'a> {
        name: &'a str,
        answer: &'a str,
    }

    fn rows() -> Vec<Row<'static>> {
        let of = Of { name: "web", answer: "yes" };
        vec![Row { of, zone: None, verdicts: vec!["redirect"], rate: 0.5, cookie: u64::MAX }]
    }

    #[test]
    fn yaml_has_the_fields_of_json_in_their_order() {
        let yaml = Data::Yaml.text(&rows()).unwrap();
        let expected = "- name: web\n  answer: \"yes\"\n  zone: null\n  verdicts:\n  - redirect\n  rate: 0.5\n  cookie: 18446744073709551615";
        assert_eq!(yaml.replace('\'', "\""), expected);
        let read: Value = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(read, serde_json::to_value(rows()).unwrap());
    }

    #[test]
    fn several_documents_can_be_told_apart() {
        assert_eq!(Data::Yaml.next_text(&json!({"a": 1})).unwrap(), "---\na: 1");
        assert_eq!(Data::Json.next_text(&json!({"a": 1})).unwrap(), "{\"a\":1}");
    }

    /// Values quote annotations and names of processes.
    #[test]
    fn yaml_cannot_style_itself_and_says_the_same() {
        for command in ["\x1b[2J", "a\r\nb", "\u{9b}31m", "a\u{202e}b", "\x1b\u{202e}"] {
            let quoting = json!({"command": command, "key": "a: b #"});
            let yaml = Data::Yaml.text(&quoting).unwrap();
            assert!(!yaml.contains(|it: char| it != '\n' && (it.is_control() || it == '\u{202e}')), "{yaml:?}");
            assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), quoting, "{yaml}");
        }
    }
}
