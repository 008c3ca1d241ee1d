//! A pair of HAProxys in the places of our proxies: one in the client's pod, which the client dials on loopback, and
//! one in the server's. Between them is TLS 1.3, and each verifies the other's certificate. The server's has ports
//! without TLS as well, as our proxy takes both on the application's port: peers outside the mesh flood these.

use std::{
    fmt::Write as _,
    fs::{self, File},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::Context as _;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;
use tokio::process::Child;
use weft_sandbox::client::Sandbox;

use super::rows::Protocol;
use crate::load::{Flood, server};

/// The name in the server's certificate.
const SERVER_NAME: &str = "server.bench";
/// Connections of one process: more than any row has.
const MAX_CONNECTIONS: u32 = 12_000;
/// The suite that our proxies agree on.
const SUITE: &str = "TLS_AES_128_GCM_SHA256";

/// What the two speak to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hop {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2.
    Http2,
    /// Bytes.
    Tcp,
}

/// Certificates, configurations and logs, removed on drop.
#[derive(Debug)]
struct Files(TempDir);

/// A running pair. The processes are in the pods' cgroups, and so end with the pods.
#[derive(Debug)]
pub(super) struct Pair {
    hop: Hop,
    client: Child,
    server: Child,
    logs: [PathBuf; 2],
    /// Until they have started: later, nothing of a run that is killed is to be left.
    files: Option<Files>,
}

/// The first line of what HAProxy says it is.
pub(super) fn version() -> Option<String> {
    let output = std::process::Command::new("haproxy").arg("-v").output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned())
}

impl Files {
    /// Makes a root and a certificate for either side, ECDSA with P-256 as in the mesh.
    ///
    /// # Errors
    /// They cannot be made or written.
    fn create() -> anyhow::Result<Self> {
        let files = Self(tempfile::Builder::new().prefix("weft-bench-haproxy-").tempdir()?);
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "bench");
        let root = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        fs::write(files.path("root.pem"), root.pem())?;
        for name in ["client.bench", SERVER_NAME] {
            let key = KeyPair::generate()?;
            let certificate = CertificateParams::new(vec![name.to_owned()])?.signed_by(&key, &root)?;
            fs::write(files.path(&format!("{name}.pem")), certificate.pem() + &key.serialize_pem())?;
        }
        Ok(files)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Pair {
    /// Starts both.
    ///
    /// # Errors
    /// `haproxy` is missing, or its files cannot be written.
    pub(super) fn start(sandbox: &Sandbox, hop: Hop, server_ip: &str) -> anyhow::Result<Self> {
        let files = Files::create()?;
        let start = |pod: &str, text: &str| -> anyhow::Result<(Child, PathBuf)> {
            let config = files.path(&format!("{pod}-{}.cfg", hop.base()));
            fs::write(&config, text)?;
            let log = config.with_extension("log");
            let output = File::create(&log)?;
            let program = config.to_string_lossy().into_owned();
            // In the foreground, one process without a master.
            let command = ["haproxy", "-db", "-f", &program];
            let pod = format!("bench/{pod}");
            let child = sandbox.spawn(&pod, None, &command, Stdio::null(), output.try_clone()?.into(), output.into());
            Ok((child.context("start haproxy")?, log))
        };
        let (server, server_log) = start("server", &hop.server(files.0.path()))?;
        let (client, client_log) = start("client", &hop.client(files.0.path(), server_ip))?;
        Ok(Self { hop, client, server, logs: [client_log, server_log], files: Some(files) })
    }

    /// Where the client dials.
    pub(super) fn target(&self, protocol: Protocol) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.hop.base() + offset(protocol)))
    }

    /// Where a peer outside the mesh floods the server's side.
    pub(super) fn flooded(&self, server: IpAddr, flood: Flood) -> SocketAddr {
        let port = match flood {
            Flood::Hellos { .. } => self.hop.ports(Protocol::Http1).1,
            Flood::Heads { .. } | Flood::Connections { .. } => self.hop.plain(Protocol::Http1),
            Flood::Resets { .. } => self.hop.plain(Protocol::Http2),
        };
        SocketAddr::new(server, port)
    }

    /// The process ids, the client's side first.
    ///
    /// # Errors
    /// One has ended.
    pub(super) fn pids(&self) -> anyhow::Result<(u32, u32)> {
        self.client.id().zip(self.server.id()).context("a haproxy has ended")
    }

    /// They have read their files, which are removed. Returns what both said.
    pub(super) fn started(&mut self) -> String {
        let said = self.logs.iter().map(|log| fs::read_to_string(log).unwrap_or_default()).collect();
        self.files = None;
        said
    }
}

impl Hop {
    /// Ports of different hops are different, because all pairs are in the same pods.
    fn base(self) -> u16 {
        match self {
            Self::Http1 => 7100,
            Self::Http2 => 7200,
            Self::Tcp => 7300,
        }
    }

