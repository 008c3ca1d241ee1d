//! How a command reaches an API server, and what a terminal shows until it answers.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, ChildStdout, Command, Output, Stdio},
    sync::{
        Arc, RwLock,
        mpsc::{Receiver, channel},
    },
    thread,
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

/// An API server with a few objects or none.
struct ApiServer {
    address: SocketAddr,
    certificate: String,
    /// The head of each request.
    requests: Receiver<String>,
}

impl ApiServer {
    /// A server without objects.
    fn start() -> Self {
        Self::with(|| (), Vec::new())
    }

    /// A server with these objects, by the beginnings of requests, such as `GET /version`. It waits before each answer.
    fn with(wait: impl Fn() + Clone + Send + 'static, objects: Vec<(&'static str, Value)>) -> Self {
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
            let object = objects.iter().find(|(request, _)| head.starts_with(request));
            let (status, body) = match object {
                Some((_, object)) => ("200 OK", object.to_string()),
                None => ("404 Not Found", NOT_FOUND.to_owned()),
            };
            let lengths = head.lines().filter_map(|line| line.split_once(": "));
            let length = lengths.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
            let content = length.filter_map(|(_, value)| value.parse::<u64>().ok()).sum::<u64>();
            io::copy(&mut Read::by_ref(&mut stream).take(content), &mut io::sink()).unwrap();
            let _ = seen.send(head);
            wait();
            let length = body.len();
            let answer = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
                 connection: close\r\n\r\n{body}"
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
    /// What a command that fails prints on standard error.
    fn failed(&self, arguments: &[&str]) -> String {
        let mut weft = self.clean(env!("CARGO_BIN_EXE_weft"));
        let output = weft.args(arguments).arg("--kubeconfig").arg(self.0.path().join("config")).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{arguments:?}: {text}");
        text
    }

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

/// A command of `weft` on a terminal.
struct Terminal {
    process: Child,
    screen: ChildStdout,
    shown: String,
}

impl Terminal {
    fn start(kubeconfig: &Kubeconfig, arguments: &str) -> Self {
        let weft = format!("{} {arguments}", env!("CARGO_BIN_EXE_weft"));
        let mut script = kubeconfig.clean("script");
        script.args(["-q", "-c", &weft, "/dev/null"]).stdout(Stdio::piped());
        let mut process = script.spawn().unwrap();
        let screen = process.stdout.take().unwrap();
        Self { process, screen, shown: String::new() }
    }

    /// Reads until it shows this.
    fn wait_for(&mut self, text: &str) {
        while !self.shown.contains(text) {
            let mut piece = [0; 1024];
            let length = self.screen.read(&mut piece).unwrap();
            assert!(length > 0, "{text:?} is not shown: {:?}", self.shown);
            self.shown.push_str(&String::from_utf8_lossy(&piece[..length]));
        }
    }

    /// Waits until the command has ended; all that it showed.
    fn end(mut self) -> String {
        self.screen.read_to_string(&mut self.shown).unwrap();
        self.process.wait().unwrap();
        self.shown
    }
}

/// Runs the command until it has the API server's answer.
fn answered(mut command: Command) {
    without_a_mesh(&command.output().unwrap());
}

/// The standard error of a command that found no mesh.
fn without_a_mesh(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("linkerd-config does not exist"), "{text}");
    text
}

/// Has a server wait while the gate is locked for writing.
fn while_closed(gate: &Arc<RwLock<()>>) -> impl Fn() + Clone + Send + 'static {
    let gate = Arc::clone(gate);
    move || drop(gate.read())
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

