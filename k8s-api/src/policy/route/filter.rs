//! What a rule does to requests and responses besides sending them somewhere.

use ::http::{HeaderName, HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    matching::{header_name, header_value},
    read_all,
};
use crate::{
    field::{FieldPath, Invalid},
    names::is_dns_name,
};

/// A filter, as written. Filters that Weft does not have keep their type and lose their settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteFilter {
    /// The type, which names the field with the settings.
    #[serde(rename = "type")]
    pub filter_type: String,
    /// Of type RequestHeaderModifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_header_modifier: Option<HeaderChanges>,
    /// Of type ResponseHeaderModifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_header_modifier: Option<HeaderChanges>,
    /// Of type RequestRedirect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_redirect: Option<RedirectSettings>,
}

/// Changes of headers, as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
pub struct HeaderChanges {
    /// Headers that replace those of the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<Vec<HttpHeader>>,
    /// Headers beside those of the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add: Option<Vec<HttpHeader>>,
    /// Names of headers to remove.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remove: Option<Vec<String>>,
}

/// A header, as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
pub struct HttpHeader {
    /// Name.
    pub name: String,
    /// Value.
    pub value: String,
}

/// A redirection, as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RedirectSettings {
    /// `http` or `https`; absent means that of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<String>,
    /// Host of the new location; absent means that of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Change of the path; absent means none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathChange>,
    /// Port of the new location; absent means that of the scheme, or of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Status of the response: 301, or 302 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status_code: Option<u16>,
}

/// Change of a path, as written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PathChange {
    /// `ReplaceFullPath` or `ReplacePrefixMatch`.
    #[serde(rename = "type")]
    pub change_type: String,
    /// The new path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replace_full_path: Option<String>,
    /// What replaces the prefix that matched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replace_prefix_match: Option<String>,
}

/// A filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Changes headers of requests.
    RequestHeaders(HeaderModifier),
    /// Changes headers of responses.
    ResponseHeaders(HeaderModifier),
    /// Answers with a redirection.
    Redirect(Redirect),
    /// A type that Weft does not have. A rule with it must not take effect without it.
    Unsupported(String),
}

/// Changes of headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderModifier {
    /// Headers that replace those of the same name.
    pub set: Vec<(HeaderName, HeaderValue)>,
    /// Headers beside those of the same name.
    pub add: Vec<(HeaderName, HeaderValue)>,
    /// Headers to remove.
    pub remove: Vec<HeaderName>,
}

/// A redirection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redirect {
    /// `http` or `https`.
    pub scheme: Option<String>,
    /// Host of the new location.
    pub hostname: Option<String>,
    /// Change of the path.
    pub path: Option<RedirectPath>,
    /// Port of the new location.
    pub port: Option<u16>,
    /// Status of the response.
    pub status: Option<StatusCode>,
}

/// Change of a path; both begin with a slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedirectPath {
    /// Replaces the path.
    Full(String),
    /// Replaces the prefix that matched.
    Prefix(String),
}

impl RouteFilter {
    /// Reads the settings that belong to the filter's type.
    ///
    /// # Errors
    /// When its settings are absent or invalid.
    pub fn read(&self) -> Result<Filter, Vec<Invalid>> {
        let absent = |name: &str| vec![FieldPath::of(name).invalid(format!("absent, type is {:?}", self.filter_type))];
        let under = |name: &str, found: Vec<Invalid>| -> Vec<Invalid> {
            let nested = |invalid: Invalid| Invalid { field: invalid.field.under(FieldPath::of(name)), ..invalid };
            found.into_iter().map(nested).collect()
        };
        match self.filter_type.as_str() {
            "RequestHeaderModifier" => {
                let name = "requestHeaderModifier";
                let changes = self.request_header_modifier.as_ref().ok_or_else(|| absent(name))?;
                changes.read().map(Filter::RequestHeaders).map_err(|found| under(name, found))
            }
            "ResponseHeaderModifier" => {
                let name = "responseHeaderModifier";
                let changes = self.response_header_modifier.as_ref().ok_or_else(|| absent(name))?;
                changes.read().map(Filter::ResponseHeaders).map_err(|found| under(name, found))
            }
            "RequestRedirect" => {
                let name = "requestRedirect";
                let settings = self.request_redirect.as_ref().ok_or_else(|| absent(name))?;
                settings.read().map(Filter::Redirect).map_err(|found| under(name, found))
            }
            other => Ok(Filter::Unsupported(other.to_owned())),
        }
    }
}

impl HeaderChanges {
    fn read(&self) -> Result<HeaderModifier, Vec<Invalid>> {
        let header = |header: &HttpHeader| {
            let name = header_name(FieldPath::of("name"), &header.name);
            let value = header_value(FieldPath::of("value"), &header.value);
            match (name, value) {
                (Ok(name), Ok(value)) => Ok((name, value)),
                (name, value) => Err(name.err().into_iter().chain(value.err()).collect()),
            }
        };
        let name = |name: &String| header_name(FieldPath::default(), name).map_err(|invalid| vec![invalid]);
        let set = read_all("set", self.set.as_deref().unwrap_or_default(), header);
        let add = read_all("add", self.add.as_deref().unwrap_or_default(), header);
        let remove = read_all("remove", self.remove.as_deref().unwrap_or_default(), name);
        match (set, add, remove) {
            (Ok(set), Ok(add), Ok(remove)) => Ok(HeaderModifier { set, add, remove }),
            (set, add, remove) => Err([set.err(), add.err(), remove.err()].into_iter().flatten().flatten().collect()),
        }
    }
}

