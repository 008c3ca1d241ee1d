//! Keys, certificates and kubeconfigs of one cluster, created with `openssl`, valid for the lifetime of a test
//! cluster.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::json;
use weft_xtask::command;

const DAYS: &str = "30";
const SERVICE_NAMES: [&str; 4] =
    ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"];

/// A directory of `NAME.crt` and `NAME.key`.
#[derive(Debug)]
pub(crate) struct Pki {
    directory: PathBuf,
    /// `https://ADDRESS:6443`.
    server: String,
}

impl Pki {
    /// Creates what the control plane of a cluster at this address needs, and what its nodes share.
    ///
    /// # Errors
    /// When `openssl` fails.
    pub(crate) fn create(directory: &Path, address: &str) -> Result<Self> {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        let pki = Self { directory: directory.to_path_buf(), server: format!("https://{address}:6443") };
        // The distribution's own file would add extensions of its choice.
        fs::write(pki.file("openssl.cnf"), "[req]\ndistinguished_name = name\n[name]\n")
            .context("write openssl.cnf")?;
        pki.authority("ca")?;
        pki.authority("front-proxy-ca")?;
        let names = SERVICE_NAMES.iter().map(|name| format!("DNS:{name}")).collect::<Vec<_>>().join(",");
        let names = format!("DNS:localhost,{names},IP:127.0.0.1,IP:10.96.0.1,IP:{address}");
        pki.issue("apiserver", "/CN=kube-apiserver", Some(&names), "ca")?;
        pki.issue("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", None, "ca")?;
        pki.issue("admin", "/O=system:masters/CN=kubernetes-admin", None, "ca")?;
        pki.issue("controller-manager", "/CN=system:kube-controller-manager", None, "ca")?;
        pki.issue("scheduler", "/CN=system:kube-scheduler", None, "ca")?;
        pki.issue("proxy", "/CN=system:kube-proxy", None, "ca")?;
        pki.issue("front-proxy", "/CN=front-proxy-client", None, "front-proxy-ca")?;
        let (key, public) = (pki.file("service-account.key"), pki.file("service-account.pub"));
        openssl(&["genrsa", "-out", &key, "2048"])?;
        openssl(&["rsa", "-in", &key, "-pubout", "-out", &public])?;
        Ok(pki)
    }

    /// Creates what a node's kubelet needs, in the directory of its settings.
    ///
    /// # Errors
    /// When `openssl` fails or a file cannot be written.
    pub(crate) fn join(&self, name: &str, address: &str, config: &Path) -> Result<()> {
        let alternatives = format!("DNS:{name},IP:{address}");
        self.issue(name, &format!("/O=system:nodes/CN=system:node:{name}"), Some(&alternatives), "ca")?;
        for (file, to) in [
            (format!("{name}.crt"), "kubelet.crt"),
            (format!("{name}.key"), "kubelet.key"),
            ("ca.crt".into(), "ca.crt"),
        ] {
            let (file, to) = (self.directory.join(file), config.join(to));
            if file != to {
                fs::copy(&file, &to).with_context(|| format!("copy {} to {}", file.display(), to.display()))?;
            }
        }
        self.kubeconfig(name, &config.join("kubelet.kubeconfig"))?;
        self.kubeconfig("proxy", &config.join("proxy.kubeconfig"))
    }

    /// Writes a kubeconfig with a certificate's identity and without references to other files.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn kubeconfig(&self, certificate: &str, to: &Path) -> Result<()> {
        let base64 = |file: String| openssl(&["base64", "-A", "-in", &self.file(&file)]);
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "weft", "cluster": {
                "server": self.server,
                "certificate-authority-data": base64("ca.crt".to_owned())?,
            }}],
            "users": [{ "name": certificate, "user": {
                "client-certificate-data": base64(format!("{certificate}.crt"))?,
                "client-key-data": base64(format!("{certificate}.key"))?,
            }}],
            "contexts": [{ "name": "weft", "context": { "cluster": "weft", "user": certificate } }],
            "current-context": "weft",
        });
        // JSON is YAML.
        fs::write(to, format!("{config:#}\n")).with_context(|| format!("write {}", to.display()))
    }

    fn authority(&self, name: &str) -> Result<()> {
        let extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign"];
        self.request(name, &format!("/CN={name}"), &extensions, &[])
    }

    fn issue(&self, name: &str, subject: &str, alternatives: Option<&str>, by: &str) -> Result<()> {
        let alternatives = alternatives.map(|names| format!("subjectAltName={names}"));
        let mut extensions = vec![
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            "extendedKeyUsage=serverAuth,clientAuth",
        ];
        extensions.extend(alternatives.as_deref());
        let (certificate, key) = (self.file(&format!("{by}.crt")), self.file(&format!("{by}.key")));
        self.request(name, subject, &extensions, &["-CA", &certificate, "-CAkey", &key])
    }

    fn request(&self, name: &str, subject: &str, extensions: &[&str], signer: &[&str]) -> Result<()> {
        let (certificate, key) = (self.file(&format!("{name}.crt")), self.file(&format!("{name}.key")));
        let config = self.file("openssl.cnf");
        let mut arguments =
            vec!["req", "-config", &config, "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
        arguments.extend(["-days", DAYS, "-subj", subject, "-keyout", &key, "-out", &certificate]);
        arguments.extend(extensions.iter().flat_map(|extension| ["-addext", extension]));
        arguments.extend(signer);
        openssl(&arguments).map(drop)
    }

    fn file(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }
}

fn openssl(arguments: &[&str]) -> Result<String> {
    command::output(Command::new("openssl").args(arguments))
}
