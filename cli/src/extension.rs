//! `weft viz`: installing, checking and removing the component `weft-viz`. The other commands of `linkerd viz` are
//! hidden here: they are at the root.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Command, Subcommand};

use crate::{
    absent,
    check::{self, VizCheckArgs},
    dashboard::{self, DashboardArgs},
    install::viz::{InstallArgs, UninstallArgs, install, uninstall},
    viz::{self, Verb},
};

#[derive(Debug, Args)]
#[command(mut_subcommands = hide_verb, after_help = "Examples:
  weft viz install | kubectl apply -f -
  weft viz check
  weft viz uninstall | kubectl delete -f -

`weft stat`, `weft tap` and `weft dashboard` work without it, with your right to port-forward to pods. With it, they need rights of
their own (`get stats.viz.weft.io`, `create taps.viz.weft.io`), and answers look back 15 minutes.")]
pub(crate) struct VizArgs {
    #[command(subcommand)]
    command: VizCommand,
}

#[derive(Debug, Subcommand)]
enum VizCommand {
    /// Print the manifests of the component
    Install(InstallArgs),
    /// Print what to delete to remove the component
    Uninstall(UninstallArgs),
    /// Check whether the component is sound
    Check(VizCheckArgs),
    #[command(flatten)]
    Metrics(Verb),
    /// As `weft dashboard`
    #[command(hide = true)]
    Dashboard(DashboardArgs),
    #[command(flatten)]
    Absent(absent::InViz),
}

/// Executes `weft viz`.
pub(crate) async fn execute(args: VizArgs) -> Result<ExitCode> {
    match args.command {
        VizCommand::Install(args) => install(args).await,
        VizCommand::Uninstall(args) => uninstall(args).await,
        VizCommand::Check(args) => check::viz(args).await,
        VizCommand::Metrics(verb) => {
            viz::execute(verb).await?;
            Ok(ExitCode::SUCCESS)
        }
        VizCommand::Dashboard(args) => {
            dashboard::execute(args).await?;
            Ok(ExitCode::SUCCESS)
        }
        VizCommand::Absent(command) => Ok(command.refuse()),
    }
}

fn hide_verb(command: Command) -> Command {
    let hidden = command.is_hide_set() || Verb::has_subcommand(command.get_name());
    command.hide(hidden)
}
