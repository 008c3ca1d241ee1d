//! Routes of an OpenAPI document, as Linkerd makes them (`linkerd2:pkg/profiles/openapi.go`).
//!
//! One route for each operation; its name is method and path. Linkerd's extensions `x-linkerd-retryable` and
//! `x-linkerd-timeout` of operations are read. Beyond Linkerd, the path of an OpenAPI 3 server counts, and a response
//! `5XX` is a range.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, anyhow, bail};
use http::Uri;
use serde::Deserialize;
use serde_json::Value;
use weft_k8s_api::profile::{RequestMatch, ResponseClass, ResponseMatch, Route, StatusRange};

use super::quoted;
use crate::manifest::document;

#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    swagger: Option<Value>,
    #[serde(default)]
    openapi: Option<Value>,
    #[serde(default, rename = "basePath")]
    base_path: Option<String>,
    #[serde(default)]
    servers: Vec<Server>,
    /// Also extensions, which have other types.
    #[serde(default)]
    paths: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct Server {
    url: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PathItem {
    delete: Option<Operation>,
    get: Option<Operation>,
    head: Option<Operation>,
    options: Option<Operation>,
    patch: Option<Operation>,
    post: Option<Operation>,
    put: Option<Operation>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Operation {
    responses: BTreeMap<String, Value>,
    #[serde(rename = "x-linkerd-retryable")]
    retryable: bool,
    #[serde(rename = "x-linkerd-timeout")]
    timeout: Option<String>,
}

/// The routes, by path and method.
pub(super) fn routes(file: &str, text: &str) -> Result<Vec<Route>> {
    let value = document::parse_yaml(text).map_err(|error| anyhow!("{file}: {}", error.without_snippet()))?;
    let json = serde_json::to_value(&value).with_context(|| file.to_owned())?;
    let document: Document = serde_path_to_error::deserialize(json).with_context(|| file.to_owned())?;
    if document.swagger.is_none() && document.openapi.is_none() {
        bail!("{file}: not an OpenAPI document: it has neither `swagger` nor `openapi`");
    }
    let base = base(&document);
    let mut routes = Vec::new();
    for (path, item) in document.paths.into_iter().filter(|(path, _)| path.starts_with('/')) {
        let item: PathItem =
            serde_path_to_error::deserialize(item).with_context(|| format!("{file}: paths[{path:?}]"))?;
        let path = format!("{base}{path}");
        let operations = [
            ("DELETE", item.delete),
            ("GET", item.get),
            ("HEAD", item.head),
            ("OPTIONS", item.options),
            ("PATCH", item.patch),
            ("POST", item.post),
            ("PUT", item.put),
        ];
        let operations = operations.into_iter().filter_map(|(method, operation)| Some((method, operation?)));
        routes.extend(operations.map(|(method, operation)| route(&path, method, operation)));
    }
    if routes.is_empty() {
        bail!("{file}: has no operations, so there would be no routes");
    }
    Ok(routes)
}

/// What precedes every path, without a final slash.
fn base(document: &Document) -> String {
    let of_server = |server: &Server| match server.url.parse::<Uri>() {
        Ok(uri) => uri.path().to_owned(),
        // A template with variables: nothing can be said about it.
        Err(_) => String::new(),
    };
    let base = document.base_path.clone().or_else(|| document.servers.first().map(of_server)).unwrap_or_default();
    base.trim_end_matches('/').to_owned()
}

fn route(path: &str, method: &str, operation: Operation) -> Route {
    let mut classes: Vec<_> = operation.responses.keys().filter_map(|status| range(status)).collect();
    classes.sort_by_key(|range| range.min);
    let classes = classes.into_iter().map(|range| ResponseClass {
        condition: ResponseMatch { status: Some(range), ..ResponseMatch::default() },
        is_failure: range.min.is_some_and(|min| min >= 500).then_some(true),
    });
    let classes: Vec<_> = classes.collect();
    Route {
        name: format!("{method} {path}"),
        condition: RequestMatch {
            path_regex: Some(expression(path)),
            method: Some(method.to_owned()),
            ..RequestMatch::default()
        },
        response_classes: Some(classes).filter(|classes| !classes.is_empty()),
        is_retryable: operation.retryable.then_some(true),
        timeout: operation.timeout,
    }
}

/// The statuses of a response: one, or a hundred. `default` says nothing about which.
fn range(status: &str) -> Option<StatusRange> {
    let (min, max) = match status.strip_suffix("XX").or_else(|| status.strip_suffix("xx")) {
        Some(hundred) => {
            let hundred: u32 = hundred.parse().ok().filter(|hundred| (1..=5).contains(hundred))?;
            (hundred * 100, hundred * 100 + 99)
        }
        None => {
            let status = status.parse().ok().filter(|status| (100..=599).contains(status))?;
            (status, status)
        }
    };
    Some(StatusRange { min: Some(min), max: Some(max) })
}

/// A path's regular expression, in which parameters are one segment.
fn expression(path: &str) -> String {
    let (mut expression, mut rest) = (String::new(), path);
    while let Some((before, after)) = rest.split_once('{') {
        let Some((_, after)) = after.split_once('}') else { break };
        expression.push_str(&quoted(before));
        expression.push_str("[^/]*");
        rest = after;
    }
    expression.push_str(&quoted(rest));
    expression
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<Route> {
        routes("web.yaml", text).unwrap()
    }

    #[test]
    fn every_operation_is_a_route() {
        let routes = read(
            "swagger: '2.0'\nbasePath: /v1/\npaths:\n  /b: {get: {}, put: {}, delete: {}, parameters: []}\n  x-ours: 3\n  \
             /a: {post: {}}\n",
        );
        let names: Vec<_> = routes.iter().map(|route| route.name.as_str()).collect();
        assert_eq!(names, ["POST /v1/a", "DELETE /v1/b", "GET /v1/b", "PUT /v1/b"]);
        assert_eq!(routes[0].condition.path_regex.as_deref(), Some("/v1/a"));
        assert_eq!(routes[0].response_classes, None);
    }

    #[test]
    fn responses_are_classes_by_status() {
        let routes = read(
            "openapi: 3.0.0\nservers: [{url: 'https://example.com/api'}]\npaths:\n  /a:\n    get:\n      responses:\n        \
             '503': {}\n        200: {}\n        default: {}\n        5XX: {}\n      x-linkerd-retryable: true\n      \
             x-linkerd-timeout: 1s\n",
        );
        assert_eq!(routes[0].name, "GET /api/a");
        let classes = routes[0].response_classes.as_ref().unwrap();
        let found: Vec<_> = classes
            .iter()
            .map(|class| {
                (
                    class.condition.status.unwrap().min.unwrap(),
                    class.condition.status.unwrap().max.unwrap(),
                    class.is_failure,
                )
            })
            .collect();
        assert_eq!(found, [(200, 200, None), (500, 599, Some(true)), (503, 503, Some(true))]);
        assert_eq!((routes[0].is_retryable, routes[0].timeout.as_deref()), (Some(true), Some("1s")));
    }

    #[test]
    fn parameters_are_one_segment() {
        assert_eq!(expression("/a.json/{id}/x{n}"), r"/a\.json/[^/]*/x[^/]*");
        assert_eq!(expression("/a{"), r"/a\{");
    }

    #[test]
    fn what_is_no_document_is_refused_with_the_file() {
        for (text, words) in [
            ("a: [", "web.yaml"),
            ("kind: Pod\n", "neither `swagger` nor `openapi`"),
            ("openapi: 3.0.0\npaths: {}\n", "no operations"),
            ("openapi: 3.0.0\npaths: {/a: {get: {x-linkerd-retryable: often}}}\n", "paths[\"/a\"]"),
        ] {
            let error = format!("{:#}", routes("web.yaml", text).unwrap_err());
            assert!(error.contains("web.yaml") && error.contains(words), "{error}");
        }
    }
}
