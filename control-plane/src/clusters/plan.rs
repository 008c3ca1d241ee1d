//! Which clusters to follow: Secrets in, starts and stops out. Pure functions.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::core::v1::Secret;
use tokio::time::Instant;
use weft_k8s_api::labels;

use super::link::Link;

/// The shortest time between two starts of one cluster: each lists all of its objects.
const RESTART: Duration = Duration::from_secs(10);

/// The most clusters that are followed: each has an index with a thread, and the objects of its cluster.
const MAX_CLUSTERS: usize = 64;

/// A change of the set of followed clusters.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    /// Follow a cluster, instead of what was followed under this name.
    Start { cluster: String, link: Box<Link> },
    /// Follow a cluster no longer.
    Stop { cluster: String },
}

/// A Secret that cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unusable {
    pub(super) secret_name: String,
    pub(super) secret_uid: Option<String>,
    /// The reason, and what happens instead.
    pub(super) problem: String,
}

/// Secrets, and what is followed because of them.
#[derive(Default)]
pub(super) struct Plan {
    secrets: BTreeMap<String, Entry>,
    /// While the Secrets are listed: their names so far.
    listing: Option<BTreeSet<String>>,
    followed: BTreeMap<String, Link>,
    /// When clusters were last started, whether or not they are followed still.
    started: BTreeMap<String, Instant>,
    /// Clusters beyond the limit, each reported once.
    excess: BTreeSet<String>,
    unusable: Vec<Unusable>,
}

struct Entry {
    cluster: String,
    uid: Option<String>,
    /// `None` if the Secret cannot be used.
    link: Option<Link>,
    problem: Option<String>,
}

impl Plan {
    /// Begins a list: Secrets that are not in it are gone.
    pub(super) fn list_begins(&mut self) {
        self.listing = Some(BTreeSet::new());
    }

    /// Ends a list.
    pub(super) fn list_ends(&mut self) {
        if let Some(listing) = self.listing.take() {
            self.secrets.retain(|name, _| listing.contains(name));
        }
    }

    /// Takes in a Secret.
    pub(super) fn apply(&mut self, secret: &Secret) {
        let name = secret.metadata.name.clone().unwrap_or_default();
        if let Some(listing) = &mut self.listing {
            listing.insert(name.clone());
        }
        let is_link = secret.type_.as_deref() == Some(labels::LINK_SECRET_TYPE);
        let label = secret.metadata.labels.as_ref().and_then(|all| all.get(labels::LINK_CLUSTER));
        let Some(cluster) = label.filter(|_| is_link).cloned() else {
            self.secrets.remove(&name);
            return;
        };
        let (link, mut problem) = match Link::read(secret) {
            Ok(link) => (Some(link), None),
            Err(error) => (None, Some(format!("cluster {cluster} is not followed as this says: {error}"))),
        };
        let first = self.secrets.iter().find(|(other, entry)| **other != name && entry.cluster == cluster);
        if let Some((other, _)) = first {
            problem.get_or_insert_with(|| {
                format!("cluster {cluster} is linked by Secret {other} too; the first by name counts")
            });
        }
        let known = self.secrets.get(&name).and_then(|entry| entry.problem.as_ref());
        let uid = secret.metadata.uid.clone();
        if let Some(problem) = problem.as_ref().filter(|problem| known != Some(problem)) {
            self.unusable.push(Unusable {
                secret_name: name.clone(),
                secret_uid: uid.clone(),
                problem: problem.clone(),
            });
        }
        self.secrets.insert(name, Entry { cluster, uid, link, problem });
    }

    /// Takes in that a Secret was deleted.
    pub(super) fn delete(&mut self, name: &str) {
        self.secrets.remove(name);
    }

    /// Secrets that cannot be used and were not reported yet.
    pub(super) fn unusable(&mut self) -> Vec<Unusable> {
        std::mem::take(&mut self.unusable)
    }

