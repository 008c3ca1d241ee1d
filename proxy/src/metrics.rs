//! The proxy's metric families, under Linkerd's names, and the handles with which the data path counts.
//!
//! Owns names and label keys. Labels are looked up once per connection, endpoint or route; after that, counting is an
//! atomic addition. Refuses to know when something happens.

mod balancer;
mod bounded;
mod by_host;
mod chosen;
mod detect;
mod histogram;
mod http;
mod inbound;
mod retain;
mod route;
mod stream;
mod tcp_route;
mod transport;

use std::{borrow::Cow, net::SocketAddr, sync::Arc, time::Duration};

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::{Registry, Unit},
};
use weft_runtime::metrics::Family;

use balancer::BalancerFamilies;
pub(crate) use balancer::{BalancerKind, BalancerMetrics};
pub(crate) use by_host::ByHost;
use chosen::UndeclaredPorts;
pub(crate) use chosen::{Authorities, ClientIds, DialledAddresses, InboundTargets, OTHER, TargetNames};
use detect::DetectFamilies;
pub(crate) use detect::DetectMetrics;
pub(crate) use histogram::{FrameBytes, Histogram, LatencyMs};
use http::HttpFamilies;
pub(crate) use http::{HttpMetrics, Outcome, ProfileMetrics};
use inbound::InboundFamilies;
pub(crate) use inbound::InboundRouteMetrics;
pub(crate) use retain::InUse;
use retain::Retained;
use route::RouteFamilies;
pub(crate) use route::{BackendMetrics, RequestMetrics, RouteMetrics};
pub(crate) use stream::StreamEnd;
use tcp_route::TcpRouteFamilies;
pub(crate) use tcp_route::TcpRouteMetrics;
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
    /// `route_*`: requests as the application sees them.
    route: HttpFamilies,
    /// `route_actual_*`: requests with their repetitions.
    route_actual: HttpFamilies,
    route_retryable: Counters,
    retained: Retained,
    /// The values of the label `client_id` of inbound families.
    pub(crate) client_ids: Arc<ClientIds>,
    /// The values of the label `authority` of inbound families.
    pub(crate) authorities: Arc<Authorities>,
    /// The values of the label `target_name` of inbound families.
    pub(crate) target_names: Arc<TargetNames>,
    /// The addresses in labels of outbound families, which the application chooses.
    pub(crate) dialled: Arc<DialledAddresses>,
    undeclared_ports: Arc<UndeclaredPorts>,
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
    /// `outbound_tcp_errors_total`.
    pub(crate) outbound_tcp_errors: Counters,
    /// `outbound_http_errors_total`.
    pub(crate) outbound_http_errors: Counters,
    /// `outbound_tcp_protocol_connections_total`.
    pub(crate) outbound_protocol_connections: Counters,
    inbound_detect: DetectFamilies,
    outbound_detect: DetectFamilies,
    transfer_cost: Counters,
    http_routes: RouteFamilies,
    grpc_routes: RouteFamilies,
    tcp_routes: TcpRouteFamilies,
    tls_routes: TcpRouteFamilies,
    http_balancers: BalancerFamilies,
    tcp_balancers: BalancerFamilies,
    tls_balancers: BalancerFamilies,
    inbound_http: InboundFamilies,
    inbound_grpc: InboundFamilies,
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

