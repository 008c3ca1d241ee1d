//! Shared code of several end-to-end tests. What tests of other packages need, too, is in `weft-test-kit`.
//!
//! - [`certificates`]: a trust anchor and an issuer in files, for helm and `weft`,
//! - [`cluster`]: a cluster with Weft in it, seen through kubectl,
//! - [`output`]: what a program has printed,
//! - [`prometheus`]: a Prometheus that scrapes a sandbox,
//! - [`report`]: what tests expect of a client's report,
//! - [`tutorial`]: the documents that describe the installation, run as written.

#![expect(clippy::print_stdout, reason = "a tutorial shows what its commands print")]

pub mod certificates;
pub mod cluster;
pub mod output;
pub mod prometheus;
pub mod report;
pub mod tutorial;
