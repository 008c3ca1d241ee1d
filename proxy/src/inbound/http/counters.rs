//! Counters of one connection's requests. Counters of allowed requests are looked up once; those of refusals each
//! time.

use std::{net::SocketAddr, sync::Arc};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;

use crate::{
    http::respond::Failure,
    inbound::{Inbound, http::HttpConnection},
    metrics::{Direction, HttpMetrics, InUse, InboundRouteMetrics, Labels, label},
    policy::{
        authz::Client,
        limit::{RateLimit, Scope},
        server::{Matched, ServerPolicy},
    },
    route::Meta,
};

/// Entries kept per connection: pairs of a route and an authorization of one policy.
const KEPT: usize = 16;

/// Counters of allowed requests on one route.
pub(super) struct Handles {
    /// Requests, responses, latency.
    pub(super) http: Arc<HttpMetrics>,
    /// `inbound_http_*` or `inbound_grpc_*`.
    pub(super) route: Arc<InboundRouteMetrics>,
    /// `inbound_http_authz_allow_total`, kept while this lives.
    pub(super) allowed: (InUse, Counter),
}

/// One connection's cache of its counters.
#[derive(Default)]
pub(super) struct Counters(Mutex<Vec<Entry>>);

struct Entry {
    policy: Arc<ServerPolicy>,
    route: usize,
    authz: Arc<Meta>,
    authority: Option<Box<str>>,
    handles: Arc<Handles>,
}

impl Counters {
    /// The counters of requests on this route that this authorization allows.
    pub(super) fn handles(
        &self,
        connection: &HttpConnection,
        policy: &Arc<ServerPolicy>,
        matched: Matched<'_>,
        authz: &Arc<Meta>,
        authority: Option<&str>,
    ) -> Arc<Handles> {
        let mut entries = self.0.lock();
        let known = entries.iter().find(|entry| {
            Arc::ptr_eq(&entry.policy, policy)
                && entry.route == matched.index
                && Arc::ptr_eq(&entry.authz, authz)
                && entry.authority.as_deref() == authority
        });
        if let Some(entry) = known {
            return Arc::clone(&entry.handles);
        }
        let HttpConnection { inbound, client, target: port, .. } = connection;
        let mut labels = route_labels(inbound, policy, Some(&matched.details.meta), port.addr);
        authz.append_labels("authz", &mut labels);
        client.tls.append_labels(&inbound.shared.metrics.client_ids, &mut labels);
        let metrics = &inbound.shared.metrics;
        let mut of_http = labels.clone();
        if let Some(authority) = authority {
            of_http.insert(0, label("authority", authority.to_owned()));
        }
        let handles = Arc::new(Handles {
            http: Arc::new(metrics.http(Direction::Inbound, &of_http)),
            route: port.route(&policy.meta, &matched.details.meta, policy.is_grpc()),
            allowed: metrics.counter(&metrics.inbound_http_allow, &labels),
        });
        // Entries of older policies would only keep those policies alive.
        entries.retain(|entry| Arc::ptr_eq(&entry.policy, policy));
        if entries.len() >= KEPT {
            entries.clear();
        }
        let (policy, authz, authority) = (Arc::clone(policy), Arc::clone(authz), authority.map(Box::from));
        entries.push(Entry { policy, route: matched.index, authz, authority, handles: Arc::clone(&handles) });
        handles
    }

    /// Counts a request that no authorization allows.
    pub(super) fn denied(
        &self,
        inbound: &Inbound,
        policy: &ServerPolicy,
        route: &Arc<Meta>,
        client: &Client,
        target: SocketAddr,
    ) {
        let mut labels = route_labels(inbound, policy, Some(route), target);
        client.tls.append_labels(&inbound.shared.metrics.client_ids, &mut labels);
        let metrics = &inbound.shared.metrics;
        metrics.count(&metrics.inbound_http_deny, &labels);
    }

    /// Counts a request without a matching route.
    pub(super) fn route_not_found(
        &self,
        inbound: &Inbound,
        policy: &ServerPolicy,
        client: &Client,
        target: SocketAddr,
    ) {
        let mut labels = route_labels(inbound, policy, None, target);
        client.tls.append_labels(&inbound.shared.metrics.client_ids, &mut labels);
        let metrics = &inbound.shared.metrics;
        metrics.count(&metrics.inbound_http_route_not_found, &labels);
    }

    /// Counts a request that exceeds a rate limit.
    pub(super) fn rate_limited(
        &self,
        inbound: &Inbound,
        policy: &ServerPolicy,
        limit: &RateLimit,
        scope: Scope,
        client: &Client,
        target: SocketAddr,
    ) {
        let mut labels = route_labels(inbound, policy, None, target);
        limit.meta.append_labels("ratelimit", &mut labels);
        labels.push(label("ratelimit_scope", scope.label()));
        client.tls.append_labels(&inbound.shared.metrics.client_ids, &mut labels);
        let metrics = &inbound.shared.metrics;
        metrics.count(&metrics.inbound_http_ratelimit, &labels);
    }

    /// Counts a request that the proxy answered itself, but for one that policy denies.
    pub(super) fn failed(&self, inbound: &Inbound, failure: &Failure, target: SocketAddr) {
        let Some(error) = failure.label() else { return };
        let mut labels = vec![label("error", error)];
        labels.extend(inbound.labels.labels(target));
        let metrics = &inbound.shared.metrics;
        metrics.count(&metrics.inbound_http_errors, &labels);
    }
}

fn route_labels(inbound: &Inbound, policy: &ServerPolicy, route: Option<&Arc<Meta>>, target: SocketAddr) -> Labels {
    let mut labels = inbound.labels.labels(target);
    inbound.append_server(&policy.meta, target, &mut labels);
    if let Some(route) = route {
        route.append_labels("route", &mut labels);
    }
    labels
}
