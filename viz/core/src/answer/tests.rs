//! Scrapes of made-up proxies in, rows out.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tonic::Streaming;
use weft_proto::{
    linkerd::tap::{ObserveRequest, TapEvent},
    viz::{EdgesRequest, Resource, RoutesRequest, SeriesRequest, StatInboundRequest, StatOutboundRequest, StatRequest},
};

use super::*;
use crate::{
    Config, Engine,
    collect::tests::pod,
    fleet::{Exposition, Fleet, Pod},
};

/// Pods with a text for each scrape; the last one stays.
#[derive(Debug, Default)]
struct Texts {
    pods: Vec<Arc<Pod>>,
    texts: HashMap<String, Vec<String>>,
    asked: Mutex<HashMap<String, usize>>,
}

impl Fleet for Texts {
    async fn pods(&self, namespace: &str) -> Result<Vec<Arc<Pod>>, String> {
        if namespace == "forbidden" {
            return Err("pods is forbidden".to_owned());
        }
        Ok(self.pods.iter().filter(|pod| namespace.is_empty() || pod.namespace == namespace).cloned().collect())
    }

    async fn metrics(&self, pod: &Pod, metrics: &mut Exposition<'_>) -> Result<(), String> {
        let Some(texts) = self.texts.get(&pod.name) else { return Err("connection refused".to_owned()) };
        let mut asked = self.asked.lock();
        let index = asked.entry(pod.name.clone()).or_default();
        let text = texts.get(*index).or(texts.last()).cloned().unwrap_or_default();
        *index += 1;
        metrics.read(text.as_bytes())
    }

    async fn tap(&self, _pod: &Pod, _request: ObserveRequest) -> Result<Streaming<TapEvent>, String> {
        Err("no tap here".to_owned())
    }
}

impl Texts {
    /// A pod of a Deployment, whose counters are 0 at the first scrape and these at the second.
    fn with(mut self, namespace: &str, deployment: &str, name: &str, second: &[String]) -> Self {
        let mut pod = (*pod(namespace, name)).clone();
        pod.owners = vec![
            ("replicaset".to_owned(), format!("{deployment}-1")),
            ("deployment".to_owned(), deployment.to_owned()),
        ];
        pod.labels = [("app".to_owned(), deployment.to_owned())].into();
        pod.service_account = deployment.to_owned();
        self.pods.push(Arc::new(pod));
        if !second.is_empty() {
            let first: String = second.iter().map(|line| format!("{} 0\n", line.rsplit_once(' ').unwrap().0)).collect();
            self.texts.insert(name.to_owned(), vec![first, second.iter().map(|line| format!("{line}\n")).collect()]);
        }
        self
    }

    fn engine(self) -> Engine<Self> {
        Engine::new(self, Config { first: Duration::from_millis(20), ..Config::default() })
    }
}

fn resource(namespace: &str, kind: &str, name: &str) -> Option<Resource> {
    Some(Resource { namespace: namespace.to_owned(), kind: kind.to_owned(), name: name.to_owned() })
}

fn inbound_http(labels: &str, success: u64, failure: u64) -> Vec<String> {
    http(&format!("direction=\"inbound\",{labels}"), success, failure)
}

/// All below 10 ms, half of them below 5.
fn http(labels: &str, success: u64, failure: u64) -> Vec<String> {
    let all = success + failure;
    vec![
        format!("response_total{{{labels},status_code=\"200\",classification=\"success\"}} {success}"),
        format!("response_total{{{labels},status_code=\"500\",classification=\"failure\"}} {failure}"),
        format!("response_latency_ms_bucket{{{labels},status_code=\"200\",le=\"5.0\"}} {}", all / 2),
        format!("response_latency_ms_bucket{{{labels},status_code=\"200\",le=\"10.0\"}} {all}"),
        format!("response_latency_ms_bucket{{{labels},status_code=\"200\",le=\"+Inf\"}} {all}"),
    ]
}

const WEB_ID: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";
const CLIENT_ID: &str = "client.shop.serviceaccount.identity.linkerd.cluster.local";

