//! Random histories against a model: whatever happened, the index answers what the contract with Linkerd says of the
//! objects that are left.
//!
//! `random` compares the index with another index, which has the same rules. The model shares nothing with it but the
//! settings of a cluster: it is slow, reads objects as JSON, keeps nothing, and looks at all objects for each question.
//! It was written from the contract (sections are cited), not from the index; where it follows a rule of ours that is
//! not Linkerd's, it says so.
//!
//! A history begins with a list and goes on with batches of applies, deletes, duplicates, older versions after newer
//! ones, objects that come and go within a batch, and lists of a kind in which some are missing. Its streams stay open
//! all the time. `WEFT_INDEX_HISTORIES=1000000 cargo test --release -p weft-index model` goes on for longer than the
//! suite does.

mod answers;
mod endpoints;
mod inbound;
mod objects;
mod outbound;
mod reading;
mod traffic;

use std::{
    collections::BTreeSet,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use proptest::{collection::vec, prelude::*, test_runner::TestRunner};
use weft_k8s_api::manifest::{Object, ObjectRef};

use super::*;
use answers::{Question, Stream};
use endpoints::Client;
use objects::Dice;
use reading::Objects;

/// Histories in an ordinary run.
const HISTORIES: u32 = 300;
/// Objects that histories are made of.
const FORMS: usize = 3000;
/// Nodes among them, the first.
const NODES: usize = 3;
/// Of all questions, each history asks one in this number.
const SHARE: usize = 8;

/// An object, as the model and as the index read it.
struct Form {
    json: Value,
    object: Object,
}

/// A change, by the numbers of the forms that it is about.
#[derive(Clone, Debug)]
enum Step {
    Apply(usize),
    Delete(usize),
    /// The newest object once more, or another one of the past: a duplicate if it has not changed, an older version if
    /// it has.
    Again(usize),
    /// It comes, goes, and comes again in another form.
    Flap(usize, usize),
    /// All objects of the kind of a form, of which some are gone.
    Relist(usize, u64),
}

#[derive(Clone, Debug)]
struct History {
    settings: usize,
    /// Which questions are asked.
    offset: usize,
    /// Which nodes are there from the start; forms of nodes are the first.
    nodes: Vec<usize>,
    listed: Vec<usize>,
    batches: Vec<Vec<Step>>,
}

fn forms() -> &'static [Form] {
    static ALL: LazyLock<Vec<Form>> = LazyLock::new(|| {
        let mut dice = Dice(1);
        let made = (0..FORMS).map(|_| objects::any(&mut dice));
        let form = |json: Value| Form { object: read(&json), json };
        objects::nodes().into_iter().chain(made).map(form).collect()
    });
    &ALL
}

/// The object as the index gets it: with its strictest reading, if a part of it is not valid.
fn read(json: &Value) -> Object {
    let read = manifest::parse("test.json".as_ref(), &json.to_string());
    read.objects.into_iter().next().map_or_else(|| unreadable(json), |read| read.object)
}

/// How many settings there are.
const SETTINGS: usize = 2 * 2 * 2 * DefaultPolicy::ALL.len() * 2;

/// Settings of clusters, as they differ.
fn settings(number: usize) -> Cluster {
    let mut cluster = cluster();
    cluster.ipv6 = number & 1 != 0;
    cluster.h2_upgrade = number & 2 == 0;
    cluster.transport_mode = if number & 4 == 0 { TransportMode::TransportHeader } else { TransportMode::Transparent };
    cluster.require_reference_grants = number >= SETTINGS / 2;
    cluster.default_policy = DefaultPolicy::ALL[number / 8 % DefaultPolicy::ALL.len()];
    cluster
}

fn questions() -> &'static [Question] {
    static ALL: LazyLock<Vec<Question>> = LazyLock::new(|| {
        let services = [("shop", "web"), ("shop", "api"), ("ops", "web")].map(|(of, name)| Key::new(of, name));
        let clients = ["shop", "ops", "dev"];
        let mut all = Vec::new();
        for service in &services {
            all.push(Question::Discovery(service.clone()));
            for (hostname, zone) in [(None, Some("a")), (None, None), (Some("web-0"), Some("b"))] {
                all.extend([80, 8080].map(|port| Question::FromAfar(service.clone(), port, hostname, zone)));
            }
            for port in [80, 8080, 3306, 9999] {
                for (node, hostname) in [
                    (Some("n1"), None),
                    (Some("n2"), None),
                    (Some("n3"), None),
                    (Some("nx"), None),
                    (None, None),
                    (None, Some("web-0")),
                    (Some("n1"), Some("web-1")),
                ] {
                    let (node, hostname) = (node.map(str::to_owned), hostname.map(str::to_owned));
                    all.push(Question::Endpoints(service.clone(), EndpointsQuery { port, node, hostname }));
                }
                for namespace in [None, Some("ops".to_owned())] {
                    all.push(Question::ServiceProfile(service.clone(), ProfileQuery { port, namespace }));
                }
                all.extend(clients.map(|client| Question::OutboundName(service.clone(), port, client)));
            }
        }
        for ip in ["10.244.0.1", "10.244.0.2", "10.244.0.3", "fd00::1", "192.168.0.1"] {
            all.extend(
                [80, 8080, 3306, 9090].map(|port| Question::AddressProfile(SocketAddr::new(ip.parse().unwrap(), port))),
            );
        }
        for (of, pod) in [("shop", "p1"), ("shop", "p2"), ("shop", "p3"), ("ops", "p1")] {
            all.extend([80, 8080, 9090, 3306].map(|port| Question::Inbound(Key::new(of, pod), port)));
        }
        all.extend([80, 8080].map(|port| Question::InboundExternal(Key::new("shop", "vm"), port)));
        for ip in ["10.96.0.1", "10.96.0.2", "10.96.0.3", "10.244.0.1", "8.8.8.8", "8.8.4.4", "93.184.216.34"] {
            for port in [80, 8080, 9999] {
                let addr = SocketAddr::new(ip.parse().unwrap(), port);
                all.extend(clients.map(|client| Question::Outbound(addr, client)));
            }
        }
        all
    });
    &ALL
}

