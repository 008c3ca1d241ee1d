//! The API server of a run: a new etcd and kube-apiserver without a node, or one that runs already. Removes what the
//! run created there.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde::Deserialize as _;
use serde_json::Value;
use tokio::{process::Command, time::timeout};
use weft_test_kit::wait::until;

use super::{api::Api, args::ApiServer, objects::RUN_LABEL};

/// The first start builds Kubernetes.
const STARTS_WITHIN: Duration = Duration::from_secs(3600);
const ENDS_WITHIN: Duration = Duration::from_secs(300);
const SERVED_WITHIN: Duration = Duration::from_secs(60);
/// Definitions of custom resources in the checkout: Weft's own, and upstream's of the Gateway API.
const DEFINITIONS: [&str; 2] = ["charts/weft-crds/templates", "charts/weft-crds/files/gateway-api"];
const DEFINITION_PATH: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// The API server.
pub(crate) struct Cluster {
    kubeconfig: PathBuf,
    /// The one that this run started.
    own: Option<Own>,
    /// Definitions that this run installed.
    installed: Vec<String>,
}

struct Own {
    lab: PathBuf,
    name: String,
}

/// What a run creates besides definitions: everything is in one of its namespaces or has its label.
pub(crate) struct Created {
    /// The label's value.
    pub(crate) run: String,
    pub(crate) namespaces: Vec<String>,
}

impl Cluster {
    /// Chooses the API server that the options name. Starts nothing yet.
    ///
    /// # Errors
    /// There is neither a kubeconfig nor a program that starts one.
    pub(crate) fn choose(server: &ApiServer) -> anyhow::Result<Self> {
        let installed = Vec::new();
        if let Some(kubeconfig) = &server.kubeconfig {
            return Ok(Self { kubeconfig: kubeconfig.clone(), own: None, installed });
        }
        let lab = server
            .lab
            .clone()
            .context("no API server: run this with `cargo xtask bench`, or name one that runs with --kubeconfig")?;
        let own = Own { lab, name: format!("bench-{}", std::process::id()) };
        Ok(Self { kubeconfig: PathBuf::new(), own: Some(own), installed })
    }

    /// Starts the API server if it is ours.
    ///
    /// # Errors
    /// It does not start.
    pub(crate) async fn start(&mut self) -> anyhow::Result<Api> {
        if let Some(own) = &self.own {
            self.kubeconfig = own.up().await?;
        }
        Api::connect(&self.kubeconfig).await
    }

    /// Installs the definitions of custom resources.
    ///
    /// # Errors
    /// The API server refuses one.
    pub(super) async fn install_definitions(&mut self, api: &Api) -> anyhow::Result<()> {
        for definition in definitions()? {
            self.install(api, &definition).await?;
        }
        Ok(())
    }

    pub(crate) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    async fn install(&mut self, api: &Api, definition: &Value) -> anyhow::Result<()> {
        let name = definition["metadata"]["name"].as_str().context("a definition without a name")?;
        let path = format!("{DEFINITION_PATH}/{name}");
        if api.read(&path).await?.is_some() {
            return Ok(());
        }
        self.installed.push(name.to_owned());
        api.apply(&path, definition).await?;
        let served = until(SERVED_WITHIN, async || {
            let found = api.read(&path).await?.unwrap_or_default();
            let conditions = found["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let established = conditions.iter().any(|one| one["type"] == "Established" && one["status"] == "True");
            anyhow::ensure!(established, "{name} is not established: {}", Value::from(conditions));
            Ok(())
        });
        served.await
    }

    /// Removes the API server if it is ours, else the run's objects from it. Call it in any case, also after a start
    /// that failed or was interrupted.
    ///
    /// # Errors
    /// Something is left; the message says what and how to remove it.
    pub(crate) async fn remove(self, created: &Created) -> anyhow::Result<()> {
        match self.own {
            Some(own) => own.down().await,
            None => {
                let remedy = || format!("objects labelled {RUN_LABEL}={} may be left, delete them", created.run);
                let removing = remove_objects(&self.kubeconfig, created, &self.installed);
                timeout(ENDS_WITHIN, removing).await.context("not removed in time").flatten().with_context(remedy)
            }
        }
    }
}

impl Own {
    /// Returns the path of the kubeconfig.
    async fn up(&self) -> anyhow::Result<PathBuf> {
        let mut up = self.command(&["kube", "up", "--control-plane-only", "--name", &self.name]);
        let started = timeout(STARTS_WITHIN, up.stdout(Stdio::null()).status());
        let status = started.await.context("the API server does not start")??;
        anyhow::ensure!(status.success(), "the API server does not start: `kube up` ended with {status}");
        let mut env = self.command(&["kube", "env", "--output", "json", "--name", &self.name]);
        let output = timeout(ENDS_WITHIN, env.stderr(Stdio::inherit()).output()).await.context("`kube env`")??;
        anyhow::ensure!(output.status.success(), "`kube env` ended with {}", output.status);
        let variables: Value = serde_json::from_slice(&output.stdout).context("read the variables of the cluster")?;
        variables["KUBECONFIG"].as_str().map(PathBuf::from).context("`kube env` names no KUBECONFIG")
    }