fn to_web(pod: &str) -> String {
    format!(
        "direction=\"outbound\",target_ip=\"10.0.0.9\",tls=\"true\",server_id=\"{WEB_ID}\",dst_namespace=\"shop\",\
             dst_deployment=\"web\",dst_service=\"web-svc\",dst_pod=\"{pod}\""
    )
}

/// Two replicas of web, of which a client knows both, and a stranger that one of them denied.
fn shop() -> Engine<Texts> {
    texts_of_shop().engine()
}

fn texts_of_shop() -> Texts {
    let served = |count: u64| {
        let tls = format!(
            "tls=\"true\",client_id=\"{CLIENT_ID}\",srv_kind=\"server\",srv_name=\"web-http\",srv_port=\"8080\",route_kind=\"default\",route_name=\"default\""
        );
        let mut lines = inbound_http(&tls, count, 1);
        lines.push(format!(
            "tcp_open_connections{{direction=\"inbound\",peer=\"src\",tls=\"true\",client_id=\"{CLIENT_ID}\"}} 2"
        ));
        lines.push(format!(
            "tcp_open_connections{{direction=\"inbound\",peer=\"dst\",tls=\"true\",client_id=\"{CLIENT_ID}\"}} 5"
        ));
        lines.push(format!(
            "tcp_read_bytes_total{{direction=\"inbound\",peer=\"src\",tls=\"true\",client_id=\"{CLIENT_ID}\"}} 100"
        ));
        lines
    };
    let mut first = served(10);
    first.push("inbound_http_authz_deny_total{tls=\"true\",client_id=\"stranger.other.serviceaccount.identity.linkerd.cluster.local\",\
        srv_kind=\"server\",srv_name=\"web-http\",srv_port=\"8080\",route_kind=\"default\",route_name=\"default\"} 4".to_owned());
    first.push("inbound_http_local_ratelimit_total{srv_kind=\"server\",srv_name=\"web-http\",srv_port=\"8080\",ratelimit_scope=\"total\"} 3".to_owned());
    first.extend(inbound_http("tls=\"no_identity\",no_tls_reason=\"no_tls_from_remote\",srv_kind=\"default\",srv_name=\"all-unauthenticated\",\
        srv_port=\"9000\",route_kind=\"default\",route_name=\"probe\"", 2, 0));
    let mut client = http(&to_web("web-0"), 10, 1);
    client.extend(http(&to_web("web-1"), 20, 1));
    client.push(format!("tcp_open_connections{{peer=\"dst\",{}}} 2", to_web("web-0")));
    Texts::default()
        .with("shop", "web", "web-0", &first)
        .with("shop", "web", "web-1", &served(20))
        .with("shop", "client", "client-0", &client)
}

/// Nodes whose clocks are years apart: times are the collector's, and a proxy's clock is compared with itself alone.
#[tokio::test]
async fn clocks_that_differ_change_no_number() {
    let mut texts = texts_of_shop();
    for (name, started) in [("web-0", "1"), ("web-1", "4102444800"), ("client-0", "1700000000")] {
        for text in texts.texts.get_mut(name).unwrap() {
            text.insert_str(0, &format!("process_start_time_seconds {started}\n"));
        }
    }
    let rows = async |engine: Engine<Texts>| {
        let request = StatRequest { resource: resource("shop", "pod", ""), ..StatRequest::default() };
        let stat = engine.stat(request).await.unwrap();
        let edges = EdgesRequest { resource: resource("shop", "pod", ""), ..EdgesRequest::default() };
        let edges = engine.edges(edges).await.unwrap().edges;
        let http = stat.rows.into_iter().map(|row| (row.resource.unwrap().name, row.http));
        let edges = edges.into_iter().map(|edge| (edge.source.map(|it| it.name).unwrap_or_default(), edge.http));
        let counted = http.chain(edges).map(|(name, http)| (name, http.map(|it| (it.success, it.failure, it.p99_ms))));
        counted.collect::<Vec<_>>()
    };
    let (skewed, right) = (rows(texts.engine()).await, rows(shop()).await);
    assert_eq!(skewed, right);
    assert!(
        right.iter().any(|(name, http)| name == "web-1" && http.is_some_and(|(success, ..)| success == 20)),
        "{right:?}"
    );
}

