//! Routes of HTTP requests.

use http::StatusCode;
use weft_k8s_api::policy::{
    TrafficPolicy,
    traffic::{Retry, StatusRange, Timeouts},
};
use weft_proto::linkerd::{
    http_route::{HttpFailureInjector, HttpRouteMatch, PathMatch, ResponseHeaderModifier, path_match},
    outbound::{
        Backend, HttpRoute,
        http_route::{
            self, Distribution, Filter, RouteBackend as Message, Rule, WeightedRouteBackend, distribution, filter,
            retry,
        },
    },
};

use super::{
    super::{default_metadata, route_message},
    Context, REFUSED, RETRY_REQUEST_BYTES, backend, duration, retry_backoff, route_metadata, timeouts,
};
use weft_index::{OutboundHttpRoute, RequestFilter, RouteBackend};

impl Context<'_> {
    /// The routes. An EgressNetwork ends with a route for everything else; a Service has one only where it has no
    /// other.
    pub(super) fn http_routes(&self, routes: &[OutboundHttpRoute]) -> Vec<HttpRoute> {
        let mut messages: Vec<_> = routes.iter().map(|route| self.http_route(route)).collect();
        match self.egress() {
            Some(TrafficPolicy::Allow) => messages.push(self.default_route("http-egress-allow", Vec::new())),
            Some(TrafficPolicy::Deny) => {
                let refuse = fail(StatusCode::FORBIDDEN, REFUSED.to_owned());
                messages.push(self.default_route("http-egress-deny", vec![refuse]));
            }
            None if messages.is_empty() => messages.push(self.default_route("http", Vec::new())),
            None => {}
        }
        messages
    }

    fn http_route(&self, route: &OutboundHttpRoute) -> HttpRoute {
        let rules = route.rules.iter().map(|rule| {
            let backends = match &rule.backends[..] {
                [] => first(self.parent.clone()),
                backends => {
                    let backends = backends.iter().map(|backend| self.http_backend(backend)).collect();
                    let random = distribution::RandomAvailable { backends };
                    Distribution { kind: Some(distribution::Kind::RandomAvailable(random)) }
                }
            };
            Rule {
                matches: rule.matches.iter().map(route_message::http_match).collect(),
                filters: rule.filters.iter().map(http_filter).collect(),
                backends: Some(backends),
                allow_l5d_request_headers: self.l5d_headers,
                ..limited(&rule.timeouts, rule.retry.as_ref())
            }
        });
        HttpRoute {
            metadata: Some(route_metadata(&route.id)),
            hosts: route.hosts.iter().map(route_message::host).collect(),
            rules: rules.collect(),
        }
    }

    fn http_backend(&self, backend: &RouteBackend) -> WeightedRouteBackend {
        let filters = match &backend.problem {
            None => backend.filters.iter().map(http_filter).collect(),
            Some(problem) => vec![fail(StatusCode::INTERNAL_SERVER_ERROR, problem.clone())],
        };
        let message = backend::of_route(backend, &self.policy.parent, self.load);
        let backend_message = Message { backend: Some(message), filters, ..Message::default() };
        WeightedRouteBackend { backend: Some(backend_message), weight: backend.weight }
    }

    fn default_route(&self, name: &str, filters: Vec<Filter>) -> HttpRoute {
        let any = PathMatch { kind: Some(path_match::Kind::Prefix("/".to_owned())) };
        let rule = Rule {
            matches: vec![HttpRouteMatch { path: Some(any), ..HttpRouteMatch::default() }],
            filters,
            backends: Some(first(self.parent.clone())),
            ..limited(&self.policy.timeouts, self.policy.http_retry.as_ref())
        };
        HttpRoute { metadata: Some(default_metadata(name)), hosts: Vec::new(), rules: vec![rule] }
    }
}

/// Everything to one backend.
pub(super) fn first(backend: Backend) -> Distribution {
    let backend = Message { backend: Some(backend), ..Message::default() };
    let first = distribution::FirstAvailable { backends: vec![backend] };
    Distribution { kind: Some(distribution::Kind::FirstAvailable(first)) }
}

/// A rule with nothing but timeouts and retries.
fn limited(limits: &Timeouts, retry: Option<&Retry<StatusRange>>) -> Rule {
    #[expect(deprecated, reason = "as Linkerd's control plane, for proxies that know no other timeout")]
    Rule {
        timeouts: Some(timeouts(limits)),
        request_timeout: duration(limits.request),
        retry: retry.map(|retry| http_route::Retry {
            max_retries: retry.limit.into(),
            max_request_bytes: RETRY_REQUEST_BYTES,
            conditions: Some(retry::Conditions {
                status_ranges: retry
                    .conditions
                    .iter()
                    .flatten()
                    .map(|range| retry::conditions::StatusRange { start: range.min.into(), end: range.max.into() })
                    .collect(),
            }),
            timeout: duration(retry.timeout),
            backoff: Some(retry_backoff()),
        }),
        ..Rule::default()
    }
}

fn http_filter(filter: &RequestFilter) -> Filter {
    let kind = match filter {
        RequestFilter::RequestHeaders(change) => {
            filter::Kind::RequestHeaderModifier(route_message::request_headers(change))
        }
        RequestFilter::ResponseHeaders(change) => {
            let message = route_message::request_headers(change);
            let (add, set, remove) = (message.add, message.set, message.remove);
            filter::Kind::ResponseHeaderModifier(ResponseHeaderModifier { add, set, remove })
        }
        RequestFilter::Redirect(redirect) => filter::Kind::Redirect(route_message::redirect(redirect)),
        RequestFilter::Fail(message) => return fail(StatusCode::INTERNAL_SERVER_ERROR, message.clone()),
    };
    Filter { kind: Some(kind) }
}

fn fail(status: StatusCode, message: String) -> Filter {
    let injector = HttpFailureInjector { status: status.as_u16().into(), message, ratio: None };
    Filter { kind: Some(filter::Kind::FailureInjector(injector)) }
}