impl RedirectSettings {
    fn read(&self) -> Result<Redirect, Vec<Invalid>> {
        let mut found = Vec::new();
        if let Some(scheme) = self.scheme.as_deref().filter(|scheme| !matches!(*scheme, "http" | "https")) {
            found.push(FieldPath::of("scheme").invalid(format!("bad scheme {scheme:?}, expected http or https")));
        }
        if let Some(name) = self.hostname.as_deref().filter(|name| !is_dns_name(name)) {
            found.push(FieldPath::of("hostname").invalid(format!("bad host name {name:?}, expected a DNS name")));
        }
        if self.port == Some(0) {
            found.push(FieldPath::of("port").invalid("bad port 0, expected 1-65535"));
        }
        let status = self.status_code.map(|code| {
            let is_redirect = |status: &StatusCode| status.is_redirection();
            StatusCode::from_u16(code).ok().filter(is_redirect).ok_or_else(|| {
                FieldPath::of("statusCode").invalid(format!("bad status {code}, expected one of 300-399"))
            })
        });
        let status = status.transpose().map_err(|invalid| found.push(invalid)).ok().flatten();
        let path = self.path.as_ref().map(PathChange::read).transpose();
        let path = path.map_err(|invalid| found.push(invalid)).ok().flatten();
        if !found.is_empty() {
            return Err(found);
        }
        Ok(Redirect { scheme: self.scheme.clone(), hostname: self.hostname.clone(), path, port: self.port, status })
    }
}

impl PathChange {
    fn read(&self) -> Result<RedirectPath, Invalid> {
        let (field, value) = match self.change_type.as_str() {
            "ReplaceFullPath" => ("path.replaceFullPath", &self.replace_full_path),
            "ReplacePrefixMatch" => ("path.replacePrefixMatch", &self.replace_prefix_match),
            other => {
                return Err(FieldPath::of("path.type")
                    .invalid(format!("unsupported type {other:?}, expected ReplaceFullPath or ReplacePrefixMatch")));
            }
        };
        match value {
            Some(path) if path.starts_with('/') && field == "path.replaceFullPath" => {
                Ok(RedirectPath::Full(path.clone()))
            }
            Some(path) if path.starts_with('/') => Ok(RedirectPath::Prefix(path.clone())),
            Some(path) => {
                Err(FieldPath::of(field).invalid(format!("relative path {path:?}, expected one that begins with /")))
            }
            None => Err(FieldPath::of(field).invalid(format!("absent, type is {:?}", self.change_type))),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(filter: Value) -> Result<Filter, Vec<String>> {
        let filter: RouteFilter = serde_json::from_value(filter).unwrap();
        filter.read().map_err(|found| found.iter().map(|invalid| invalid.field.to_string()).collect())
    }

    #[test]
    fn settings_are_read_or_named() {
        let redirect = |settings: Value| json!({"type": "RequestRedirect", "requestRedirect": settings});
        for (filter, expected) in [
            (
                json!({"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": [{"name": "a", "value": "b"}]}}),
                &[][..],
            ),
            (json!({"type": "ResponseHeaderModifier", "responseHeaderModifier": {"remove": ["a"]}}), &[]),
            (json!({"type": "ResponseHeaderModifier"}), &["responseHeaderModifier"]),
            (
                json!({"type": "RequestHeaderModifier", "requestHeaderModifier":
                    {"add": [{"name": "a b", "value": "\n"}], "remove": ["a", ""]}}),
                &[
                    "requestHeaderModifier.add[0].name",
                    "requestHeaderModifier.add[0].value",
                    "requestHeaderModifier.remove[1]",
                ],
            ),
            (redirect(json!({"scheme": "https", "hostname": "a.example", "port": 443, "statusCode": 301})), &[]),
            (redirect(json!({"path": {"type": "ReplaceFullPath", "replaceFullPath": "/a"}})), &[]),
            (redirect(json!({"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/a"}})), &[]),
            (
                redirect(json!({"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "a"}})),
                &["requestRedirect.path.replacePrefixMatch"],
            ),
            (redirect(json!({"path": {"type": "ReplaceFullPath"}})), &["requestRedirect.path.replaceFullPath"]),
            (redirect(json!({"path": {"type": "Other"}})), &["requestRedirect.path.type"]),
            (
                redirect(json!({"scheme": "ftp", "hostname": "A", "port": 0, "statusCode": 200})),
                &[
                    "requestRedirect.scheme",
                    "requestRedirect.hostname",
                    "requestRedirect.port",
                    "requestRedirect.statusCode",
                ],
            ),
        ] {
            let found = read(filter.clone()).err().unwrap_or_default();
            assert_eq!(found, expected, "{filter}");
        }
    }

    #[test]
    fn a_filter_of_another_type_is_unsupported_and_not_dropped() {
        let mirror = json!({"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "b"}}});
        assert_eq!(read(mirror), Ok(Filter::Unsupported("RequestMirror".to_owned())));
    }
}
