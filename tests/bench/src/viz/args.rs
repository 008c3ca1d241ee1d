//! The options of `weft-bench viz`.

use clap::{ValueEnum, value_parser};

use crate::control_plane::args::ApiServer;

/// Options of `weft-bench viz`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  weft-bench viz --json
  weft-bench viz --parts window --interval-seconds 10
                                       a window of 15 minutes in 15 minutes
  weft-bench viz --pods 3000 --destinations 5
  weft-bench viz --parts proxy         only what a scrape costs a proxy
  weft-bench viz --kubeconfig /run/weft-kube/big/kubeconfig
                                       an API server that runs, such as that of
                                       cargo xtask kube up --control-plane-only --name big")]
pub struct Args {
    /// Print everything as one JSON object on the last line
    #[arg(long)]
    pub json: bool,
    /// What to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::ALL)]
    pub parts: Vec<Part>,
    /// Meshed pods, all in one namespace
    #[arg(long, default_value_t = 1000, value_parser = value_parser!(u32).range(1..=20_000))]
    pub pods: u32,
    /// Workloads that each pod sends to, of three pods each: its proxy has 96 lines for each of them
    #[arg(long, default_value_t = 20, value_parser = value_parser!(u32).range(1..=200))]
    pub destinations: u32,
    /// Minute: how long to measure with the component's own interval, seconds
    #[arg(long, default_value_t = 60, value_parser = value_parser!(u32).range(10..=3600))]
    pub seconds: u32,
    /// Window: time between two scrapes of a pod, seconds. The component's own is 10; with less, as many scrapes as 15
    /// minutes have are there sooner
    #[arg(long, default_value_t = 2, value_parser = value_parser!(u32).range(1..=60))]
    pub interval_seconds: u32,
    /// Where the objects are.
    #[command(flatten)]
    pub api_server: ApiServer,
}

/// A part of the bench of weft-viz.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// What a scrape costs a proxy
    Proxy,
    /// What the component takes with its own interval
    Minute,
    /// What it takes until its window of 15 minutes is full
    Window,
}

impl Part {
    const ALL: [Self; 3] = [Self::Proxy, Self::Minute, Self::Window];
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
}
