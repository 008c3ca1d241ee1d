//! A proxy that cannot prove its identity does not serve: it names the broken setting and exits with 64, whichever
//! setting it is, and never falls back to a plaintext inbound listener.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use tempfile::TempDir;
use tokio::{process::Command, time::timeout};
use weft_test_kit::binaries;
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

    /// The proxy's exit, or none if it keeps running.
    async fn run(&self) -> Option<Output> {
        let mut proxy = Command::new(binaries::directory().unwrap().join("weft-proxy"));
        proxy.env_clear().envs(self.variables.iter().map(|(name, value)| (name, value)));
        proxy.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        timeout(REFUSES_WITHIN, proxy.output()).await.ok().map(Result::unwrap)
    }
}

async fn refuses(setup: Setup, names: &str) {
    let output = setup.run().await.unwrap_or_else(|| panic!("the proxy runs on although {names} is broken"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(EXIT_USAGE), "{stderr}");
    assert!(stderr.contains(names), "{names} is not named: {stderr}");
}

#[tokio::test]
async fn a_proxy_with_everything_in_order_runs() {
    let mut setup = Setup::good();
    setup.variables.push(("LINKERD2_PROXY_LOG", "error".to_owned()));
    let output = timeout(Duration::from_secs(3), setup.run()).await;
    assert!(output.is_err(), "it ended: {output:?}");
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
