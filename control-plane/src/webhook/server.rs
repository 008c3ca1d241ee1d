//! The HTTPS server that the API server calls: `POST /` with an AdmissionReview (`admission.k8s.io/v1`).
//!
//! A body that is not an AdmissionReview is answered with HTTP 400 and the reason; an AdmissionReview is always
//! answered with one. [`Limits::WEBHOOK`] bounds connections and what they may hold.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Extensions, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Body;
use kube::core::{
    DynamicObject,
    admission::{AdmissionRequest, AdmissionReview},
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::Instant,
};
use tokio_rustls::{TlsAcceptor, rustls::ServerConfig};
use weft_runtime::{
    admin::text,
    drain::Watch,
    server::{Limits, RequestBody, Server},
};

use super::Admission;

/// The largest request body, in bytes: Linkerd's limit. An AdmissionReview contains an object at most twice, of up to
/// 1.5 MiB each.
const MAX_BODY_BYTES: usize = 10 * 1024 * 1024;
/// How long connections are still accepted after the drain began; within the grace period. By then, no client is sent
/// here.
pub(super) const LINGER: Duration = Duration::from_secs(3);
/// Protocols inside TLS.
pub(super) const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// The supported version of AdmissionReview.
const API_VERSION: &str = "admission.k8s.io/v1";

/// Serves until the drain and for `linger` beyond, asks clients to reconnect elsewhere, then lets requests in progress
/// finish.
pub(super) async fn serve(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    admission: Arc<Admission>,
    watch: Watch,
    linger: Duration,
) {
    let acceptor = TlsAcceptor::from(tls);
    let server = Server::new("webhook", Limits::WEBHOOK, watch).linger(linger);
    let service = move |request, _: SocketAddr| {
        let admission = admission.clone();
        async move { handle(&admission, request).await }
    };
    let handshake = move |stream: TcpStream| {
        let accepted = acceptor.accept(stream);
        async move { accepted.await.map(|stream| (stream, Extensions::new())) }
    };
    server.serve_with_extensions(listener, handshake, service).await;
}

async fn handle(admission: &Admission, request: Request<RequestBody>) -> Response<Full<Bytes>> {
    if request.uri().path() != "/" {
        return text(StatusCode::NOT_FOUND, "not found, expected POST /\n");
    }
    if request.method() != Method::POST {
        return text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed, expected POST /\n");
    }
    if request.body().size_hint().lower() > MAX_BODY_BYTES as u64 {
        return too_large();
    }
    let body = match Limited::new(request.into_body(), MAX_BODY_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => return too_large(),
        Err(error) => return text(StatusCode::BAD_REQUEST, format!("request body cannot be read: {error}\n")),
    };
    let review = match read(&body) {
        Ok(review) => review,
        Err(problem) => {
            tracing::warn!(%problem, "request without an AdmissionReview");
            return text(StatusCode::BAD_REQUEST, format!("{problem}\n"));
        }
    };
    let since = Instant::now();
    let answer = admission.answer(&review).await;
    tracing::debug!(
        kind = review.kind.kind,
        namespace = review.namespace,
        name = review.name,
        allowed = answer.allowed,
        patched = answer.patch.is_some(),
        problem = answer.result.message,
        us = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX),
        "reviewed"
    );
    let body = serde_json::to_vec(&answer.into_review()).expect("an answer is JSON");
    let mut response = Response::new(Full::new(Bytes::from(body)));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

/// Parses the request in an AdmissionReview.
pub(crate) fn read(body: &[u8]) -> Result<AdmissionRequest<DynamicObject>, String> {
    let review: AdmissionReview<DynamicObject> = serde_json::from_slice(body)
        .map_err(|error| format!("the body is not an AdmissionReview: {error}; expected one of {API_VERSION}"))?;
    if review.types.api_version != API_VERSION || review.types.kind != "AdmissionReview" {
        return Err(format!(
            "the body is a {} of {}, expected an AdmissionReview of {API_VERSION}",
            review.types.kind, review.types.api_version
        ));
    }
    review.try_into().map_err(|_| "the AdmissionReview holds no request".to_owned())
}

