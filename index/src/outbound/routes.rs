//! From a parent's route records to the routes that its clients follow.

use std::{sync::Arc, time::Duration};

use weft_k8s_api::policy::{
    route::{Backend, BackendKind, Filter, GrpcMatch, HttpMatch, ParentKind},
    traffic::{GrpcCode, StatusRange, Timeouts},
};

use super::policy::{
    BackendResource, ConnectionRoute, OutboundGrpcRoute, OutboundHttpRoute, RequestFilter, RequestRoute, RequestRule,
    RouteBackend, ServicePort,
};
use crate::{
    acceptance::{self, Acceptance},
    cluster::Cluster,
    records::{GrpcRule, HttpRule, Key, RouteKind, RouteRecord, RuleBackend, Rules, Traffic},
    store::{ParentId, Store},
};

/// A parent as its routes see it.
pub(super) struct Parent<'a> {
    pub(super) store: &'a Store,
    pub(super) cluster: &'a Cluster,
    pub(super) id: ParentId,
    /// The port that the client dialled.
    pub(super) port: u16,
    /// The annotations of the parent.
    pub(super) traffic: &'a Traffic,
}

/// The routes that a client follows, by kind.
#[derive(Default)]
pub(super) struct Routes {
    pub(super) http: Vec<OutboundHttpRoute>,
    pub(super) grpc: Vec<OutboundGrpcRoute>,
    pub(super) tls: Vec<ConnectionRoute>,
    pub(super) tcp: Vec<ConnectionRoute>,
}

impl Parent<'_> {
    /// The routes that a client of this namespace follows: those of the parent's namespace, which apply to every
    /// client, and those of the client's own namespace. Both are in one order, the oldest first, then by name.
    pub(super) fn routes(&self, namespace: Option<&str>) -> Routes {
        let mut routes = Routes::default();
        let mut records = self.store.routes_of(&self.id);
        records.retain(|record| {
            let of = record.id.key.namespace.as_str();
            record.readable && (of == self.id.key.namespace || Some(of) == namespace) && self.accepts(record)
        });
        // As in Linkerd, routes without a time are last; only manifests in files have none.
        let by_name = |record: &RouteRecord| (record.id.key.name.clone(), record.id.key.namespace.clone());
        records
            .sort_by_cached_key(|record| (record.created.is_none(), record.created, by_name(record), record.id.kind));
        for record in records {
            match &record.rules {
                Rules::Http { hosts, rules } => {
                    let rules = rules.iter().map(|rule| self.http_rule(record, rule)).collect();
                    routes.http.push(RequestRoute { id: record.id.clone(), hosts: hosts.clone(), rules });
                }
                Rules::Grpc { hosts, rules } => {
                    let rules = rules.iter().map(|rule| self.grpc_rule(record, rule)).collect();
                    routes.grpc.push(RequestRoute { id: record.id.clone(), hosts: hosts.clone(), rules });
                }
                Rules::Tls { names, backends } => {
                    let backends =
                        backends.iter().map(|backend| self.backend(record, backend, Ok(Vec::new()))).collect();
                    routes.tls.push(ConnectionRoute { id: record.id.clone(), names: names.clone(), backends });
                }
                Rules::Tcp { backends } => {
                    let backends =
                        backends.iter().map(|backend| self.backend(record, backend, Ok(Vec::new()))).collect();
                    routes.tcp.push(ConnectionRoute { id: record.id.clone(), names: Vec::new(), backends });
                }
            }
        }
        routes
    }

    /// Whether one of the record's references to this parent covers the port and is accepted.
    fn accepts(&self, record: &Arc<RouteRecord>) -> bool {
        record.parents.iter().filter(|named| ParentId::of(named) == self.id).any(|named| {
            let covers = match named.port {
                Some(port) => port == self.port,
                // As in Linkerd, a route of an EgressNetwork must name a port.
                None => self.id.kind == ParentKind::Service,
            };
            covers && acceptance::of(self.store, self.cluster, record, named) == Acceptance::Accepted
        })
    }

    fn http_rule(&self, record: &RouteRecord, rule: &HttpRule) -> RequestRule<HttpMatch, StatusRange> {
        RequestRule {
            matches: rule.matches.clone(),
            filters: rule_filters(record.id.kind, &rule.filters),
            backends: rule.backends.iter().map(|backend| self.request_backend(record, backend)).collect(),
            timeouts: self.timeouts(record, rule.timeouts.request),
            retry: record.http_retry.as_ref().or(self.traffic.http_retry.as_ref()).cloned(),
        }
    }

    fn grpc_rule(&self, record: &RouteRecord, rule: &GrpcRule) -> RequestRule<GrpcMatch, GrpcCode> {
        RequestRule {
            matches: rule.matches.clone(),
            filters: rule_filters(record.id.kind, &rule.filters),
            backends: rule.backends.iter().map(|backend| self.request_backend(record, backend)).collect(),
            timeouts: self.timeouts(record, None),
            retry: record.grpc_retry.as_ref().or(self.traffic.grpc_retry.as_ref()).cloned(),
        }
    }

    /// The timeouts of a rule: those of the route's annotations and of the rule, or else those of the parent.
    fn timeouts(&self, record: &RouteRecord, rule: Option<Duration>) -> Timeouts {
        let mut own = record.timeouts.unwrap_or_default();
        // In the Gateway API, zero means none.
        own.request = own.request.or(rule.filter(|timeout| !timeout.is_zero()));
        if own == Timeouts::default() { self.traffic.timeouts } else { own }
    }

    fn request_backend(&self, record: &RouteRecord, of: &RuleBackend) -> RouteBackend {
        self.backend(record, &of.backend, of.filters.iter().map(|of| filter(record.id.kind, of)).collect())
    }

    /// A backend with its filters, or with the name of the filter that does not exist here.
    fn backend(
        &self,
        record: &RouteRecord,
        backend: &Backend,
        filters: Result<Vec<RequestFilter>, String>,
    ) -> RouteBackend {
        let key = Key::new(&backend.namespace, &backend.name);
        let (resource, mut problem) = match (&backend.kind, backend.port) {
            (BackendKind::Service, Some(port)) => self.service_backend(record, key, port),
            (BackendKind::Service, None) => (None, Some(format!("missing port for backend Service {}", key.name))),
            (BackendKind::EgressNetwork, port) => self.egress_backend(key, port),
            (BackendKind::Unsupported { group, kind }, _) => {
                let group = if group.is_empty() { "core" } else { group };
                (None, Some(format!("unsupported backend type {group} {kind}")))
            }
        };
        let filters = filters.unwrap_or_else(|name| {
            problem.get_or_insert_with(|| format!("unsupported backend filter: {name} filter is not supported"));
            Vec::new()
        });
        RouteBackend { resource, weight: backend.weight, filters, problem }
    }

    /// As in Linkerd, the Service must exist, and nothing else is asked of it: its endpoints may come, and its ports
    /// may be declared, later. Beyond Linkerd, one of another namespace may need a ReferenceGrant.
    fn service_backend(
        &self,
        record: &RouteRecord,
        service: Key,
        port: u16,
    ) -> (Option<BackendResource>, Option<String>) {
        let problem = if !self.store.may_refer(self.cluster, &record.id, &service) {
            Some(format!("no ReferenceGrant of namespace {} permits Service {}", service.namespace, service.name))
        } else if !self.store.services.contains_key(&service) {
            Some(format!("Service not found {}", service.name))
        } else {
            None
        };
        (Some(BackendResource::Service(ServicePort::new(self.cluster, service, port))), problem)
    }

    /// Only the EgressNetwork that is the parent can be a backend: the original destination is in no other.
    fn egress_backend(&self, network: Key, port: Option<u16>) -> (Option<BackendResource>, Option<String>) {
        let problem = if self.id.kind == ParentKind::Service {
            Some("EgressNetwork backends attach to EgressNetwork parents only".to_owned())
        } else if network == self.id.key {
            None
        } else if self.store.egress_networks.contains_key(&network) {
            Some("Route with EgressNetwork backend needs to have the same EgressNetwork as a parent".to_owned())
        } else {
            Some(format!("EgressNetwork not found {}", network.name))
        };
        let dialled = if self.id.kind == ParentKind::EgressNetwork { self.port } else { 0 };
        (Some(BackendResource::EgressNetwork { network, port: port.unwrap_or(dialled) }), problem)
    }
}

