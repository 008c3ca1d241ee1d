//! A Weft mesh on one Linux host, without Kubernetes, from ordinary manifests.
//!
//! A pod is a network namespace with an address from the pod CIDR, a container is a process in it, Services get cluster
//! IPs, a name and (for clients outside the mesh) address translation in the node's namespace. The control plane, the
//! agent and the proxies are the real binaries, and the control plane is itself a meshed pod.
//!
//! Two halves share [`config`] and [`state`]:
//! - the daemon, [`daemon::run`] (`weft sandbox run`), owns everything: it makes the host match the manifests and
//!   writes the state to `state.json`;
//! - the client, [`client::Sandbox`], reads that file, starts and stops daemons and runs commands in pods. The command
//!   line, the demo, the tests and the benches use it.
//!
//! ```text
//! manifests ─> daemon::desired (pure) ─> daemon: pods, services, control plane, agent ─> host (namespaces, cgroups, nft)
//!                                             └─> state.json ─> client
//! ```
//!
//! Read `daemon.rs` first. The sandbox is not a Kubernetes: on a cluster, everything runs there unchanged.
//!
//! On other systems than Linux there are settings, state and a client that knows no sandbox, so that `weft` builds
//! there.

#[cfg(target_os = "linux")]
pub mod client;
pub mod config;
#[cfg(target_os = "linux")]
pub mod daemon;
#[cfg(not(target_os = "linux"))]
mod elsewhere;
#[cfg(target_os = "linux")]
pub mod host;
pub mod state;

/// A client that finds no sandbox.
#[cfg(not(target_os = "linux"))]
pub mod client {
    pub use crate::elsewhere::{ClientError, Sandbox};
}
