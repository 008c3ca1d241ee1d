//! Routes of the gRPC services in a protobuf file, as Linkerd makes them (`linkerd2:pkg/profiles/proto.go`).
//!
//! One route for each method; it may be retried if its option `idempotency_level` says so. Imports are not read.

use anyhow::{Result, anyhow, bail};
use weft_k8s_api::profile::{RequestMatch, Route};

use super::quoted;

/// The routes, in the file's order.
pub(super) fn routes(file: &str, text: &str) -> Result<Vec<Route>> {
    let parsed = protox_parse::parse(file, text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        anyhow!("{file}:{}: {error}", before.matches('\n').count() + 1)
    })?;
    let package = parsed.package.filter(|package| !package.is_empty());
    let mut routes = Vec::new();
    for service in parsed.service {
        let service_name = match &package {
            Some(package) => format!("{package}.{}", service.name()),
            None => service.name().to_owned(),
        };
        for method in service.method {
            let retryable = method.options.as_ref().is_some_and(|options| {
                options.uninterpreted_option.iter().any(|option| {
                    let named = option.name.iter().any(|part| part.name_part == "idempotency_level");
                    named && matches!(option.identifier_value(), "IDEMPOTENT" | "NO_SIDE_EFFECTS")
                })
            });
            routes.push(Route {
                name: method.name().to_owned(),
                condition: RequestMatch {
                    path_regex: Some(quoted(&format!("/{service_name}/{}", method.name()))),
                    method: Some("POST".to_owned()),
                    ..RequestMatch::default()
                },
                response_classes: None,
                is_retryable: retryable.then_some(true),
                timeout: None,
            });
        }
    }
    if routes.is_empty() {
        bail!("{file}: has no services with methods, so there would be no routes");
    }
    Ok(routes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOTING: &str = r#"
syntax = "proto3";
package emojivoto.v1;
import "google/api/annotations.proto";
message Empty {}
service Voting {
  rpc Vote(Empty) returns (Empty) { option idempotency_level = IDEMPOTENT; }
  rpc Watch(Empty) returns (stream Empty) { option (google.api.http) = { get: "/v1/watch" }; }
  rpc Results(Empty) returns (Empty) { option idempotency_level = NO_SIDE_EFFECTS; }
}
"#;

    #[test]
    fn every_method_is_a_route() {
        let routes = routes("voting.proto", VOTING).unwrap();
        let found: Vec<_> = routes
            .iter()
            .map(|route| (route.name.as_str(), route.condition.path_regex.as_deref().unwrap(), route.is_retryable))
            .collect();
        assert_eq!(
            found,
            [
                ("Vote", r"/emojivoto\.v1\.Voting/Vote", Some(true)),
                ("Watch", r"/emojivoto\.v1\.Voting/Watch", None),
                ("Results", r"/emojivoto\.v1\.Voting/Results", Some(true)),
            ]
        );
        assert!(routes.iter().all(|route| route.condition.method.as_deref() == Some("POST")));
    }

    #[test]
    fn a_file_without_a_package_has_services_without_one() {
        let text = "syntax = \"proto3\";\nmessage M {}\nservice S { rpc A(M) returns (M); }\n";
        assert_eq!(routes("s.proto", text).unwrap()[0].condition.path_regex.as_deref(), Some("/S/A"));
    }

    #[test]
    fn a_mistake_is_named_with_its_line() {
        let error = routes("voting.proto", &VOTING.replace("message Empty {}", "message Empty {")).unwrap_err();
        assert!(error.to_string().starts_with("voting.proto:"), "{error}");
        let error = routes("voting.proto", "syntax = \"proto3\";\nmessage M {}\n").unwrap_err();
        assert!(error.to_string().contains("no services"), "{error}");
    }
}
