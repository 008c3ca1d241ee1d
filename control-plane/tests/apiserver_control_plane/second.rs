//! A second API server on the same etcd, which can be made to lag behind; and etcd itself.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};

use kube::{Client, Config};
use nix::sched::{CloneFlags, setns};
use weft_test_kit::wait::eventually;

use crate::{link::Link, process::PATIENCE};

/// Where etcd listens, in the cluster's network namespace.
const ETCD: &str = "127.0.0.1:2379";
/// Port of the first API server, and of the second one.
const FIRST_PORT: &str = "--secure-port=6443";
const PORT: u16 = 6444;
/// Settings that two API servers cannot share.
const OWN: [&str; 4] = ["--etcd-servers=", "--secure-port=", "--audit-log-path=", "--audit-policy-file="];
/// What an API server logs a minute before it ends, if the first one wrote a Service's address while it started.
const REPAIR_FAILED: &str = "repair failed with not retryable error";

/// See above; killed when dropped.
pub(crate) struct SecondServer {
    command: Command,
    process: Child,
    log: PathBuf,
    host: String,
    /// Its connection to etcd.
    pub(crate) etcd: Link,
}

impl SecondServer {
    /// Starts it with the settings of the first one.
    pub(crate) async fn start(directory: &Path) -> Self {
        let host = host().await;
        let (first, arguments) = first(&host);
        let netns = first.join("ns/net");
        let etcd = Link::within(&netns, ETCD.to_owned());
        let log = directory.join("second-apiserver.log");
        // It ends with the test, however that ends.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "nsenter"]);
        command.arg(format!("--net={}", netns.display())).arg(format!("--mount={}", first.join("ns/mnt").display()));
        command.arg("--");
        command.args(arguments.iter().filter(|argument| !OWN.iter().any(|own| argument.starts_with(own))));
        command.arg(format!("--etcd-servers=http://{}", etcd.address())).arg(format!("--secure-port={PORT}"));
        // The Service `kubernetes` stays the first one's.
        command.arg("--endpoint-reconciler-type=none");
        let process = spawn(&mut command, &log);
        Self { command, process, log, host, etcd }
    }

    /// Host and port of its HTTPS listener.
    pub(crate) fn address(&self) -> String {
        format!("{}:{PORT}", self.host)
    }

    /// A client of it, when it is ready.
    pub(crate) async fn client(&mut self) -> Client {
        let mut config = Config::infer().await.unwrap();
        config.cluster_url = format!("https://{}", self.address()).parse().unwrap();
        let client = Client::try_from(config).unwrap();
        eventually("the second API server is ready", PATIENCE, async || {
            let ready = http::Request::get("/readyz").body(Vec::new()).unwrap();
            client.request_text(ready).await.map_err(|error| {
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                if log.contains(REPAIR_FAILED) {
                    self.end();
                    self.process = spawn(&mut self.command, &self.log);
                }
                let lines: Vec<_> = log.lines().rev().take(20).collect();
                format!("{error}\n{}", lines.join("\n"))
            })
        })
        .await;
        client
    }

    fn end(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for SecondServer {
    fn drop(&mut self) {
        self.end();
    }
}

fn spawn(command: &mut Command, log: &Path) -> Child {
    let output = File::create(log).unwrap();
    command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap()
}

/// Makes etcd forget everything before this revision, which is a resource version.
pub(crate) async fn compact(revision: &str) {
    let body = format!(r#"{{"revision":"{revision}","physical":true}}"#);
    let netns = File::open(first(&host().await).0.join("ns/net")).unwrap();
    let answer = thread::spawn(move || {
        setns(netns, CloneFlags::CLONE_NEWNET).unwrap();
        let mut stream = TcpStream::connect(ETCD).unwrap();
        let head = format!(
            "POST /v3/kv/compaction HTTP/1.1\r\nhost: etcd\r\nconnection: close\r\ncontent-length: {}",
            body.len()
        );
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    let answer = answer.join().unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Process and command line of the API server that advertises this address.
fn first(host: &str) -> (PathBuf, Vec<String>) {
    let address = format!("--advertise-address={host}");
    let found = fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let line = fs::read_to_string(entry.path().join("cmdline")).ok()?;
        let arguments: Vec<_> = line.split_terminator('\0').map(str::to_owned).collect();
        let has = |wanted: &str| arguments.iter().any(|argument| argument == wanted);
        let is_first = arguments.first()?.ends_with("/kube-apiserver") && has(FIRST_PORT) && has(&address);
        is_first.then(|| (entry.path(), arguments))
    });
    found.expect("the API server of KUBECONFIG runs on this host, as `cargo xtask kube up` starts it")
}

async fn host() -> String {
    Config::infer().await.unwrap().cluster_url.host().unwrap().to_owned()
}
