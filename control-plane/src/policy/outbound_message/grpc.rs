//! Routes of gRPC requests.

use tonic::Code;
use weft_k8s_api::policy::{
    TrafficPolicy,
    traffic::{GrpcCode, Retry, Timeouts},
};
use weft_proto::linkerd::{
    grpc_route::{GrpcFailureInjector, GrpcRouteMatch},
    outbound::{
        Backend, GrpcRoute,
        grpc_route::{
            self, Distribution, Filter, RouteBackend as Message, Rule, WeightedRouteBackend, distribution, filter,
            retry,
        },
    },
};

use super::{
    super::{default_metadata, route_message},
    Context, REFUSED, RETRY_REQUEST_BYTES, backend, duration, retry_backoff, route_metadata, timeouts,
};
use weft_index::{OutboundGrpcRoute, RequestFilter, RouteBackend};

/// The code of requests for what cannot be reached. It is not one of gRPC's, and is what Linkerd sends: proxies answer
/// with UNKNOWN.
const FAILED: u32 = 500;

impl Context<'_> {
    /// The routes. An EgressNetwork ends with a route for everything else.
    pub(super) fn grpc_routes(&self, routes: &[OutboundGrpcRoute]) -> Vec<GrpcRoute> {
        let mut messages: Vec<_> = routes.iter().map(|route| self.grpc_route(route)).collect();
        match self.egress() {
            Some(TrafficPolicy::Allow) => messages.push(self.default_grpc_route("grpc-egress-allow", Vec::new())),
            Some(TrafficPolicy::Deny) => {
                let refuse = fail(i32::from(Code::PermissionDenied).unsigned_abs(), REFUSED.to_owned());
                messages.push(self.default_grpc_route("grpc-egress-deny", vec![refuse]));
            }
            None => {}
        }
        messages
    }

    fn grpc_route(&self, route: &OutboundGrpcRoute) -> GrpcRoute {
        let rules = route.rules.iter().map(|rule| {
            let backends = match &rule.backends[..] {
                [] => first(self.parent.clone()),
                backends => {
                    let backends = backends.iter().map(|backend| self.grpc_backend(backend)).collect();
                    let random = distribution::RandomAvailable { backends };
                    Distribution { kind: Some(distribution::Kind::RandomAvailable(random)) }
                }
            };
            Rule {
                matches: rule.matches.iter().map(route_message::grpc_match).collect(),
                filters: rule.filters.iter().map(grpc_filter).collect(),
                backends: Some(backends),
                allow_l5d_request_headers: self.l5d_headers,
                ..limited(&rule.timeouts, rule.retry.as_ref())
            }
        });
        GrpcRoute {
            metadata: Some(route_metadata(&route.id)),
            hosts: route.hosts.iter().map(route_message::host).collect(),
            rules: rules.collect(),
        }
    }

    fn grpc_backend(&self, backend: &RouteBackend) -> WeightedRouteBackend {
        let filters = match &backend.problem {
            None => backend.filters.iter().map(grpc_filter).collect(),
            Some(problem) => vec![fail(FAILED, problem.clone())],
        };
        let message = backend::of_route(backend, &self.policy.parent, self.load);
        let backend_message = Message { backend: Some(message), filters, ..Message::default() };
        WeightedRouteBackend { backend: Some(backend_message), weight: backend.weight }
    }

    fn default_grpc_route(&self, name: &str, filters: Vec<Filter>) -> GrpcRoute {
        let rule = Rule {
            matches: vec![GrpcRouteMatch::default()],
            filters,
            backends: Some(first(self.parent.clone())),
            ..limited(&self.policy.timeouts, self.policy.grpc_retry.as_ref())
        };
        GrpcRoute { metadata: Some(default_metadata(name)), hosts: Vec::new(), rules: vec![rule] }
    }
}

fn first(backend: Backend) -> Distribution {
    let backend = Message { backend: Some(backend), ..Message::default() };
    let first = distribution::FirstAvailable { backends: vec![backend] };
    Distribution { kind: Some(distribution::Kind::FirstAvailable(first)) }
}

/// A rule with nothing but timeouts and retries.
fn limited(limits: &Timeouts, retry: Option<&Retry<GrpcCode>>) -> Rule {
    #[expect(deprecated, reason = "as Linkerd's control plane, for proxies that know no other timeout")]
    Rule {
        timeouts: Some(timeouts(limits)),
        request_timeout: duration(limits.request),
        retry: retry.map(|retry| grpc_route::Retry {
            max_retries: retry.limit.into(),
            max_request_bytes: RETRY_REQUEST_BYTES,
            conditions: Some(conditions(retry.conditions.as_deref().unwrap_or_default())),
            timeout: duration(retry.timeout),
            backoff: Some(retry_backoff()),
        }),
        ..Rule::default()
    }
}

fn conditions(codes: &[GrpcCode]) -> retry::Conditions {
    retry::Conditions {
        cancelled: codes.contains(&GrpcCode::Cancelled),
        deadine_exceeded: codes.contains(&GrpcCode::DeadlineExceeded),
        resource_exhausted: codes.contains(&GrpcCode::ResourceExhausted),
        internal: codes.contains(&GrpcCode::Internal),
        unavailable: codes.contains(&GrpcCode::Unavailable),
    }
}

fn grpc_filter(filter: &RequestFilter) -> Filter {
    match filter {
        RequestFilter::RequestHeaders(change) => {
            let change = route_message::request_headers(change);
            Filter { kind: Some(filter::Kind::RequestHeaderModifier(change)) }
        }
        RequestFilter::Fail(message) => fail(FAILED, message.clone()),
        // The API has no such filters; the index answers with a failure instead.
        RequestFilter::ResponseHeaders(_) | RequestFilter::Redirect(_) => {
            fail(FAILED, "the filter is not supported".to_owned())
        }
    }
}

fn fail(code: u32, message: String) -> Filter {
    let injector = GrpcFailureInjector { code, message, ratio: None };
    Filter { kind: Some(filter::Kind::FailureInjector(injector)) }
}
