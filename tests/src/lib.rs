//! What the tests with a Kubernetes cluster share. All other shared parts are in `weft-test-kit`.
//!
//! - [`cluster`]: a cluster with Weft in it, seen through kubectl,
//! - [`tutorial`]: the documents that say how Weft gets there, run as written.

#![expect(clippy::print_stdout, reason = "a tutorial shows what its commands print")]

pub mod cluster;
pub mod tutorial;
