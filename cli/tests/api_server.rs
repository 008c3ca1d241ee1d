//! How a command reaches an API server, and what a terminal shows until it answers.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    thread,
    time::Duration,
};

use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    crypto::aws_lc_rs,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A name that no resolver knows.
const NAME: &str = "kubernetes.invalid";
const NOT_FOUND: &str = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}"#;

/// An API server without objects.
struct ApiServer {
    address: SocketAddr,
    certificate: String,
    /// The head of each request.
    requests: Receiver<String>,
}

impl ApiServer {
    /// Each answer takes `delay`.
    fn start(delay: Duration) -> Self {
        let certified = rcgen::generate_simple_self_signed([NAME.to_owned(), "127.0.0.1".to_owned()]).unwrap();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der()));
        let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certified.cert.der().clone()], key);
        let config = Arc::new(config.unwrap());
        let (seen, requests) = channel();
        let address = serve(move |stream| {
            let mut stream = StreamOwned::new(ServerConnection::new(config.clone()).unwrap(), stream);
            // A client that does not want this server.
            let Some(head) = head(&mut stream) else { return };
            let _ = seen.send(head);
            thread::sleep(delay);
            let length = NOT_FOUND.len();
            let answer = format!(
                "HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
                 connection: close\r\n\r\n{NOT_FOUND}"
            );
            stream.write_all(answer.as_bytes()).unwrap();
            stream.conn.send_close_notify();
            let _ = stream.flush();
        });
        Self { address, certificate: certified.cert.pem(), requests }
    }

    /// A kubeconfig with this server under the host's name or address, more fields of the cluster, and a user.
    fn kubeconfig(&self, host: &str, cluster: Value, user: Value) -> Kubeconfig {
        let directory = tempfile::tempdir().unwrap();
        let authority = directory.path().join("ca.crt");
        std::fs::write(&authority, &self.certificate).unwrap();
        let mut entry =
            json!({"server": format!("https://{host}:{}", self.address.port()), "certificate-authority": authority});
        entry.as_object_mut().unwrap().extend(cluster.as_object().unwrap().clone());
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "a",
            "clusters": [{"name": "a", "cluster": entry}],
            "users": [{"name": "a", "user": user}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        });
        std::fs::write(directory.path().join("config"), config.to_string()).unwrap();
        Kubeconfig(directory)
    }
}

struct Kubeconfig(TempDir);

impl Kubeconfig {
    /// `weft upgrade`, which asks for one object and ends when it does not exist.
    fn upgrade(&self) -> Command {
        let mut weft = self.clean(env!("CARGO_BIN_EXE_weft"));
        weft.args(["upgrade", "--kubeconfig"]).arg(self.0.path().join("config"));
        weft
    }

    fn clean(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"] {
            command.env_remove(name).env_remove(name.to_lowercase());
        }
        command.env("HOME", self.0.path()).env("TERM", "xterm").stdin(Stdio::null());
        command
    }
}

/// Runs the command until it has the API server's answer; its standard error.
fn answered(mut command: Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("linkerd-config does not exist"), "{text}");
    text
}

/// Handles each connection in a thread of its own.
fn serve(handle: impl Fn(TcpStream) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (handle, stream) = (handle.clone(), stream.unwrap());
            thread::spawn(move || handle(stream));
        }
    });
    address
}

/// The head of a request; `None` if the client ends before it is complete.
fn head(stream: &mut impl Read) -> Option<String> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        bytes.extend(byte);
    }
    String::from_utf8(bytes).ok()
}

#[test]
fn a_terminal_says_what_a_slow_command_waits_for() {
    let server = ApiServer::start(Duration::from_millis(1500));
    let kubeconfig = server.kubeconfig("127.0.0.1", json!({}), json!({}));
    let mut terminal = kubeconfig.clean("script");
    let weft = format!("{} upgrade --kubeconfig {}/config", env!("CARGO_BIN_EXE_weft"), kubeconfig.0.path().display());
    let shown = terminal.args(["-q", "-c", &weft, "/dev/null"]).output().unwrap().stdout;
    let shown = String::from_utf8_lossy(&shown);
    let line = shown.find("waiting for: the API server\r\x1b[2K").unwrap_or_else(|| panic!("{shown:?}"));
    assert!(shown[line..].contains("linkerd-config does not exist"), "{shown:?}");
}

#[test]
fn a_pipe_gets_no_progress() {
    let server = ApiServer::start(Duration::from_millis(1500));
    let text = answered(server.kubeconfig("127.0.0.1", json!({}), json!({})).upgrade());
    let request = server.requests.try_recv().unwrap();
    assert!(request.starts_with("GET /api/v1/namespaces/linkerd/configmaps/linkerd-config "), "{request}");
    assert!(!text.contains("waiting") && !text.contains('\x1b'), "{text:?}");
}
