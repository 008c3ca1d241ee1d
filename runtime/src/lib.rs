//! The life of a Weft process, the same for every binary.
//!
//! Owns start and end: telemetry ([`telemetry`]), the metrics registry ([`metrics`]), the HTTP server and its limits
//! ([`server`]), the admin server on it ([`admin`]), readiness ([`readiness`]), signals ([`signal`]), supervised tasks
//! ([`tasks`]), open files ([`files`]), access to the process ([`dumpable`]) and draining ([`drain`]). Refuses to know
//! the purpose of the process.
//!
//! ```text
//! telemetry::init ─> Tasks::spawn(..)* ─> run_until(signal::shutdown()) ─> Drain::drain(deadline) ─> exit
//! ```

#![cfg_attr(test, expect(clippy::disallowed_methods, reason = "tests start what they end with"))]

pub mod admin;
pub mod drain;
pub mod dumpable;
pub mod error;
pub mod files;
pub mod metrics;
pub mod readiness;
pub mod server;
pub mod signal;
pub mod tasks;
pub mod telemetry;