/// The filters of a rule. A rule with a filter that does not exist here fails requests: without the filter it might let
/// requests through that it is there to change or refuse.
fn rule_filters(kind: RouteKind, filters: &[Filter]) -> Vec<RequestFilter> {
    let filters: Result<Vec<_>, _> = filters
        .iter()
        .map(|of| match filter(kind, of)? {
            // As in Linkerd, whose control plane reads it so in its own HTTPRoute.
            RequestFilter::ResponseHeaders(change) if kind == RouteKind::Http => {
                Ok(RequestFilter::RequestHeaders(change))
            }
            other => Ok(other),
        })
        .collect();
    filters.unwrap_or_else(|name: String| vec![RequestFilter::Fail(format!("{name} filter is not supported"))])
}

/// A filter, or the type of one that does not exist here.
fn filter(kind: RouteKind, filter: &Filter) -> Result<RequestFilter, String> {
    match filter {
        Filter::RequestHeaders(change) => Ok(RequestFilter::RequestHeaders(change.clone())),
        // Linkerd's API has no such filters of gRPC requests.
        Filter::ResponseHeaders(_) if kind == RouteKind::Grpc => Err("ResponseHeaderModifier".to_owned()),
        Filter::Redirect(_) if kind == RouteKind::Grpc => Err("RequestRedirect".to_owned()),
        Filter::ResponseHeaders(change) => Ok(RequestFilter::ResponseHeaders(change.clone())),
        Filter::Redirect(redirect) => Ok(RequestFilter::Redirect(redirect.clone())),
        Filter::Unsupported(name) => Err(name.clone()),
    }
}
