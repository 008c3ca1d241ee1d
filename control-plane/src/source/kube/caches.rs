//! From watch updates to events. Pure functions.
//!
//! Of every object it knows only the existence and the version; the content is the index's concern. Of a list that is
//! not the first, what has changed is held until the list is complete: between the pages, an address that was reused
//! would be that of two objects.
//!
//! An unreadable object never allows anything. If its types are right, its strictest reading is applied. If they are
//! not, or if it cannot be read what a Server selects, an authorization or authentication is treated as absent, which
//! denies. Every other object keeps its last good state: without a Server, a route, a rate limit or an EgressNetwork,
//! more would be allowed. Where there is none, as after a restart, something stands for these that allows nothing.

use std::collections::{HashMap, HashSet};

use k8s_openapi::{api::core::v1::ObjectReference, jiff::Timestamp};
use weft_k8s_api::manifest::{Kind, ObjectRef, Unreadable};

use super::{
    follow::{Read, Trouble, Update},
    kinds::Watched,
};
use weft_index::Event;

/// The objects that were sent, by kind.
pub(super) struct Caches {
    kinds: Vec<Cache>,
    reports: Vec<UnreadableObject>,
}

/// A problem of an unreadable object, to be reported to its owner.
#[derive(Debug, PartialEq)]
pub(super) struct UnreadableObject {
    pub(super) regarding: ObjectReference,
    pub(super) problem: String,
}

struct Cache {
    kind: Watched,
    known: HashMap<Name, Known>,
    /// While a list is received.
    listing: Option<Listing>,
    /// Whether a list has ever been complete.
    listed: bool,
    trouble: Option<Trouble>,
    /// Whether the kind is not installed.
    absent: bool,
    /// Times of writes that have arrived, of objects that were known before.
    writes: Vec<Timestamp>,
}

/// A list so far.
#[derive(Default)]
struct Listing {
    /// Its objects.
    names: HashSet<Name>,
    /// Those that have changed since an earlier list.
    changed: Vec<Read>,
}

type Name = (Option<String>, String);

struct Known {
    /// Resource version.
    version: String,
    /// When it was last written.
    written: Option<Timestamp>,
    applied: Applied,
    /// Its problem, which is reported once.
    problem: Option<String>,
}

/// What the index has of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Applied {
    Nothing,
    /// What stands for it, because a part of it has always had the wrong type, or because it was always unknown what it
    /// selects.
    Restrictive,
    /// Its last state with the right types.
    Good,
}

impl Caches {
    /// Empty caches.
    pub(super) fn new(kinds: &[Watched]) -> Self {
        let cache = |kind: &Watched| Cache {
            kind: *kind,
            known: HashMap::new(),
            listing: None,
            listed: false,
            trouble: None,
            absent: false,
            writes: Vec::new(),
        };
        Self { kinds: kinds.iter().map(cache).collect(), reports: Vec::new() }
    }

    /// Whether every kind was listed once.
    pub(super) fn synced(&self) -> bool {
        self.kinds.iter().all(|cache| cache.listed)
    }

    /// Each kind, and whether its watch works.
    pub(super) fn works(&self) -> impl Iterator<Item = (Kind, bool)> {
        self.kinds.iter().map(|cache| (cache.kind.kind, cache.trouble.is_none()))
    }

    /// What the start waits for, as text.
    pub(super) fn waiting(&self) -> String {
        let waiting = self.kinds.iter().filter(|cache| !cache.listed);
        let (troubled, quiet): (Vec<_>, Vec<_>) = waiting.partition(|cache| cache.trouble.is_some());
        let mut reasons: Vec<_> =
            troubled.iter().filter_map(|cache| Some(cache.trouble.as_ref()?.problem.clone())).collect();
        if !quiet.is_empty() {
            let plurals: Vec<_> = quiet.iter().map(|cache| cache.kind.plural).collect();
            reasons.push(format!("waiting for {}", plurals.join(", ")));
        }
        reasons.join("; ")
    }

    /// Problems of unreadable objects that have not been reported yet.
    pub(super) fn reports(&mut self) -> Vec<UnreadableObject> {
        std::mem::take(&mut self.reports)
    }

