//! The admin server: `/live`, `/ready`, `/ping`, `/metrics`, and the routes that a binary adds. HTTP/1.1 and HTTP/2,
//! in plain text unless the binary provides a handshake.

use std::{collections::HashMap, fmt, future::Future, io, io::Write as _, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use http::{Extensions, HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Full, Limited};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

use crate::{
    drain::Drain,
    metrics::{Format, Metrics},
    readiness::Readiness,
    server::{Limits, RequestBody, Server, plain},
};

/// The largest request body that a route accepts, in bytes: enough for a log filter.
const MAX_BODY_BYTES: usize = 16 * 1024;

/// The answer of a route.
pub type AdminResponse = Response<Full<Bytes>>;
type Handler = Arc<dyn Fn(&AdminRequest) -> AdminResponse + Send + Sync>;
type Guard = Arc<dyn Fn(&AdminRequest) -> Option<AdminResponse> + Send + Sync>;

/// A request to a route.
#[derive(Debug)]
pub struct AdminRequest {
    /// Method, URI and headers.
    pub head: Parts,
    /// At most 16 KiB.
    pub body: Bytes,
    /// Address of the client; IPv4-mapped IPv6 addresses are unwrapped.
    pub peer: SocketAddr,
}

/// The server, before it serves.
#[derive(Clone)]
pub struct Admin {
    metrics: Metrics,
    readiness: Readiness,
    routes: HashMap<&'static str, Vec<(Option<Method>, Handler)>>,
    guard: Option<Guard>,
}

impl Admin {
    /// Creates a server with the standard routes.
    #[must_use]
    pub fn new(metrics: Metrics, readiness: Readiness) -> Self {
        Self { metrics, readiness, routes: HashMap::new(), guard: None }
    }

    /// Adds a route for one method.
    #[must_use]
    pub fn route(
        self,
        method: Method,
        path: &'static str,
        handler: impl Fn(&AdminRequest) -> AdminResponse + Send + Sync + 'static,
    ) -> Self {
        self.add(Some(method), path, Arc::new(handler))
    }

    /// Adds a route for every method.
    #[must_use]
    pub fn route_any(
        self,
        path: &'static str,
        handler: impl Fn(&AdminRequest) -> AdminResponse + Send + Sync + 'static,
    ) -> Self {
        self.add(None, path, Arc::new(handler))
    }

    fn add(mut self, method: Option<Method>, path: &'static str, handler: Handler) -> Self {
        self.routes.entry(path).or_default().push((method, handler));
        self
    }

    /// Calls `guard` before every request; if it returns a response, that is sent instead of the route's.
    #[must_use]
    pub fn guard(mut self, guard: impl Fn(&AdminRequest) -> Option<AdminResponse> + Send + Sync + 'static) -> Self {
        self.guard = Some(Arc::new(guard));
        self
    }

    /// Serves plain text until `shutdown` completes.
    pub async fn serve(self, listener: TcpListener, shutdown: impl Future<Output = ()>) {
        self.serve_with(listener, plain, shutdown).await;
    }

    /// Serves on the stream that `handshake` returns until `shutdown` completes; see
    /// [`Server::serve_with_extensions`].
    pub async fn serve_with<H, HF, IO>(self, listener: TcpListener, handshake: H, shutdown: impl Future<Output = ()>)
    where
        H: Fn(TcpStream) -> HF,
        HF: Future<Output = io::Result<(IO, Extensions)>> + Send + 'static,
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let admin = Arc::new(self);
        // Probes and scrapes are answered until the process exits: nothing is drained.
        let (_drain, watch) = Drain::new();
        let serving = Server::new("admin", Limits::ADMIN, watch).serve_with_extensions(
            listener,
            handshake,
            move |request, peer| {
                let admin = admin.clone();
                async move { admin.handle(request, peer).await }
            },
        );
        tokio::select! {
            () = shutdown => {}
            () = serving => {}
        }
    }

    async fn handle(&self, request: Request<RequestBody>, peer: SocketAddr) -> AdminResponse {
        let (head, body) = request.into_parts();
        let Ok(body) = Limited::new(body, MAX_BODY_BYTES).collect().await else {
            return text(StatusCode::PAYLOAD_TOO_LARGE, "request body too large\n");
        };
        self.respond(&AdminRequest { head, body: body.to_bytes(), peer })
    }

    fn respond(&self, request: &AdminRequest) -> AdminResponse {
        if let Some(refusal) = self.guard.as_ref().and_then(|guard| guard(request)) {
            return refusal;
        }
        let path = request.head.uri.path();
        if let Some(methods) = self.routes.get(path) {
            let fits = |method: &Option<Method>| method.as_ref().is_none_or(|method| *method == request.head.method);
            return match methods.iter().find(|(method, _)| fits(method)) {
                Some((_, handler)) => handler(request),
                None => text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n"),
            };
        }
        if !matches!(path, "/live" | "/ready" | "/ping" | "/metrics") {
            return text(StatusCode::NOT_FOUND, "not found\n");
        }
        if !matches!(request.head.method, Method::GET | Method::HEAD) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n");
        }
        match path {
            "/live" => text(StatusCode::OK, "live\n"),
            "/ping" => text(StatusCode::OK, "pong\n"),
            "/ready" => match self.readiness.reasons() {
                reasons if reasons.is_empty() => text(StatusCode::OK, "ready\n"),
                reasons => text(StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {}\n", reasons.join(", "))),
            },
            _ => self.scrape(&request.head.headers),
        }
    }

    fn scrape(&self, headers: &HeaderMap) -> AdminResponse {
        let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
        let format = Format::accepted(accept.unwrap_or_default());
        let body = self.metrics.encode(format);
        let compressed = if accepts_gzip(headers) { gzip(&body).ok() } else { None };
        let is_compressed = compressed.is_some();
        let mut response = text(StatusCode::OK, compressed.map_or_else(|| Bytes::from(body), Bytes::from));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
        headers.insert(header::VARY, HeaderValue::from_static("accept, accept-encoding"));
        if is_compressed {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").field("routes", &self.routes.keys()).finish_non_exhaustive()
    }
}

/// Whether the client takes gzip (RFC 9110 section 12.5.3): it is listed, and not with a weight of 0.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT_ENCODING).iter();
    let codings = values.flat_map(|value| value.to_str().unwrap_or_default().split(','));
    codings.into_iter().any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        let is_gzip = matches!(name.trim().to_ascii_lowercase().as_str(), "gzip" | "x-gzip");
        let weight = weight.trim().strip_prefix("q=").map(str::parse::<f32>);
        is_gzip && weight.is_none_or(|weight| weight.is_ok_and(|weight| weight > 0.0))
    })
}

