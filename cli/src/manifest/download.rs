//! One HTTP request for a manifest, through the proxy that the environment names.
//!
//! `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` work as in curl. Plain HTTP goes to a proxy in absolute
//! form, because proxies rarely tunnel it; HTTPS goes through a tunnel. Servers are verified by the system's trust
//! store.

use std::{error::Error as StdError, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Uri,
    header::{ACCEPT, HOST, LOCATION, PROXY_AUTHORIZATION, USER_AGENT},
    uri::Scheme,
};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{
    body::{Bytes, Incoming},
    client::conn::http1,
    rt::{Read, Write},
};
use hyper_util::client::{
    legacy::connect::{
        HttpConnector,
        proxy::{SocksV5, Tunnel},
    },
    proxy::matcher::{Intercept, Matcher},
};
use kube::{Config, client::ConfigExt as _};
use tower::{Service, ServiceExt as _};

/// Deadline of the whole download.
const DEADLINE: Duration = Duration::from_secs(60);
/// Most bytes of an answer: many times what etcd stores of one object.
const MOST_BYTES: usize = 64 << 20;
/// Most redirections, curl's default.
const REDIRECTS: usize = 50;

/// The text at a URL.
///
/// # Errors
/// When it cannot be fetched, or is not text; the error names the URL.
pub(super) async fn get(url: Uri) -> Result<String> {
    get_with(url, &Matcher::from_env()).await
}

async fn get_with(url: Uri, proxies: &Matcher) -> Result<String> {
    let all = async {
        let mut at = url.clone();
        for _ in 0..=REDIRECTS {
            let response = exchange(&at, proxies).await.with_context(|| at.to_string())?;
            let status = response.status();
            if status.is_redirection() && status != StatusCode::NOT_MODIFIED {
                at = redirected(&at, &response)?;
                continue;
            }
            if status != StatusCode::OK {
                bail!("{at}: the server answered {status}");
            }
            let body = Limited::new(response.into_body(), MOST_BYTES).collect().await;
            let bytes = body.map_err(|error| anyhow!("{at}: {error}"))?.to_bytes();
            return String::from_utf8(bytes.into()).with_context(|| format!("{at}: not text"));
        }
        bail!("{url}: more than {REDIRECTS} redirections")
    };
    tokio::time::timeout(DEADLINE, all)
        .await
        .with_context(|| format!("{url}: no answer within {}s", DEADLINE.as_secs()))?
}

/// Where an answer points to, which may be a path.
fn redirected(at: &Uri, response: &Response<Incoming>) -> Result<Uri> {
    let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    let location = location.with_context(|| format!("{at}: redirected without a location"))?;
    let next: Uri = location.parse().with_context(|| format!("{at}: redirected to {location:?}"))?;
    if next.scheme().is_some() {
        if at.scheme() == Some(&Scheme::HTTPS) && next.scheme() != Some(&Scheme::HTTPS) {
            bail!("{at}: redirected to {next}, which is not encrypted");
        }
        return Ok(next);
    }
    let mut parts = next.into_parts();
    parts.scheme = at.scheme().cloned();
    parts.authority = at.authority().cloned();
    Uri::from_parts(parts).with_context(|| format!("{at}: redirected to {location:?}"))
}

async fn exchange(url: &Uri, proxies: &Matcher) -> Result<Response<Incoming>> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    let encrypted = url.scheme() == Some(&Scheme::HTTPS);
    // The cluster of this configuration is never asked: it only has the settings of TLS.
    let tls = Config::new(url.clone());
    let Some(proxy) = proxies.intercept(url) else {
        let io = connect(tls.rustls_https_connector_with_connector(tcp)?, url).await?;
        return send(io, url, None).await;
    };
    let address = proxy.uri().clone();
    let through = || format!("through the proxy {address}");
    let io = match address.scheme_str() {
        Some("socks5" | "socks5h") => {
            let mut socks = SocksV5::new(address.clone(), tcp);
            if let Some((user, password)) = proxy.raw_auth() {
                socks = socks.with_auth(user.to_owned(), password.to_owned());
            }
            let io = connect(tls.rustls_https_connector_with_connector(socks)?, url).await.with_context(through)?;
            return send(io, url, None).await;
        }
        Some("http" | "https") => tls.rustls_https_connector_with_connector(tcp)?,
        other => bail!("proxy {address}: scheme {other:?}, expected http, https, socks5 or socks5h"),
    };
    if !encrypted {
        let io = connect(io, &address).await.with_context(through)?;
        return send(io, url, Some(&proxy)).await.with_context(through);
    }
    let mut tunnel = Tunnel::new(address.clone(), io);
    if let Some(value) = proxy.basic_auth() {
        tunnel = tunnel.with_auth(value.clone());
    }
    let io = connect(tls.rustls_https_connector_with_connector(tunnel)?, url).await.with_context(through)?;
    send(io, url, None).await
}

