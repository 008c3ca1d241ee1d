//! How a proxy starts and ends. One that cannot prove its identity does not serve: it names the broken setting and
//! exits with 64, whichever setting it is, and never falls back to a plaintext inbound listener.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    process::{Output, Stdio},
    sync::atomic::{AtomicU8, Ordering},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    process::Command,
    time::timeout,
};
use weft_test_kit::{binaries, wait::eventually};
use weft_tls::ca::Root;

/// A proxy that refuses its settings exits at once, but a busy machine takes seconds to start it.
const REFUSES_WITHIN: Duration = Duration::from_secs(60);
/// sysexits.h: EX_USAGE.
const EXIT_USAGE: i32 = 64;

/// A proxy's settings and files, all valid until a test breaks one. Port 0, because nothing connects to it.
struct Setup {
    variables: Vec<(&'static str, String)>,
    files: TempDir,
}

impl Setup {
    fn good() -> Self {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("token"), "a token").unwrap();
        let path = |name: &str| files.path().join(name).display().to_string();
        let variables = vec![
            ("LINKERD2_PROXY_DESTINATION_SVC_ADDR", "127.0.0.1:1".to_owned()),
            ("LINKERD2_PROXY_POLICY_SVC_ADDR", "127.0.0.1:1".to_owned()),
            ("LINKERD2_PROXY_IDENTITY_SVC_ADDR", "127.0.0.1:1".to_owned()),
            ("LINKERD2_PROXY_POLICY_WORKLOAD", "shop:web-0".to_owned()),
            ("LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS", "127.0.0.1:0".to_owned()),
            ("LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "127.0.0.1:0".to_owned()),
            ("LINKERD2_PROXY_ADMIN_LISTEN_ADDR", "127.0.0.1:0".to_owned()),
            ("LINKERD2_PROXY_CONTROL_LISTEN_ADDR", "127.0.0.1:0".to_owned()),
            ("LINKERD2_PROXY_IDENTITY_DIR", path("identity")),
            ("LINKERD2_PROXY_IDENTITY_TOKEN_FILE", path("token")),
            ("LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS", Root::generate("root").unwrap().certificate_pem().to_owned()),
            ("LINKERD2_PROXY_IDENTITY_LOCAL_NAME", "web.shop.serviceaccount.identity.linkerd.cluster.local".to_owned()),
        ];
        fs::create_dir(files.path().join("identity")).unwrap();
        Self { variables, files }
    }

    fn set(mut self, variable: &'static str, value: &str) -> Self {
        self.variables.retain(|(name, _)| *name != variable);
        self.variables.push((variable, value.to_owned()));
        self
    }

    fn file(self, name: &str, content: &str) -> Self {
        fs::write(self.files.path().join(name), content).unwrap();
        self
    }

    fn proxy(&self) -> Command {
        let mut proxy = Command::new(binaries::directory().unwrap().join("weft-proxy"));
        proxy.env_clear().envs(self.variables.iter().map(|(name, value)| (name, value)));
        proxy.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        proxy
    }

    /// The proxy's exit, or none if it keeps running.
    async fn run(&self) -> Option<Output> {
        timeout(REFUSES_WITHIN, self.proxy().output()).await.ok().map(Result::unwrap)
    }
}

/// An address without a listener, which nothing else on this host uses: connections of other tests take ports of
/// 127.0.0.1.
fn unused_address() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let ip = Ipv4Addr::new(127, high, low, NEXT.fetch_add(1, Ordering::Relaxed));
    TcpListener::bind((ip, 0)).unwrap().local_addr().unwrap()
}