/// Whether the name of a label may contain this key. One with any other would lose the whole scrape.
pub(crate) fn is_label_key(key: &str) -> bool {
    key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// The labels `target_addr`, `target_ip` and `target_port`.
pub(crate) fn target_labels(addr: SocketAddr) -> Labels {
    vec![
        label("target_addr", addr.to_string()),
        label("target_ip", addr.ip().to_string()),
        label("target_port", addr.port().to_string()),
    ]
}

impl ProxyMetrics {
    /// Creates the families and registers them. The encoder appends `_total` to counters.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
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
        counters("outbound_tcp_errors", "Outbound connections that failed", &metrics.outbound_tcp_errors);
        counters("outbound_http_errors", "Outbound requests that failed", &metrics.outbound_http_errors);
        counters(
            "outbound_tcp_protocol_connections",
            "Outbound connections by protocol",
            &metrics.outbound_protocol_connections,
        );
        counters("control_dns_resolutions", "DNS lookups of control-plane services", &metrics.dns_resolutions);
        registry.register("tcp_open_connections", "Open connections", metrics.tcp_open_connections.clone());
        metrics.http.register(registry);
        metrics.route.register(registry.sub_registry_with_prefix("route"));
        metrics.route_actual.register(registry.sub_registry_with_prefix("route_actual"));
        metrics.inbound_detect.register(registry, "inbound_tcp_detect_http");
        metrics.outbound_detect.register(registry, "outbound_tcp_detect_http");
        registry.register_with_unit(
            "outbound_tcp_transfer_cost",
            "Bytes to and from endpoints, by their zone",
            Unit::Bytes,
            metrics.transfer_cost.clone(),
        );
        metrics.http_routes.register(registry, "outbound_http_route");
        metrics.grpc_routes.register(registry, "outbound_grpc_route");
        metrics.tcp_routes.register(registry, "outbound_tcp_route");
        metrics.tls_routes.register(registry, "outbound_tls_route");
        metrics.http_balancers.register(registry, "outbound_http_balancer");
        metrics.tcp_balancers.register(registry, "outbound_tcp_balancer");
        metrics.tls_balancers.register(registry, "outbound_tls_balancer");
        metrics.inbound_http.register(registry, "inbound_http");
        metrics.inbound_grpc.register(registry, "inbound_grpc");
    }

    /// Removes the series of kinds of connections and requests that have not been used for `idle`, and gives the places
    /// of values that no series has any more to others.
    pub(crate) fn evict(&self, idle: Duration) {
        self.retained.evict(idle);
        let keys = ["client_id", "authority", "target_name", "target_ip", "target_port", "parent_port", "srv_port"];
        self.retained.with_values(keys, |[clients, authorities, names, ips, of_target, of_parent, of_server]| {
            self.client_ids.release(&clients);
            self.authorities.release(&authorities);
            self.target_names.release(&names);
            // Some series have an address without its port, or a port alone.
            self.dialled.release(|addr| ips.contains(addr.ip().to_string().as_str()));
            self.undeclared_ports.release(|addr| {
                let port = addr.port().to_string();
                [&of_target, &of_parent, &of_server].into_iter().any(|ports| ports.contains(port.as_str()))
            });
        });
    }

    /// The target labels of inbound connections to a pod that declares these ports.
    pub(crate) fn inbound_targets(&self, declared: &[u16]) -> InboundTargets {
        InboundTargets::new(declared, Arc::clone(&self.undeclared_ports))
    }

    /// Counts one in a series that is removed when nothing was counted in it for a while.
    pub(crate) fn count(&self, family: &Counters, labels: &Labels) {
        self.counter(family, labels).1.inc();
    }

    /// A counter that stays while the first value lives, and for the retention time afterwards.
    pub(crate) fn counter(&self, family: &Counters, labels: &Labels) -> (InUse, Counter) {
        let in_use = self.retained.enter(family, labels);
        let counter = in_use.series(family, labels);
        (in_use, counter)
    }

    /// The handles of one kind of connection. `labels` follow `direction` and `peer`.
    pub(crate) fn transport(&self, direction: Direction, peer: Peer, labels: &Labels) -> TransportMetrics {
        let mut all = vec![label("direction", direction.label()), label("peer", peer.label())];
        all.extend(labels.iter().cloned());
        let transport = TransportMetrics::new(self, all);
        if direction == Direction::Outbound && peer == Peer::Dst {
            let zone = labels.iter().find(|(key, _)| key == "dst_zone_locality").map_or("", |(_, value)| value);
            return transport.with_transfer_cost(&self.transfer_cost, zone);
        }
        transport
    }

    /// The handles of HTTP on one kind of connection. `labels` follow `direction`.
    pub(crate) fn http(&self, direction: Direction, labels: &Labels) -> HttpMetrics {
        let mut all = vec![label("direction", direction.label())];
        all.extend(labels.iter().cloned());
        HttpMetrics::new(&self.http, &self.retained, all)
    }

    /// The handles of a ServiceProfile's route at its server.
    pub(crate) fn inbound_profile_route(&self, dst: &str, route: &Labels) -> HttpMetrics {
        let mut all = vec![label("direction", Direction::Inbound.label()), label("dst", dst.to_owned())];
        all.extend(route.iter().cloned());
        HttpMetrics::new(&self.route, &self.retained, all)
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
            retried: self.counter(&self.route_retryable, &all),
            skipped: self.counter(&self.route_retryable, &skipped),
        }
    }
}