    /// What to do now, and when to ask again although nothing has changed by then. A cluster whose Secret cannot be
    /// used (any more) is followed as before; without a Secret it is not.
    pub(super) fn due(&mut self, now: Instant) -> (Vec<Action>, Option<Instant>) {
        // A list that is incomplete does not say what is gone.
        if self.listing.is_some() {
            return (Vec::new(), None);
        }
        let linked: BTreeSet<_> = self.secrets.values().map(|entry| entry.cluster.clone()).collect();
        let gone: Vec<_> = self.followed.keys().filter(|cluster| !linked.contains(*cluster)).cloned().collect();
        let (mut actions, mut next) = (Vec::new(), None);
        for cluster in gone {
            self.followed.remove(&cluster);
            actions.push(Action::Stop { cluster });
        }
        self.started.retain(|cluster, at| linked.contains(cluster) || now < *at + RESTART);
        self.excess.retain(|cluster| linked.contains(cluster));
        for cluster in linked {
            let readable = self.secrets.values().filter(|entry| entry.cluster == cluster);
            let Some(link) = readable.filter_map(|entry| entry.link.clone()).next() else { continue };
            if self.followed.get(&cluster) == Some(&link) {
                continue;
            }
            if !self.followed.contains_key(&cluster) && self.followed.len() >= MAX_CLUSTERS {
                self.refuse(cluster);
                continue;
            }
            self.excess.remove(&cluster);
            match self.started.get(&cluster).map(|at| *at + RESTART) {
                Some(at) if now < at => next = Some(next.map_or(at, |next: Instant| next.min(at))),
                _ => {
                    self.started.insert(cluster.clone(), now);
                    self.followed.insert(cluster.clone(), link.clone());
                    actions.push(Action::Start { cluster, link: Box::new(link) });
                }
            }
        }
        (actions, next)
    }

