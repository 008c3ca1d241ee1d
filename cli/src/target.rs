//! The target of `weft trace` and `weft status`: a sandbox of this host, one agent's socket, or a cluster.
//!
//! A target that is named on the command line is used. Otherwise it is the sandbox `default` if it runs, else the
//! cluster of the current kubeconfig.

use std::path::PathBuf;

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
};

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TargetArgs {
    /// A sandbox of this host [default: `default` if it runs, else the cluster of the current kubeconfig]
    #[arg(long, value_name = "NAME", value_parser = sandbox_name, conflicts_with_all = ["kubeconfig", "context"])]
    pub(crate) sandbox: Option<String>,
    /// The socket of one agent on this host
    #[arg(long, value_name = "PATH", conflicts_with_all = ["sandbox", "kubeconfig", "context"])]
    pub(crate) agent_socket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
}

/// The selected target.
pub(crate) enum Target {
    Sandbox(Box<State>),
    Socket(PathBuf),
    Cluster(Cluster),
}

/// Parser for clap: a name, checked before it becomes part of a path.
pub(crate) fn sandbox_name(text: &str) -> Result<String, String> {
    check_name(text).map(|()| text.to_owned()).map_err(|error| error.to_string())
}

impl TargetArgs {
    pub(crate) async fn target(&self) -> Result<Target> {
        if let Some(socket) = &self.agent_socket {
            return Ok(Target::Socket(socket.clone()));
        }
        if let Some(name) = &self.sandbox {
            return Ok(Target::Sandbox(Box::new(Sandbox::open(name)?.state()?)));
        }
        if self.cluster.is_chosen() {
            return self.cluster.cluster().await.map(Target::Cluster);
        }
        match default_sandbox() {
            Ok(state) => {
                if std::env::var_os("KUBECONFIG").is_some() {
                    note(&format!(
                        "this is the sandbox `{DEFAULT_NAME}`; for the cluster use --kubeconfig or --context"
                    ));
                }
                Ok(Target::Sandbox(Box::new(state)))
            }
            Err(no_sandbox) => match self.cluster.cluster().await {
                Ok(cluster) => Ok(Target::Cluster(cluster)),
                Err(no_cluster) => bail!(nowhere(&no_sandbox, &no_cluster)),
            },
        }
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
         --kubeconfig FILE    a cluster, or --context NAME of the current kubeconfig\n  \
         --agent-socket PATH  one agent on this host"
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
        assert!(parse(&["--kubeconfig", "a", "--context", "b"]).unwrap().cluster.is_chosen());
    }

    #[test]
    fn the_control_planes_namespace_chooses_no_cluster() {
        assert!(!parse(&["-L", "mesh"]).unwrap().cluster.is_chosen());
    }

    #[tokio::test]
    async fn a_socket_that_is_named_is_taken() {
        let target = parse(&["--agent-socket", "/run/agent.sock"]).unwrap().target().await.unwrap();
        assert!(matches!(target, Target::Socket(path) if path.ends_with("agent.sock")));
    }

    #[test]
    fn where_there_is_nothing_every_choice_is_named() {
        let text = nowhere(&ClientError::NotFound("default".to_owned()), &anyhow::anyhow!("no cluster is configured"));
        for choice in ["--sandbox", "--kubeconfig", "--context", "--agent-socket"] {
            assert!(text.contains(choice), "{text}");
        }
    }
}