fn too_large() -> Response<Full<Bytes>> {
    text(StatusCode::PAYLOAD_TOO_LARGE, "request body too large, expected at most 10 MiB\n")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use weft_tls::serving::CurrentPair;

    use super::*;

    fn review(change: impl FnOnce(&mut Value)) -> Result<AdmissionRequest<DynamicObject>, String> {
        let mut review = json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": {
            "uid": "u", "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"}, "name": "", "namespace": "shop",
            "operation": "CREATE", "userInfo": {}, "dryRun": false,
            "object": {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "web-"}, "spec": {}}}});
        change(&mut review);
        read(&serde_json::to_vec(&review).unwrap())
    }

    /// A webhook on a real socket.
    struct Served {
        addr: std::net::SocketAddr,
        connector: tokio_rustls::TlsConnector,
        drain: weft_runtime::drain::Drain,
        server: tokio::task::JoinHandle<()>,
    }

    impl Served {
        async fn start(linger: Duration) -> Self {
            use weft_tls::serving::{self, Pair};
            let now = std::time::SystemTime::now();
            let made = serving::generate(&["hook.test".to_owned()], now, Duration::from_secs(60)).unwrap();
            let current = CurrentPair::default();
            current.set(Pair::from_pem(made.certificate.as_bytes(), made.key.as_bytes()).unwrap());
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = listener.local_addr().unwrap();
            let (drain, watch) = weft_runtime::drain::Drain::new();
            let tls = current.server_config(&ALPN, None);
            let server = tokio::spawn(serve(listener, tls, Arc::new(Admission::Profiles), watch, linger));
            let connector = tokio_rustls::TlsConnector::from(serving::client_config(&made.authority, None).unwrap());
            Self { addr, connector, drain, server }
        }
    }

    /// Sends a request as text; returns the answer as text once the server has closed the connection.
    async fn ask(connector: &tokio_rustls::TlsConnector, addr: std::net::SocketAddr, request: &str) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let stream = TcpStream::connect(addr).await.unwrap();
        let mut stream = connector.connect("hook.test".try_into().unwrap(), stream).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn lingers_when_told_to_end_and_asks_clients_to_go() {
        let Served { addr, connector, drain, server } = Served::start(Duration::from_secs(1)).await;
        let drained = tokio::spawn(drain.drain(Duration::from_secs(10)));
        tokio::task::yield_now().await;
        let answer = ask(&connector, addr, "GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 405") && answer.contains("connection: close"), "{answer}");
        server.await.unwrap();
        assert!(drained.await.unwrap(), "nothing is left");
        assert!(TcpStream::connect(addr).await.is_err(), "the port is closed");
    }

    #[tokio::test]
    async fn connections_without_a_request_keep_no_review_waiting() {
        use tokio::io::AsyncWriteExt;
        weft_runtime::files::raise_limit().unwrap();
        let ask_one = async |served: &Served, kind: &str| {
            let asked = ask(&served.connector, served.addr, "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            let answer = tokio::time::timeout(Duration::from_secs(10), asked).await;
            let answer = answer.unwrap_or_else(|_| panic!("no answer beside connections with {kind}"));
            assert!(answer.starts_with("HTTP/1.1 405"), "{kind}: {answer}");
        };
        for (kind, bytes) in
            [("nothing", &b""[..]), ("half a ClientHello", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03")]
        {
            let served = Served::start(Duration::ZERO).await;
            let mut held = Vec::new();
            for _ in 0..10_000 {
                let mut stream = TcpStream::connect(served.addr).await.unwrap();
                stream.write_all(bytes).await.unwrap();
                held.push(stream);
            }
            ask_one(&served, kind).await;
        }
        // A handshake costs a client more: as many as there is room for, and some more.
        for (kind, bytes) in [
            ("TLS alone", &b""[..]),
            ("half a head", b"POST / HTTP/1.1\r\nhost: x\r\n"),
            ("half a body", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"),
            ("HTTP/2 alone", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"),
        ] {
            let served = Served::start(Duration::ZERO).await;
            let mut held = Vec::new();
            for _ in 0..Limits::WEBHOOK.connections + 20 {
                let stream = TcpStream::connect(served.addr).await.unwrap();
                let mut stream = served.connector.connect("hook.test".try_into().unwrap(), stream).await.unwrap();
                stream.write_all(bytes).await.unwrap();
                held.push(stream);
            }
            ask_one(&served, kind).await;
        }
    }

    #[tokio::test]
    async fn answers_reviews_and_refuses_everything_else() {
        let request = |method: &str, path: &str, body: &str| {
            let length = body.len();
            format!(
                "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
            )
        };
        let review = json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": {
            "uid": "u-1", "kind": {"group": "linkerd.io", "version": "v1alpha2", "kind": "ServiceProfile"},
            "resource": {"group": "linkerd.io", "version": "v1alpha2", "resource": "serviceprofiles"}, "name": "web",
            "namespace": "shop", "operation": "CREATE", "userInfo": {}, "dryRun": false,
            "object": {"apiVersion": "linkerd.io/v1alpha2", "kind": "ServiceProfile", "metadata": {"name": "web"},
                "spec": {"routes": [{"name": "r", "condition": {}}]}}}});
        let served = Served::start(Duration::ZERO).await;
        let requests = [
            request("POST", "/?timeout=10s", &review.to_string()),
            request("POST", "/", "{}"),
            request("GET", "/", ""),
            request("POST", "/elsewhere", "{}"),
            "POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 10485761\r\n\r\n".to_owned(),
        ];
        for (request, expected) in requests.iter().zip([
            &["HTTP/1.1 200", "\"uid\":\"u-1\"", "\"allowed\":false", "spec.routes[0].condition", "\"code\":400"][..],
            &["HTTP/1.1 400", "the body is not an AdmissionReview"],
            &["HTTP/1.1 405"],
            &["HTTP/1.1 404"],
            &["HTTP/1.1 413", "at most 10 MiB"],
        ]) {
            let answer = ask(&served.connector, served.addr, request).await;
            for part in expected {
                assert!(answer.contains(part), "{part:?} is not in {answer}");
            }
        }
        assert!(served.drain.drain(Duration::from_secs(5)).await, "nothing is left");
        served.server.await.unwrap();
    }

    #[test]
    fn reads_a_review_and_refuses_other_bodies() {
        assert_eq!(review(|_| ()).unwrap().namespace.as_deref(), Some("shop"));
        let beta = review(|review| review["apiVersion"] = json!("admission.k8s.io/v1beta1")).unwrap_err();
        assert!(beta.contains("expected an AdmissionReview of admission.k8s.io/v1"), "{beta}");
        assert!(review(|review| review["request"] = Value::Null).unwrap_err().contains("no request"));
        assert!(review(|review| review["request"]["uid"] = json!(1)).unwrap_err().contains("not an AdmissionReview"));
        assert!(read(b"GET / HTTP/1.1").unwrap_err().contains("not an AdmissionReview"));
        assert!(read(b"").is_err());
    }
}
