//! The options of `weft-bench control-plane`, and which combinations of them make sense.

use std::path::PathBuf;

use clap::{ValueEnum, value_parser};

use super::objects::Size;

/// How often a restart of a pod writes to the API: delete, create, status, slice.
pub(super) const WRITES_PER_RESTART: u32 = 4;
/// The most endpoints that the API server accepts in one EndpointSlice.
const MAX_ENDPOINTS: u32 = 1000;

/// Options of `weft-bench control-plane`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  weft-bench control-plane --json
  weft-bench control-plane --parts start,changes --seconds 60 --changes-per-second 200
  weft-bench control-plane --pods 1000 --services 100 --servers 100 --clients 200 --rollout-pods 100
  weft-bench control-plane --pods 25000 --clients 25000 --clients-per-connection 250 \\
    --open-seconds 120 --parts start,changes --changes-per-second 42
  weft-bench control-plane --kubeconfig /run/weft-kube/big/kubeconfig
                                       an API server that runs, such as that of
                                       cargo xtask kube up --control-plane-only --name big")]
pub struct Args {
    /// Print everything as one JSON object on the last line
    #[arg(long)]
    pub json: bool,
    /// What to measure; every run starts the control plane and opens the streams once
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::ALL)]
    pub parts: Vec<Part>,
    /// Meshed pods
    #[arg(long, default_value_t = 10_000, value_parser = value_parser!(u32).range(1..=100_000))]
    pub pods: u32,
    /// Services; each has its share of the pods
    #[arg(long, default_value_t = 1000, value_parser = value_parser!(u32).range(1..=20_000))]
    pub services: u32,
    /// Nodes, in three zones
    #[arg(long, default_value_t = 100, value_parser = value_parser!(u32).range(1..=250))]
    pub nodes: u32,
    /// Servers, all in one namespace
    #[arg(long, default_value_t = 700, value_parser = value_parser!(u32).range(0..=20_000))]
    pub servers: u32,
    /// AuthorizationPolicies, each of one Server
    #[arg(long, default_value_t = 100, value_parser = value_parser!(u32).range(0..=20_000))]
    pub policies: u32,
    /// Simulated proxies
    #[arg(long, default_value_t = 2000, value_parser = value_parser!(u32).range(1..=25_000))]
    pub clients: u32,
    /// Proxies that share a connection to either service, as the control plane's own sidecar makes them; with 1, each
    /// has its own
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..=25_000))]
    pub clients_per_connection: u32,
    /// Time in which the connections are opened one after the other, seconds; with 0, all at once
    #[arg(long, default_value_t = 0, value_parser = value_parser!(u32).range(0..=600))]
    pub open_seconds: u32,
    /// Services that each proxy talks to: three streams for each
    #[arg(long, default_value_t = 10, value_parser = value_parser!(u32).range(1..=100))]
    pub targets: u32,
    /// How long changes are made in each part that makes them
    #[arg(long, default_value_t = 30, value_parser = value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Endpoints that are removed or added, per second
    #[arg(long, default_value_t = 100, value_parser = value_parser!(u32).range(1..=5000))]
    pub changes_per_second: u32,
    /// Rollout: pods that are restarted, at a quarter of --changes-per-second, because each takes four writes
    #[arg(long, default_value_t = 1000, value_parser = value_parser!(u32).range(1..=100_000))]
    pub rollout_pods: u32,
    /// Where the objects are.
    #[command(flatten)]
    pub api_server: ApiServer,
}

/// The API server of a bench.
#[derive(Clone, Debug, clap::Args)]
pub struct ApiServer {
    /// An API server that runs, whose objects of this bench are removed at the end [default: one that is started for
    /// it]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Program that starts the API server; cargo xtask bench sets it
    #[arg(long, value_name = "FILE", env = "WEFT_LAB", hide_env_values = true)]
    pub lab: Option<PathBuf>,
}

/// A part of the bench of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Until it is ready, and until every stream has its first answer
    Start,
    /// Endpoints that come and go
    Changes,
    /// A rolling restart of many pods
    Rollout,
    /// Every client comes back at once, while endpoints come and go
    Reconnect,
    /// One client in ten stops reading
    Stalled,
    /// One client in ten reads a few bytes a second
    Slow,
    /// The same streams with twice the Servers and Services
    Doubled,
}

impl Part {
    const ALL: [Self; 7] =
        [Self::Start, Self::Changes, Self::Rollout, Self::Reconnect, Self::Stalled, Self::Slow, Self::Doubled];
}

impl std::fmt::Display for Part {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

impl Args {
    /// Whether a part was asked for.
    #[must_use]
    pub fn wants(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    /// The number of objects.
    ///
    /// # Errors
    /// When the options contradict each other; the message says which to change.
    pub fn size(&self) -> anyhow::Result<Size> {
        let own = if self.wants(Part::Rollout) { self.rollout_pods } else { 0 };
        anyhow::ensure!(
            self.pods >= self.clients.saturating_add(own),
            "--pods {}: every client is a pod of its own, and so is every restarted pod: at least {}, or fewer --clients \
             or --rollout-pods",
            self.pods,
            self.clients.saturating_add(own)
        );
        anyhow::ensure!(
            self.clients_per_connection == 1 || !(self.wants(Part::Stalled) || self.wants(Part::Slow)),
            "--clients-per-connection {}: in the parts stalled and slow each client has a connection of its own, choose \
             --parts without them",
            self.clients_per_connection
        );
        anyhow::ensure!(
            self.targets <= self.services,
            "--targets {}: there are only {} Services, see --services",
            self.targets,
            self.services
        );
        let per_service = self.pods.div_ceil(self.services);
        anyhow::ensure!(
            per_service <= MAX_ENDPOINTS,
            "--pods {}: {per_service} pods of each Service do not fit into an EndpointSlice of {MAX_ENDPOINTS}, use more \
             --services",
            self.pods
        );
        anyhow::ensure!(
            self.policies <= self.servers,
            "--policies {}: each is of a Server of its own, and there are only {}, see --servers",
            self.policies,
            self.servers
        );
        Ok(Size {
            pods: self.pods,
            services: self.services,
            nodes: self.nodes,
            servers: self.servers,
            policies: self.policies,
        })
    }

    /// Pods that are restarted per second.
    #[must_use]
    pub fn restarts_per_second(&self) -> u32 {
        (self.changes_per_second / WRITES_PER_RESTART).max(1)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn size(flags: &str) -> Result<Size, String> {
        let words = std::iter::once("bench").chain(flags.split_whitespace());
        Cli::try_parse_from(words).unwrap().args.size().map_err(|error| error.to_string())
    }

    #[test]
    fn the_defaults_fit_together() {
        let size = size("").unwrap();
        assert_eq!((size.pods, size.services, size.servers), (10_000, 1000, 700));
    }

    #[test]
    fn a_contradiction_names_the_option() {
        for (flags, expected) in [
            ("--pods 2500", "--pods 2500"),
            ("--pods 100 --clients 10 --services 5 --parts start", "--targets 10"),
            ("--pods 5000 --services 4 --targets 4", "--services"),
            ("--servers 10", "--policies 100"),
            ("--clients-per-connection 10", "--clients-per-connection 10"),
        ] {
            let error = size(flags).unwrap_err();
            assert!(error.contains(expected), "{flags}: {error}");
        }
        assert!(size("--pods 2500 --parts start,changes").is_ok());
        let many = "--pods 25000 --clients 25000 --clients-per-connection 250 --parts start,changes";
        assert!(size(many).is_ok());
    }
}
