//! The kinds of objects that commands are about, with kubectl's names of them.

use Kind::{
    Authority, CronJob, DaemonSet, Deployment, Job, Namespace, Pod, ReplicaSet, ReplicationController, Service,
    StatefulSet,
};

/// A kind of objects. `Authority` is Linkerd's: the name that clients ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Deployment,
    DaemonSet,
    StatefulSet,
    Job,
    CronJob,
    ReplicaSet,
    ReplicationController,
    Pod,
    Namespace,
    Service,
    Authority,
}

/// A kind's names.
struct Row {
    kind: Kind,
    /// The shortest one.
    short: &'static str,
    /// In messages and in the metrics API.
    long: &'static str,
    plural: &'static str,
    /// Its API group; each has the version `v1`. `None`: the API server has no such objects.
    group: Option<&'static str>,
}

const fn row(
    kind: Kind,
    short: &'static str,
    long: &'static str,
    plural: &'static str,
    group: Option<&'static str>,
) -> Row {
    Row { kind, short, long, plural, group }
}

/// In the order of the variants.
const ROWS: [Row; 11] = [
    row(Deployment, "deploy", "deployment", "deployments", Some("apps")),
    row(DaemonSet, "ds", "daemonset", "daemonsets", Some("apps")),
    row(StatefulSet, "sts", "statefulset", "statefulsets", Some("apps")),
    row(Job, "job", "job", "jobs", Some("batch")),
    row(CronJob, "cj", "cronjob", "cronjobs", Some("batch")),
    row(ReplicaSet, "rs", "replicaset", "replicasets", Some("apps")),
    row(ReplicationController, "rc", "replicationcontroller", "replicationcontrollers", Some("")),
    row(Pod, "po", "pod", "pods", Some("")),
    row(Namespace, "ns", "namespace", "namespaces", Some("")),
    row(Service, "svc", "service", "services", Some("")),
    row(Authority, "au", "authority", "authorities", None),
];

impl Kind {
    /// Every kind.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        ROWS.iter().map(|row| row.kind)
    }

    /// Pods, and the workloads that have pods.
    pub(crate) fn with_pods() -> impl Iterator<Item = Self> {
        Self::all().filter(|kind| !matches!(kind, Namespace | Service | Authority))
    }

    /// The kind with this name, one of kubectl's.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        ROWS.iter().find(|row| [row.short, row.long, row.plural].contains(&text)).map(|row| row.kind)
    }

    /// The shortest name.
    pub(crate) fn short(self) -> &'static str {
        self.row().short
    }

    /// The name in messages and in the metrics API, in small letters.
    pub(crate) fn long(self) -> &'static str {
        self.row().long
    }

    pub(crate) fn plural(self) -> &'static str {
        self.row().plural
    }

    /// The API group; `None` if the API server has no such objects.
    pub(crate) fn group(self) -> Option<&'static str> {
        self.row().group
    }

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }
}

/// The shortest names of kinds, for help and messages.
pub(crate) fn names(kinds: impl IntoIterator<Item = Kind>) -> String {
    kinds.into_iter().map(Kind::short).collect::<Vec<_>>().join(", ")
}

/// Help for an argument of these forms, whose kinds have pods or, in a namespace, are all of its pods.
pub(crate) fn help(forms: &str) -> String {
    format!("{forms}: {}", names(Kind::with_pods().chain([Namespace])))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_kind_has_its_row_and_names_of_its_own() {
        assert!(Kind::all().all(|kind| kind.row().kind == kind));
        let names: Vec<_> = ROWS.iter().flat_map(|row| BTreeSet::from([row.short, row.long, row.plural])).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        for kind in Kind::all() {
            for name in [kind.short(), kind.long(), kind.plural()] {
                assert_eq!(Kind::parse(name), Some(kind), "{name}");
            }
        }
        assert_eq!(Kind::parse("web"), None);
    }

    #[test]
    fn names_for_help_come_from_the_table() {
        assert_eq!(help("KIND"), "KIND: deploy, ds, sts, job, cj, rs, rc, po, ns");
    }
}
