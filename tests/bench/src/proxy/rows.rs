//! What is measured: the rows, the contenders, and who takes part in which row.

use clap::ValueEnum;
use serde::Serialize;

use crate::load::{Flood, Shape};

/// A line of the comparison.
#[derive(Debug)]
pub struct Row {
    /// Its name on the command line.
    pub name: &'static str,
    /// For people.
    pub(super) what: &'static str,
    /// What is done.
    pub(super) act: Act,
}

/// What is done for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Load for some seconds.
    Load(Shape),
    /// The load of `http1-64` on a Service with `number` endpoints, of which some are removed and added meanwhile.
    Endpoints {
        /// How many.
        number: u32,
    },
    /// The load of `http1-64` on proxies with one and with two workers.
    Workers,
    /// The load of `http1-64` while nobody looks, and while both pods are tapped.
    Tap,
    /// The load of `open-1000` while nobody else comes, and while a peer outside the mesh floods the server's proxy.
    Flood(Flood),
    /// Connections that do nothing.
    Idle {
        /// HTTP/1.1, or else opaque bytes.
        http: bool,
        /// How many.
        connections: u32,
    },
    /// A start of the client's proxy.
    Start,
}

/// A way from the client to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contender {
    /// No proxy at all
    Direct,
    /// Two of our proxies, redirected to by eBPF, with mutual TLS
    Weft,
    /// The same with the programs of --baseline
    Baseline,
    /// The same as weft with two worker threads in each proxy
    #[value(name = "weft-2-workers")]
    #[serde(rename = "weft-2-workers")]
    Workers2,
    /// The same proxies as weft, while `weft tap` watches all of their requests
    #[value(name = "weft-tapped")]
    #[serde(rename = "weft-tapped")]
    Tapped,
    /// The same proxies as weft, while a pod outside the mesh floods the server's
    #[value(name = "weft-flooded")]
    #[serde(rename = "weft-flooded")]
    Flooded,
    /// Two HAProxys that speak HTTP/1.1 over mutual TLS
    #[value(name = "haproxy-http1")]
    #[serde(rename = "haproxy-http1")]
    HaproxyHttp1,
    /// The same HAProxys, under the same flood
    #[value(name = "haproxy-http1-flooded")]
    #[serde(rename = "haproxy-http1-flooded")]
    HaproxyHttp1Flooded,
    /// Two HAProxys that speak HTTP/2 over mutual TLS
    #[value(name = "haproxy-http2")]
    #[serde(rename = "haproxy-http2")]
    HaproxyHttp2,
    /// Two HAProxys that pass on bytes over mutual TLS
    HaproxyTcp,
    /// The floor: the same bytes through our proxies on a port that is marked as opaque
    Opaque,
}

/// What the client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2, gRPC included.
    Http2,
    /// Plain bytes.
    Tcp,
}

