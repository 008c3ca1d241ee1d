//! Where a command looks: in a sandbox of this host or in a cluster; `weft trace`, `weft status` and `weft explain`
//! also at one agent's socket.
//!
//! A target that is named on the command line is used. Otherwise it is the sandbox `default` if it runs, else the
//! cluster of the current kubeconfig.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Result, bail};
use clap::Args;
use weft_sandbox::{
    client::{ClientError, Sandbox},
    config::{DEFAULT_NAME, check_name},
    state::State,
};

use crate::{
    cluster::{Cluster, ClusterArgs},
    output::note,
    pod_network::PodNetwork,
};

/// A sandbox or a cluster.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct MeshArgs {
    /// A sandbox of this host [default: `default` if it runs, else the cluster of the current kubeconfig]
    #[arg(long, value_name = "NAME", value_parser = sandbox_name, conflicts_with_all = ["kubeconfig", "context"])]
    sandbox: Option<String>,
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
}

/// A sandbox, a cluster or an agent.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TargetArgs {
    #[command(flatten)]
    mesh: MeshArgs,
    /// The socket of one agent on this host
    #[arg(long, value_name = "PATH", conflicts_with_all = ["sandbox", "kubeconfig", "context"])]
    agent_socket: Option<PathBuf>,
}

/// The selected target.
pub(crate) enum Target {
    Sandbox(Arc<State>),
    Socket(PathBuf),
    Cluster(Cluster),
}

/// The line about the choice that only commands with an agent's socket have.
const SOCKET: &str = "\n  --agent-socket PATH  one agent on this host";

/// Parser for clap: a name, checked before it becomes part of a path.
pub(crate) fn sandbox_name(text: &str) -> Result<String, String> {
    check_name(text).map(|()| text.to_owned()).map_err(|error| error.to_string())
}

impl TargetArgs {
    pub(crate) async fn target(&self) -> Result<Target> {
        if let Some(socket) = &self.agent_socket {
            return Ok(Target::Socket(socket.clone()));
        }
        Ok(match self.mesh.select(SOCKET).await? {
            PodNetwork::Cluster(cluster) => Target::Cluster(cluster),
            PodNetwork::Sandbox(state) => Target::Sandbox(state),
        })
    }
}

impl MeshArgs {
    /// Access to the pods of the selected mesh.
    pub(crate) async fn network(&self) -> Result<PodNetwork> {
        self.select("").await
    }

    /// `more` is what else a person may choose.
    async fn select(&self, more: &str) -> Result<PodNetwork> {
        if let Some(name) = &self.sandbox {
            return Ok(PodNetwork::Sandbox(Arc::new(Sandbox::open(name)?.state()?)));
        }
        if self.cluster.is_chosen() {
            return self.cluster.cluster().await.map(PodNetwork::Cluster);
        }
        match default_sandbox() {
            Ok(state) => {
                let (kubeconfig, home) = (std::env::var_os("KUBECONFIG"), std::env::var_os("HOME"));
                if knows_a_cluster(kubeconfig.as_deref(), home.as_deref().map(Path::new)) {
                    note(&format!(
                        "this is the sandbox `{DEFAULT_NAME}`; for the cluster use --kubeconfig or --context"
                    ));
                }
                Ok(PodNetwork::Sandbox(Arc::new(state)))
            }
            Err(no_sandbox) => match self.cluster.cluster().await {
                Ok(cluster) => Ok(PodNetwork::Cluster(cluster)),
                Err(no_cluster) => bail!("{}{more}", nowhere(&no_sandbox, &no_cluster)),
            },
        }
    }
}

/// Whether a person may have expected a cluster: one is configured where kubectl looks for it.
fn knows_a_cluster(kubeconfig: Option<&OsStr>, home: Option<&Path>) -> bool {
    match kubeconfig {
        Some(files) if !files.is_empty() => true,
        _ => home.is_some_and(|home| home.join(".kube/config").is_file()),
    }
}

fn default_sandbox() -> Result<State, ClientError> {
    Sandbox::open(DEFAULT_NAME)?.state()
}

fn nowhere(no_sandbox: &ClientError, no_cluster: &anyhow::Error) -> String {
    let sandbox = match no_sandbox {
        ClientError::NotFound(name) => format!("no sandbox `{name}` runs on this host"),
        other => other.to_string(),
    };
    format!(
        "nowhere to look: {sandbox}, and {no_cluster:#}. Choose one:\n  \
         --sandbox NAME       a sandbox of this host (`weft sandbox list`)\n  \
         --kubeconfig FILE    a cluster, or --context NAME of the current kubeconfig"
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        target: TargetArgs,
    }

    fn parse(args: &[&str]) -> Result<TargetArgs, clap::Error> {
        Cli::try_parse_from(std::iter::once("weft").chain(args.iter().copied())).map(|cli| cli.target)
    }

    #[test]
    fn there_is_one_place_to_look() {
        assert!(parse(&["--sandbox", "a", "--context", "b"]).is_err());
        assert!(parse(&["--agent-socket", "a", "--sandbox", "b"]).is_err());
        assert!(parse(&["--kubeconfig", "a", "--context", "b"]).unwrap().mesh.cluster.is_chosen());
    }

    #[test]
    fn the_control_planes_namespace_chooses_no_cluster() {
        assert!(!parse(&["-L", "mesh"]).unwrap().mesh.cluster.is_chosen());
    }

    #[test]
    fn a_cluster_is_expected_where_kubectl_would_find_one() {
        let home = tempfile::tempdir().unwrap();
        assert!(!knows_a_cluster(None, Some(home.path())) && !knows_a_cluster(None, None));
        assert!(knows_a_cluster(Some(OsStr::new("/etc/kubeconfig")), Some(home.path())));
        std::fs::create_dir(home.path().join(".kube")).unwrap();
        std::fs::write(home.path().join(".kube/config"), "").unwrap();
        assert!(knows_a_cluster(None, Some(home.path())) && knows_a_cluster(Some(OsStr::new("")), Some(home.path())));
    }

    #[tokio::test]
    async fn a_socket_that_is_named_is_taken() {
        let target = parse(&["--agent-socket", "/run/agent.sock"]).unwrap().target().await.unwrap();
        assert!(matches!(target, Target::Socket(path) if path.ends_with("agent.sock")));
    }

    #[test]
    fn where_there_is_nothing_every_choice_is_named() {
        let text = nowhere(&ClientError::NotFound("default".to_owned()), &anyhow::anyhow!("no cluster is configured"));
        for choice in ["--sandbox", "--kubeconfig", "--context"] {
            assert!(text.contains(choice), "{text}");
        }
    }
}