async fn refuses(setup: Setup, names: &str) {
    let output = setup.run().await.unwrap_or_else(|| panic!("the proxy runs on although {names} is broken"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(EXIT_USAGE), "{stderr}");
    assert!(stderr.contains(names), "{names} is not named: {stderr}");
}

#[tokio::test]
async fn a_proxy_with_everything_in_order_runs() {
    let admin = unused_address();
    let setup =
        Setup::good().set("LINKERD2_PROXY_LOG", "error").set("LINKERD2_PROXY_ADMIN_LISTEN_ADDR", &admin.to_string());
    let mut proxy = setup.proxy().spawn().unwrap();
    let alive = eventually("the admin server", REFUSES_WITHIN, async || ask(admin, "/live").await.ok_or("no answer"));
    let alive = alive.await;
    assert!(alive.starts_with("HTTP/1.1 200"), "{alive}");
    let ended = proxy.try_wait().unwrap();
    assert!(ended.is_none(), "it ended: {ended:?}");
}

#[tokio::test]
async fn refuses_a_variable_that_cannot_be_read() {
    for variable in ["LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "LINKERD2_PROXY_INBOUND_DEFAULT_POLICY"] {
        refuses(Setup::good().set(variable, "nonsense"), variable).await;
    }
}

#[tokio::test]
async fn refuses_a_variable_that_is_missing() {
    for variable in ["LINKERD2_PROXY_IDENTITY_LOCAL_NAME", "LINKERD2_PROXY_IDENTITY_DIR"] {
        refuses(Setup::good().set(variable, ""), variable).await;
    }
}

#[tokio::test]
async fn refuses_to_run_without_identity() {
    let variable = "LINKERD2_PROXY_IDENTITY_DISABLED";
    refuses(Setup::good().set(variable, "true"), variable).await;
}

#[tokio::test]
async fn refuses_trust_anchors_that_are_no_certificates() {
    let variable = "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS";
    let broken = "-----BEGIN CERTIFICATE-----\nbm9uc2Vuc2U=\n-----END CERTIFICATE-----\n";
    refuses(Setup::good().set(variable, broken), variable).await;
    refuses(Setup::good().set(variable, "not PEM at all"), variable).await;
}

#[tokio::test]
async fn refuses_a_key_that_is_none() {
    refuses(Setup::good().file("identity/key.p8", "no key").file("identity/csr.der", "no request"), "key.p8").await;
}

#[tokio::test]
async fn refuses_a_token_that_is_missing_or_empty() {
    let variable = "LINKERD2_PROXY_IDENTITY_TOKEN_FILE";
    assert!(!Path::new("/nonexistent/token").exists());
    refuses(Setup::good().set(variable, "/nonexistent/token"), "/nonexistent/token").await;
    refuses(Setup::good().file("token", ""), "token").await;
}

#[tokio::test]
async fn a_port_that_is_taken_is_named_and_ends_the_proxy_with_1() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output =
        Setup::good().set("LINKERD2_PROXY_ADMIN_LISTEN_ADDR", &address).run().await.expect("the proxy runs on");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&format!("admin on {address}")), "{stderr}");
}

/// The kernel accepts connections from the start, so that none is refused; the identity controller of this proxy never
/// answers.
#[tokio::test]
async fn without_a_certificate_connections_wait_and_a_signal_ends_the_proxy_with_0() {
    let (inbound, outbound, admin) = (unused_address(), unused_address(), unused_address());
    let setup = Setup::good()
        .set("LINKERD2_PROXY_INBOUND_LISTEN_ADDR", &inbound.to_string())
        .set("LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS", &outbound.to_string())
        .set("LINKERD2_PROXY_ADMIN_LISTEN_ADDR", &admin.to_string());
    let mut proxy = setup.proxy().stderr(Stdio::null()).spawn().unwrap();
    eventually("the admin server", REFUSES_WITHIN, async || ask(admin, "/live").await.ok_or("does not answer")).await;
    let ready = ask(admin, "/ready").await.unwrap();
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    for address in [inbound, outbound] {
        let mut connection = TcpStream::connect(address).await.unwrap();
        connection.write_all(b"GET / HTTP/1.1\r\nhost: web\r\n\r\n").await.unwrap();
        let read = timeout(Duration::from_millis(300), connection.read(&mut [0; 64])).await;
        assert!(read.is_err(), "a connection to {address} is answered or closed: {read:?}");
    }
    kill(Pid::from_raw(proxy.id().unwrap().cast_signed()), Signal::SIGTERM).unwrap();
    let ended = timeout(REFUSES_WITHIN, proxy.wait()).await.expect("the proxy does not end").unwrap();
    assert_eq!(ended.code(), Some(0));
}

/// The answer of the admin server to a GET, or none while nobody listens.
async fn ask(admin: SocketAddr, path: &str) -> Option<String> {
    let mut connection = TcpStream::connect(admin).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}
