//! ServiceProfiles as messages: routes, retry budgets, alternate destinations
//! (`linkerd2:controller/api/destination/profile_translator.go`).

use std::{collections::HashMap, time::Duration};

use weft_index::DstOverride;
use weft_k8s_api::{duration, profile};
use weft_proto::linkerd::{
    destination::{
        HttpStatusRange, PathMatch, RequestMatch, ResponseClass, ResponseMatch, RetryBudget, Route, WeightedDst,
        request_match, response_match,
    },
    http_types::{HttpMethod, http_method},
};

/// Linkerd's default: a fifth of the requests, at least 10 a second, counted over 10 s.
const DEFAULT_RETRY_BUDGET: weft_index::RetryBudget =
    weft_index::RetryBudget { ratio: 0.2, min_per_second: 10, ttl: Duration::from_secs(10) };

/// The message of a route.
pub(super) fn route(route: &profile::Route) -> Route {
    let class = |class: &profile::ResponseClass| ResponseClass {
        condition: Some(response(&class.condition)),
        is_failure: class.is_failure.unwrap_or_default(),
    };
    Route {
        condition: Some(request(&route.condition)),
        response_classes: route.response_classes.iter().flatten().map(class).collect(),
        metrics_labels: HashMap::from([("route".to_owned(), route.name.clone())]),
        is_retryable: route.is_retryable.unwrap_or_default(),
        timeout: route.timeout.as_deref().and_then(duration::parse).and_then(|timeout| timeout.try_into().ok()),
    }
}

/// The message of a retry budget.
pub(super) fn retry_budget(budget: weft_index::RetryBudget) -> RetryBudget {
    RetryBudget {
        retry_ratio: budget.ratio,
        min_retries_per_second: budget.min_per_second,
        ttl: budget.ttl.try_into().ok(),
    }
}

/// The retry budget of a Service whose ServiceProfile has none.
pub(super) fn default_retry_budget() -> RetryBudget {
    retry_budget(DEFAULT_RETRY_BUDGET)
}

/// The message of an alternate destination; without a port of its own it has the Service's.
pub(super) fn weighted_dst(destination: &DstOverride, port: u16) -> WeightedDst {
    let DstOverride { authority, weight } = destination;
    let authority = if authority.contains(':') { authority.clone() } else { format!("{authority}:{port}") };
    WeightedDst { authority, weight: *weight, backend_ref: None }
}

fn request(wanted: &profile::RequestMatch) -> RequestMatch {
    use request_match::{Match, Seq};
    let seq = |all: &Vec<profile::RequestMatch>| Seq { matches: all.iter().map(request).collect() };
    let said = |text: &&String| !text.is_empty();
    let parts = [
        wanted.all.as_ref().map(|all| Match::All(seq(all))),
        wanted.any.as_ref().map(|any| Match::Any(seq(any))),
        wanted.not.as_ref().map(|not| Match::Not(Box::new(request(not)))),
        wanted.path_regex.as_ref().filter(said).map(|regex| Match::Path(PathMatch { regex: regex.clone() })),
        wanted.method.as_ref().filter(said).map(|name| Match::Method(method(name))),
    ];
    let mut parts: Vec<_> = parts.into_iter().flatten().collect();
    // All conditions must match; a single one needs no list.
    let only = if parts.len() == 1 { parts.pop() } else { None };
    let list = || Seq { matches: parts.into_iter().map(|part| RequestMatch { r#match: Some(part) }).collect() };
    RequestMatch { r#match: Some(only.unwrap_or_else(|| Match::All(list()))) }
}

fn response(wanted: &profile::ResponseMatch) -> ResponseMatch {
    use response_match::{Match, Seq};
    let seq = |all: &Vec<profile::ResponseMatch>| Seq { matches: all.iter().map(response).collect() };
    let range = |range: &profile::StatusRange| HttpStatusRange {
        min: range.min.unwrap_or_default(),
        max: range.max.unwrap_or_default(),
    };
    let parts = [
        wanted.all.as_ref().map(|all| Match::All(seq(all))),
        wanted.any.as_ref().map(|any| Match::Any(seq(any))),
        wanted.not.as_ref().map(|not| Match::Not(Box::new(response(not)))),
        wanted.status.as_ref().map(|status| Match::Status(range(status))),
    ];
    let mut parts: Vec<_> = parts.into_iter().flatten().collect();
    let only = if parts.len() == 1 { parts.pop() } else { None };
    let list = || Seq { matches: parts.into_iter().map(|part| ResponseMatch { r#match: Some(part) }).collect() };
    ResponseMatch { r#match: Some(only.unwrap_or_else(|| Match::All(list()))) }
}

fn method(name: &str) -> HttpMethod {
    let registered = http_method::Registered::from_str_name(&name.to_ascii_uppercase());
    let kind = match registered {
        Some(registered) => http_method::Type::Registered(registered.into()),
        None => http_method::Type::Unregistered(name.to_owned()),
    };
    HttpMethod { r#type: Some(kind) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_said_twice_must_match_twice() {
        let read = |value: serde_json::Value| request(&serde_json::from_value(value).unwrap()).r#match.unwrap();
        let path = |regex: &str| request_match::Match::Path(PathMatch { regex: regex.to_owned() });
        assert_eq!(read(json!({"pathRegex": "/a"})), path("/a"));
        let request_match::Match::All(both) = read(json!({"pathRegex": "/a", "method": "get"})) else { panic!() };
        assert_eq!(both.matches[0].r#match, Some(path("/a")));
        let get = http_method::Type::Registered(http_method::Registered::Get.into());
        assert_eq!(both.matches[1].r#match, Some(request_match::Match::Method(HttpMethod { r#type: Some(get) })));
        let request_match::Match::Not(not) = read(json!({"not": {"any": [{"pathRegex": "/b"}]}})) else { panic!() };
        assert!(matches!(not.r#match, Some(request_match::Match::Any(any)) if any.matches.len() == 1));
    }

    #[test]
    fn routes_and_budgets() {
        let read = |timeout: &str| {
            let value = json!({"name": "r", "condition": {"method": "GET"}, "isRetryable": true, "timeout": timeout,
                "responseClasses": [{"condition": {"status": {"min": 500, "max": 599}}, "isFailure": true}]});
            route(&serde_json::from_value(value).unwrap())
        };
        let found = read("1m30s");
        assert_eq!((found.metrics_labels["route"].as_str(), found.is_retryable), ("r", true));
        assert_eq!(found.timeout.unwrap().seconds, 90);
        assert!(found.response_classes[0].is_failure);
        for unset in ["", "soon", "-1s"] {
            assert_eq!(read(unset).timeout, None, "{unset:?}");
        }
        let budget =
            retry_budget(weft_index::RetryBudget { ratio: 0.5, min_per_second: 3, ttl: Duration::from_secs(20) });
        assert_eq!((budget.ttl.unwrap().seconds, budget.min_retries_per_second), (20, 3));
    }

    #[test]
    fn alternate_destinations_have_a_port() {
        let authority =
            |authority: &str| weighted_dst(&DstOverride { authority: authority.to_owned(), weight: 5 }, 80).authority;
        assert_eq!(authority("a.b.svc.cluster.local"), "a.b.svc.cluster.local:80");
        assert_eq!(authority("a.b.svc.cluster.local:8080"), "a.b.svc.cluster.local:8080");
    }
}