/// What has happened so far.
#[derive(Default)]
struct Past {
    /// The objects that are there, by what they are: the form of each.
    left: BTreeMap<ObjectRef, usize>,
    /// Forms in the order in which they were applied.
    applied: Vec<usize>,
}

impl Past {
    fn apply(&mut self, form: usize, events: &mut Vec<Event>) {
        let object = &forms()[form].object;
        self.left.insert(object.reference(), form);
        self.applied.push(form);
        events.push(Event::Apply(Box::new(object.clone())));
    }

    fn delete(&mut self, reference: ObjectRef, events: &mut Vec<Event>) {
        // A client's node is looked up once: nodes stay.
        if reference.kind != Kind::Node {
            self.left.remove(&reference);
            events.push(Event::Delete(reference));
        }
    }

    fn take(&mut self, step: &Step, events: &mut Vec<Event>) {
        match step {
            Step::Apply(form) => self.apply(*form, events),
            Step::Delete(form) => self.delete(forms()[*form].object.reference(), events),
            Step::Again(back) => {
                if let Some(form) = self.applied.iter().rev().cycle().nth(*back).copied() {
                    self.apply(form, events);
                }
            }
            Step::Flap(one, other) => {
                self.apply(*one, events);
                self.delete(forms()[*one].object.reference(), events);
                self.apply(*other, events);
                self.apply(*one, events);
            }
            Step::Relist(form, gone) => {
                let kind = forms()[*form].object.kind();
                let known = self.left.iter().filter(|(reference, _)| reference.kind == kind);
                let known: Vec<_> = known.map(|(reference, form)| (reference.clone(), *form)).collect();
                let is_gone = |at: usize| gone & (1 << (at % 64)) != 0;
                for (at, (_, form)) in known.iter().enumerate().filter(|(at, _)| !is_gone(*at)) {
                    let _ = at;
                    self.apply(*form, events);
                }
                for (at, (reference, _)) in known.into_iter().enumerate() {
                    if is_gone(at) {
                        self.delete(reference, events);
                    }
                }
            }
        }
    }

    fn objects(&self) -> Objects<'static> {
        Objects(self.left.values().map(|form| &forms()[*form].json).collect())
    }
}

/// Applies a history; compares some answers after each batch, and all that are asked at the end. The result is the
/// number of events.
fn check(history: &History) -> Result<usize, TestCaseError> {
    let cluster = settings(history.settings);
    let mut index = Index::new(cluster.clone());
    index.apply(vec![Event::Synced]);
    let asked = questions().iter().skip(history.offset % SHARE).step_by(SHARE);
    let mut streams: Vec<_> = asked.cloned().map(Stream::new).collect();
    let mut past = Past::default();
    let listed: Vec<_> = history.nodes.iter().chain(&history.listed).copied().map(Step::Apply).collect();
    let (mut count, last) = (0, history.batches.len());
    for (number, batch) in std::iter::once(&listed).chain(&history.batches).enumerate() {
        let mut events = Vec::new();
        batch.iter().for_each(|step| past.take(step, &mut events));
        count += events.len();
        index.apply(events);
        let objects = past.objects();
        for (at, stream) in streams.iter_mut().enumerate() {
            // Every stream is read after each batch in a third of the cases, and is behind in the others.
            if number == last || (at + number) % 3 == 0 {
                let found = stream.answer(&mut index);
                let expected = stream.question.expected(&objects, &cluster);
                prop_assert_eq!(found, expected, "{:?} after {} of {:#?}", stream.question, number, past.left.values());
            }
        }
    }
    Ok(count)
}

fn histories() -> impl Strategy<Value = History> {
    let form = 0..forms().len();
    let step = prop_oneof![
        6 => form.clone().prop_map(Step::Apply),
        1 => (0..NODES).prop_map(Step::Apply),
        3 => form.clone().prop_map(Step::Delete),
        3 => (0..12_usize).prop_map(Step::Again),
        1 => (form.clone(), form.clone()).prop_map(|(one, other)| Step::Flap(one, other)),
        1 => (form.clone(), any::<u64>()).prop_map(|(form, gone)| Step::Relist(form, gone)),
    ];
    let batches = vec(vec(step, 1..5), 1..8);
    let nodes = proptest::sample::subsequence((0..NODES).collect::<Vec<_>>(), 0..=NODES);
    let parts = (0..SETTINGS, 0..SHARE, nodes, vec(form, 0..40), batches);
    parts.prop_map(|(settings, offset, nodes, listed, batches)| History { settings, offset, nodes, listed, batches })
}

#[test]
fn random_histories_end_as_the_contract_says_of_what_is_left() {
    let set = std::env::var("WEFT_INDEX_HISTORIES").ok();
    let histories_wanted = set.as_deref().map_or(HISTORIES, |text| text.parse().unwrap());
    let config = ProptestConfig { cases: histories_wanted, failure_persistence: None, ..ProptestConfig::default() };
    let events = AtomicUsize::new(0);
    let run = |history| {
        events.fetch_add(check(&history)?, Ordering::Relaxed);
        Ok(())
    };
    TestRunner::new(config).run(&histories(), run).unwrap();
    let events = events.into_inner();
    assert!(events > histories_wanted as usize, "{events} events");
    if set.is_some() {
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "{histories_wanted} histories, {events} events");
    }
}