    /// Times of the writes that have arrived since the last call, of objects that were known before: nobody waits for
    /// those of the first list, which may be old.
    pub(super) fn writes(&mut self) -> impl Iterator<Item = (Kind, Timestamp)> {
        self.kinds.iter_mut().flat_map(|cache| {
            let kind = cache.kind.kind;
            cache.writes.drain(..).map(move |written| (kind, written))
        })
    }

    /// Takes in an update of a kind's watch, and appends its consequences.
    pub(super) fn take(&mut self, kind: usize, update: Update, events: &mut Vec<Event>) {
        let cache = &mut self.kinds[kind];
        // A list that begins may break off.
        let is_unproven = matches!(update, Update::Trouble(_) | Update::ListBegins | Update::Listed(_));
        if !is_unproven && cache.trouble.take().is_some() {
            tracing::info!(kind = %cache.kind.kind, "watch works again");
        }
        if !is_unproven && !matches!(update, Update::NotInstalled) && std::mem::take(&mut cache.absent) {
            tracing::info!(kind = cache.kind.kind.name(), group = cache.kind.kind.group(), "kind is installed");
        }
        match update {
            Update::ListBegins => cache.listing = Some(Listing::default()),
            Update::Listed(read) => {
                let name = name(&read.reference);
                let is_known = cache.known.get(&name).is_some_and(|known| known.version == read.version);
                let listing = cache.listing.get_or_insert_default();
                listing.names.insert(name);
                if cache.listed && !is_known {
                    listing.changed.push(read);
                } else {
                    self.reports.extend(cache.changed(read, events));
                }
            }
            Update::ListEnds => {
                cache.listed = true;
                let Listing { names, changed } = cache.listing.take().unwrap_or_default();
                let gone: Vec<_> = cache.known.keys().filter(|name| !names.contains(*name)).cloned().collect();
                for (namespace, name) in gone {
                    cache.deleted(ObjectRef { kind: cache.kind.kind, namespace, name }, events);
                }
                for read in changed {
                    self.reports.extend(cache.changed(read, events));
                }
            }
            Update::Changed(read) => self.reports.extend(cache.changed(read, events)),
            Update::Deleted(reference) => cache.deleted(reference, events),
            Update::Resumed => {}
            Update::Trouble(trouble) => cache.trouble(trouble),
            // Its objects stay: the API server reports their deletion before it forgets the kind.
            Update::NotInstalled => {
                cache.listed = true;
                if !std::mem::replace(&mut cache.absent, true) {
                    let (kind, group) = (cache.kind.kind.name(), cache.kind.kind.group());
                    tracing::info!(kind, group, "kind is not installed, it is watched once it is");
                }
            }
        }
    }
}

impl Cache {
    fn changed(&mut self, read: Read, events: &mut Vec<Event>) -> Option<UnreadableObject> {
        let Read { reference, version, written, uid, object } = read;
        let old = self.known.remove(&name(&reference));
        if let Some(old) = old.as_ref().filter(|old| old.version == version) {
            let known = Known { version, written, applied: old.applied, problem: old.problem.clone() };
            self.known.insert(name(&reference), known);
            return None;
        }
        self.writes.extend(written.filter(|_| old.as_ref().is_some_and(|old| old.written != written)));
        let (before, old_problem) = old.map_or((Applied::Nothing, None), |old| (old.applied, old.problem));
        let (object, applied, problem) = match object {
            Ok(object) => (Some(object), Applied::Good, None),
            Err(unreadable) => {
                let problem = problems(&unreadable);
                let applied = if unreadable.is_stand_in { Applied::Restrictive } else { Applied::Good };
                (unreadable.restrictive.map(|object| *object), applied, Some(problem))
            }
        };
        let applied = match object {
            Some(_) if (before, applied) == (Applied::Good, Applied::Restrictive) => before,
            Some(object) => {
                match before {
                    Applied::Nothing => tracing::debug!("added {reference}"),
                    Applied::Restrictive | Applied::Good => tracing::debug!("updated {reference}"),
                }
                events.push(Event::Apply(Box::new(object)));
                applied
            }
            None if before != Applied::Nothing && absence_denies(self.kind.kind) => {
                tracing::debug!("removed {reference}");
                events.push(Event::Delete(reference.clone()));
                Applied::Nothing
            }
            None => before,
        };
        let report = problem.clone().filter(|problem| old_problem.as_ref() != Some(problem)).map(|problem| {
            tracing::error!(
                object = %reference,
                problem,
                "object cannot be read: its unreadable parts deny until it is corrected"
            );
            self.report(&reference, uid, problem)
        });
        self.known.insert(name(&reference), Known { version, written, applied, problem });
        report
    }

