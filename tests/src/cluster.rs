//! A Kubernetes cluster as a user sees it: through kubectl, with the cluster in `KUBECONFIG`.
//!
//! The cluster has to be ready before the tests run (`cargo xtask test cluster` creates one, or uses the one in
//! `KUBECONFIG`). What is only visible on the host of a local cluster, such as its audit log, is optional here.

use std::{
    env,
    ffi::OsStr,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::Value;
use weft_examples::client::Report;
use weft_test_kit::{
    binaries,
    wait::{self, Polling},
};

/// Time limit of a rollout on a small and busy machine.
const ROLLOUT: &str = "180s";

/// Time limit for a new kind to be served, on a busy machine.
const SERVED: Duration = Duration::from_secs(60);

/// The pause between two looks at the cluster: starting kubectl takes a tenth of a second of a processor.
const BETWEEN_POLLS: Duration = Duration::from_millis(250);

/// A cluster to test.
#[derive(Debug)]
pub struct Cluster {
    path: std::ffi::OsString,
    audit_log: Option<PathBuf>,
}

/// A load that runs in a pod until its report is read.
#[derive(Debug)]
pub struct Load {
    child: Option<Child>,
}

impl Cluster {
    /// The cluster in the environment.
    ///
    /// # Errors
    /// When KUBECONFIG names no cluster, or it does not answer.
    pub fn from_env() -> anyhow::Result<Self> {
        if env::var_os("KUBECONFIG").is_none() {
            bail!(
                "KUBECONFIG is not set: `cargo xtask test cluster` brings up a cluster, `cargo xtask kube env` prints the setting of one"
            );
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let directories = std::iter::once(binaries::directory()?).chain(env::split_paths(&path));
        let cluster = Self {
            path: env::join_paths(directories).context("put the binaries into PATH")?,
            audit_log: env::var_os("WEFT_KUBE_AUDIT_LOG").map(PathBuf::from),
        };
        cluster.kubectl(&["version", "-o", "json"]).context("ask the cluster for its version")?;
        Ok(cluster)
    }

    /// PATH with the product's binaries in front.
    pub fn path(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }

    /// A command with this cluster's environment.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("PATH", &self.path).stdin(Stdio::null());
        command
    }

    /// The output of kubectl.
    ///
    /// # Errors
    /// When it fails; the error contains its message.
    pub fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self.command("kubectl").args(arguments).output().context("start kubectl")?;
        stdout(&output).with_context(|| format!("kubectl {}", arguments.join(" ")))
    }

    /// The output of kubectl with `-o json`.
    ///
    /// # Errors
    /// As [`Self::kubectl`].
    pub fn get(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let text = self.kubectl(&[&["get"], arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).context("read what kubectl printed")
    }

    /// Applies a manifest.
    ///
    /// # Errors
    /// The API server's error, unchanged.
    pub fn apply(&self, manifest: &str) -> anyhow::Result<String> {
        self.with_file(&["apply"], manifest)
    }

    /// Deletes the objects of a manifest, and waits until they are gone.
    ///
    /// # Errors
    /// The API server's error, unchanged.
    pub fn delete(&self, manifest: &str) -> anyhow::Result<String> {
        self.with_file(&["delete"], manifest)
    }

    /// The objects of a manifest, as kubectl reads them. The API server does not validate them.
    ///
    /// # Errors
    /// When kubectl cannot read the manifest.
    pub fn objects(&self, manifest: &str) -> anyhow::Result<Vec<Value>> {
        let printed = self.with_file(&["create", "--dry-run=client", "--validate=false", "-o", "json"], manifest)?;
        let mut objects = Vec::new();
        for document in serde_json::Deserializer::from_str(&printed).into_iter::<Value>() {
            let document = document.context("read what kubectl printed")?;
            match document["items"].as_array() {
                Some(items) => objects.extend_from_slice(items),
                None => objects.push(document),
            }
        }
        Ok(objects)
    }

    fn with_file(&self, arguments: &[&str], manifest: &str) -> anyhow::Result<String> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(manifest.as_bytes())?;
        let path = file.path().to_string_lossy().into_owned();
        self.kubectl(&[arguments, &["-f", &path]].concat())
    }

    /// Waits until a workload such as `deploy/web` is rolled out.
    ///
    /// # Errors
    /// When it is not in time.
    pub fn rolled_out(&self, namespace: &str, workload: &str) -> anyhow::Result<()> {
        self.kubectl(&["-n", namespace, "rollout", "status", workload, "--timeout", ROLLOUT]).map(drop)
    }

    /// Names of the pods that match a label selector, without terminating ones.
    ///
    /// # Errors
    /// As [`Self::kubectl`].
    pub fn pods(&self, namespace: &str, selector: &str) -> anyhow::Result<Vec<String>> {
        let list = self.get(&["-n", namespace, "pods", "-l", selector])?;
        let staying =
            list["items"].as_array().into_iter().flatten().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        Ok(staying.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)).collect())
    }

    /// The only pod that matches a label selector.
    ///
    /// # Errors
    /// When no pod, or more than one, has these labels.
    pub fn pod(&self, namespace: &str, selector: &str) -> anyhow::Result<String> {
        let pods = self.pods(namespace, selector)?;
        match pods.as_slice() {
            [pod] => Ok(pod.clone()),
            _ => bail!("expected one pod -l {selector} in {namespace}, found {pods:?}"),
        }
    }

    /// Runs `weft-client` in a workload's pod to its end and returns its report.
    ///
    /// # Errors
    /// When it printed no report.
    pub fn client(&self, namespace: &str, pod: &str, arguments: &[&str]) -> anyhow::Result<Report> {
        self.start_client(namespace, pod, arguments)?.report()
    }

    /// Starts `weft-client` in a pod, to read its report later. With `--until-eof` it runs until then.
    ///
    /// # Errors
    /// When kubectl cannot be started.
    pub fn start_client(&self, namespace: &str, pod: &str, arguments: &[&str]) -> anyhow::Result<Load> {
        let mut kubectl = self.command("kubectl");
        kubectl
            .args(["-n", namespace, "exec", "-i", pod, "-c", "client", "--", "/weft-client"])
            .args(arguments)
            .arg("--json");
        let child = kubectl
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start kubectl exec")?;
        Ok(Load { child: Some(child) })
    }

    /// Whether the API server's audit log is a file on this host.
    pub fn has_audit_log(&self) -> bool {
        self.audit_log.is_some()
    }

    /// The audit log's entries so far, if the cluster has a log on this host.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn audit(&self) -> anyhow::Result<Option<Vec<Value>>> {
        let Some(log) = &self.audit_log else { return Ok(None) };
        let text = std::fs::read_to_string(log).with_context(|| format!("read {}", log.display()))?;
        // The last line may be incomplete.
        Ok(Some(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()))
    }

    /// Waits until the API server serves a kind, which it does some time after its definition is established.
    ///
    /// # Errors
    /// The last answer of kubectl.
    pub fn serves(&self, kind: &str) -> anyhow::Result<()> {
        self.until(SERVED, |cluster| cluster.kubectl(&["get", kind, "-A"]).map(drop))
    }

    /// Waits until the function succeeds.
    ///
    /// # Errors
    /// The function's last error.
    pub fn until<T>(&self, within: Duration, mut ask: impl FnMut(&Self) -> anyhow::Result<T>) -> anyhow::Result<T> {
        wait::blocking::until(Polling::every(BETWEEN_POLLS, within), || ask(self))
    }

    /// The repository's root, where tutorials are run, relative to the package, where cargo runs its tests.
    pub fn repository() -> &'static Path {
        Path::new("..")
    }
}

