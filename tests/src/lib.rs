//! The harness of the end-to-end tests, the demo and the benches: a mesh to run and what to ask it.
//!
//! - [`mesh`]: a running sandbox with the example manifests, and requests from inside its pods,
//! - [`agent`], [`metrics`], [`observe`]: what the kernel, the proxies and the host itself count,
//! - [`cluster`], [`tutorial`]: a Kubernetes cluster with Weft in it, and the documents that say how it gets there,
//! - [`demo`]: the scenario of `weft-demo`,
//! - [`mod@bench`]: the measurements of `weft-bench`.
//!
//! Everything here uses the product as a user does: its binaries, its manifests, its APIs.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "demo, benches and tests report on standard output")]

pub mod agent;
pub mod bench;
pub mod binaries;
pub mod cluster;
pub mod demo;
pub mod manifests;
pub mod mesh;
pub mod metrics;
pub mod observe;
pub mod tutorial;
pub mod wait;
