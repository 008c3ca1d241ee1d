//! Features of the kernel and the host: one table, in which each is detected by trying it and never by the kernel's
//! version, because distributions backport features and leave others out.
//!
//! Missing required features are reported together in one message; a missing optional feature is a warning that names
//! what does not work. [`probe`] tries the features. Refuses to change anything.

mod probe;

use std::str::FromStr;

use aya::{maps::MapType, programs::ProgramType, sys::BpfHelper};
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use weft_proto::agent::{Feature as ApiFeature, FeatureFound, FeatureNeed};

use crate::{
    datapath::{bpf::AttachType, cookies::CookieSource},
    host,
};

/// How much depends on a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Nothing works without it.
    Required,
    /// This function is missing without it.
    Optional(&'static str),
    /// Something else replaces it, at this price.
    Replaced(&'static str),
    /// Nothing depends on it; it may explain other observations on the host.
    Noted,
}

/// The way to detect it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Probe {
    Btf,
    Cgroup2,
    Bpffs,
    Program(ProgramType),
    /// A program for one of several hooks of its type.
    Hook(AttachType),
    Map(MapType),
    Helper(ProgramType, BpfHelper),
    CgroupLink,
    NetnsLink,
    NetnsCookie,
    PidfdGetfd,
    Jit,
    Lockdown,
    UnprivilegedBpf,
}

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Yes,
    No,
    /// It could not be probed, for this reason. That does not prevent the start: loading the programs will show.
    Unknown(String),
    /// The value of a setting.
    State(String),
}

/// A version of the kernel, compared numerically.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Linux {
    major: u32,
    minor: u32,
}

/// A row of the table before it is probed.
struct Row {
    name: &'static str,
    needed_for: &'static str,
    /// The first Linux with it.
    since: &'static str,
    need: Need,
    probe: Probe,
}

/// A feature and the result of its probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Feature {
    pub(crate) name: &'static str,
    pub(crate) needed_for: &'static str,
    pub(crate) since: &'static str,
    pub(crate) need: Need,
    pub(crate) found: Found,
    /// How it was detected.
    pub(crate) how: &'static str,
}

/// The missing features.
#[derive(Debug, thiserror::Error)]
#[error("Linux {kernel} lacks what redirection needs: {missing}. Linux {enough} has all of it")]
pub(crate) struct Lacking {
    kernel: String,
    missing: String,
    enough: String,
}

const fn required(name: &'static str, needed_for: &'static str, since: &'static str, probe: Probe) -> Row {
    Row { name, needed_for, since, need: Need::Required, probe }
}

const fn helper(
    name: &'static str,
    needed_for: &'static str,
    since: &'static str,
    program: ProgramType,
    helper: BpfHelper,
) -> Row {
    required(name, needed_for, since, Probe::Helper(program, helper))
}

/// Requirement of one way to recognise pods by the cookies of their network namespaces. If one is missing, the other
/// way is used.
const fn cookie(name: &'static str, needed_for: &'static str, since: &'static str, probe: Probe) -> Row {
    const PRICE: &str = "degraded: each TCP socket of the node's pods carries the cookie instead";
    Row { name, needed_for, since, need: Need::Replaced(PRICE), probe }
}