#[tokio::test]
async fn a_workload_has_what_its_proxies_accept() {
    let stat = shop()
        .stat(StatRequest { resource: resource("shop", "deployment", ""), ..StatRequest::default() })
        .await
        .unwrap();
    let names: Vec<&str> = stat.rows.iter().map(|row| row.resource.as_ref().unwrap().name.as_str()).collect();
    assert_eq!(names, ["client", "web"]);
    let web = &stat.rows[1];
    let http = web.http.as_ref().unwrap();
    assert_eq!((http.success, http.failure, web.meshed_pods, web.running_pods), (32, 2, 2, 2));
    // 34 requests, of which 5 + 10 + 1 are below 5 ms: the rank 17 is the first of 18 between 5 and 10 ms.
    assert!((http.p50_ms.unwrap() - (5.0 + 5.0 / 18.0)).abs() < 1e-9, "{http:?}");
    assert!(http.seconds > 0.0);
    let tcp = web.tcp.as_ref().unwrap();
    assert_eq!((tcp.open_connections, tcp.read_bytes), (4, 200));
    let client = stat.rows[0].http.as_ref().unwrap();
    assert_eq!((client.success, client.p50_ms), (0, None));
    let coverage = stat.coverage.unwrap();
    assert_eq!((coverage.proxies, coverage.answered), (3, 3));
}

#[tokio::test]
async fn traffic_to_and_from_is_what_clients_count() {
    let engine = shop();
    let deployment = |name: &str| resource("shop", "deployment", name);
    let ask = |of: Option<Resource>, to: Option<Resource>, from: Option<Resource>| StatRequest {
        resource: of,
        to,
        from,
        ..StatRequest::default()
    };
    for (request, name, expected) in [
        (ask(deployment("client"), deployment("web"), None), "client", 32),
        (ask(deployment("client"), resource("shop", "service", "web-svc"), None), "client", 32),
        (ask(deployment("client"), resource("shop", "pod", "web-0"), None), "client", 11),
        (ask(deployment("client"), resource("shop", "replicaset", "web-1"), None), "client", 32),
        (ask(deployment("client"), resource("shop", "namespace", "shop"), None), "client", 32),
        (ask(deployment("client"), resource("shop", "service", "other"), None), "client", 0),
        (ask(deployment("web"), None, deployment("client")), "web", 32),
        (ask(resource("shop", "pod", "web-1"), None, deployment("client")), "web-1", 21),
        (ask(deployment("web"), None, deployment("web")), "web", 0),
        (ask(resource("shop", "service", ""), None, None), "web-svc", 32),
        (ask(resource("shop", "service", ""), None, deployment("client")), "web-svc", 32),
    ] {
        let label = format!("{request:?}");
        let stat = engine.stat(request).await.unwrap();
        let names: Vec<&str> = stat.rows.iter().map(|row| row.resource.as_ref().unwrap().name.as_str()).collect();
        assert_eq!(names, [name], "{label}");
        let http = stat.rows[0].http.as_ref().unwrap();
        let all = http.success + http.failure;
        let is_expected = if expected == 11 || expected == 21 {
            all == expected
        } else {
            http.success == if expected == 0 { 0 } else { 30 }
        };
        assert!(is_expected, "{label}: {http:?}");
    }
}

#[tokio::test]
async fn a_selector_selects_pods() {
    let request =
        StatRequest { resource: resource("shop", "pod", ""), selector: "app=web".to_owned(), ..StatRequest::default() };
    let stat = shop().stat(request).await.unwrap();
    let names: Vec<&str> = stat.rows.iter().map(|row| row.resource.as_ref().unwrap().name.as_str()).collect();
    assert_eq!(names, ["web-0", "web-1"]);
}

