//! The Kubernetes side of Weft that needs no cluster: names, types and pure rules shared by the control plane, the
//! sandbox, the agent and the CLI.
//!
//! ```text
//! text --manifest--> Object --inject--> Pod with the proxy
//!                      |--policy------> meaning of a Server, an AuthorizationPolicy, an authentication
//!                      '--profile-----> meaning of a ServiceProfile
//! Helm values --values--> settings of injection and redirection
//! types --crds--> the chart's custom resource definitions
//! ```
//!
//! Everything here is a function from values to values; only [`manifest::load_dir`], [`manifest::load_file`] and
//! `kubeconfig` read files. Nothing uses the network, the clock or the environment.

pub mod boolean;
mod condition;
pub mod crds;
pub mod duration;
mod expression;
pub mod field;
pub mod inject;
#[cfg(feature = "kubeconfig")]
pub mod kubeconfig;
pub mod labels;
pub mod manifest;
pub mod names;
pub mod observe;
pub mod policy;
pub mod ports;
pub mod printable;
pub mod profile;
mod quantity;
pub mod support;
pub mod values;
pub mod workload;
