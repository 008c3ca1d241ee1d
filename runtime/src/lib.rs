//! The life of a Weft process, the same for every binary.
//!
//! Owns start and end: telemetry ([`telemetry`]), the metrics registry ([`metrics`]), the admin server ([`admin`]),
//! readiness ([`readiness`]), signals ([`signal`]), supervised tasks ([`tasks`]) and draining ([`drain`]). Refuses to
//! know what the process is for.
//!
//! ```text
//! telemetry::init ─> Tasks::spawn(..)* ─> run_until(signal::shutdown()) ─> Drain::drain(deadline) ─> exit
//! ```

pub mod admin;
pub mod drain;
pub mod metrics;
pub mod readiness;
pub mod signal;
pub mod tasks;
pub mod telemetry;
