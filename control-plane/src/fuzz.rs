//! Entry points of the fuzz targets: requests as they arrive, and objects as the API server sends them.
//!
//! Each function panics if the control plane violates its guarantee, and returns nothing. The first byte of a request
//! chooses the method and how the rest arrives; the rest is a message, or a message in gRPC's frame.

mod certify;
mod objects;
mod review;
#[cfg(test)]
mod seeds;
mod world;

use std::sync::LazyLock;

use bytes::Bytes;
use http::Request;
use prost::Message;
use tonic::Code;
use weft_proto::linkerd::{
    destination::{DestinationProfile, GetDestination, Update, update},
    inbound::{PortSpec, Server},
    outbound::{OutboundPolicy, TrafficSpec},
};

use crate::{authority, destination, grpc, policy::workload};
use world::{Answer, Wire, World};

/// The longest name of a namespace, a pod or a node (RFC 1123).
const MAX_NAME: usize = 253;
/// The longest answer about the few objects that there are, in bytes.
const MAX_ANSWER: usize = 64 * 1024;

const GET: &str = "/io.linkerd.proxy.destination.Destination/Get";
const GET_PROFILE: &str = "/io.linkerd.proxy.destination.Destination/GetProfile";
const GET_PORT: &str = "/io.linkerd.proxy.inbound.InboundServerPolicies/GetPort";
const WATCH_PORT: &str = "/io.linkerd.proxy.inbound.InboundServerPolicies/WatchPort";
const GET_POLICY: &str = "/io.linkerd.proxy.outbound.OutboundPolicies/Get";
const WATCH_POLICY: &str = "/io.linkerd.proxy.outbound.OutboundPolicies/Watch";

/// Codes of requests that are no message: tonic's, when it reads one.
const UNREADABLE: [Code; 2] = [Code::Internal, Code::OutOfRange];

/// Answers a request for endpoints or for a profile. It is answered, or refused with one of Linkerd's codes; what is
/// kept for it is bounded.
pub fn destination_request(bytes: &[u8]) {
    static WORLD: LazyLock<World> = LazyLock::new(World::new);
    let Some(wire) = Wire::new(bytes) else { return };
    if let Some(request) = wire.message::<GetDestination>() {
        let token = destination::token::Token::parse(&request.context_token);
        let names = [token.namespace, token.node_name];
        assert!(names.iter().flatten().all(|name| name.len() <= MAX_NAME), "{names:?}");
        let authority = authority::Authority::parse(&request.path);
        assert!(authority.is_none_or(|authority| authority.host.len() <= authority::MAX_AUTHORITY));
    }
    let (path, codes): (_, &[Code]) = if wire.flag() {
        (GET, &[Code::Ok, Code::InvalidArgument, Code::NotFound, Code::FailedPrecondition, Code::ResourceExhausted])
    } else {
        (GET_PROFILE, &[Code::Ok, Code::InvalidArgument, Code::NotFound, Code::FailedPrecondition, Code::Unknown])
    };
    let answer = ask(&WORLD, &wire, path, codes);
    if path == GET {
        answer.messages::<Update>().iter().for_each(check_update);
    } else {
        answer.messages::<DestinationProfile>();
    }
    WORLD.keep(answer);
    WORLD.check_bounds();
}

/// Answers a request for a policy, once and as a stream: both answers are the same.
pub fn policy_request(bytes: &[u8]) {
    static WORLD: LazyLock<World> = LazyLock::new(World::new);
    let Some(wire) = Wire::new(bytes) else { return };
    let named = if wire.flag() {
        wire.message::<PortSpec>().map(|request| request.workload)
    } else {
        wire.message::<TrafficSpec>().map(|request| request.source_workload)
    };
    if let Some(Ok(workload)) = named.map(|name| workload::parse(&name)) {
        assert!(workload.namespace().len() <= MAX_NAME);
    }
    let (once, stream) = if wire.flag() { (GET_PORT, WATCH_PORT) } else { (GET_POLICY, WATCH_POLICY) };
    let codes = [Code::Ok, Code::InvalidArgument, Code::NotFound];
    let (once, stream) = (ask(&WORLD, &wire, once, &codes), ask(&WORLD, &wire, stream, &codes));
    assert_eq!(once.code, stream.code);
    if wire.flag() {
        let servers = once.messages::<Server>();
        servers.iter().for_each(check_server);
        assert_eq!(servers, stream.messages());
    } else {
        let policies = once.messages::<OutboundPolicy>();
        assert!(policies.iter().all(|policy| policy.protocol.is_some() && policy.metadata.is_some()), "{policies:?}");
        assert_eq!(policies, stream.messages());
    }
    WORLD.keep(stream);
    WORLD.check_bounds();
}

/// Answers a request for a certificate. One is issued only for the identity of the token's ServiceAccount.
pub fn certify_request(bytes: &[u8]) {
    certify::request(bytes);
}

/// Adds an object of a watched kind to a few others, asks everything that it may concern, and removes it: the answers
/// are then those of before.
pub fn object(json: &[u8]) {
    objects::object(json);
}

