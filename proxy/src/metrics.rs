//! The proxy's metric families, under Linkerd's names, and the handles with which the data path counts.
//!
//! Owns names and label keys. Labels are looked up once per connection, endpoint or route; after that, counting is an
//! atomic addition. Refuses to know when something happens.

mod histogram;
mod http;
mod retain;
mod retries;
mod transport;

use std::{borrow::Cow, collections::HashSet, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use weft_runtime::metrics::Family;

pub(crate) use histogram::LatencyMs;
use http::HttpFamilies;
pub(crate) use http::{HttpMetrics, ProfileMetrics};
use retain::{InUse, Retained};
pub(crate) use retries::RetryCounters;
use retries::RetryFamilies;
pub(crate) use transport::TransportMetrics;

/// A set of labels. Keys come from code, except the `dst_*` ones, which come from the destination controller.
pub(crate) type Labels = Vec<(Cow<'static, str>, Cow<'static, str>)>;

/// A family of counters.
pub(crate) type Counters = Family<Labels, Counter>;

/// All families. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProxyMetrics {
    tcp_open: Counters,
    tcp_open_connections: Family<Labels, Gauge>,
    tcp_read_bytes: Counters,
    tcp_write_bytes: Counters,
    tcp_close: Counters,
    http: HttpFamilies,
    route: HttpFamilies,
    route_actual: HttpFamilies,
    route_retryable: Counters,
    retained: Retained,
    /// `inbound_http_authz_allow_total`.
    pub(crate) inbound_http_allow: Counters,
    /// `inbound_http_authz_deny_total`.
    pub(crate) inbound_http_deny: Counters,
    /// `inbound_http_route_not_found_total`.
    pub(crate) inbound_http_route_not_found: Counters,
    /// `inbound_http_local_ratelimit_total`.
    pub(crate) inbound_http_ratelimit: Counters,
    /// `inbound_tcp_authz_allow_total`.
    pub(crate) inbound_tcp_allow: Counters,
    /// `inbound_tcp_authz_deny_total`.
    pub(crate) inbound_tcp_deny: Counters,
    /// `inbound_tcp_authz_terminate_total`.
    pub(crate) inbound_tcp_terminate: Counters,
    /// `inbound_tcp_transport_header_connections_total`.
    pub(crate) inbound_transport_header: Counters,
    /// `inbound_tcp_errors_total`.
    pub(crate) inbound_tcp_errors: Counters,
    /// `inbound_http_errors_total`.
    pub(crate) inbound_http_errors: Counters,
    /// `inbound_tcp_detect_http_results_total`.
    pub(crate) inbound_detect_results: Counters,
    /// `outbound_tcp_errors_total`.
    pub(crate) outbound_tcp_errors: Counters,
    /// `outbound_http_errors_total`.
    pub(crate) outbound_http_errors: Counters,
    /// `outbound_tcp_detect_http_results_total`.
    pub(crate) outbound_detect_results: Counters,
    /// `outbound_tcp_protocol_connections_total`.
    pub(crate) outbound_protocol_connections: Counters,
    outbound_tcp_route_open: Counters,
    outbound_tcp_route_close: Counters,
    /// `outbound_http_route_request_statuses_total`.
    pub(crate) outbound_route_statuses: Counters,
    /// `outbound_http_route_backend_requests_total`.
    pub(crate) outbound_backend_requests: Counters,
    /// `outbound_http_route_retry_*`.
    pub(crate) retries: RetryFamilies,
    /// `outbound_http_balancer_endpoints`, by `endpoint_state`.
    pub(crate) outbound_balancer_endpoints: Family<Labels, Gauge>,
    /// `control_dns_resolutions_total`.
    pub(crate) dns_resolutions: Counters,
}

/// Direction of a connection, for the label `direction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From another workload to the application.
    Inbound,
    /// From the application to another workload.
    Outbound,
}

/// End of the proxy, for the label `peer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// The accepted connection.
    Src,
    /// The connection to the destination.
    Dst,
}

impl Direction {
    /// The label's value.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Inbound => "inbound",
            Self::Outbound => "outbound",
        }
    }
}

impl Peer {
    /// The label's value.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Src => "src",
            Self::Dst => "dst",
        }
    }
}