impl Load {
    /// Names what happens from now on; the report says of each failure in what phase it was. For loads with
    /// `--until-eof`.
    ///
    /// # Errors
    /// When the client has ended.
    pub fn begin(&mut self, phase: &str) -> anyhow::Result<()> {
        let input = self.child.as_mut().and_then(|child| child.stdin.as_mut()).context("its input is closed")?;
        writeln!(input, "{phase}").with_context(|| format!("tell the load that {phase:?} begins"))
    }

    /// Whether the client still runs.
    ///
    /// # Errors
    /// The state of its process cannot be read, or [`Self::report`] has taken the process.
    pub fn is_running(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.as_mut().context("its process is gone")?.try_wait()?.is_none())
    }

    /// Ends the client's standard input, waits for the client and returns its report.
    ///
    /// # Errors
    /// When it printed no report.
    pub fn report(mut self) -> anyhow::Result<Report> {
        let output = self.child.take().context("asked once")?.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        // A failed request makes the client exit with an error; it still prints a report.
        text.lines()
            .rev()
            .find_map(|line| serde_json::from_str(line).ok())
            .with_context(|| format!("no report: {text}{}", String::from_utf8_lossy(&output.stderr)))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn stdout(output: &Output) -> anyhow::Result<String> {
    if !output.status.success() {
        bail!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
