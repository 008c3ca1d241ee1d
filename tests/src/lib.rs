//! Shared code of several end-to-end tests. What tests of other packages need, too, is in `weft-test-kit`.
//!
//! - [`cluster`]: a cluster with Weft in it, seen through kubectl,
//! - [`prometheus`]: a Prometheus that scrapes a sandbox,
//! - [`tutorial`]: the documents that describe the installation, run as written.

#![expect(clippy::print_stdout, reason = "a tutorial shows what its commands print")]

pub mod cluster;
pub mod prometheus;
pub mod tutorial;
