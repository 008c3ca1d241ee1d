//! The one test harness, shared by tests, benches and the demo. It uses the product as a user does: its binaries, its
//! manifests, its APIs; nothing here uses the internals of an application.
//!
//! | To have | take |
//! |---|---|
//! | a node: cgroups, network namespaces, a bpffs and the real agent | [`node`] |
//! | three network namespaces in a row, two of them ready to be meshed | [`world`] |
//! | a process in one of them, and what it does on command | [`pod`], over [`actor`] |
//! | a whole mesh from manifests, in a sandbox | [`mesh`], [`manifests`] |
//! | something that becomes true | [`wait`] |
//! | answers of the agent, of proxies, of the host | [`agent`], [`metrics`], [`observe`] |
//! | a double of a proxy that is scraped | [`scrape`] |
//! | the output of a process of the product | [`process`] |
//! | a program of tests without libtest | [`check`] |

#![expect(clippy::print_stderr, clippy::print_stdout, reason = "tests report on the standard streams")]
#![expect(clippy::unwrap_used, reason = "a test ends where an expectation of its harness does")]

pub mod actor;
pub mod agent;
pub mod binaries;
pub mod check;
pub mod manifests;
pub mod mesh;
pub mod metrics;
pub mod node;
pub mod observe;
pub mod pod;
pub mod process;
pub mod scrape;
pub mod wait;
pub mod world;