    async fn down(&self) -> anyhow::Result<()> {
        let remedy = || format!("`cargo xtask kube down --name {}` removes what is left", self.name);
        let mut down = self.command(&["kube", "down", "--name", &self.name]);
        // Ctrl-C must not interrupt this one.
        let status = down.process_group(0).stdout(Stdio::null()).status();
        let status = timeout(ENDS_WITHIN, status).await.with_context(remedy)?.with_context(remedy)?;
        if !status.success() {
            bail!("`kube down` ended with {status}: {}", remedy());
        }
        Ok(())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.lab);
        command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        command
    }
}

async fn remove_objects(kubeconfig: &Path, created: &Created, installed: &[String]) -> anyhow::Result<()> {
    let api = Api::connect(kubeconfig).await?;
    for namespace in &created.namespaces {
        api.delete(&format!("/api/v1/namespaces/{namespace}")).await?;
    }
    // Pods whose node is gone are removed, too.
    api.delete(&format!("/api/v1/nodes?labelSelector={RUN_LABEL}%3D{}", created.run)).await?;
    for namespace in &created.namespaces {
        until(ENDS_WITHIN, async || match api.read(&format!("/api/v1/namespaces/{namespace}")).await? {
            None => Ok(()),
            Some(_) => bail!("the namespace {namespace} does not go away"),
        })
        .await?;
    }
    for name in installed {
        api.delete(&format!("{DEFINITION_PATH}/{name}")).await?;
    }
    Ok(())
}

/// Every definition of the chart that is not rendered from a template.
fn definitions() -> anyhow::Result<Vec<Value>> {
    let mut found = Vec::new();
    // `cargo xtask bench` runs this program in the checkout's root, and cargo its tests in the package's folder.
    let here = std::env::current_dir().context("the current directory")?;
    let root = here.ancestors().find(|root| DEFINITIONS.iter().all(|directory| root.join(directory).is_dir()));
    let root = root.with_context(|| format!("{} is not in the checkout of Weft", here.display()))?;
    for directory in DEFINITIONS {
        let directory = root.join(directory);
        let list = || format!("list {}, where the definitions of the checkout are", directory.display());
        for entry in std::fs::read_dir(&directory).with_context(list)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "yaml") {
                continue;
            }
            let read = || format!("read {}", path.display());
            let text = std::fs::read_to_string(&path).with_context(read)?;
            if text.contains("{{") {
                continue;
            }
            for document in serde_yaml_ng::Deserializer::from_str(&text) {
                let value = Value::deserialize(document).with_context(read)?;
                if value["kind"] == "CustomResourceDefinition" {
                    found.push(value);
                }
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_charts_definitions_are_found() {
        let found = definitions().unwrap();
        let names: Vec<_> = found.iter().filter_map(|one| one["metadata"]["name"].as_str()).collect();
        for name in ["servers.policy.linkerd.io", "serviceprofiles.linkerd.io", "httproutes.gateway.networking.k8s.io"]
        {
            assert!(names.contains(&name), "{names:?}");
        }
    }
}