/// Reviews an object as the webhooks do.
pub fn review(json: &[u8]) {
    review::review(json);
}

/// Asks one of the services over its HTTP interface, and checks the code of the answer.
fn ask(world: &World, wire: &Wire<'_>, path: &str, codes: &[Code]) -> Answer {
    let answer = world.call(Request::post(path).body(wire.body()).expect("a valid path"));
    assert!(codes.contains(&answer.code) || UNREADABLE.contains(&answer.code), "{path}: {:?}", answer.code);
    if wire.is_too_long() {
        assert_eq!(answer.code, Code::OutOfRange, "a message of more than {} bytes", grpc::MAX_REQUEST_BYTES);
    }
    assert!(answer.first.as_ref().is_none_or(|first| first.len() <= MAX_ANSWER), "{path}: a long answer");
    answer
}

/// Every endpoint has an address that proxies can connect to, and labels that Prometheus accepts.
fn check_update(message: &Update) {
    if let Some(update::Update::Add(set)) = &message.update {
        let usable =
            |addr: &weft_proto::linkerd::net::TcpAddress| addr.ip.is_some() && (1..=65535).contains(&addr.port);
        assert!(set.addrs.iter().all(|endpoint| endpoint.addr.as_ref().is_some_and(usable)), "{set:?}");
        let is_name = |key: &String| key.chars().all(|character| character.is_ascii_alphanumeric() || character == '_');
        assert!(set.addrs.iter().flat_map(|endpoint| endpoint.metric_labels.keys()).all(is_name), "{set:?}");
    }
}

/// Stock proxies refuse a whole policy that has an authorization without networks.
fn check_server(server: &Server) {
    assert!(server.protocol.is_some(), "{server:?}");
    assert!(server.authorizations.iter().all(|authorization| !authorization.networks.is_empty()), "{server:?}");
}

/// The messages of a frame of an answer, which holds whole messages.
fn messages<M: Message + Default>(frame: &Bytes) -> Vec<M> {
    let (mut rest, mut found) = (frame.clone(), Vec::new());
    while !rest.is_empty() {
        let header = rest.split_to(grpc::HEADER_BYTES);
        assert_eq!(header[0], 0, "answers are not compressed");
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
        let message = rest.split_to(usize::try_from(length).expect("at least 32 bits"));
        found.push(M::decode(message).expect("an answer is a message"));
    }
    found
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::{Path, PathBuf},
    };

    use super::*;

    /// The directory of the inputs that a target starts from.
    pub(super) fn corpus(target: &str) -> PathBuf {
        let own = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
        Path::new(&own).join("../fuzz/corpus").join(target)
    }

    /// The inputs that each target starts from.
    fn seeds(target: &str) -> Vec<Vec<u8>> {
        let directory = corpus(target);
        let files = fs::read_dir(&directory).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
        let found: Vec<_> = files.collect();
        assert!(!found.is_empty(), "{}", directory.display());
        found
    }

    #[test]
    fn every_seed_keeps_the_guarantees() {
        seeds("destination_request").iter().for_each(|seed| destination_request(seed));
        seeds("policy_request").iter().for_each(|seed| policy_request(seed));
        seeds("certify_request").iter().for_each(|seed| certify_request(seed));
        seeds("objects").iter().for_each(|seed| object(seed));
        seeds("review").iter().for_each(|seed| review(seed));
    }

    /// Without coverage, and in seconds: every beginning of every seed, and every seed with another byte at each place.
    #[test]
    fn what_is_near_a_seed_keeps_the_guarantees() {
        type Target = fn(&[u8]);
        let targets: [(&str, Target); 5] = [
            ("destination_request", destination_request),
            ("policy_request", policy_request),
            ("certify_request", certify_request),
            ("objects", object),
            ("review", review),
        ];
        for (target, run) in targets {
            for mut seed in seeds(target) {
                // Elsewhere, JSON is hardly ever an object.
                let stride = if ["objects", "review"].contains(&target) { 31 } else { 1 };
                for at in (0..seed.len()).step_by(stride) {
                    run(&seed[..at]);
                    let byte = seed[at];
                    for other in [0, byte ^ 1, 0xff] {
                        seed[at] = other;
                        run(&seed);
                    }
                    seed[at] = byte;
                }
            }
        }
    }

    #[test]
    fn every_api_answers_some_seed() {
        let world = World::new();
        for target in ["destination_request", "policy_request"] {
            let mut answered = [0, 0];
            for seed in seeds(target) {
                let wire = Wire::new(&seed).unwrap();
                let path = match (target, wire.flag()) {
                    ("destination_request", true) => GET,
                    ("destination_request", false) => GET_PROFILE,
                    (_, true) => WATCH_PORT,
                    (_, false) => WATCH_POLICY,
                };
                let answer = world.call(Request::post(path).body(wire.body()).unwrap());
                answered[usize::from(wire.flag())] += usize::from(answer.first.is_some());
            }
            assert!(answered.iter().all(|count| *count > 0), "{target}: {answered:?}");
        }
        assert!(seeds("objects").iter().all(|seed| objects::read(seed).is_some()), "every seed is an object");
    }
}