/// Versions are those of the mainline commits.
const TABLE: [Row; 36] = [
    required("BTF of the kernel", "loading the programs (CONFIG_DEBUG_INFO_BTF)", "5.4", Probe::Btf),
    required("cgroup2", "attaching to the pods' cgroup", "4.5", Probe::Cgroup2),
    required("links to cgroups", "programs that outlive the agent", "5.7", Probe::CgroupLink),
    required("links to network namespaces", "steering inbound connections", "5.9", Probe::NetnsLink),
    required(
        "program cgroup_sock_addr",
        "connect4, connect6: redirecting outbound connections",
        "4.17",
        Probe::Program(ProgramType::CgroupSockAddr),
    ),
    required(
        "hook getpeername4",
        "the peer's name that the application dialled",
        "5.8",
        Probe::Hook(AttachType::GetPeerName4),
    ),
    required("hook post_bind4", "knowing the proxy's listeners", "4.17", Probe::Hook(AttachType::PostBind4)),
    required("program sock_ops", "handing over the original destination", "4.13", Probe::Program(ProgramType::SockOps)),
    required(
        "program cgroup_sockopt",
        "SO_ORIGINAL_DST and the attestation",
        "5.3",
        Probe::Program(ProgramType::CgroupSockopt),
    ),
    required("program sk_lookup", "steering inbound connections", "5.9", Probe::Program(ProgramType::SkLookup)),
    required("map hash", "pods and their rules", "3.19", Probe::Map(MapType::Hash)),
    required("map array", "settings", "3.19", Probe::Map(MapType::Array)),
    required("map percpu_array", "counting verdicts", "4.6", Probe::Map(MapType::PerCpuArray)),
    required("map lru_hash", "handing over the original destination", "4.10", Probe::Map(MapType::LruHash)),
    required("map lpm_trie", "skipped subnets", "4.11", Probe::Map(MapType::LpmTrie)),
    required("map sockhash", "the proxies' listeners", "4.18", Probe::Map(MapType::SockHash)),
    required("map sk_storage", "the original destination", "5.2", Probe::Map(MapType::SkStorage)),
    required("map ringbuf", "the trace of verdicts", "5.8", Probe::Map(MapType::RingBuf)),
    helper(
        "bpf_get_netns_cookie in connect4",
        "knowing the pod that connects",
        "5.7",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_netns_cookie,
    ),
    helper(
        "bpf_get_netns_cookie in post_bind4",
        "knowing the pod whose proxy binds",
        "5.7",
        ProgramType::CgroupSock,
        BpfHelper::BPF_FUNC_get_netns_cookie,
    ),
    cookie(
        "bpf_get_netns_cookie in sock_ops",
        "knowing the pod whose proxy accepts or listens",
        "5.15",
        Probe::Helper(ProgramType::SockOps, BpfHelper::BPF_FUNC_get_netns_cookie),
    ),
    cookie(
        "bpf_get_netns_cookie in getsockopt",
        "knowing the pod whose proxy asks",
        "5.15",
        Probe::Helper(ProgramType::CgroupSockopt, BpfHelper::BPF_FUNC_get_netns_cookie),
    ),
    helper(
        "bpf_sk_storage_get in connect4",
        "the original destination",
        "5.3",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_sk_storage_get,
    ),
    helper(
        "bpf_sk_storage_get in post_bind4",
        "knowing the proxy's listeners",
        "5.9",
        ProgramType::CgroupSock,
        BpfHelper::BPF_FUNC_sk_storage_get,
    ),
    helper(
        "bpf_sk_storage_get in sock_ops",
        "the original destination",
        "5.3",
        ProgramType::SockOps,
        BpfHelper::BPF_FUNC_sk_storage_get,
    ),
    helper(
        "bpf_sk_storage_get in getsockopt",
        "the original destination",
        "5.3",
        ProgramType::CgroupSockopt,
        BpfHelper::BPF_FUNC_sk_storage_get,
    ),
    helper(
        "bpf_bind in connect4",
        "the pod's address as the source of redirected connections",
        "4.17",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_bind,
    ),
    helper(
        "bpf_setsockopt in connect4",
        "redirecting sockets that are bound to a device",
        "5.8",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_setsockopt,
    ),
    helper(
        "bpf_sock_hash_update in sock_ops",
        "the proxies' listeners",
        "4.18",
        ProgramType::SockOps,
        BpfHelper::BPF_FUNC_sock_hash_update,
    ),
    helper(
        "bpf_sk_assign in sk_lookup",
        "steering inbound connections",
        "5.9",
        ProgramType::SkLookup,
        BpfHelper::BPF_FUNC_sk_assign,
    ),
    helper(
        "bpf_get_current_cgroup_id in connect4",
        "knowing a proxy by its cgroup",
        "5.7",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_current_cgroup_id,
    ),
    helper(
        "bpf_get_current_cgroup_id in post_bind4",
        "knowing a proxy by its cgroup",
        "5.7",
        ProgramType::CgroupSock,
        BpfHelper::BPF_FUNC_get_current_cgroup_id,
    ),
    helper(
        "bpf_get_current_comm in connect4",
        "the trace of verdicts",
        "5.7",
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_current_comm,
    ),
    cookie("SO_NETNS_COOKIE", "enrolling a pod by its network namespace", "5.14", Probe::NetnsCookie),
    Row {
        name: "pidfd_getfd",
        needed_for: "proxies that listened before the agent came",
        since: "5.6",
        need: Need::Optional(
            "proxies that were there before the agent get no inbound connection until they start again",
        ),
        probe: Probe::PidfdGetfd,
    },
    Row {
        name: "BPF JIT",
        needed_for: "speed",
        since: "3.0",
        need: Need::Optional("the programs are interpreted, so that every connection takes longer"),
        probe: Probe::Jit,
    },
];

