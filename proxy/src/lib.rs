//! The sidecar proxy as a library, for its own program and its fuzz targets. Nothing else may use it: applications
//! meet on gRPC.

#![cfg_attr(test, expect(clippy::disallowed_methods, reason = "tests start what they end with"))]

mod access_log;
mod admin;
mod app;
mod attest;
mod build_info;
mod config;
mod control;
mod destination;
mod detect;
mod discover;
mod dns;
mod duration;
mod failure_log;
#[cfg(test)]
mod faults;
pub mod fuzz;
mod http;
mod identity;
mod in_flight;
mod inbound;
mod io;
mod listen;
mod metrics;
mod orig_dst;
mod outbound;
mod pauses;
mod policy;
mod recent;
mod request;
mod route;
mod shared;
mod tap;
mod tap_server;
#[cfg(test)]
mod testing;
mod trace;
mod transport_header;

use std::process::ExitCode;

use weft_runtime::dumpable;

use crate::config::Config;

/// EX_USAGE of sysexits.h, with which Linkerd's proxy exits on invalid settings.
const EXIT_USAGE: u8 = 64;

const HELP: &str = "\
Weft's sidecar proxy, wire-compatible with linkerd2-proxy.

Usage: weft-proxy [--help | --version]

All settings are environment variables. Durations are a whole number with ms, s, m, h or d; lists are separated by
commas; blank means unset.

A proxy beside a control plane on the same host, without Kubernetes:
  LINKERD2_PROXY_DESTINATION_SVC_ADDR=127.0.0.1:8086 \\
  LINKERD2_PROXY_POLICY_SVC_ADDR=127.0.0.1:8090 \\
  LINKERD2_PROXY_IDENTITY_SVC_ADDR=127.0.0.1:8080 \\
  LINKERD2_PROXY_POLICY_WORKLOAD=demo:web-0 \\
  LINKERD2_PROXY_IDENTITY_DIR=/run/identity \\
  LINKERD2_PROXY_IDENTITY_TOKEN_FILE=/run/token \\
  LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS=\"$(cat ca.crt)\" \\
  LINKERD2_PROXY_IDENTITY_LOCAL_NAME=web.demo.serviceaccount.identity.linkerd.cluster.local \\
  weft-proxy
";

/// Reads the settings from the environment once and runs the proxy.
///
/// Exits with 64 if a setting is invalid, with 1 if it cannot start or a part of it ends unexpectedly, otherwise with
/// 0.
pub fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        None => {}
        Some("--help" | "-h") => {
            print_line(&format!("{HELP}\n{}", config::help().trim_end()));
            return ExitCode::SUCCESS;
        }
        Some("--version" | "-V") => {
            print_line(concat!("weft-proxy ", env!("CARGO_PKG_VERSION")));
            return ExitCode::SUCCESS;
        }
        Some(other) => {
            complain(&format!("unexpected argument {other}: settings are environment variables, see --help"));
            return ExitCode::from(EXIT_USAGE);
        }
    }
    // Before a key or a token is read.
    if let Err(error) = dumpable::forbid() {
        complain(&format!("cannot keep other processes out of this one: {error}"));
        return ExitCode::FAILURE;
    }
    let config = match Config::parse(&|name| std::env::var(name).ok()) {
        Ok(config) => config,
        Err(error) => {
            complain(&error.to_string());
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    match app::run(config, &config::unknown(names)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{error:#}"));
            if error.is::<config::UnusableSetting>() { ExitCode::from(EXIT_USAGE) } else { ExitCode::FAILURE }
        }
    }
}

fn print_line(text: &str) {
    use std::io::Write as _;
    // If standard output is closed, nothing can be done about it.
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn complain(text: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "weft-proxy: {text}");
}
