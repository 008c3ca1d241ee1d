//! Conditions on requests: hosts, paths, headers, query parameters.

use std::collections::BTreeMap;

use ::http::{HeaderName, HeaderValue};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    expression,
    field::{FieldPath, Invalid},
    names::is_dns_name,
};

/// A condition on a path, as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
pub struct PathValue {
    /// `PathPrefix`, the default, `Exact` or `RegularExpression`.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub match_type: Option<String>,
    /// The path; absent means `/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

/// A condition on a header or a query parameter, as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
pub struct NamedMatch {
    /// `Exact`, the default, or `RegularExpression`.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub match_type: Option<String>,
    /// Name of the header or parameter.
    pub name: String,
    /// The exact value, or a regular expression that the whole value has to match.
    pub value: String,
}

/// A condition on a path. Paths begin with a slash.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PathMatch {
    /// Exactly this path.
    Exact(String),
    /// This path and those below it, by whole segments.
    Prefix(String),
    /// Paths that the regular expression matches as a whole.
    Regex(String),
}

/// A condition on a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ValueMatch {
    /// Exactly this value.
    Exact(String),
    /// Values that the regular expression matches as a whole.
    Regex(String),
}

/// A condition on a header.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HeaderMatch {
    /// Name of the header.
    pub name: HeaderName,
    /// Its value; an exact one is a valid header value.
    pub value: ValueMatch,
}

/// A condition on a query parameter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct QueryMatch {
    /// Name of the parameter.
    pub name: String,
    /// Condition on the decoded value.
    pub value: ValueMatch,
}

/// A condition on a request's host, or on a TLS server name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HostMatch {
    /// Exactly this name.
    Exact(String),
    /// Names that end with these labels, `["example", "com"]`, and have at least one more.
    Suffix(Vec<String>),
}

impl PathValue {
    /// Reads the condition; an absent path is `/`.
    ///
    /// # Errors
    /// When the type is unknown, the path is not absolute, or the regular expression does not compile.
    pub fn read(&self) -> Result<PathMatch, Invalid> {
        let value = self.value.clone().unwrap_or_else(|| "/".to_owned());
        let at = || FieldPath::of("value");
        let absolute = |value: String| {
            let problem = || at().invalid(format!("relative path {value:?}, expected one that begins with /"));
            if value.starts_with('/') { Ok(value) } else { Err(problem()) }
        };
        match self.match_type.as_deref() {
            None | Some("PathPrefix") => absolute(value).map(PathMatch::Prefix),
            Some("Exact") => absolute(value).map(PathMatch::Exact),
            Some("RegularExpression") => regex(at(), value).map(PathMatch::Regex),
            Some(other) => Err(FieldPath::of("type")
                .invalid(format!("unsupported match type {other:?}, expected PathPrefix, Exact or RegularExpression"))),
        }
    }
}

impl NamedMatch {
    /// The condition on a header.
    ///
    /// # Errors
    /// When the name or an exact value is not that of a header, the type is unknown, or the regular expression does not
    /// compile.
    pub fn read_header(&self) -> Result<HeaderMatch, Vec<Invalid>> {
        let name = header_name(FieldPath::of("name"), &self.name);
        let value = self.read_value().and_then(|value| match value {
            ValueMatch::Exact(text) => header_value(FieldPath::of("value"), &text).map(|_| ValueMatch::Exact(text)),
            regex @ ValueMatch::Regex(_) => Ok(regex),
        });
        match (name, value) {
            (Ok(name), Ok(value)) => Ok(HeaderMatch { name, value }),
            (name, value) => Err(name.err().into_iter().chain(value.err()).collect()),
        }
    }

    /// The condition on a query parameter.
    ///
    /// # Errors
    /// When the name is empty, the type is unknown, or the regular expression does not compile.
    pub fn read_query(&self) -> Result<QueryMatch, Vec<Invalid>> {
        if self.name.is_empty() {
            return Err(vec![FieldPath::of("name").invalid("empty, expected the name of a query parameter")]);
        }
        let value = self.read_value().map_err(|invalid| vec![invalid])?;
        Ok(QueryMatch { name: self.name.clone(), value })
    }

    fn read_value(&self) -> Result<ValueMatch, Invalid> {
        match self.match_type.as_deref() {
            None | Some("Exact") => Ok(ValueMatch::Exact(self.value.clone())),
            Some("RegularExpression") => regex(FieldPath::of("value"), self.value.clone()).map(ValueMatch::Regex),
            Some(other) => Err(FieldPath::of("type")
                .invalid(format!("unsupported match type {other:?}, expected Exact or RegularExpression"))),
        }
    }
}