/// Settings that matter in bug reports about BPF.
const NOTES: [Row; 3] = [
    Row {
        name: "bpffs at /sys/fs/bpf",
        needed_for: "pins in the default place; without one, `run` mounts one or says how to",
        since: "4.4",
        need: Need::Noted,
        probe: Probe::Bpffs,
    },
    Row {
        name: "lockdown",
        needed_for: "nothing: the programs read no kernel memory, so any level is fine",
        since: "5.4",
        need: Need::Noted,
        probe: Probe::Lockdown,
    },
    Row {
        name: "unprivileged_bpf_disabled",
        needed_for: "nothing: the agent has CAP_BPF, so any value is fine",
        since: "4.4",
        need: Need::Noted,
        probe: Probe::UnprivilegedBpf,
    },
];

/// Probes everything on the running kernel. Features that are newer than the given Linux count as missing.
pub(crate) fn examine(as_on: Option<Linux>) -> Vec<Feature> {
    examine_with(as_on, probe::probe)
}

fn examine_with(as_on: Option<Linux>, probe: impl Fn(Probe) -> Found) -> Vec<Feature> {
    let try_row = |row: &Row| {
        let left_out = as_on.is_some_and(|as_on| Linux::of(row.since) > as_on);
        let (found, how) =
            if left_out { (Found::No, "left out by --as-on-linux") } else { (probe(row.probe), row.probe.how()) };
        Feature { name: row.name, needed_for: row.needed_for, since: row.since, need: row.need, found, how }
    };
    TABLE.iter().chain(&NOTES).map(try_row).collect()
}

/// Where programs and agent learn the cookies of namespaces.
pub(crate) fn cookie_source(features: &[Feature]) -> CookieSource {
    let lacks = |feature: &Feature| matches!(feature.need, Need::Replaced(_)) && feature.found == Found::No;
    if features.iter().any(lacks) { CookieSource::Sockets } else { CookieSource::Kernel }
}

/// Refuses a host without a required feature, and logs the consequences of other missing ones.
///
/// # Errors
/// When a required feature is missing; the message names all that are.
pub(crate) fn check(features: &[Feature]) -> Result<(), Lacking> {
    for feature in features {
        match (&feature.found, feature.need) {
            (Found::No, Need::Optional(without) | Need::Replaced(without)) => {
                tracing::warn!(feature = feature.name, linux = feature.since, without, "the host lacks a feature");
            }
            (Found::Unknown(reason), Need::Required) => {
                tracing::warn!(feature = feature.name, reason, "cannot find out whether the host has a feature");
            }
            _ => {}
        }
    }
    lacking(features, &host::kernel()).map_or(Ok(()), Err)
}

fn lacking(features: &[Feature], kernel: &str) -> Option<Lacking> {
    let missing: Vec<&Feature> = features.iter().filter(|feature| feature.is_missing()).collect();
    let enough = missing.iter().map(|feature| feature.since).max_by_key(|since| Linux::of(since))?;
    let names: Vec<String> = missing
        .iter()
        .map(|feature| format!("{} for {} (Linux {})", feature.name, feature.needed_for, feature.since))
        .collect();
    Some(Lacking { kernel: kernel.to_owned(), missing: names.join("; "), enough: enough.to_owned() })
}

impl Linux {
    /// A version in the table.
    fn of(since: &str) -> Self {
        since.parse().unwrap_or(Self { major: 0, minor: 0 })
    }
}

impl FromStr for Linux {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        let (major, minor) = parts.ok_or("a Linux is given as MAJOR.MINOR, for example 5.10")?;
        Ok(Self { major, minor })
    }
}