#[tokio::test]
async fn a_proxy_that_does_not_answer_is_named_and_the_others_are_counted() {
    let engine = Texts::default()
        .with("shop", "web", "web-0", &inbound_http("tls=\"disabled\"", 5, 0))
        .with("shop", "web", "web-1", &[])
        .engine();
    let stat = engine
        .stat(StatRequest { resource: resource("shop", "deployment", "web"), ..StatRequest::default() })
        .await
        .unwrap();
    assert_eq!((stat.rows[0].http.as_ref().unwrap().success, stat.rows[0].meshed_pods), (5, 2));
    let coverage = stat.coverage.unwrap();
    assert_eq!((coverage.proxies, coverage.answered), (2, 1));
    assert_eq!(
        (coverage.problems[0].pod.as_str(), coverage.problems[0].message.as_str()),
        ("web-1", "connection refused")
    );
}

#[tokio::test]
async fn malformed_requests_name_their_field() {
    let engine = shop();
    let good = || StatRequest { resource: resource("shop", "deployment", "web"), ..StatRequest::default() };
    for (request, field) in [
        (StatRequest { resource: None, ..good() }, "resource"),
        (StatRequest { resource: resource("shop", "Deployment", ""), ..good() }, "resource"),
        (StatRequest { window_seconds: 901, ..good() }, "window_seconds"),
        (StatRequest { selector: "=".to_owned(), ..good() }, "selector"),
        (StatRequest { to: good().resource, from: good().resource, ..good() }, "from"),
        (StatRequest { from: resource("shop", "service", "web"), ..good() }, "from"),
        (StatRequest { resource: resource("shop", "service", ""), to: good().resource, ..good() }, "resource"),
    ] {
        let error = engine.stat(request).await.unwrap_err();
        assert!(matches!(error, RequestError::Invalid { field: found, .. } if found == field), "{error}");
    }
    let forbidden = StatRequest { resource: resource("forbidden", "pod", ""), ..StatRequest::default() };
    assert_eq!(engine.stat(forbidden).await.unwrap_err(), RequestError::Unavailable("pods is forbidden".to_owned()));
}

#[tokio::test]
async fn servers_have_routes_denials_and_limits() {
    let request =
        StatInboundRequest { resource: resource("shop", "deployment", "web"), ..StatInboundRequest::default() };
    let stat = shop().stat_inbound(request).await.unwrap();
    let rows: Vec<_> = stat
        .rows
        .iter()
        .map(|row| {
            let http = row.http.as_ref().unwrap();
            (row.server.as_str(), row.route.as_str(), http.success, http.failure, row.denied, row.rate_limited)
        })
        .collect();
    assert_eq!(
        rows,
        [
            ("8080:web-http", "", 0, 0, 0, 3),
            ("8080:web-http", "default", 30, 2, 4, 0),
            ("9000:default:all-unauthenticated", "probe", 2, 0, 0, 0),
        ]
    );
}

#[tokio::test]
async fn edges_join_what_both_ends_say() {
    let request = EdgesRequest { resource: resource("shop", "deployment", ""), ..EdgesRequest::default() };
    let found = shop().edges(request).await.unwrap();
    let name = |resource: &Option<Resource>| {
        resource.as_ref().map_or_else(String::new, |resource| format!("{}/{}", resource.kind, resource.name))
    };
    let edges: Vec<_> = found
        .edges
        .iter()
        .map(|edge| {
            (
                name(&edge.source),
                name(&edge.destination),
                edge.client_identity.as_str(),
                edge.no_identity_reason.as_str(),
                edge.denied,
            )
        })
        .collect();
    assert_eq!(
        edges,
        [
            ("deployment/client".to_owned(), "deployment/web".to_owned(), CLIENT_ID, "", 0),
            (String::new(), "deployment/web".to_owned(), "", "no_tls_from_remote", 0),
            (
                "serviceaccount/stranger".to_owned(),
                "deployment/web".to_owned(),
                "stranger.other.serviceaccount.identity.linkerd.cluster.local",
                "",
                4
            ),
        ]
    );
    assert_eq!(found.edges[0].server_identity, WEB_ID);
    assert_eq!(found.edges[0].http.as_ref().unwrap().success, 30);
    let request = EdgesRequest { resource: resource("shop", "workload", ""), ..EdgesRequest::default() };
    let of_workloads = shop().edges(request).await.unwrap();
    assert_eq!(of_workloads.edges.len(), 3);
}