/// Every row, in the order of the table.
pub const ROWS: [Row; 26] = [
    load("http1-1", "HTTP/1.1, 1 kept connection, 1 KiB", Shape::Http1 { connections: 1 }),
    load("http1-16", "HTTP/1.1, 16 kept connections, 1 KiB", Shape::Http1 { connections: 16 }),
    load("http1-64", "HTTP/1.1, 64 kept connections, 1 KiB", Shape::Http1 { connections: 64 }),
    load("http1-256", "HTTP/1.1, 256 kept connections, 1 KiB", Shape::Http1 { connections: 256 }),
    load("http2-1x64", "HTTP/2, 1 connection of 64 streams, 1 KiB", Shape::Http2 { connections: 1, streams: 64 }),
    load("http2-16x4", "HTTP/2, 16 connections of 4 streams, 1 KiB", Shape::Http2 { connections: 16, streams: 4 }),
    load("connection", "HTTP/1.1, a connection for each request, 16 at once", Shape::Http1New { connections: 16 }),
    load("open-1000", "HTTP/1.1, 1,000 requests/s, open loop", Shape::Open { rate: 1000, connections: 16 }),
    load("open-5000", "HTTP/1.1, 5,000 requests/s, open loop", Shape::Open { rate: 5000, connections: 64 }),
    load("bulk", "one opaque stream from the server; Gbit/s, CPU per MiB", Shape::Bulk),
    load("round-trip", "64 opaque bytes back and forth, 1 connection", Shape::RoundTrip),
    load("grpc-unary", "gRPC, 1 connection of 64 unary calls, 128 B", Shape::GrpcUnary { connections: 1, streams: 64 }),
    load(
        "grpc-stream",
        "gRPC, 1 connection of 64 streams, 128 B messages back and forth",
        Shape::GrpcStream { connections: 1, streams: 64 },
    ),
    Row {
        name: "endpoints-1000",
        what: "http1-64 over 1,000 endpoints, 20 changes per second",
        act: Act::Endpoints { number: 1000 },
    },
    Row {
        name: "endpoints-10000",
        what: "http1-64 over 10,000 endpoints, 20 changes per second",
        act: Act::Endpoints { number: 10_000 },
    },
    Row { name: "workers", what: "http1-64 with 1 and with 2 workers in each proxy", act: Act::Workers },
    Row { name: "tap", what: "http1-64 without and with `weft tap` of both pods", act: Act::Tap },
    flood(
        "flood-heads",
        "open-1000 while a peer holds 10,000 connections open, each with half of an HTTP/1.1 head",
        Flood::Heads { connections: 10_000 },
    ),
    flood(
        "flood-hellos",
        "open-1000 while a peer holds 10,000 connections open, each with half of a TLS ClientHello",
        Flood::Hellos { connections: 10_000 },
    ),
    flood(
        "flood-resets",
        "open-1000 while a peer opens and resets up to 20,000 HTTP/2 streams/s on 4 connections",
        Flood::Resets { connections: 4, per_second: 20_000 },
    ),
    flood(
        "flood-connections",
        "open-1000 while a peer opens and resets up to 2,000 connections/s",
        Flood::Connections { per_second: 2000 },
    ),
    idle("idle-http-1000", "1,000 idle HTTP/1.1 connections", true, 1000),
    idle("idle-http-10000", "10,000 idle HTTP/1.1 connections", true, 10_000),
    idle("idle-opaque-1000", "1,000 idle opaque connections", false, 1000),
    idle("idle-opaque-10000", "10,000 idle opaque connections", false, 10_000),
    Row { name: "start", what: "start of the client's proxy, until /ready says so", act: Act::Start },
];

const fn load(name: &'static str, what: &'static str, shape: Shape) -> Row {
    Row { name, what, act: Act::Load(shape) }
}

const fn flood(name: &'static str, what: &'static str, flood: Flood) -> Row {
    Row { name, what, act: Act::Flood(flood) }
}

const fn idle(name: &'static str, what: &'static str, http: bool, connections: u32) -> Row {
    Row { name, what, act: Act::Idle { http, connections } }
}

