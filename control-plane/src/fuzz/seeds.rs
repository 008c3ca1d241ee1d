//! The seeds of the proxy's fuzz targets: what this control plane answers to questions about a few policies.
//!
//! The test fails where a file is not the answer; `WEFT_BLESS=1 cargo test -p weft-control-plane --lib seeds` writes
//! them.

use std::{collections::BTreeSet, env, fmt::Debug, fs, path::Path};

use http::Request;
use prost::Message;
use weft_index::Event;
use weft_k8s_api::manifest;
use weft_proto::linkerd::{
    inbound::{PortSpec, Server},
    net::TcpAddress,
    outbound::{OutboundPolicy, TrafficSpec, traffic_spec::Target},
};

use super::{
    WATCH_POLICY, WATCH_PORT,
    tests::corpus,
    world::{Wire, World},
};

/// Policies beyond those of the other targets: one of each protocol, and every kind of match, filter and backend.
const POLICIES: &str = include_str!("policies.yaml");

/// Ports of pods and of an ExternalWorkload, each with the name of its seed.
const PORTS: [(&str, &str, u32); 8] = [
    ("http1", "shop:web-1", 8080),
    ("http2", "shop:web-1", 9091),
    ("grpc", "shop:web-1", 9090),
    ("tls", "shop:web-1", 9443),
    ("opaque", "shop:web-1", 3306),
    ("detect", "shop:web-2", 80),
    ("detect_routes", "shop:web-1", 9092),
    ("external", r#"{"ns":"shop","external_workload":"vm"}"#, 8080),
];

/// Destinations of a pod in the namespace `ops`, each with the name of its seed.
const DESTINATIONS: [(&str, &str); 10] = [
    ("split", "10.96.0.1:80"),
    ("all", "10.96.0.20:80"),
    ("http1", "10.96.0.21:81"),
    ("http2", "10.96.0.21:82"),
    ("grpc", "10.96.0.2:80"),
    ("opaque", "10.96.0.1:3306"),
    ("undefined_port", "10.96.0.1:81"),
    ("tls", "203.0.113.7:443"),
    ("egress", "203.0.113.7:80"),
    ("egress_fallback", "198.51.100.1:80"),
];

#[test]
fn the_seeds_of_the_proxys_targets_are_answers() {
    let world = World::new();
    let read = manifest::parse(Path::new("policies.yaml"), POLICIES);
    assert!(read.errors.is_empty() && read.ignored.is_empty(), "{:?} {:?}", read.errors, read.ignored);
    let events = read.objects.into_iter().map(|located| Event::Apply(Box::new(located.object)));
    world.apply(events.collect());

    let ports = PORTS.map(|(name, workload, port)| {
        (name, answer::<Server>(&world, WATCH_PORT, &PortSpec { workload: workload.to_owned(), port }))
    });
    check("inbound_policy", &ports);

    let destinations = DESTINATIONS.map(|(name, addr)| {
        let addr: std::net::SocketAddr = addr.parse().expect("an address");
        let target = Some(Target::Addr(TcpAddress::from(addr)));
        let question = TrafficSpec { source_workload: "ops:client".to_owned(), target };
        (name, answer::<OutboundPolicy>(&world, WATCH_POLICY, &question))
    });
    check("outbound_policy", &destinations);
}

/// The first message of the answer to a question.
fn answer<M: Message + Default>(world: &World, path: &str, question: &(impl Message + Debug)) -> M {
    let wire = [&[0][..], &question.encode_to_vec()].concat();
    let wire = Wire::new(&wire).expect("it has a first byte");
    let answer = world.call(Request::post(path).body(wire.body()).expect("a valid path"));
    answer.messages().into_iter().next().unwrap_or_else(|| panic!("{question:?}: {:?}", answer.code))
}

/// Compares the seeds of a target with messages; the same labels may be written in another order.
fn check<M: Message + Default + Debug + PartialEq>(target: &str, messages: &[(&str, M)]) {
    let directory = corpus(target);
    let is_blessing = env::var_os("WEFT_BLESS").is_some_and(|value| value == "1");
    if is_blessing {
        fs::create_dir_all(&directory).expect("the directory can be made");
    }
    for (name, message) in messages {
        let path = directory.join(name);
        let kept = fs::read(&path).ok().and_then(|bytes| M::decode(&bytes[..]).ok());
        if is_blessing && kept.as_ref() != Some(message) {
            fs::write(&path, message.encode_to_vec()).expect("the seed can be written");
        } else {
            assert_eq!(kept.as_ref(), Some(message), "{} is not current, WEFT_BLESS=1 writes it", path.display());
        }
    }
    let files = fs::read_dir(&directory).expect("the corpus").map(|entry| entry.expect("a file").file_name());
    let files: BTreeSet<_> = files.map(|name| name.to_string_lossy().into_owned()).collect();
    assert_eq!(files, messages.iter().map(|(name, _)| (*name).to_owned()).collect());
}
