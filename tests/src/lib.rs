//! Shared code of the tests with a Kubernetes cluster. All other shared code is in `weft-test-kit`.
//!
//! - [`cluster`]: a cluster with Weft in it, seen through kubectl,
//! - [`tutorial`]: the documents that describe the installation, run as written.

#![expect(clippy::print_stdout, reason = "a tutorial shows what its commands print")]

pub mod cluster;
pub mod tutorial;