/// Starts a proxy that connects every tunnel to the API server; its address, and the head of each request for a tunnel.
fn proxy(server: SocketAddr) -> (SocketAddr, Receiver<String>) {
    let (seen, tunnels) = channel();
    let address = serve(move |mut client| {
        let Some(head) = head(&mut client) else { return };
        let _ = seen.send(head);
        let mut server = TcpStream::connect(server).unwrap();
        client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
        let (mut requests, mut onwards) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        thread::spawn(move || io::copy(&mut requests, &mut onwards));
        let _ = io::copy(&mut server, &mut client);
    });
    (address, tunnels)
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

/// An HTTP server that has nothing. It waits before it says so.
fn web_server(wait: impl Fn() + Clone + Send + 'static) -> SocketAddr {
    serve(move |mut stream| {
        if head(&mut stream).is_some() {
            wait();
            let answer = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            stream.write_all(answer).unwrap();
        }
    })
}

#[test]
fn a_terminal_says_what_a_slow_command_waits_for() {
    let gate = Arc::new(RwLock::new(()));
    let closed = gate.write().unwrap();
    let wait = while_closed(&gate);
    let server = ApiServer::with(wait.clone(), Vec::new());
    let kubeconfig = server.kubeconfig("127.0.0.1", json!({}), json!({}));
    let file = format!("{}/config", kubeconfig.0.path().display());
    let url = format!("http://{}/a.yaml", web_server(wait));
    let (api_server, no_mesh) = ("the API server", "linkerd-config does not exist");
    let no_workload = "Deployment default/web: ";
    let no_viz = ("the API server, and weft-viz", "weft-viz cannot be asked");
    let no_manifest = (url.as_str(), "the server answered 404");
    let running = [
        (format!("upgrade --kubeconfig {file}"), (api_server, no_mesh)),
        (format!("profile --template web --kubeconfig {file}"), (api_server, no_mesh)),
        (format!("inject --manual {file} --kubeconfig {file}"), (api_server, no_mesh)),
        (format!("authz deploy/web --kubeconfig {file}"), (api_server, no_workload)),
        (format!("trace deploy/web --kubeconfig {file}"), (api_server, no_workload)),
        (format!("trace --kubeconfig {file}"), ("the nodes' agents", "the agents' pods in namespace linkerd")),
        (format!("diagnostics proxy-metrics deploy/web --kubeconfig {file}"), ("the proxies' metrics", no_workload)),
        (format!("tap deploy/web --kubeconfig {file}"), no_viz),
        (format!("top deploy/web --kubeconfig {file}"), no_viz),
        (format!("dashboard --show url --port 0 --kubeconfig {file}"), no_viz),
        (format!("inject {url}"), no_manifest),
        (format!("uninject {url}"), no_manifest),
        (format!("install --ignore-cluster --values {url}"), no_manifest),
        (format!("upgrade --from-manifests {url}"), no_manifest),
    ]
    .map(|(arguments, shown)| (Terminal::start(&kubeconfig, &arguments), arguments, shown));
    let waiting = running.map(|(mut terminal, arguments, (waits_for, fails_with))| {
        let line = format!("waiting for: {waits_for}");
        terminal.wait_for(&line);
        (terminal, arguments, line, fails_with)
    });
    drop(closed);
    for (terminal, arguments, line, fails_with) in waiting {
        let shown = terminal.end();
        let cleared = shown.find(&format!("{line}\r\x1b[2K")).unwrap_or_else(|| panic!("{arguments}: {shown:?}"));
        assert!(shown[cleared..].contains(fails_with), "{arguments}: {shown:?}");
    }
}

#[test]
fn a_pipe_gets_no_progress() {
    let gate = Arc::new(RwLock::new(()));
    let closed = gate.write().unwrap();
    let server = ApiServer::with(while_closed(&gate), Vec::new());
    let kubeconfig = server.kubeconfig("127.0.0.1", json!({}), json!({}));
    let piped = kubeconfig.upgrade().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let request = server.requests.recv().unwrap();
    // One that began later has waited long enough to say so.
    let file = format!("upgrade --kubeconfig {}/config", kubeconfig.0.path().display());
    let mut terminal = Terminal::start(&kubeconfig, &file);
    terminal.wait_for("waiting for: the API server");
    drop(closed);
    let text = without_a_mesh(&piped.wait_with_output().unwrap());
    terminal.end();
    assert!(request.starts_with("GET /api/v1/namespaces/linkerd/configmaps/linkerd-config "), "{request}");
    assert!(!text.contains("waiting") && !text.contains('\x1b'), "{text:?}");
}

#[test]
fn requests_go_through_the_proxy_of_the_kubeconfig_or_the_environment() {
    let server = ApiServer::start();
    let (address, tunnels) = proxy(server.address);
    let direct = server.kubeconfig(NAME, json!({}), json!({}));
    let behind = server.kubeconfig(NAME, json!({"proxy-url": format!("http://{address}")}), json!({}));
    let tunnel = format!("CONNECT {NAME}:{} ", server.address.port());

    let mut environment = direct.upgrade();
    environment.env("HTTPS_PROXY", format!("http://user:secret@{address}"));
    answered(environment);
    let head = tunnels.try_recv().unwrap();
    assert!(head.starts_with(&tunnel) && head.to_lowercase().contains("proxy-authorization: basic "), "{head}");

    let mut exempt = behind.upgrade();
    exempt.env("NO_PROXY", "*");
    answered(exempt);
    assert!(tunnels.try_recv().unwrap().starts_with(&tunnel));

    let mut of_the_proxy = direct.upgrade();
    of_the_proxy.env("HTTPS_PROXY", format!("http://{address}")).env("NO_PROXY", "127.0.0.1");
    answered(of_the_proxy);
    assert!(tunnels.try_recv().unwrap().starts_with(&tunnel));
}

#[test]
fn an_api_server_on_this_host_is_asked_directly() {
    let server = ApiServer::start();
    let (address, tunnels) = proxy(server.address);
    let kubeconfig = server.kubeconfig("127.0.0.1", json!({}), json!({}));
    let mut weft = kubeconfig.upgrade();
    weft.env("HTTPS_PROXY", format!("http://{address}"));
    answered(weft);
    assert!(tunnels.try_recv().is_err());
}

#[test]
fn of_the_kubeconfigs_in_the_environment_those_that_do_not_exist_are_skipped() {
    let server = ApiServer::start();
    let kubeconfig = server.kubeconfig("127.0.0.1", json!({}), json!({}));
    let (none, config) = (kubeconfig.0.path().join("none"), kubeconfig.0.path().join("config"));
    let upgrade = |files: &[&Path]| {
        let mut weft = kubeconfig.clean(env!("CARGO_BIN_EXE_weft"));
        weft.arg("upgrade").env("KUBECONFIG", std::env::join_paths(files).unwrap());
        // In no pod of a cluster.
        weft.env_remove("KUBERNETES_SERVICE_HOST");
        weft
    };
    answered(upgrade(&[none.as_path(), config.as_path()]));
    let output = upgrade(&[none.as_path()]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains(&format!("KUBECONFIG ({}) names no file", none.display())), "{text}");
}

/// The value of the header of the request that the API server got.
fn authorization(server: &ApiServer, user: Value) -> Option<String> {
    let kubeconfig = server.kubeconfig("127.0.0.1", json!({}), user);
    answered(kubeconfig.upgrade());
    let head = server.requests.try_recv().unwrap();
    let lines = head.lines().filter_map(|line| line.split_once(": "));
    lines.filter(|(name, _)| name.eq_ignore_ascii_case("authorization")).map(|(_, value)| value.to_owned()).next()
}

#[test]
fn tokens_of_oidc_reach_the_api_server() {
    let server = ApiServer::start();
    assert_eq!(authorization(&server, json!({})), None);

    let credential = r#"{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"of-the-plugin"}}"#;
    let exec = json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never",
        "command": "echo", "args": [credential]}});
    assert_eq!(authorization(&server, exec).as_deref(), Some("Bearer of-the-plugin"));

    // {"alg":"none"} . {"exp":4102444800}, which is the year 2100.
    let token = "eyJhbGciOiJub25lIn0.eyJleHAiOjQxMDI0NDQ4MDB9.c2lnbmF0dXJl";
    let provider = json!({"auth-provider": {"name": "oidc", "config": {"id-token": token, "client-id": "weft",
        "idp-issuer-url": "https://issuer.invalid"}}});
    assert_eq!(authorization(&server, provider).as_deref(), Some(format!("Bearer {token}").as_str()));
}

