//! A Weft mesh on one Linux host, without Kubernetes, from ordinary manifests.
//!
//! A pod is a network namespace with an address from the pod CIDR, a container is a process in it, Services get cluster
//! IPs, a name and (for clients outside the mesh) address translation in the node's namespace. The control plane, the
//! agent and the proxies are the real binaries, and the control plane is itself a meshed pod.
//!
//! Two halves that share [`config`] and [`state`]:
//! - the daemon, [`daemon::run`] (`weft sandbox run`), owns everything: it keeps the host like the manifests say and
//!   writes the state to `state.json`;
//! - the client, [`client::Sandbox`], reads that file, starts and stops daemons and runs commands in pods. The command
//!   line, the demo, the tests and the benches are its users.
//!
//! ```text
//! manifests ─> daemon::desired (pure) ─> daemon: pods, services, control plane, agent ─> host (namespaces, cgroups, nft)
//!                                             └─> state.json ─> client
//! ```
//!
//! Read `daemon.rs` first. It is not a Kubernetes: where a cluster is wanted, everything runs there unchanged.

pub mod client;
pub mod config;
pub mod daemon;
pub mod host;
pub mod state;