impl Probe {
    fn how(self) -> &'static str {
        match self {
            Self::Btf => "/sys/kernel/btf/vmlinux is there",
            Self::Cgroup2 => "one is mounted",
            Self::Bpffs => "one is mounted",
            Self::Program(_) | Self::Hook(_) => "loaded one",
            Self::Map(_) => "made one",
            Self::Helper(..) => "asked the verifier",
            Self::CgroupLink => "asked bpf(2)",
            Self::NetnsLink => "attached a program in a new namespace",
            Self::NetnsCookie => "asked a socket",
            Self::PidfdGetfd => "took a descriptor of this process",
            Self::Jit | Self::Lockdown | Self::UnprivilegedBpf => "read the setting",
        }
    }
}

impl Feature {
    /// Whether the agent cannot start because it is missing.
    pub(crate) fn is_missing(&self) -> bool {
        self.need == Need::Required && self.found == Found::No
    }
}

impl From<&Feature> for ApiFeature {
    fn from(feature: &Feature) -> Self {
        let (need, without) = match feature.need {
            Need::Required => (FeatureNeed::Required, ""),
            Need::Optional(without) | Need::Replaced(without) => (FeatureNeed::Optional, without),
            Need::Noted => (FeatureNeed::Noted, ""),
        };
        let (found, detail) = match &feature.found {
            Found::Yes => (FeatureFound::Yes, String::new()),
            Found::No => (FeatureFound::No, without.to_owned()),
            Found::Unknown(reason) => (FeatureFound::Unknown, reason.clone()),
            Found::State(value) => (FeatureFound::Yes, value.clone()),
        };
        Self {
            name: feature.name.to_owned(),
            needed_for: feature.needed_for.to_owned(),
            since: feature.since.to_owned(),
            need: need.into(),
            found: found.into(),
            how: feature.how.to_owned(),
            detail,
        }
    }
}

fn need(feature: &ApiFeature) -> &'static str {
    match feature.need() {
        FeatureNeed::Required => "required",
        FeatureNeed::Optional => "optional",
        FeatureNeed::Noted => "noted",
        FeatureNeed::Unspecified => "unknown",
    }
}

fn found(feature: &ApiFeature) -> &'static str {
    match feature.found() {
        FeatureFound::Yes => "yes",
        FeatureFound::No => "no",
        FeatureFound::Unknown | FeatureFound::Unspecified => "unknown",
    }
}

/// The features as a JSON array.
pub(crate) fn json(features: &[ApiFeature]) -> Value {
    let row = |feature: &ApiFeature| {
        json!({
            "name": feature.name, "needed_for": feature.needed_for, "since": feature.since, "need": need(feature),
            "found": found(feature), "how": feature.how, "detail": feature.detail,
        })
    };
    features.iter().map(row).collect()
}