/// A mesh that names another namespace to its proxies. This user has no token, and may request none: the error is where
/// `weft` asks for one.
#[test]
fn the_component_is_found_where_the_mesh_expects_it() {
    let tap = "{serviceAccountName: weft-viz, namespace: monitoring}";
    let values = format!("proxy: {{image: {{name: a, version: b}}, tap: {tap}}}");
    let config = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "linkerd-config"},
        "data": {"values": values}});
    let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    let pods = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {},
        "items": [{"metadata": {"name": "weft-viz-1"}, "status": ready}]});
    let objects = vec![
        ("GET /api/v1/namespaces/linkerd/configmaps/linkerd-config ", config),
        ("GET /api/v1/namespaces/monitoring/pods?", pods),
    ];
    let server = ApiServer::with(|| (), objects);
    let text = server.kubeconfig("127.0.0.1", json!({}), json!({})).failed(&["stat", "deploy"]);
    assert!(text.contains("ServiceAccount monitoring/weft-viz-viewer"), "{text}");
}

#[test]
fn a_workload_without_pods_is_named_by_every_command_about_its_pods() {
    let web = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {"selector": {"matchLabels": {"app": "web"}}, "template": {}}});
    let pods = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []});
    let objects =
        vec![("GET /apis/apps/v1/namespaces/shop/deployments/web ", web), ("GET /api/v1/namespaces/shop/pods?", pods)];
    let server = ApiServer::with(|| (), objects);
    let kubeconfig = server.kubeconfig("127.0.0.1", json!({}), json!({}));
    // A trace waits for pods, and ends here because there is no agent.
    for command in [&["authz"][..], &["identity"], &["diagnostics", "proxy-metrics"], &["trace"]] {
        let text = kubeconfig.failed(&[command, &["deploy/web", "-n", "shop"]].concat());
        assert!(text.contains("no pod in namespace shop has the labels app=web"), "{command:?}: {text}");
    }
    let text = kubeconfig.failed(&["identity", "-l", "app=api", "-n", "shop"]);
    assert!(text.contains("no pod in namespace shop has the labels app=api"), "{text}");
    let text = kubeconfig.failed(&["trace", "web-0", "-n", "shop"]);
    assert!(text.contains("pod shop/web-0 does not exist yet"), "{text}");
}
