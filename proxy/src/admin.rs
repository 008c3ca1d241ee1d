//! The admin server on 4191: the runtime's metrics and probes, and the routes that Linkerd's proxy adds.
//!
//! Routes that change something answer loopback clients only. The environment is shown as it was at start.

use std::{collections::BTreeMap, io, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http::{Extensions, Method, StatusCode, header};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};
use weft_runtime::{
    admin::{self, AdminRequest, AdminResponse, text},
    metrics::Metrics,
    readiness::Readiness,
    telemetry::LogLevel,
};

use crate::{
    inbound::{admin::AdminPort, tls::OwnPortStream},
    shared::Shared,
};

/// Dependencies of the admin server.
pub(crate) struct Admin {
    /// All metrics.
    pub(crate) registry: Metrics,
    /// Gates behind `/ready`.
    pub(crate) readiness: Readiness,
    /// The log level that `/proxy-log-level` changes.
    pub(crate) log: LogLevel,
    /// Set to true by `POST /shutdown`.
    pub(crate) shutdown: watch::Sender<bool>,
    /// Policy of the admin port.
    pub(crate) port: AdminPort,
}

/// Serves until the process ends.
pub(crate) async fn run(shared: Arc<Shared>, admin: Admin, listener: TcpListener) -> anyhow::Result<()> {
    let Admin { registry, readiness, log, shutdown, port } = admin;
    let port = Arc::new(port);
    let guard = Arc::clone(&port);
    let enabled = shared.config.admin.shutdown_endpoint;
    let environment: BTreeMap<String, String> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .collect();
    admin::Admin::new(registry, readiness)
        .route_any("/env.json", move |request| env_json(request, &environment))
        .route_any("/proxy-log-level", move |request| log_level(request, &log))
        .route_any("/shutdown", move |request| stop(request, enabled, &shutdown))
        .guard(move |request| guard.check(request))
        .serve_with(listener, move |stream| accept(Arc::clone(&port), stream), std::future::pending())
        .await;
    Ok(())
}

async fn accept(port: Arc<AdminPort>, stream: TcpStream) -> io::Result<(Box<dyn OwnPortStream>, Extensions)> {
    port.accept(stream).await
}

fn log_level(request: &AdminRequest, log: &LogLevel) -> AdminResponse {
    if !is_local(request.peer) {
        return forbidden();
    }
    match request.head.method {
        Method::GET => text(StatusCode::OK, log.current()),
        Method::PUT => {
            let Ok(filter) = std::str::from_utf8(&request.body) else {
                return text(StatusCode::BAD_REQUEST, "the log level is not UTF-8\n");
            };
            match log.set(filter.trim()) {
                Ok(()) => text(StatusCode::NO_CONTENT, ""),
                Err(error) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
            }
        }
        _ => not_allowed("GET, PUT"),
    }
}