/// Compresses fast: metrics repeat themselves so much that more effort gains little.
fn gzip(text: &str) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(text.len() / 8), Compression::fast());
    encoder.write_all(text.as_bytes())?;
    encoder.finish()
}

/// A plain-text answer.
#[must_use]
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> AdminResponse {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn get(admin: &Admin, method: Method, path: &str) -> (u16, String) {
        let (head, ()) = Request::builder().method(method).uri(path).body(()).unwrap().into_parts();
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let response = admin.respond(&AdminRequest { head, body: Bytes::new(), peer });
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn standard_routes_and_added_ones() {
        let readiness = Readiness::new();
        let gate = readiness.gate("identity");
        let admin = Admin::new(Metrics::new(), readiness)
            .route(Method::POST, "/shutdown", |_| text(StatusCode::OK, "shutdown\n"));
        let not_ready = get(&admin, Method::GET, "/ready").await;
        assert_eq!(not_ready, (503, "not ready: identity\n".to_owned()));
        gate.open();
        for (method, path, status, body) in [
            (Method::GET, "/live", 200, "live\n"),
            (Method::GET, "/ping", 200, "pong\n"),
            (Method::GET, "/ready", 200, "ready\n"),
            (Method::HEAD, "/ready", 200, "ready\n"),
            (Method::POST, "/ready", 405, "method not allowed\n"),
            (Method::POST, "/shutdown", 200, "shutdown\n"),
            (Method::GET, "/shutdown", 405, "method not allowed\n"),
            (Method::GET, "/nothing", 404, "not found\n"),
        ] {
            assert_eq!(get(&admin, method.clone(), path).await, (status, body.to_owned()), "{method} {path}");
        }
    }

    #[tokio::test]
    async fn metrics_are_compressed_for_clients_that_take_gzip() {
        use std::io::Read as _;
        let admin = Admin::new(Metrics::new(), Readiness::new());
        for (accepted, is_compressed) in [
            (None, false),
            (Some("gzip"), true),
            (Some("br, GZIP;q=0.5"), true),
            (Some("deflate, gzip;q=0"), false),
            (Some("gzip;q=many"), false),
            (Some("identity"), false),
        ] {
            let mut request = Request::get("/metrics");
            if let Some(accepted) = accepted {
                request = request.header("accept-encoding", accepted);
            }
            let (head, ()) = request.body(()).unwrap().into_parts();
            let peer = SocketAddr::from(([127, 0, 0, 1], 1));
            let response = admin.respond(&AdminRequest { head, body: Bytes::new(), peer });
            let encoding = response.headers().get("content-encoding").map(|value| value.to_str().unwrap().to_owned());
            assert_eq!(encoding.as_deref(), is_compressed.then_some("gzip"), "{accepted:?}");
            let bytes = response.into_body().collect().await.unwrap().to_bytes();
            let mut text = String::new();
            if is_compressed {
                flate2::read::GzDecoder::new(&*bytes).read_to_string(&mut text).unwrap();
                assert!(bytes.len() < text.len());
            } else {
                text = String::from_utf8(bytes.to_vec()).unwrap();
            }
            assert!(text.contains("process_start_time_seconds "), "{accepted:?} {text}");
        }
    }

    #[tokio::test]
    async fn metrics_are_served_over_http() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let admin = Admin::new(Metrics::new(), Readiness::new());
        tokio::spawn(admin.serve(listener, std::future::pending()));
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains("process_start_time_seconds"), "{answer}");
    }
}