    /// Reports that a cluster is beyond the limit. It is followed as soon as another is followed no longer.
    fn refuse(&mut self, cluster: String) {
        let secret = self.secrets.iter().find(|(_, entry)| entry.cluster == cluster && entry.link.is_some());
        if let Some((secret, entry)) = secret.filter(|_| !self.excess.contains(&cluster)) {
            let problem = format!("cluster {cluster} is not followed: at most {MAX_CLUSTERS} clusters are");
            self.unusable.push(Unusable { secret_name: secret.clone(), secret_uid: entry.uid.clone(), problem });
            self.excess.insert(cluster);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::link::tests::*, *};

    struct World {
        plan: Plan,
        now: Instant,
    }

    impl World {
        fn new() -> Self {
            Self { plan: Plan::default(), now: Instant::now() }
        }

        fn apply(&mut self, name: &str, cluster: &str, token: &str) {
            self.plan.apply(&secret(
                name,
                cluster,
                &kubeconfig(json!({"server": "https://a"}), json!({"token": token})),
            ));
        }

        fn apply_bad(&mut self, name: &str, cluster: &str) {
            self.plan.apply(&secret(name, cluster, &kubeconfig(json!({}), json!({"exec": {"command": "sh"}}))));
        }

        /// `+` started with the token, `-` stopped; and seconds until the next check.
        fn check(&mut self, expected: &str, next: Option<u64>) {
            let (actions, at) = self.plan.due(self.now);
            let show = |action: Action| match action {
                Action::Stop { cluster } => format!("-{cluster}"),
                Action::Start { cluster, link } => {
                    let user = serde_json::to_value(&link.kubeconfig).unwrap()["users"][0]["user"].clone();
                    format!("+{cluster}={}", user["token"].as_str().unwrap_or_default())
                }
            };
            assert_eq!(actions.into_iter().map(show).collect::<Vec<_>>().join(" "), expected);
            assert_eq!(at.map(|at| at.duration_since(self.now).as_secs()), next);
        }

        fn wait(&mut self, seconds: u64) {
            self.now += Duration::from_secs(seconds);
        }
    }

    #[test]
    fn clusters_start_and_stop_with_their_secrets() {
        let mut world = World::new();
        world.apply("a", "east", "1");
        world.apply("b", "west", "1");
        world.check("+east=1 +west=1", None);
        world.apply("a", "east", "1");
        world.check("", None);
        world.plan.delete("a");
        world.check("-east", None);
        world.plan.list_begins();
        world.check("", None);
        world.plan.list_ends();
        world.check("-west", None);
        assert_eq!(world.plan.unusable(), []);
    }

    #[test]
    fn a_list_that_is_not_complete_stops_nothing() {
        let mut world = World::new();
        world.apply("a", "east", "1");
        world.check("+east=1", None);
        world.plan.list_begins();
        world.apply("b", "west", "1");
        world.check("", None);
        world.apply("a", "east", "1");
        world.plan.list_ends();
        world.check("+west=1", None);
    }

    #[test]
    fn restarts_of_a_cluster_are_few_and_have_the_newest_secret() {
        let mut world = World::new();
        world.apply("a", "east", "1");
        world.check("+east=1", None);
        world.wait(1);
        world.apply("a", "east", "2");
        world.check("", Some(9));
        world.apply("a", "east", "3");
        world.check("", Some(9));
        // A Secret that is created again is no way around it.
        world.plan.delete("a");
        world.check("-east", None);
        world.apply("a", "east", "4");
        world.check("", Some(9));
        world.wait(9);
        world.check("+east=4", None);
    }

    #[test]
    fn a_secret_that_cannot_be_used_changes_nothing_and_is_reported_once() {
        let mut world = World::new();
        world.apply("a", "east", "1");
        world.check("+east=1", None);
        world.wait(60);
        world.apply_bad("a", "east");
        world.check("", None);
        let unusable = world.plan.unusable();
        assert!(unusable.len() == 1 && unusable[0].problem.contains("exec of \"reader\" is refused"), "{unusable:?}");
        world.apply_bad("a", "east");
        assert_eq!(world.plan.unusable(), []);
        world.plan.delete("a");
        world.check("-east", None);
        world.apply_bad("b", "north");
        world.check("", None);
    }

    #[test]
    fn of_two_secrets_for_one_cluster_the_first_that_can_be_used_counts() {
        let mut world = World::new();
        world.apply("b", "east", "2");
        world.check("+east=2", None);
        world.wait(60);
        world.apply("a", "east", "1");
        assert!(world.plan.unusable()[0].problem.contains("linked by Secret b too"));
        world.check("+east=1", None);
        world.wait(60);
        world.apply_bad("a", "east");
        world.check("+east=2", None);
    }

    #[test]
    fn clusters_beyond_a_number_are_reported_once_and_followed_when_there_is_room() {
        let mut world = World::new();
        for number in 0..MAX_CLUSTERS {
            world.apply(&format!("a-{number:02}"), &format!("c-{number:02}"), "1");
        }
        assert_eq!(world.plan.due(world.now).0.len(), MAX_CLUSTERS);
        world.apply("b", "west", "1");
        world.check("", None);
        let unusable = world.plan.unusable();
        assert!(unusable.len() == 1 && unusable[0].problem.contains("at most 64 clusters"), "{unusable:?}");
        world.check("", None);
        assert_eq!(world.plan.unusable(), []);
        world.plan.delete("a-07");
        world.check("-c-07 +west=1", None);
    }

    #[test]
    fn secrets_of_another_type_or_without_a_cluster_link_nothing() {
        let mut world = World::new();
        let config = kubeconfig(json!({"server": "https://a"}), json!({}));
        let mut other = secret("a", "east", &config);
        other.type_ = Some("Opaque".to_owned());
        world.plan.apply(&other);
        let mut nameless = secret("b", "east", &config);
        nameless.metadata.labels = None;
        world.plan.apply(&nameless);
        world.check("", None);
        assert_eq!(world.plan.unusable(), []);
    }
}