impl HostMatch {
    /// Reads `host.example.org`, or `*.example.org` for all names below it.
    ///
    /// # Errors
    /// When it is not a host name.
    pub fn read(hostname: &str) -> Result<Self, Vec<Invalid>> {
        let (is_suffix, name) = match hostname.strip_prefix("*.") {
            Some(suffix) => (true, suffix),
            None => (false, hostname),
        };
        if !is_dns_name(name) {
            let expected = "expected a DNS name such as api.example.org, or *.example.org";
            return Err(vec![FieldPath::default().invalid(format!("bad host name {hostname:?}, {expected}"))]);
        }
        Ok(if is_suffix {
            Self::Suffix(name.split('.').map(str::to_owned).collect())
        } else {
            Self::Exact(name.to_owned())
        })
    }
}

/// Conditions that this version does not know; ignoring one would make the match wider.
pub(super) fn unknown(fields: &BTreeMap<String, Value>) -> impl Iterator<Item = Invalid> {
    let known = "expected path, headers, queryParams or method";
    fields.keys().map(move |name| FieldPath::of(name).invalid(format!("unsupported condition, {known}")))
}

/// Checks that the proxy can compile a regular expression.
fn regex(at: FieldPath, text: String) -> Result<String, Invalid> {
    match expression::check(&text) {
        Ok(()) => Ok(text),
        Err(problem) => Err(at.invalid(problem)),
    }
}

/// Checks the name of a header.
pub(super) fn header_name(at: FieldPath, text: &str) -> Result<HeaderName, Invalid> {
    HeaderName::from_bytes(text.as_bytes())
        .map_err(|_| at.invalid(format!("bad header name {text:?}, expected letters, digits and hyphens")))
}

/// Checks the value of a header.
pub(super) fn header_value(at: FieldPath, text: &str) -> Result<HeaderValue, Invalid> {
    HeaderValue::from_str(text)
        .map_err(|_| at.invalid(format!("bad header value {text:?}, expected visible ASCII characters")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &str) -> String {
        value.to_owned()
    }

    #[test]
    fn paths_are_absolute_or_regular_expressions() {
        let read = |match_type: Option<&str>, value: Option<&str>| {
            PathValue { match_type: match_type.map(text), value: value.map(text) }.read().ok()
        };
        assert_eq!(read(None, None), Some(PathMatch::Prefix(text("/"))));
        assert_eq!(read(Some("PathPrefix"), Some("/a")), Some(PathMatch::Prefix(text("/a"))));
        assert_eq!(read(Some("Exact"), Some("/a")), Some(PathMatch::Exact(text("/a"))));
        assert_eq!(read(Some("RegularExpression"), Some("/a.*")), Some(PathMatch::Regex(text("/a.*"))));
        for (match_type, value) in
            [("PathPrefix", "a"), ("Exact", ""), ("RegularExpression", "("), ("Suffix", "/a"), ("exact", "/a")]
        {
            assert_eq!(read(Some(match_type), Some(value)), None, "{match_type} {value}");
        }
    }

    #[test]
    fn headers_and_parameters_have_valid_names_and_values() {
        let named = |match_type: Option<&str>, name: &str, value: &str| NamedMatch {
            match_type: match_type.map(text),
            name: text(name),
            value: text(value),
        };
        for (match_type, name, value, header, query) in [
            (None, "x-a", "1", true, true),
            (Some("RegularExpression"), "x-a", "[0-9]+", true, true),
            (Some("RegularExpression"), "x-a", "[", false, false),
            (Some("Prefix"), "x-a", "1", false, false),
            (None, "x a", "1", false, true),
            (None, "", "1", false, false),
            (None, "x-a", "a\nb", false, true),
        ] {
            let written = named(match_type, name, value);
            assert_eq!(written.read_header().is_ok(), header, "{written:?}");
            assert_eq!(written.read_query().is_ok(), query, "{written:?}");
        }
    }

    #[test]
    fn hosts_are_names_or_suffixes() {
        assert_eq!(HostMatch::read("a.example"), Ok(HostMatch::Exact(text("a.example"))));
        assert_eq!(HostMatch::read("*.a.example"), Ok(HostMatch::Suffix(vec![text("a"), text("example")])));
        for bad in ["", "*", "*.", "a..b", "A.example", "a.*.example", "-a"] {
            assert!(HostMatch::read(bad).is_err(), "{bad:?}");
        }
    }
}