impl Row {
    /// The row with this name.
    ///
    /// # Errors
    /// When no row has this name; the error lists all names.
    pub fn named(name: &str) -> Result<&'static Self, String> {
        static ALL: [Row; ROWS.len()] = ROWS;
        let names = || ALL.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
        ALL.iter().find(|row| row.name == name).ok_or_else(|| format!("the rows are {}", names()))
    }

    /// The load, if it is one that runs for some seconds.
    pub(super) fn shape(&self) -> Option<Shape> {
        match self.act {
            Act::Load(shape) => Some(shape),
            Act::Endpoints { .. } | Act::Workers | Act::Tap => Some(Shape::Http1 { connections: 64 }),
            Act::Flood(_) => Some(Shape::Open { rate: 1000, connections: 16 }),
            Act::Idle { .. } | Act::Start => None,
        }
    }

    /// The flood that a contender is measured under.
    pub(super) fn flood(&self, contender: Contender) -> Option<Flood> {
        match self.act {
            Act::Flood(flood) if contender.unflooded() != contender => Some(flood),
            _ => None,
        }
    }

    /// What the client speaks.
    pub(super) fn protocol(&self) -> Protocol {
        match self.act {
            Act::Load(Shape::Http1 { .. } | Shape::Http1New { .. } | Shape::Open { .. }) => Protocol::Http1,
            Act::Load(Shape::Http2 { .. } | Shape::GrpcUnary { .. } | Shape::GrpcStream { .. }) => Protocol::Http2,
            Act::Load(Shape::Bulk | Shape::RoundTrip) => Protocol::Tcp,
            Act::Start | Act::Endpoints { .. } | Act::Workers | Act::Tap | Act::Flood(_) => Protocol::Http1,
            Act::Idle { http, .. } => {
                if http {
                    Protocol::Http1
                } else {
                    Protocol::Tcp
                }
            }
        }
    }

    /// Whether a contender takes part.
    pub(super) fn has(&self, contender: Contender) -> bool {
        match self.act {
            // HAProxy would read its configuration again for each change.
            Act::Start | Act::Endpoints { .. } => return matches!(contender, Contender::Weft | Contender::Baseline),
            Act::Workers => return matches!(contender, Contender::Weft | Contender::Workers2),
            Act::Tap => return matches!(contender, Contender::Weft | Contender::Tapped),
            Act::Flood(_) => return matches!(contender.unflooded(), Contender::Weft | Contender::HaproxyHttp1),
            Act::Load(_) | Act::Idle { .. } => {}
        }
        let idle = matches!(self.act, Act::Idle { .. });
        let grpc = matches!(self.act, Act::Load(Shape::GrpcUnary { .. } | Shape::GrpcStream { .. }));
        let http = self.protocol() != Protocol::Tcp;
        match contender {
            Contender::Direct => !idle,
            Contender::Weft | Contender::Baseline => true,
            Contender::Workers2 | Contender::Tapped | Contender::Flooded | Contender::HaproxyHttp1Flooded => false,
            // gRPC needs HTTP/2 all the way.
            Contender::HaproxyHttp1 => http && !grpc,
            Contender::HaproxyHttp2 => http,
            Contender::HaproxyTcp => !http,
            // Plain bytes are opaque anyway.
            Contender::Opaque => http && !idle,
        }
    }
}

impl Contender {
    /// Its name on the command line and in reports.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Weft => "weft",
            Self::Baseline => "baseline",
            Self::Workers2 => "weft-2-workers",
            Self::Tapped => "weft-tapped",
            Self::Flooded => "weft-flooded",
            Self::HaproxyHttp1 => "haproxy-http1",
            Self::HaproxyHttp1Flooded => "haproxy-http1-flooded",
            Self::HaproxyHttp2 => "haproxy-http2",
            Self::HaproxyTcp => "haproxy-tcp",
            Self::Opaque => "opaque",
        }
    }

    /// The contender with the same proxies and without a flood; itself if it has none.
    pub(super) fn unflooded(self) -> Self {
        match self {
            Self::Flooded => Self::Weft,
            Self::HaproxyHttp1Flooded => Self::HaproxyHttp1,
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_found_by_its_name_and_no_other() {
        for row in &ROWS {
            assert_eq!(Row::named(row.name).unwrap().act, row.act);
        }
        assert!(Row::named("http3").unwrap_err().contains("http1-16"));
    }

    #[test]
    fn contenders_have_the_names_of_the_command_line() {
        for contender in Contender::value_variants() {
            let value = contender.to_possible_value().unwrap();
            assert_eq!(value.get_name(), contender.label());
            assert_eq!(serde_json::to_value(contender).unwrap(), contender.label());
        }
    }

    #[test]
    fn each_row_of_a_peer_has_someone_to_be_compared_with() {
        for row in ROWS.iter().filter(|row| matches!(row.act, Act::Load(_) | Act::Idle { .. })) {
            let others = [Contender::HaproxyHttp1, Contender::HaproxyHttp2, Contender::HaproxyTcp];
            assert!(row.has(Contender::Weft) && others.iter().any(|other| row.has(*other)), "{}", row.name);
        }
    }

    #[test]
    fn every_flooded_contender_has_its_proxies_without_the_flood_beside_it() {
        for row in &ROWS {
            for contender in Contender::value_variants().iter().copied().filter(|contender| row.has(*contender)) {
                assert!(row.has(contender.unflooded()), "{} of {}", contender.label(), row.name);
                let is_flooded = contender.label().ends_with("-flooded");
                assert_eq!(row.flood(contender).is_some(), is_flooded, "{} of {}", contender.label(), row.name);
            }
            let is_flood = row.name.starts_with("flood-");
            let flooded = [Contender::Flooded, Contender::HaproxyHttp1Flooded].map(|contender| row.has(contender));
            assert_eq!(flooded, [is_flood; 2], "{}", row.name);
        }
    }
}