    fn report(&self, reference: &ObjectRef, uid: Option<String>, problem: String) -> UnreadableObject {
        let regarding = ObjectReference {
            api_version: Some(self.kind.resource(self.kind.versions[0]).api_version),
            kind: Some(reference.kind.to_string()),
            namespace: reference.namespace.clone(),
            name: Some(reference.name.clone()),
            uid,
            ..ObjectReference::default()
        };
        UnreadableObject { regarding, problem }
    }

    fn deleted(&mut self, reference: ObjectRef, events: &mut Vec<Event>) {
        if self.known.remove(&name(&reference)).is_some_and(|known| known.applied != Applied::Nothing) {
            tracing::debug!("removed {reference}");
            events.push(Event::Delete(reference));
        }
    }

    /// Reports a trouble once, however often it occurs.
    fn trouble(&mut self, trouble: Trouble) {
        let (kind, problem) = (self.kind.kind.name(), &trouble.problem);
        if self.trouble.as_ref() == Some(&trouble) {
            tracing::debug!(kind, problem, "watch still fails");
        } else if trouble.lasting {
            tracing::error!(kind, problem, "watch fails and needs action, retrying");
        } else if self.listed {
            tracing::warn!(kind, problem, "watch interrupted, the last state stays in force");
        } else {
            tracing::warn!(kind, problem, "watch cannot start, retrying");
        }
        self.trouble = Some(trouble);
    }
}

fn name(reference: &ObjectRef) -> Name {
    (reference.namespace.clone(), reference.name.clone())
}

/// Policies that only ever allow: their absence denies.
fn absence_denies(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::ServerAuthorization
            | Kind::AuthorizationPolicy
            | Kind::MeshTLSAuthentication
            | Kind::NetworkAuthentication
    )
}