/// Sets one label.
pub(crate) fn label(
    key: impl Into<Cow<'static, str>>,
    value: impl Into<Cow<'static, str>>,
) -> (Cow<'static, str>, Cow<'static, str>) {
    (key.into(), value.into())
}

/// The labels `target_addr`, `target_ip` and `target_port`.
pub(crate) fn target_labels(addr: SocketAddr) -> Labels {
    vec![
        label("target_addr", addr.to_string()),
        label("target_ip", addr.ip().to_string()),
        label("target_port", addr.port().to_string()),
    ]
}

/// The target labels of inbound connections. Clients choose ports; of the ports that the pod does not declare, only a
/// limited number get their own labels, and the rest share one set, so that a scan of all ports leaves few series.
pub(crate) struct InboundTargets {
    declared: Vec<u16>,
    others: Mutex<HashSet<SocketAddr>>,
}

impl InboundTargets {
    /// Undeclared addresses with their own labels, per worker.
    const OTHERS: usize = 128;

    /// Creates a set without undeclared ports.
    pub(crate) fn new(declared: &[u16]) -> Self {
        Self { declared: declared.to_vec(), others: Mutex::default() }
    }

    /// Like [`target_labels`], with `other` in each label for an address beyond the limit.
    pub(crate) fn labels(&self, addr: SocketAddr) -> Labels {
        if self.has_own(addr) {
            return target_labels(addr);
        }
        ["target_addr", "target_ip", "target_port"].map(|key| label(key, "other")).into()
    }

    /// The port as a label's value.
    pub(crate) fn port(&self, addr: SocketAddr) -> Cow<'static, str> {
        if self.has_own(addr) { addr.port().to_string().into() } else { "other".into() }
    }

    fn has_own(&self, addr: SocketAddr) -> bool {
        if self.declared.contains(&addr.port()) {
            return true;
        }
        let mut others = self.others.lock();
        others.contains(&addr) || (others.len() < Self::OTHERS && others.insert(addr))
    }
}

/// A connection on an opaque route.
#[derive(Debug)]
pub(crate) struct TcpRoute {
    in_use: InUse,
    close: Counters,
    labels: Labels,
}

impl TcpRoute {
    /// Counts the connection's end, with the error that ended it or an empty one.
    pub(crate) fn closed(mut self, error: &'static str) {
        self.labels.push(label("error", error));
        self.in_use.has("outbound_tcp_route_close", &self.close, &self.labels);
        self.close.get_or_create(&self.labels).inc();
    }
}