#[cfg(test)]
mod documented;

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
            transport.closed(Some(libc::ECONNRESET));
            let http = metrics.http(Direction::Outbound, &labels);
            http.request();
            http.failure(Outcome { grpc_status: Some(0), ..Outcome::success(200) }, Duration::from_millis(3));
            let route = metrics.tcp_route(false, labels.clone());
            route.opened();
            route.closed("unexpected");
            drop(route);
            metrics.count(&metrics.inbound_http_deny, &labels);
            metrics.detect(Direction::Outbound, labels.clone()).detected("http/1", Duration::ZERO);
            drop(metrics.balancer(BalancerKind::Http, &labels, IDLE));
            let route = metrics.route(true, labels.clone(), false);
            route.backend(Labels::new()).ended(StreamEnd::default(), Duration::ZERO);
            let requests = route.requests(None);
            requests.ended(StreamEnd::default(), Duration::ZERO);
            requests.retries().requests.inc();
            metrics.inbound_route(false, &labels).ended(StreamEnd::default(), Duration::ZERO, Duration::ZERO);
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
        // Of its families, those that the connection and the requests in use have.
        let of_held = ["tcp_", "request_", "response_"];
        let held_lines = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let of_port = |line: &&str| line.contains(r#"target_port="80""#);
            text.lines().filter(of_port).filter(|line| of_held.iter().any(|name| line.starts_with(name))).count()
        };
        let held_lines = held_lines();
        assert!(known > 100 && lines(1500) == known);
        tokio::time::advance(IDLE / 2).await;
        use_once(1001);
        tokio::time::advance(IDLE / 2).await;
        metrics.evict(IDLE);
        assert_eq!(
            (lines(80), lines(1000), lines(1001)),
            (held_lines, 0, known),
            "what no connection and no request uses"
        );
        drop(held);
        tokio::time::advance(IDLE).await;
        metrics.evict(IDLE);
        assert_eq!((lines(80), lines(1001)), (0, 0));
        use_once(80);
        assert_eq!(lines(80), known, "counted anew");
    }

    #[test]
    fn families_have_linkerds_names() {
        let mut registry = Registry::default();
        let metrics = ProxyMetrics::register(&mut registry);
        let labels = target_labels("10.0.0.1:80".parse().unwrap());
        let transport = metrics.transport(Direction::Outbound, Peer::Dst, &labels);
        transport.opened();
        transport.read(7);
        transport.written(9);
        transport.closed(None);
        for errno in [libc::ECONNRESET, libc::EPIPE, libc::ETIMEDOUT, 4000] {
            transport.opened();
            transport.closed(Some(errno));
        }
        // What a controller says beside the zones that there are becomes no label.
        for (zone, bytes) in [("local", 1), ("remote", 10), ("of-a-controller", 100), ("another", 1000)] {
            let mut zoned = labels.clone();
            zoned.push(label("dst_zone_locality", zone));
            let transport = metrics.transport(Direction::Outbound, Peer::Dst, &zoned);
            transport.read(bytes);
            transport.written(2 * bytes);
        }
        let http = metrics.http(Direction::Inbound, &labels);
        http.request();
        for outcome in [Outcome::success(200), Outcome::failure(Some(200), Some("h2(CANCEL)"))] {
            http.latency(200, Duration::from_millis(3), None);
            http.response(outcome);
        }
        metrics.inbound_http_deny.get_or_create(&vec![label("tls", "true")]).inc();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let target = r#"target_addr="10.0.0.1:80",target_ip="10.0.0.1",target_port="80""#;
        for line in [
            format!(r#"tcp_open_total{{direction="outbound",peer="dst",{target}}} 5"#),
            format!(r#"tcp_open_connections{{direction="outbound",peer="dst",{target}}} 0"#),
            format!(r#"tcp_read_bytes_total{{direction="outbound",peer="dst",{target}}} 7"#),
            format!(r#"tcp_write_bytes_total{{direction="outbound",peer="dst",{target}}} 9"#),
            format!(r#"tcp_close_total{{direction="outbound",peer="dst",{target},errno=""}} 1"#),
            format!(r#"tcp_close_total{{direction="outbound",peer="dst",{target},errno="ECONNRESET"}} 1"#),
            format!(r#"tcp_close_total{{direction="outbound",peer="dst",{target},errno="EPIPE"}} 1"#),
            format!(r#"tcp_close_total{{direction="outbound",peer="dst",{target},errno="ETIMEDOUT"}} 1"#),
            format!(r#"tcp_close_total{{direction="outbound",peer="dst",{target},errno="UNKNOWN_ERRNO"}} 1"#),
            r#"outbound_tcp_transfer_cost_bytes_total{op="Recv",zone_locality="local"} 1"#.to_owned(),
            r#"outbound_tcp_transfer_cost_bytes_total{op="Send",zone_locality="local"} 2"#.to_owned(),
            r#"outbound_tcp_transfer_cost_bytes_total{op="Recv",zone_locality="remote"} 10"#.to_owned(),
            r#"outbound_tcp_transfer_cost_bytes_total{op="Send",zone_locality="remote"} 20"#.to_owned(),
            r#"outbound_tcp_transfer_cost_bytes_total{op="Recv",zone_locality="unknown"} 1107"#.to_owned(),
            r#"outbound_tcp_transfer_cost_bytes_total{op="Send",zone_locality="unknown"} 2209"#.to_owned(),
            format!(r#"request_total{{direction="inbound",{target}}} 1"#),
            format!(r#"response_total{{direction="inbound",{target},status_code="200",classification="success"}} 1"#),
            format!(
                r#"response_total{{direction="inbound",{target},status_code="200",classification="failure",error="h2(CANCEL)"}} 1"#
            ),
            format!(r#"response_latency_ms_bucket{{le="3.0",direction="inbound",{target},status_code="200"}} 2"#),
            r#"inbound_http_authz_deny_total{tls="true"} 1"#.to_owned(),
            format!(r#"response_latency_ms_bucket{{le="+Inf",direction="inbound",{target},status_code="200"}} 2"#),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