async fn connect<C>(connector: C, to: &Uri) -> Result<C::Response>
where
    C: Service<Uri, Error: Into<Box<dyn StdError + Send + Sync>>>,
{
    connector.oneshot(to.clone()).await.map_err(|error| anyhow::Error::from_boxed(error.into()))
}

/// Sends the request on a new connection; `proxy` is the other end if it is not the server.
async fn send<T>(io: T, url: &Uri, proxy: Option<&Intercept>) -> Result<Response<Incoming>>
where
    T: Read + Write + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(io).await?;
    // Ends with the answer's body, or when the sender is gone.
    tokio::spawn(connection);
    let path = url.path_and_query().map_or("/", |path| path.as_str());
    let host = url.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    // Names and passwords in URLs are not for the header.
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let target = if proxy.is_some() { format!("http://{host}{path}") } else { path.to_owned() };
    let mut request = Request::builder()
        .method(Method::GET)
        .uri(target)
        .header(HOST, host)
        .header(ACCEPT, "*/*")
        .header(USER_AGENT, concat!("weft/", env!("CARGO_PKG_VERSION")))
        .body(Empty::<Bytes>::new())?;
    if let Some(value) = proxy.and_then(Intercept::basic_auth) {
        let value: HeaderValue = value.clone();
        request.headers_mut().insert(PROXY_AUTHORIZATION, value);
    }
    Ok(sender.send_request(request).await?)
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
        task::JoinHandle,
    };

    use super::*;

    /// A server that gives each connection the next answer, and returns the requests.
    async fn server(answers: Vec<String>) -> (String, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serving = tokio::spawn(async move {
            let mut requests = Vec::new();
            for answer in answers {
                let (mut connection, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(connection.read_u8().await.unwrap());
                }
                connection.write_all(answer.as_bytes()).await.unwrap();
                requests.push(String::from_utf8(request).unwrap());
            }
            requests
        });
        (address, serving)
    }

    fn ok(body: &str) -> String {
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    }

    async fn fetch(url: &str, proxies: &Matcher) -> Result<String> {
        get_with(url.parse().unwrap(), proxies).await
    }

    #[tokio::test]
    async fn redirections_are_followed_and_may_be_paths() {
        let moved = "HTTP/1.1 302 Found\r\nLocation: /real.yaml?x=1\r\nContent-Length: 0\r\n\r\n".to_owned();
        let (address, serving) = server(vec![moved, ok("kind: Pod\n")]).await;
        let text = fetch(&format!("http://{address}/web.yaml"), &Matcher::builder().build()).await.unwrap();
        assert_eq!(text, "kind: Pod\n");
        let requests = serving.await.unwrap();
        assert!(requests[0].starts_with("GET /web.yaml HTTP/1.1\r\n"), "{requests:?}");
        assert!(requests[1].starts_with("GET /real.yaml?x=1 HTTP/1.1\r\n"), "{requests:?}");
    }

    #[tokio::test]
    async fn an_answer_that_is_not_ok_is_an_error_with_the_url() {
        let (address, _serving) = server(vec!["HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_owned()]).await;
        let error = fetch(&format!("http://{address}/no.yaml"), &Matcher::builder().build()).await.unwrap_err();
        assert!(format!("{error:#}").contains("/no.yaml: the server answered 404"), "{error:#}");
    }

    #[tokio::test]
    async fn plain_http_goes_to_a_proxy_in_absolute_form_with_its_password() {
        let (address, serving) = server(vec![ok("kind: Pod\n")]).await;
        let proxies = Matcher::builder().http(format!("http://user:secret@{address}")).build();
        fetch("http://manifests.invalid/web.yaml", &proxies).await.unwrap();
        let request = serving.await.unwrap().remove(0);
        assert!(request.starts_with("GET http://manifests.invalid/web.yaml HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("proxy-authorization: Basic dXNlcjpzZWNyZXQ="), "{request}");
    }

    #[tokio::test]
    async fn https_asks_a_proxy_for_a_tunnel() {
        let refused = "HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n".to_owned();
        let (address, serving) = server(vec![refused]).await;
        let proxies = Matcher::builder().https(format!("http://{address}")).build();
        let error = fetch("https://manifests.invalid/web.yaml", &proxies).await.unwrap_err();
        assert!(format!("{error:#}").contains(&format!("through the proxy http://{address}")), "{error:#}");
        assert!(serving.await.unwrap()[0].starts_with("CONNECT manifests.invalid:443 HTTP/1.1\r\n"));
    }

    #[tokio::test]
    async fn no_proxy_names_those_that_are_reached_directly() {
        let (address, serving) = server(vec![ok("direct")]).await;
        let proxies = Matcher::builder().all("http://127.0.0.1:1").no("127.0.0.1").build();
        assert_eq!(fetch(&format!("http://{address}/"), &proxies).await.unwrap(), "direct");
        assert!(serving.await.unwrap()[0].starts_with("GET / HTTP/1.1\r\n"));
    }
}