#[tokio::test]
async fn what_was_refused_is_one_clients_or_the_service_accounts() {
    let refused =
        format!("inbound_http_authz_deny_total{{tls=\"true\",client_id=\"{CLIENT_ID}\",srv_port=\"8080\"}} 4");
    let engine = Texts::default()
        .with("shop", "web", "web-0", &[refused])
        .with("shop", "client", "client-0", &http(&to_web("web-0"), 10, 1))
        .with("shop", "client", "client-1", &http(&to_web("web-0"), 20, 1))
        .engine();
    let ask = async |kind: &str, name: &str| {
        let request = EdgesRequest { resource: resource("shop", kind, name), ..EdgesRequest::default() };
        let found = engine.edges(request).await.unwrap().edges;
        let name = |resource: &Option<Resource>| resource.as_ref().unwrap().name.clone();
        found
            .iter()
            .map(|edge| {
                assert_eq!(edge.client_identity, CLIENT_ID);
                (name(&edge.source), name(&edge.destination), edge.denied, edge.http.as_ref().map(|http| http.success))
            })
            .collect::<Vec<_>>()
    };
    let edge =
        |source: &str, destination: &str, denied, success| (source.to_owned(), destination.to_owned(), denied, success);
    assert_eq!(ask("deployment", "").await, [edge("client", "web", 4, Some(30))]);
    // Two pods speak for the account: the count is theirs together, and is there once.
    assert_eq!(
        ask("pod", "").await,
        [
            edge("client-0", "web-0", 0, Some(10)),
            edge("client-1", "web-0", 0, Some(20)),
            edge("client", "web-0", 4, None),
        ]
    );
}

#[tokio::test]
async fn routes_have_what_clients_saw_and_what_was_sent() {
    let route = |family: &str, direction: &str, route: &str, value: u64| {
        let route = if route.is_empty() { String::new() } else { format!(",rt_route=\"{route}\"") };
        format!(
            "{family}{{direction=\"{direction}\",dst=\"web-svc.shop.svc.cluster.local:80\"{route},classification=\"success\",status_code=\"200\"}} {value}"
        )
    };
    let engine = Texts::default()
        .with("shop", "web", "web-0", &[route("route_response_total", "inbound", "GET /", 9)])
        .with(
            "shop",
            "client",
            "client-0",
            &[
                route("route_response_total", "outbound", "GET /", 7),
                route("route_actual_response_total", "outbound", "GET /", 8),
                route("route_response_total", "outbound", "", 2),
            ],
        )
        .engine();
    let ask = async |of: Option<Resource>, to: Option<Resource>| {
        let found = engine.routes(RoutesRequest { resource: of, to, ..RoutesRequest::default() }).await.unwrap();
        let count = |golden: &Option<Golden>| golden.as_ref().map(|golden| golden.success);
        found
            .rows
            .iter()
            .map(|row| {
                assert_eq!(row.service, "web-svc.shop");
                let of = row.resource.as_ref().unwrap();
                (format!("{}/{}", of.kind, of.name), row.route.clone(), count(&row.effective), count(&row.actual))
            })
            .collect::<Vec<_>>()
    };
    let row = |of: &str, route: &str, effective, actual| (of.to_owned(), route.to_owned(), effective, actual);
    let web = [row("deployment/web", "GET /", Some(9), None)];
    assert_eq!(ask(resource("shop", "deployment", "web"), None).await, web);
    assert_eq!(ask(resource("shop", "deployment", ""), None).await, web);
    let service = [row("service/web-svc", "GET /", Some(9), None)];
    assert_eq!(ask(resource("shop", "service", "web-svc"), None).await, service);
    assert_eq!(ask(resource("shop", "service", ""), None).await, service);
    assert_eq!(ask(resource("shop", "service", "other"), None).await, []);
    let to = ask(resource("shop", "deployment", "client"), resource("shop", "service", "web-svc")).await;
    let client = "deployment/client";
    assert_eq!(to, [row(client, "GET /", Some(7), Some(8)), row(client, "[DEFAULT]", Some(2), None)]);
}