/// The features for people.
pub(crate) fn table(features: &[ApiFeature]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(["FEATURE", "NEEDED FOR", "NEED", "LINUX", "FOUND", "HOW"]);
    for feature in features {
        let mut seen = found(feature).to_owned();
        if !feature.detail.is_empty() {
            seen = format!("{seen}: {}", feature.detail);
        }
        table.add_row([
            feature.name.clone(),
            feature.needed_for.clone(),
            need(feature).to_owned(),
            feature.since.clone(),
            seen,
            feature.how.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The features without these, and the error message if the kernel is refused.
    fn without(missing: &[Probe]) -> (Vec<Feature>, Option<String>) {
        let features = examine_with(None, |probe| if missing.contains(&probe) { Found::No } else { Found::Yes });
        let refusal = lacking(&features, "5.4.0-216-generic").map(|lacking| lacking.to_string());
        (features, refusal)
    }

    #[test]
    fn a_refusal_names_everything_that_is_missing_and_what_has_it() {
        let (features, refusal) = without(&[Probe::Map(MapType::RingBuf), Probe::Program(ProgramType::SkLookup)]);
        assert_eq!(
            refusal.as_deref(),
            Some(
                "Linux 5.4.0-216-generic lacks what redirection needs: program sk_lookup for steering inbound \
                 connections (Linux 5.9); map ringbuf for the trace of verdicts (Linux 5.8). Linux 5.9 has all of it"
            )
        );
        assert!(check(&features).is_err());
    }

    #[test]
    fn without_a_way_to_ask_for_cookies_sockets_carry_them() {
        let ways = [
            Probe::NetnsCookie,
            Probe::Helper(ProgramType::SockOps, BpfHelper::BPF_FUNC_get_netns_cookie),
            Probe::Helper(ProgramType::CgroupSockopt, BpfHelper::BPF_FUNC_get_netns_cookie),
        ];
        for lacks in [&ways[..], &ways[..1], &ways[1..2], &ways[2..]] {
            let (features, refusal) = without(lacks);
            assert_eq!((refusal, cookie_source(&features)), (None, CookieSource::Sockets), "{lacks:?}");
            assert!(check(&features).is_ok());
            let reported =
                features.iter().map(ApiFeature::from).filter(|feature| feature.detail.starts_with("degraded: "));
            assert_eq!(reported.count(), lacks.len());
        }
        assert_eq!(cookie_source(&without(&[Probe::Jit]).0), CookieSource::Kernel);
    }

    #[test]
    fn as_on_an_older_linux_what_is_younger_is_missing() {
        let missing = |as_on: &str| -> Vec<&str> {
            let features = examine_with(Some(as_on.parse().unwrap()), |_| Found::Yes);
            features.iter().filter(|feature| feature.found == Found::No).map(|feature| feature.name).collect()
        };
        assert_eq!(missing("5.15"), [""; 0]);
        assert_eq!(missing("5.14"), ["bpf_get_netns_cookie in sock_ops", "bpf_get_netns_cookie in getsockopt"]);
        assert_eq!(missing("5.10").len(), 3);
        assert!(missing("5.7").contains(&"map ringbuf"));
    }

    #[test]
    fn a_host_that_has_everything_is_taken() {
        let features = examine_with(None, |_| Found::Yes);
        assert!(lacking(&features, "6.1.0").is_none());
        assert!(check(&features).is_ok());
    }

    #[test]
    fn optional_and_unknown_features_refuse_nobody() {
        let optional = |probe| match probe {
            Probe::PidfdGetfd | Probe::Jit | Probe::Bpffs => Found::No,
            Probe::Map(_) => Found::Unknown("not permitted".into()),
            Probe::Lockdown => Found::State("confidentiality".into()),
            _ => Found::Yes,
        };
        let features = examine_with(None, optional);
        assert!(check(&features).is_ok());
        let reported: Vec<ApiFeature> = features.iter().map(Into::into).collect();
        let of = |name: &str| reported.iter().find(|feature| feature.name == name).expect("it is in the table").clone();
        assert_eq!(of("pidfd_getfd").found(), FeatureFound::No);
        assert!(of("pidfd_getfd").detail.contains("until they start again"), "the function that is missing is named");
        assert_eq!((found(&of("map hash")), of("map hash").detail.as_str()), ("unknown", "not permitted"));
        assert_eq!((need(&of("lockdown")), of("lockdown").detail.as_str()), ("noted", "confidentiality"));
        let text = table(&reported).to_string();
        assert!(text.contains("SO_NETNS_COOKIE") && text.contains("confidentiality"), "{text}");
        assert_eq!(json(&reported)[0]["name"], "BTF of the kernel");
    }

    #[test]
    fn every_required_feature_can_be_the_missing_one() {
        for row in TABLE.iter().filter(|row| row.need == Need::Required) {
            let features = examine_with(None, |probe| if probe == row.probe { Found::No } else { Found::Yes });
            let text = lacking(&features, "x").expect(row.name).to_string();
            assert!(text.contains(row.name) && text.ends_with(&format!("Linux {} has all of it", row.since)), "{text}");
        }
    }

    #[test]
    fn names_and_probes_occur_once() {
        for (index, row) in TABLE.iter().enumerate() {
            assert!(row.since.parse::<Linux>().is_ok(), "{}", row.name);
            for other in &TABLE[index + 1..] {
                assert!(row.name != other.name && row.probe != other.probe, "{} {}", row.name, other.name);
            }
        }
    }

    #[test]
    fn versions_compare_as_numbers() {
        let linux = |text: &str| text.parse::<Linux>().unwrap();
        assert!(linux("5.15") > linux("5.9") && linux("6.1") > linux("5.15"));
        for wrong in ["", "5", "5.", "5.x", "5.10.3", "-5.1"] {
            assert!(wrong.parse::<Linux>().is_err(), "{wrong}");
        }
    }
}