impl ProxyMetrics {
    /// Creates the families and registers them. The encoder appends `_total` to counters.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            route: HttpFamilies::of_routes(),
            route_actual: HttpFamilies::of_actual_routes(),
            ..Self::default()
        };
        metrics.register_in(registry);
        metrics
    }

    /// Registers the families.
    pub(crate) fn register_in(&self, registry: &mut Registry) {
        let metrics = self;
        let mut counters = |name: &'static str, help: &'static str, family: &Counters| {
            registry.register(name, help, family.clone());
        };
        counters("tcp_open", "Opened connections", &metrics.tcp_open);
        counters("tcp_read_bytes", "Bytes read from peers", &metrics.tcp_read_bytes);
        counters("tcp_write_bytes", "Bytes written to peers", &metrics.tcp_write_bytes);
        counters("tcp_close", "Closed connections", &metrics.tcp_close);
        counters("route_retryable", "Failures on retryable routes of ServiceProfiles", &metrics.route_retryable);
        counters("inbound_http_authz_allow", "Requests allowed by policy", &metrics.inbound_http_allow);
        counters("inbound_http_authz_deny", "Requests denied by policy", &metrics.inbound_http_deny);
        counters(
            "inbound_http_route_not_found",
            "Requests that no route matches",
            &metrics.inbound_http_route_not_found,
        );
        counters("inbound_http_local_ratelimit", "Requests seen by rate limits", &metrics.inbound_http_ratelimit);
        counters("inbound_tcp_authz_allow", "Connections allowed by policy", &metrics.inbound_tcp_allow);
        counters("inbound_tcp_authz_deny", "Connections denied by policy", &metrics.inbound_tcp_deny);
        counters(
            "inbound_tcp_authz_terminate",
            "Connections ended because policy changed",
            &metrics.inbound_tcp_terminate,
        );
        counters(
            "inbound_tcp_transport_header_connections",
            "Connections with a transport header",
            &metrics.inbound_transport_header,
        );
        counters("inbound_tcp_errors", "Inbound connections that failed", &metrics.inbound_tcp_errors);
        counters("inbound_http_errors", "Inbound requests that failed", &metrics.inbound_http_errors);
        counters("inbound_tcp_detect_http_results", "Results of HTTP detection", &metrics.inbound_detect_results);
        counters("outbound_tcp_errors", "Outbound connections that failed", &metrics.outbound_tcp_errors);
        counters("outbound_http_errors", "Outbound requests that failed", &metrics.outbound_http_errors);
        counters("outbound_tcp_detect_http_results", "Results of HTTP detection", &metrics.outbound_detect_results);
        counters(
            "outbound_tcp_protocol_connections",
            "Outbound connections by protocol",
            &metrics.outbound_protocol_connections,
        );
        counters("outbound_tcp_route_open", "Opened connections of opaque routes", &metrics.outbound_tcp_route_open);
        counters("outbound_tcp_route_close", "Closed connections of opaque routes", &metrics.outbound_tcp_route_close);
        counters(
            "outbound_http_route_request_statuses",
            "Responses of HTTP routes by status",
            &metrics.outbound_route_statuses,
        );
        counters(
            "outbound_http_route_backend_requests",
            "Requests sent to a route's backends",
            &metrics.outbound_backend_requests,
        );
        counters("control_dns_resolutions", "DNS lookups of control-plane services", &metrics.dns_resolutions);
        metrics.retries.register(registry);
        registry.register("tcp_open_connections", "Open connections", metrics.tcp_open_connections.clone());
        for families in [&metrics.http, &metrics.route, &metrics.route_actual] {
            families.register(registry);
        }
        registry.register(
            "outbound_http_balancer_endpoints",
            "Endpoints of a balancer by state",
            metrics.outbound_balancer_endpoints.clone(),
        );
    }

    /// Removes the series of kinds of connections and requests that have not been used for `idle`.
    pub(crate) fn evict(&self, idle: Duration) {
        self.retained.evict(idle);
    }

    /// The series of opaque routes with these labels, kept while a connection uses the route and for the retention
    /// time afterwards.
    pub(crate) fn tcp_route(&self, labels: &Labels) -> TcpRoute {
        let in_use = self.retained.enter(labels.clone());
        in_use.has("outbound_tcp_route_open", &self.outbound_tcp_route_open, labels);
        self.outbound_tcp_route_open.get_or_create(labels).inc();
        TcpRoute { in_use, close: self.outbound_tcp_route_close.clone(), labels: labels.clone() }
    }

    /// The handles of one kind of connection. `labels` follow `direction` and `peer`.
    pub(crate) fn transport(&self, direction: Direction, peer: Peer, labels: &Labels) -> TransportMetrics {
        let mut all = vec![label("direction", direction.label()), label("peer", peer.label())];
        all.extend(labels.iter().cloned());
        TransportMetrics::new(self, all)
    }

    /// The handles of HTTP on one kind of connection. `labels` follow `direction`.
    pub(crate) fn http(&self, direction: Direction, labels: &Labels) -> HttpMetrics {
        let mut all = vec![label("direction", direction.label())];
        all.extend(labels.iter().cloned());
        HttpMetrics::new(&self.http, &self.retained, all)
    }

    /// The handles of a ServiceProfile's route; `dst` is the service and port, `route` the labels `rt_*`.
    pub(crate) fn profile_route(&self, direction: Direction, dst: &str, route: &Labels) -> ProfileMetrics {
        let mut all = vec![label("direction", direction.label()), label("dst", dst.to_owned())];
        all.extend(route.iter().cloned());
        let http = |families| Arc::new(HttpMetrics::new(families, &self.retained, all.clone()));
        let mut skipped = all.clone();
        skipped.push(label("skipped", "no_budget"));
        ProfileMetrics {
            route: http(&self.route),
            actual: http(&self.route_actual),
            retried: self.route_retryable.get_or_create_owned(&all),
            skipped: self.route_retryable.get_or_create_owned(&skipped),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn series_that_nothing_uses_are_forgotten() {
        const IDLE: Duration = Duration::from_secs(600);
        let mut registry = Registry::default();
        let metrics = ProxyMetrics::register(&mut registry);
        let use_once = |port: u16| {
            let labels = target_labels(SocketAddr::from(([10, 0, 0, 1], port)));
            let transport = metrics.transport(Direction::Outbound, Peer::Dst, &labels);
            transport.opened();
            transport.closed(Some(&std::io::ErrorKind::ConnectionReset.into()));
            let http = metrics.http(Direction::Outbound, &labels);
            http.request();
            http.response(200, true, Some(0), Duration::from_millis(3));
            metrics.tcp_route(&labels).closed("io");
            (transport, http)
        };
        let lines = |port: u16| {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text.lines().filter(|line| line.contains(&format!(r#"target_port="{port}""#))).count()
        };
        let held = use_once(80);
        for port in 1000..2000 {
            use_once(port);
        }
        let known = lines(80);
        assert!(known > 10 && lines(1500) == known);
        tokio::time::advance(IDLE / 2).await;
        use_once(1001);
        tokio::time::advance(IDLE / 2).await;
        metrics.evict(IDLE);
        assert_eq!(
            (lines(80), lines(1000), lines(1001)),
            (known - 2, 0, known),
            "no connection is on the opaque route"
        );
        drop(held);
        tokio::time::advance(IDLE).await;
        metrics.evict(IDLE);
        assert_eq!((lines(80), lines(1001)), (0, 0));
        use_once(80);
        assert_eq!(lines(80), known, "counted anew");
    }

    #[test]
    fn undeclared_ports_beyond_a_number_share_labels() {
        let targets = InboundTargets::new(&[80]);
        let mut seen = HashSet::new();
        for port in 1000..=u16::MAX {
            let addr = SocketAddr::from(([10, 0, 0, 1], port));
            seen.insert(targets.labels(addr));
            seen.insert(vec![label("port", targets.port(addr))]);
        }
        assert_eq!(seen.len(), 2 * (InboundTargets::OTHERS + 1));
        let first = SocketAddr::from(([10, 0, 0, 1], 1000));
        assert_eq!(targets.labels(first), target_labels(first), "the first ones keep their own");
        let declared = SocketAddr::from(([10, 0, 0, 1], 80));
        assert_eq!(targets.labels(declared), target_labels(declared));
        assert_eq!(targets.port(declared), "80");
    }

    #[test]
    fn families_have_linkerds_names() {
        let mut registry = Registry::default();
        let metrics = ProxyMetrics::register(&mut registry);
        let labels = target_labels("10.0.0.1:80".parse().unwrap());
        let transport = metrics.transport(Direction::Outbound, Peer::Dst, &labels);
        transport.opened();
        transport.read(7);
        transport.closed(None);
        let http = metrics.http(Direction::Inbound, &labels);
        http.request();
        http.response(200, true, None, Duration::from_millis(3));
        metrics.inbound_http_deny.get_or_create(&vec![label("tls", "true")]).inc();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let target = r#"target_addr="10.0.0.1:80",target_ip="10.0.0.1",target_port="80""#;
        for line in [
            format!(r#"tcp_open_total{{direction="outbound",peer="dst",{target}}} 1"#),
            format!(r#"tcp_open_connections{{direction="outbound",peer="dst",{target}}} 0"#),
            format!(r#"tcp_read_bytes_total{{direction="outbound",peer="dst",{target}}} 7"#),
            format!(r#"tcp_close_total{{direction="outbound",peer="dst",{target},errno=""}} 1"#),
            format!(r#"request_total{{direction="inbound",{target}}} 1"#),
            format!(r#"response_total{{direction="inbound",{target},status_code="200",classification="success"}} 1"#),
            format!(r#"response_latency_ms_bucket{{le="3.0",direction="inbound",{target},status_code="200"}} 1"#),
            r#"inbound_http_authz_deny_total{tls="true"} 1"#.to_owned(),
            format!(r#"response_latency_ms_bucket{{le="+Inf",direction="inbound",{target},status_code="200"}} 1"#),
        ] {
            assert!(text.contains(&line), "{line} is not in\n{text}");
        }
    }
}