fn problems(unreadable: &Unreadable) -> String {
    let each = unreadable.problems.iter().map(|problem| format!("{}: {}", problem.field, problem.problem));
    each.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use weft_k8s_api::manifest;

    use super::*;
    use crate::source::kube::kinds::{Interest, watched};

    struct World {
        caches: Caches,
        servers: usize,
        networks: usize,
    }

    impl World {
        /// Caches of Servers and NetworkAuthentications only.
        fn new() -> Self {
            let kinds = watched(Interest::Parts { discovery: None, policy: true, reference_grants: true });
            let wanted = ["servers", "networkauthentications"];
            let kinds: Vec<_> = kinds.into_iter().filter(|kind| wanted.contains(&kind.plural)).collect();
            Self { caches: Caches::new(&kinds), servers: 0, networks: 1 }
        }

        /// Names of events, `+` applied and `-` deleted.
        fn check(&mut self, kind: usize, updates: Vec<Update>, expected: &str) {
            let mut events = Vec::new();
            for update in updates {
                self.caches.take(kind, update, &mut events);
            }
            let names = events.into_iter().map(|event| match event {
                Event::Apply(object) => format!("+{}", object.reference().name),
                Event::Delete(reference) => format!("-{}", reference.name),
                Event::Synced => "synced".to_owned(),
            });
            assert_eq!(names.collect::<Vec<_>>().join(" "), expected);
        }
    }

    fn object(kind: Kind, name: &str, version: u32, spec: Value) -> Read {
        let reference = ObjectRef { kind, namespace: Some("shop".to_owned()), name: name.to_owned() };
        let value = json!({"apiVersion": format!("{}/v1", kind.group()), "kind": kind.name(), "spec": spec,
            "metadata": {"name": name, "namespace": "shop"}});
        Read {
            reference,
            version: version.to_string(),
            written: Timestamp::from_second(version.into()).ok(),
            uid: Some("u".to_owned()),
            object: manifest::from_api(kind, value),
        }
    }

    fn server(name: &str, version: u32, spec: Value) -> Read {
        object(Kind::Server, name, version, spec)
    }

    fn good() -> Value {
        json!({"podSelector": {}, "port": 80})
    }

    fn network(version: u32, cidr: &str) -> Read {
        let spec = json!({"networks": [{"cidr": cidr}]});
        object(Kind::NetworkAuthentication, "n", version, spec)
    }

    use Update::{Changed, Deleted, ListBegins, ListEnds, Listed};

    fn trouble(problem: &str) -> Update {
        Update::Trouble(Trouble { problem: problem.to_owned(), lasting: true })
    }

    #[test]
    fn a_list_is_complete_and_a_later_one_deletes_what_vanished() {
        let mut world = World::new();
        let servers = world.servers;
        let first = vec![ListBegins, Listed(server("a", 1, good())), Listed(server("b", 1, good())), ListEnds];
        world.check(servers, first, "+a +b");
        assert!(!world.caches.synced());
        assert_eq!(world.caches.waiting(), "waiting for networkauthentications");
        let networks = world.networks;
        world.check(networks, vec![ListBegins, ListEnds], "");
        assert!(world.caches.synced());
        // Only b is unchanged. Nothing is said of c, which may have what a had, while a is there.
        world.check(servers, vec![ListBegins, Listed(server("c", 2, good())), Listed(server("b", 1, good()))], "");
        world.check(servers, vec![ListEnds], "-a +c");
        let reference = server("b", 1, good()).reference;
        world.check(servers, vec![Changed(server("b", 3, good())), Deleted(reference.clone())], "+b -b");
        world.check(servers, vec![Deleted(reference)], "");
    }

    #[test]
    fn writes_are_those_of_objects_that_were_known_each_once() {
        let mut world = World::new();
        let servers = world.servers;
        world.check(servers, vec![ListBegins, Listed(server("a", 1, good())), ListEnds], "+a");
        assert_eq!(world.caches.writes().count(), 0);
        let same_time = Read { version: "3".to_owned(), ..server("a", 2, good()) };
        let list = vec![ListBegins, Listed(server("a", 2, good())), Listed(server("b", 2, good())), ListEnds];
        world.check(servers, list, "+a +b");
        world.check(servers, vec![Changed(same_time), Changed(server("b", 5, good()))], "+a +b");
        let seconds: Vec<_> = world.caches.writes().map(|(kind, at)| (kind, at.as_second())).collect();
        assert_eq!(seconds, [(Kind::Server, 2), (Kind::Server, 5)]);
        assert_eq!(world.caches.writes().count(), 0);
    }

    #[test]
    fn a_list_that_breaks_off_deletes_nothing() {
        let mut world = World::new();
        let servers = world.servers;
        let list = |names: &[&str]| names.iter().map(|name| Listed(server(name, 1, good()))).collect::<Vec<_>>();
        world.check(servers, [vec![ListBegins], list(&["a", "b"]), vec![ListEnds]].concat_updates(), "+a +b");
        world.check(servers, [vec![ListBegins], list(&["a"]), vec![trouble("x")]].concat_updates(), "");
        world.check(servers, [vec![ListBegins], list(&["b"]), vec![ListEnds]].concat_updates(), "-a");
    }

    trait Concat {
        fn concat_updates(self) -> Vec<Update>;
    }

    impl<const N: usize> Concat for [Vec<Update>; N] {
        fn concat_updates(self) -> Vec<Update> {
            self.into_iter().flatten().collect()
        }
    }

    #[test]
    fn unreadable_policy_denies() {
        let mut world = World::new();
        let (servers, networks) = (world.servers, world.networks);
        // Right types, invalid values: the Server counts, and its access policy denies.
        world.check(
            servers,
            vec![Changed(server("s", 1, json!({"podSelector": {}, "port": 80, "accessPolicy": "x"})))],
            "+s",
        );
        // Wrong types: the Server keeps its last state.
        world.check(servers, vec![Changed(server("s", 2, json!({"podSelector": 1, "port": 80})))], "");
        // The same if it is unknown what it selects.
        for (version, spec) in [(21, json!({"podSelector": {}, "port": 80800})), (22, json!({"port": 80}))] {
            world.check(servers, vec![Changed(server("s", version, spec))], "");
        }
        world.check(servers, vec![Changed(server("s", 3, good()))], "+s");
        // An authentication with wrong types is treated as absent, and is back when it is readable.
        world.check(networks, vec![Changed(network(1, "10.0.0.0/8"))], "+n");
        world.caches.reports();
        world.check(networks, vec![Changed(network(2, "10.0.0.0/80"))], "-n");
        world.check(networks, vec![Changed(network(3, "10.0.0.0/80"))], "");
        // Its owner is informed once.
        let reports = world.caches.reports();
        assert_eq!(reports.len(), 1, "{reports:?}");
        assert!(reports[0].problem.starts_with("spec.networks[0].cidr: "), "{reports:?}");
        assert_eq!(reports[0].regarding.name.as_deref(), Some("n"));
        world.check(networks, vec![Changed(network(4, "10.0.0.0/9"))], "+n");
    }

    #[test]
    fn a_policy_that_was_never_readable_is_applied_for_its_denial() {
        let mut world = World::new();
        let (servers, networks) = (world.servers, world.networks);
        let list = vec![ListBegins, Listed(server("s", 1, json!({"podSelector": 1, "port": 80}))), ListEnds];
        world.check(servers, list, "+s");
        assert!(world.caches.reports()[0].problem.starts_with("spec.podSelector: "));
        // Still unreadable, but about something else.
        world.check(servers, vec![Changed(server("s", 2, json!({"podSelector": {}, "port": []})))], "+s");
        world.check(servers, vec![Changed(server("s", 3, good()))], "+s");
        // From now on there is a good state.
        world.check(servers, vec![Changed(server("s", 4, json!({"podSelector": {}, "port": []})))], "");
        let reference = server("s", 4, good()).reference;
        world.check(servers, vec![Deleted(reference)], "-s");
        world.check(networks, vec![Changed(network(1, "10.0.0.0/80"))], "");
    }

    #[test]
    fn only_the_absence_of_what_allows_denies() {
        for (kind, expected) in [
            (Kind::AuthorizationPolicy, true),
            (Kind::NetworkAuthentication, true),
            (Kind::Server, false),
            (Kind::HttpRoute, false),
            (Kind::HttpLocalRateLimitPolicy, false),
            (Kind::EgressNetwork, false),
            (Kind::Service, false),
        ] {
            assert_eq!(absence_denies(kind), expected, "{kind}");
        }
    }

    #[test]
    fn a_kind_that_is_not_installed_is_not_waited_for_and_followed_when_it_is() {
        let mut world = World::new();
        let (servers, networks) = (world.servers, world.networks);
        world.check(servers, vec![ListBegins, ListEnds], "");
        assert!(!world.caches.synced());
        world.check(networks, vec![Update::NotInstalled, Update::NotInstalled], "");
        assert!(world.caches.synced());
        world.check(networks, vec![ListBegins, Listed(network(1, "10.0.0.0/8")), ListEnds], "+n");
        // Without a word of the API server about its objects, they stay.
        world.check(networks, vec![Update::NotInstalled], "");
    }

    #[test]
    fn troubles_are_reasons_until_they_end() {
        let mut world = World::new();
        let (servers, networks) = (world.servers, world.networks);
        world.check(servers, vec![trouble("servers are missing")], "");
        assert_eq!(world.caches.waiting(), "servers are missing; waiting for networkauthentications");
        world.check(servers, vec![ListBegins, ListEnds], "");
        world.check(networks, vec![ListBegins, ListEnds], "");
        assert_eq!(world.caches.waiting(), "");
    }

    #[test]
    fn a_watch_works_again_when_a_list_is_complete_or_it_is_resumed() {
        let mut world = World::new();
        let servers = world.servers;
        let works = |world: &World| world.caches.works().filter(|(_, works)| !works).count() == 0;
        world.check(servers, vec![ListBegins, Listed(server("a", 1, good())), ListEnds], "+a");
        world.check(servers, vec![trouble("x"), ListBegins, Listed(server("a", 1, good()))], "");
        assert!(!works(&world), "the list may break off");
        world.check(servers, vec![ListEnds], "");
        assert!(works(&world));
        world.check(servers, vec![trouble("x")], "");
        assert!(!works(&world));
        world.check(servers, vec![Update::Resumed], "");
        assert!(works(&world));
    }
}