    fn protocols(self) -> &'static [Protocol] {
        match self {
            Self::Http1 | Self::Http2 => &[Protocol::Http1, Protocol::Http2],
            Self::Tcp => &[Protocol::Tcp],
        }
    }

    /// The keywords of a TLS socket that fix the protocol.
    fn alpn(self) -> &'static str {
        match self {
            Self::Http1 => " alpn http/1.1",
            Self::Http2 => " alpn h2",
            Self::Tcp => "",
        }
    }

    fn client(self, files: &Path, server_ip: &str) -> String {
        let mut text = self.common();
        let files = files.display();
        for protocol in self.protocols() {
            let (front, hop) = self.ports(*protocol);
            let _ = write!(
                text,
                "frontend front-{front}\n  bind 127.0.0.1:{front}{speaks}\n  default_backend hop-{hop}\n\
                 backend hop-{hop}\n  server peer {server_ip}:{hop} ssl crt {files}/client.bench.pem \
                 ca-file {files}/root.pem verify required verifyhost {SERVER_NAME} sni str({SERVER_NAME}){alpn}\n",
                speaks = speaks(*protocol),
                alpn = self.alpn(),
            );
        }
        text
    }

    fn server(self, files: &Path) -> String {
        let mut text = self.common();
        let files = files.display();
        for protocol in self.protocols() {
            let (_, hop) = self.ports(*protocol);
            let _ = write!(
                text,
                "frontend hop-{hop}\n  bind :{hop} ssl crt {files}/{SERVER_NAME}.pem ca-file {files}/root.pem \
                 verify required{alpn}\n  default_backend app-{hop}\n\
                 frontend plain-{hop}\n  bind :{plain}{speaks}\n  default_backend app-{hop}\n\
                 backend app-{hop}\n  server app 127.0.0.1:{app}{speaks}\n",
                app = app(*protocol),
                plain = self.plain(*protocol),
                speaks = speaks(*protocol),
                alpn = self.alpn(),
            );
        }
        text
    }

    /// One thread, as our proxies have by default, and connections that are kept and shared as much as it can.
    fn common(self) -> String {
        let mode = if self == Self::Tcp { "tcp" } else { "http" };
        // TCP has no connections to share.
        let reuse = if self == Self::Tcp { "" } else { "  http-reuse always\n  timeout http-keep-alive 10m\n" };
        format!(
            "global\n  nbthread 1\n  no strict-limits\n  maxconn {MAX_CONNECTIONS}\n\
             \x20 ssl-default-bind-options ssl-min-ver TLSv1.3\n  ssl-default-server-options ssl-min-ver TLSv1.3\n\
             \x20 ssl-default-bind-ciphersuites {SUITE}\n  ssl-default-server-ciphersuites {SUITE}\n\
             defaults\n  mode {mode}\n  timeout connect 5s\n  timeout client 10m\n  timeout server 10m\n{reuse}"
        )
    }

    /// The port that the client dials, and that of the other side.
    fn ports(self, protocol: Protocol) -> (u16, u16) {
        let front = self.base() + offset(protocol);
        (front, front + 10)
    }

    /// The port of the other side without TLS.
    fn plain(self, protocol: Protocol) -> u16 {
        self.base() + offset(protocol) + 20
    }
}

fn offset(protocol: Protocol) -> u16 {
    match protocol {
        Protocol::Http1 => 1,
        Protocol::Http2 => 2,
        Protocol::Tcp => 3,
    }
}

fn app(protocol: Protocol) -> u16 {
    match protocol {
        Protocol::Http1 => server::HTTP1,
        Protocol::Http2 => server::HTTP2,
        Protocol::Tcp => server::TCP,
    }
}

fn speaks(protocol: Protocol) -> &'static str {
    if protocol == Protocol::Http2 { " proto h2" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_verify_each_other_and_speak_what_the_hop_says() {
        for (hop, alpn) in [(Hop::Http1, " alpn http/1.1"), (Hop::Http2, " alpn h2"), (Hop::Tcp, "verify required\n")] {
            let (client, server) = (hop.client(Path::new("/c"), "10.0.0.2"), hop.server(Path::new("/c")));
            for text in [&client, &server] {
                assert_eq!(text.matches("verify required").count(), hop.protocols().len(), "{text}");
                assert!(text.contains("ssl-min-ver TLSv1.3"), "{text}");
            }
            assert!(server.contains(alpn), "{server}");
            for protocol in hop.protocols() {
                let (front, behind) = hop.ports(*protocol);
                assert!(client.contains(&format!("bind 127.0.0.1:{front}")), "{client}");
                assert!(client.contains(&format!("10.0.0.2:{behind} ssl")), "{client}");
                assert!(server.contains(&format!("bind :{behind} ssl")), "{server}");
                let plain = hop.plain(*protocol);
                assert!(server.contains(&format!("bind :{plain}{}\n", speaks(*protocol))), "{server}");
                assert!(!client.contains(&plain.to_string()), "{client}");
            }
        }
    }

    #[test]
    fn no_two_pairs_share_a_port() {
        let hops = [Hop::Http1, Hop::Http2, Hop::Tcp];
        let ports = hops.iter().flat_map(|hop| hop.protocols().iter().map(move |protocol| (hop, *protocol)));
        let each = |(hop, protocol): (&Hop, Protocol)| {
            let (front, behind) = hop.ports(protocol);
            [front, behind, hop.plain(protocol)]
        };
        let mut all: Vec<_> = ports.flat_map(each).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn certificates_of_both_sides_come_with_their_keys() {
        let files = Files::create().unwrap();
        for name in ["client.bench.pem", "server.bench.pem"] {
            let text = fs::read_to_string(files.path(name)).unwrap();
            assert!(text.contains("BEGIN CERTIFICATE") && text.contains("PRIVATE KEY"), "{name}");
        }
    }
}