#[tokio::test]
async fn outbound_routes_have_backends_timeouts_and_retries() {
    let labels = "parent_group=\"core\",parent_kind=\"Service\",parent_namespace=\"shop\",parent_name=\"web-svc\",parent_port=\"80\",\
        parent_section_name=\"\",route_group=\"gateway.networking.k8s.io\",route_kind=\"HTTPRoute\",route_namespace=\"shop\",route_name=\"split\"";
    let backend = "backend_group=\"core\",backend_kind=\"Service\",backend_namespace=\"shop\",backend_name=\"web-b\",backend_port=\"80\",backend_section_name=\"\"";
    let lines = [
        format!(
            "outbound_http_route_request_statuses_total{{{labels},hostname=\"\",http_status=\"200\",error=\"\"}} 6"
        ),
        format!(
            "outbound_http_route_request_statuses_total{{{labels},hostname=\"\",http_status=\"503\",error=\"\"}} 2"
        ),
        format!(
            "outbound_http_route_request_statuses_total{{{labels},hostname=\"\",http_status=\"504\",error=\"REQUEST_TIMEOUT\"}} 1"
        ),
        // Statuses that share a series: a proxy has one for each class.
        format!(
            "outbound_http_route_request_statuses_total{{{labels},hostname=\"\",http_status=\"2xx\",error=\"\"}} 20"
        ),
        format!(
            "outbound_http_route_request_statuses_total{{{labels},hostname=\"\",http_status=\"5xx\",error=\"\"}} 10"
        ),
        format!("outbound_http_route_request_duration_seconds_bucket{{{labels},hostname=\"\",le=\"0.05\"}} 9"),
        format!("outbound_http_route_request_duration_seconds_bucket{{{labels},hostname=\"\",le=\"+Inf\"}} 9"),
        format!("outbound_http_route_retry_requests_total{{{labels},hostname=\"\"}} 3"),
        format!(
            "outbound_http_route_backend_response_statuses_total{{{labels},{backend},http_status=\"200\",error=\"\"}} 6"
        ),
        format!(
            "outbound_grpc_route_request_statuses_total{{{labels},hostname=\"\",grpc_status=\"UNAVAILABLE\",error=\"\"}} 1"
        ),
        format!(
            "outbound_grpc_route_request_statuses_total{{{labels},hostname=\"\",grpc_status=\"NOT_FOUND\",error=\"\"}} 1"
        ),
    ];
    let engine = Texts::default().with("shop", "client", "client-0", &lines).engine();
    let ask = |to: Option<Resource>| StatOutboundRequest {
        resource: resource("shop", "deployment", "client"),
        to,
        ..StatOutboundRequest::default()
    };
    let found = engine.stat_outbound(ask(None)).await.unwrap();
    let rows: Vec<_> = found
        .rows
        .iter()
        .map(|row| {
            let http = row.http.as_ref().unwrap();
            (
                row.service.as_str(),
                row.route.as_str(),
                row.backend.as_str(),
                http.success,
                http.failure,
                row.timeouts,
                row.retries,
            )
        })
        .collect();
    assert_eq!(
        rows,
        [("shop/web-svc:80", "split", "", 27, 14, 1, 3), ("shop/web-svc:80", "split", "shop/web-b:80", 6, 0, 0, 0)]
    );
    // Half of the first bucket, in milliseconds.
    assert_eq!(found.rows[0].http.as_ref().unwrap().p50_ms, Some(25.0));
    assert_eq!(engine.stat_outbound(ask(resource("shop", "service", "web-svc"))).await.unwrap().rows.len(), 2);
    assert_eq!(engine.stat_outbound(ask(resource("shop", "service", "other"))).await.unwrap().rows.len(), 0);
}

#[tokio::test]
async fn a_series_has_points_from_the_oldest() {
    let engine = shop();
    let request =
        SeriesRequest { resource: resource("shop", "deployment", "web"), window_seconds: 10, step_seconds: 1 };
    let found = engine.series(request).await.unwrap();
    assert_eq!(found.points.last().unwrap().age_seconds, 0.0);
    let all: u64 = found.points.iter().filter_map(|point| point.http.as_ref()).map(|http| http.success).sum();
    assert_eq!(all, 32);
}
