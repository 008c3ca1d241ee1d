//! Objects as the API server sends them.

use std::{collections::BTreeSet, sync::LazyLock};

use http::Request;
use prost::Message;
use serde_json::Value;
use tonic::Code;
use weft_index::Event;
use weft_k8s_api::manifest::{self, Kind, Object, ObjectRef};
use weft_proto::linkerd::{
    destination::{DestinationProfile, GetDestination, Update},
    inbound::{PortSpec, Server},
    net::{IpAddress, TcpAddress},
    outbound::{OutboundPolicy, TrafficSpec, traffic_spec::Target},
};

use super::{
    GET, GET_PROFILE, WATCH_POLICY, WATCH_PORT, check_server, check_update,
    world::{self, Wire, World},
};

/// An index with a few objects, and what it answers.
struct Known {
    world: World,
    objects: Vec<Object>,
    /// Questions about the objects.
    questions: Vec<Question>,
    before: Before,
}

/// What must not depend on an object that is gone.
struct Before {
    answers: Vec<Answered>,
    /// Numbers of objects, by kind.
    objects: std::collections::BTreeMap<&'static str, usize>,
    ineffective: usize,
    /// Objects whose status is to be written.
    statuses: BTreeSet<ObjectRef>,
}

/// A path, and a message.
type Question = (&'static str, Vec<u8>);

/// A code, and the messages that come with it.
#[derive(Debug, PartialEq)]
enum Answered {
    Refused(Code),
    Endpoints(Vec<Update>),
    Profile(Vec<DestinationProfile>),
    Inbound(Vec<Server>),
    Outbound(Vec<OutboundPolicy>),
}

/// Adds an object, asks, and removes it.
pub(super) fn object(json: &[u8]) {
    static KNOWN: LazyLock<Known> = LazyLock::new(Known::new);
    let Some(object) = read(json) else { return };
    let known = &*KNOWN;
    let reference = object.reference();
    let own = questions_about(&reference);
    let own_before = known.answers(&own);
    // Twice: the second time, it is the same object.
    for _ in 0..2 {
        known.world.apply(vec![Event::Apply(Box::new(object.clone()))]);
    }
    known.answers(&known.questions);
    known.answers(&own);
    let replaced = known.objects.iter().filter(|known| known.reference() == reference);
    let restored = replaced.map(|known| Event::Apply(Box::new(known.clone())));
    known.world.apply([Event::Delete(reference.clone())].into_iter().chain(restored).collect());
    known.check(&own, &own_before);
    known.check(&known.questions, &known.before.answers);
    let Before { objects, ineffective, statuses, .. } = known.now();
    assert_eq!((&objects, ineffective), (&known.before.objects, known.before.ineffective));
    assert_eq!(statuses, known.before.statuses);
}

/// The object, as the control plane reads what the API server sends; `None` if it is of another kind, or unusable.
pub(super) fn read(json: &[u8]) -> Option<Object> {
    let value: Value = serde_json::from_slice(json).ok()?;
    let version = value["apiVersion"].as_str()?;
    let group = version.split_once('/').map_or("", |(group, _)| group);
    let kind = Kind::of(group, value["kind"].as_str()?)?;
    let object =
        manifest::from_api(kind, value).or_else(|unreadable| unreadable.restrictive.map(|object| *object).ok_or(()));
    // The API server gives every object a name, and a namespace if its kind has one.
    let object = object.ok()?;
    let metadata = object.metadata();
    let is_named = metadata.name.as_ref().is_some_and(|name| !name.is_empty());
    (is_named && metadata.namespace.is_some() == kind.is_namespaced()).then_some(object)
}

impl Known {
    fn new() -> Self {
        let (world, objects) = (World::new(), world::objects());
        let mut questions: Vec<_> = objects.iter().flat_map(|object| questions_about(&object.reference())).collect();
        for ip in ["10.96.0.1", "10.96.0.2", "10.244.0.1", "10.244.0.2", "192.168.7.7", "203.0.113.7"] {
            let ip: std::net::IpAddr = ip.parse().expect("an address");
            questions.push((GET_PROFILE, destination(format!("{ip}:8080"))));
            let addr = TcpAddress { ip: Some(IpAddress::from(ip)), port: 80 };
            questions.push((WATCH_POLICY, outbound(Target::Addr(addr))));
        }
        let nothing =
            Before { answers: Vec::new(), objects: Default::default(), ineffective: 0, statuses: BTreeSet::new() };
        let mut known = Self { world, objects, questions, before: nothing };
        known.before = Before { answers: known.answers(&known.questions), ..known.now() };
        known
    }

    /// Asks again: the answers are those of before.
    fn check(&self, questions: &[Question], before: &[Answered]) {
        for (question, before) in questions.iter().zip(before) {
            assert_eq!(self.answer(question), *before, "{}: {}", question.0, question.1.escape_ascii());
        }
    }

    fn now(&self) -> Before {
        let statuses = self.world.index().statuses();
        statuses.all_anew();
        Before {
            answers: Vec::new(),
            objects: self.world.statistics().objects,
            ineffective: self.world.index().ineffective_policies(),
            statuses: statuses.take_changed(),
        }
    }

    fn answers(&self, questions: &[Question]) -> Vec<Answered> {
        questions.iter().map(|question| self.answer(question)).collect()
    }

    fn answer(&self, (path, message): &Question) -> Answered {
        let wire = [&[0][..], message].concat();
        let wire = Wire::new(&wire).expect("it has a first byte");
        let answer = self.world.call(Request::post(*path).body(wire.body()).expect("a valid path"));
        if answer.code != Code::Ok {
            assert!(!matches!(answer.code, Code::Internal | Code::OutOfRange | Code::Unavailable), "{:?}", answer.code);
            return Answered::Refused(answer.code);
        }
        match *path {
            GET => {
                let updates = answer.messages();
                updates.iter().for_each(check_update);
                Answered::Endpoints(updates)
            }
            GET_PROFILE => Answered::Profile(answer.messages()),
            WATCH_PORT => {
                let servers = answer.messages();
                servers.iter().for_each(check_server);
                Answered::Inbound(servers)
            }
            _ => Answered::Outbound(answer.messages()),
        }
    }
}

/// What clients may ask about an object of this name.
fn questions_about(object: &ObjectRef) -> Vec<Question> {
    let namespace = object.namespace.as_deref().unwrap_or_default();
    let name = &object.name;
    let authority = format!("{name}.{namespace}.svc.cluster.local:80");
    match object.kind {
        Kind::Service => vec![
            (GET, destination(authority.clone())),
            (GET, destination(format!("web-1.{authority}"))),
            (GET_PROFILE, destination(authority.clone())),
            (WATCH_POLICY, outbound(Target::Authority(authority))),
        ],
        Kind::Pod => [80, 8080].map(|port| (WATCH_PORT, inbound(format!("{namespace}:{name}"), port))).to_vec(),
        Kind::ExternalWorkload => {
            let workload = serde_json::json!({"ns": namespace, "external_workload": name});
            vec![(WATCH_PORT, inbound(workload.to_string(), 8080))]
        }
        _ => Vec::new(),
    }
}

fn destination(path: String) -> Vec<u8> {
    let context_token = r#"{"ns":"shop","nodeName":"n1"}"#.to_owned();
    GetDestination { path, context_token, ..GetDestination::default() }.encode_to_vec()
}

fn inbound(workload: String, port: u32) -> Vec<u8> {
    PortSpec { workload, port }.encode_to_vec()
}

fn outbound(target: Target) -> Vec<u8> {
    TrafficSpec { source_workload: "ops:client".to_owned(), target: Some(target) }.encode_to_vec()
}