/// The whole environment, or the variables in the query: `/env.json?A&B`.
fn env_json(request: &AdminRequest, environment: &BTreeMap<String, String>) -> AdminResponse {
    if request.head.method != Method::GET {
        return not_allowed("GET");
    }
    if !accepts_json(request) {
        return text(StatusCode::NOT_ACCEPTABLE, "the answer is application/json\n");
    }
    let json = match request.head.uri.query().filter(|query| !query.is_empty()) {
        None => serde_json::json!(environment),
        Some(query) if query.contains('=') => {
            return text(StatusCode::BAD_REQUEST, "expected names of variables: /env.json?A&B\n");
        }
        Some(query) => {
            let wanted: BTreeMap<&str, Option<&String>> =
                query.split('&').map(|name| (name, environment.get(name))).collect();
            serde_json::json!(wanted)
        }
    };
    let mut response = text(StatusCode::OK, Bytes::from(json.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

fn stop(request: &AdminRequest, enabled: bool, shutdown: &watch::Sender<bool>) -> AdminResponse {
    if request.head.method != Method::POST {
        return not_allowed("POST");
    }
    if !is_local(request.peer) {
        return forbidden();
    }
    if !enabled {
        return text(StatusCode::NOT_FOUND, "shutdown endpoint is not enabled\n");
    }
    shutdown.send_replace(true);
    text(StatusCode::OK, "shutdown\n")
}

fn is_local(peer: SocketAddr) -> bool {
    peer.ip().to_canonical().is_loopback()
}

fn accepts_json(request: &AdminRequest) -> bool {
    let mut accepted = request.head.headers.get_all(header::ACCEPT).iter().peekable();
    if accepted.peek().is_none() {
        return true;
    }
    let mut ranges = accepted.flat_map(|value| value.to_str().unwrap_or_default().split(','));
    ranges.any(|range| {
        let range = range.split(';').next().unwrap_or_default().trim();
        matches!(range, "application/json" | "application/*" | "*/*")
    })
}

fn forbidden() -> AdminResponse {
    text(StatusCode::FORBIDDEN, "only clients on localhost may do this\n")
}

fn not_allowed(allow: &'static str) -> AdminResponse {
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n");
    response.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static(allow));
    response
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use http_body_util::{BodyExt as _, Empty};
    use hyper::client::conn::http2;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use weft_runtime::telemetry::{self, LogFormat};

    use super::*;

    const LOCAL: &str = "127.0.0.1:1";
    const REMOTE: &str = "10.0.0.1:1";
    /// Loopback, as a listener of IPv6 sees it.
    const MAPPED: &str = "[::ffff:127.0.0.1]:1";

    fn request(method: Method, uri: &str, peer: &str, accept: Option<&str>) -> AdminRequest {
        let mut builder = http::Request::builder().method(method).uri(uri);
        if let Some(accept) = accept {
            builder = builder.header("accept", accept);
        }
        let (head, ()) = builder.body(()).unwrap().into_parts();
        AdminRequest { head, body: Bytes::new(), peer: peer.parse().unwrap() }
    }

    /// The log of this process, which can be started only once.
    fn log() -> LogLevel {
        static LEVEL: LazyLock<LogLevel> = LazyLock::new(|| telemetry::init("off", LogFormat::Plain).unwrap().level);
        LEVEL.clone()
    }

    /// A response's status and body.
    async fn parts(response: AdminResponse) -> (u16, String) {
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn shutdown_is_for_local_posts_where_it_is_enabled() {
        const FORBIDDEN: &str = "only clients on localhost may do this\n";
        for (method, peer, enabled, status, body) in [
            (Method::POST, LOCAL, true, 200, "shutdown\n"),
            (Method::POST, MAPPED, true, 200, "shutdown\n"),
            (Method::POST, LOCAL, false, 404, "shutdown endpoint is not enabled\n"),
            (Method::POST, REMOTE, true, 403, FORBIDDEN),
            (Method::GET, LOCAL, true, 405, "method not allowed\n"),
        ] {
            let (sender, receiver) = watch::channel(false);
            let response = stop(&request(method.clone(), "/shutdown", peer, None), enabled, &sender);
            assert_eq!(parts(response).await, (status, body.to_owned()), "{method} {peer} {enabled}");
            assert_eq!(*receiver.borrow(), status == 200, "{method} {peer} {enabled}");
        }
    }

    #[tokio::test]
    async fn the_log_level_is_shown_and_changed_for_local_clients_alone() {
        // A target of this test alone, so that others' logs stay off.
        const DEBUG: &str = "weft_proxy::level=debug";
        let is_debug = || tracing::enabled!(target: "weft_proxy::level", tracing::Level::DEBUG);
        let log = log();
        for (method, peer, sent, status, answer, debugs) in [
            (Method::GET, LOCAL, &b""[..], 200, "off", false),
            (Method::PUT, REMOTE, DEBUG.as_bytes(), 403, "only clients", false),
            (Method::GET, REMOTE, b"", 403, "only clients", false),
            (Method::POST, LOCAL, DEBUG.as_bytes(), 405, "method not allowed", false),
            (Method::PUT, LOCAL, b"weft_proxy::level=debug\n", 204, "", true),
            (Method::GET, MAPPED, b"", 200, DEBUG, true),
            (Method::PUT, LOCAL, b"weft_proxy::level=loud", 400, "`weft_proxy::level=loud` is not a log filter", true),
            (Method::PUT, LOCAL, b"\xff", 400, "the log level is not UTF-8", true),
            (Method::GET, LOCAL, b"", 200, DEBUG, true),
            (Method::PUT, MAPPED, b"off", 204, "", false),
        ] {
            let mut request = request(method.clone(), "/proxy-log-level", peer, None);
            request.body = Bytes::from_static(sent);
            let response = log_level(&request, &log);
            let allowed = response.headers().get("allow").map(|allowed| allowed.to_str().unwrap().to_owned());
            assert_eq!(allowed.as_deref(), (status == 405).then_some("GET, PUT"));
            let (answered, body) = parts(response).await;
            let described = format!("{method} {peer} {}", sent.escape_ascii());
            assert_eq!((answered, is_debug()), (status, debugs), "{described}: {body}");
            assert!(body.starts_with(answer) && body.is_empty() == answer.is_empty(), "{described}: {body}");
        }
    }

    #[tokio::test]
    async fn the_environment_is_shown_whole_or_by_name() {
        let environment = BTreeMap::from([("A".to_owned(), "1".to_owned()), ("B".to_owned(), "2".to_owned())]);
        for (method, uri, accept, status, body) in [
            (Method::GET, "/env.json", None, 200, r#"{"A":"1","B":"2"}"#),
            (Method::GET, "/env.json?A&C", Some("application/json"), 200, r#"{"A":"1","C":null}"#),
            (Method::GET, "/env.json?A", Some("text/html, */*;q=0.1"), 200, r#"{"A":"1"}"#),
            (Method::GET, "/env.json", Some("text/html"), 406, "the answer is application/json\n"),
            (Method::GET, "/env.json?A=1", None, 400, "expected names of variables: /env.json?A&B\n"),
            (Method::POST, "/env.json", None, 405, "method not allowed\n"),
        ] {
            let response = env_json(&request(method, uri, REMOTE, accept), &environment);
            assert_eq!(response.status(), status, "{uri}");
            let bytes = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(bytes, body, "{uri}");
        }
    }

    #[tokio::test]
    async fn a_meshed_client_is_known_and_policy_decides() {
        use crate::{
            inbound::testing::{self, Mesh, OWN},
            policy::{
                Policies,
                testing::{authz, detecting, only},
            },
        };
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        const PROMETHEUS: &str = "prometheus.viz.serviceaccount.identity.linkerd.cluster.local";
        let mesh = Mesh::new();
        let mut config = testing::config();
        config.inbound.policy_timeout = std::time::Duration::from_secs(600);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        config.admin.listen = addr;
        let (shared, _drain) = testing::shared(config.clone(), &mesh);
        let policies = Policies::unreachable(config);
        let readiness = Readiness::new();
        let admin = Admin {
            registry: Metrics::new(),
            readiness,
            log: log(),
            shutdown: watch::channel(false).0,
            port: AdminPort::new(Arc::clone(&shared), &policies),
        };
        tokio::spawn(run(shared, admin, listener));

        // 127.0.0.1 is the pod itself, which policy admits.
        let connect = async |from: &str, identity: Option<&str>| {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(std::net::SocketAddr::new(from.parse().unwrap(), 0)).unwrap();
            let mut stream: Box<dyn OwnPortStream> = Box::new(socket.connect(addr).await.unwrap());
            if let Some(identity) = identity {
                let config = mesh.credentials(identity).client_config(&OWN.parse().unwrap(), &[]);
                let name = rustls::pki_types::ServerName::try_from(OWN).unwrap();
                let connector = tokio_rustls::TlsConnector::from(config);
                stream = Box::new(connector.connect(name, stream).await.unwrap());
            }
            stream
        };
        let get = async |from: &str, identity: Option<&str>, path: &str| {
            let mut stream = connect(from, identity).await;
            let request = format!("GET {path} HTTP/1.1\r\nhost: proxy\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut status = [0; 12];
            stream.read_exact(&mut status).await.unwrap();
            String::from_utf8_lossy(&status).into_owned()
        };
        const ELSEWHERE: &str = "127.0.0.2";
        // Before its policy is known, nothing but the probes, except for the pod itself.
        assert_eq!(get(ELSEWHERE, None, "/ready").await, "HTTP/1.1 200");
        assert_eq!(get(ELSEWHERE, Some(PROMETHEUS), "/metrics").await, "HTTP/1.1 503");
        assert_eq!(get("127.0.0.1", None, "/metrics").await, "HTTP/1.1 200");
        policies.publish(addr.port(), detecting(vec![authz("prometheus", only(&[PROMETHEUS]))]));
        for (identity, path, expected) in [
            (None, "/ready", "HTTP/1.1 200"),
            (None, "/metrics", "HTTP/1.1 403"),
            (Some("other.demo"), "/metrics", "HTTP/1.1 403"),
            (Some(PROMETHEUS), "/metrics", "HTTP/1.1 200"),
        ] {
            assert_eq!(get(ELSEWHERE, identity, path).await, expected, "{identity:?} {path}");

            let stream = TokioIo::new(connect(ELSEWHERE, identity).await);
            let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
            tokio::spawn(connection);
            let request = http::Request::get(format!("http://proxy{path}")).body(Empty::<Bytes>::new()).unwrap();
            let status = sender.send_request(request).await.unwrap().status();
            assert_eq!(status.as_str(), &expected[9..], "{identity:?} {path} over HTTP/2");
        }
    }
}
