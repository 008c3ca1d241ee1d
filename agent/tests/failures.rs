//! What can go wrong around the agent, against the real kernel: each failure has its outcome here, and
//! docs/interception.md a table of them. Needs root, cgroup2 and iproute2, and fails without them.
//!
//! Every check has a world of its own ([`world`]: three network namespaces, of which `a` and `b` are meshed), so that they
//! can be run alone: `cargo test -p weft-agent --test failures -- pins`.

#![expect(clippy::print_stdout, reason = "a test program without libtest reports by itself")]
#![expect(clippy::allow_attributes, reason = "modules that test programs share are not used whole by each")]
#![expect(clippy::unwrap_used, reason = "a test ends where its expectation does")]

#[path = "../src/datapath/bpf.rs"]
#[allow(dead_code, reason = "a test looks at pins and attaches nothing")]
mod bpf;
#[path = "failures/confined.rs"]
mod confined;
#[path = "failures/crashes.rs"]
mod crashes;
#[path = "failures/flood.rs"]
mod flood;
#[path = "failures/full.rs"]
mod full;
#[path = "failures/kernel.rs"]
mod kernel;
#[path = "failures/load.rs"]
mod load;
#[path = "failures/migration.rs"]
mod migration;
#[path = "failures/pins.rs"]
mod pins;
#[path = "datapath/pod.rs"]
#[allow(dead_code, reason = "not every test has use for all of it")]
mod pod;
#[path = "failures/pods.rs"]
mod pods;
#[path = "failures/privilege.rs"]
mod privilege;
#[path = "failures/traced.rs"]
mod traced;
#[path = "failures/versions.rs"]
mod versions;
#[path = "datapath/world.rs"]
#[allow(dead_code, reason = "not every test has use for all of it")]
mod world;

use std::{panic::AssertUnwindSafe, process::ExitCode, time::Instant};

use crate::{
    pod::{Answer, Pod},
    world::World,
};

const AGENT: &str = env!("CARGO_BIN_EXE_weft-agent");
const PROXY: u32 = 2102;
const APP: u32 = 1000;

type Check = (&'static str, fn(&mut World));

const CHECKS: [Check; 36] = [
    ("agent: ten crashes in a row are not noticed", crashes::ten_crashes_in_a_row),
    ("agent: killed at any step of a first start, the next one completes it", crashes::killed_while_starting),
    ("agent: killed at any step of an update, the next one completes it", crashes::killed_while_updating),
    ("agent: killed at any step of an enrolment, the pod is never half open", crashes::killed_while_enrolling),
    ("agent: killed at any step of a change of rules, old or new ones are in force", crashes::killed_while_changing),
    ("agent: a second one on the same pins is refused, on a Kubernetes node it waits", crashes::one_at_a_time),
    ("programs: another build replaces them in place", versions::upgrade_in_place),
    ("programs: one that the kernel refuses changes nothing", versions::refused_program),
    ("layout: a newer one is left alone", versions::newer_layout_is_left_alone),
    ("layout: pods come over from an older one without a gap", migration::pods_come_over),
    ("layout: an older one stays while a pod needs it", migration::stays_while_needed),
    ("pins: removed under a running agent, they are made again", pins::removed_under_the_agent),
    ("pins: removed without an agent, pods are open until enrolled again", pins::removed_without_an_agent),
    ("pins: a bpffs unmounted under the agent is not missed", pins::unmounted_under_the_agent),
    ("pins: a directory elsewhere is refused", pins::not_on_a_bpffs),
    ("pins: unloading under a running agent ends it", pins::unloaded_under_the_agent),
    ("pins: unloading without an agent leaves nothing in the kernel", pins::unload_leaves_nothing),
    ("map full: PODS", full::pods),
    ("map full: PORTS", full::ports),
    ("map full: FLOWS", full::flows),
    ("map full: FLOWS, while a connection waits for its proxy", full::flows_while_waiting),
    ("map full: LISTENERS", full::listeners),
    ("map full: PROXIES", full::proxies),
    ("map full: ADMISSIONS", full::admissions),
    ("map full: one container fills none", full::one_container),
    ("ring buffer full: connections go on and the loss is told", full::events),
    (
        "trace: a pod that floods delays no enrolment, and its flood is not read without a watcher",
        flood::delays_nothing,
    ),
    ("pod: a proxy with thousands of descriptors is taken over", pods::proxy_with_many_descriptors),
    ("pod: a proxy that crashes again and again is back with its listener", pods::proxy_crash_loop),
    ("pod: a source port used again has its own destination", pods::source_port_reuse),
    ("pod: sockets of other processes and of before the enrolment", pods::inherited_sockets),
    ("pod: a namespace without an entry, and the cookie 0", pods::unknown_cookies),
    ("privilege: the chart's capabilities are enough", privilege::enough),
    ("privilege: none of the capabilities is too much", privilege::not_too_much),
    ("privilege: what the confinement forbids", privilege::confinement),
    ("privilege: the chart asks for the same", privilege::as_in_the_chart),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some(pod::SUBCOMMAND) => return pod::main(&arguments[1..], pods::command),
        Some(pod::CHILD) => return pod::child(&arguments[1..]),
        Some(traced::SUBCOMMAND) => return traced::main(&arguments[1..]),
        Some(confined::SUBCOMMAND) => return confined::main(&arguments[1..]),
        Some(confined::RIGHTS) => return confined::rights(&arguments[1..]),
        Some(confined::PROBE) => return confined::probe(&arguments[1..]),
        _ => {}
    }
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with("--")).collect();
    let is_chosen = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    let chosen: Vec<&Check> = CHECKS.iter().filter(|(name, _)| is_chosen(name)).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        chosen.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    // A failed check is reported once, below.
    std::panic::set_hook(Box::new(|_| {}));
    let mut failures = 0;
    for (name, check) in &chosen {
        let begin = Instant::now();
        let mut log = String::new();
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let mut world = World::new();
            let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| check(&mut world)));
            log = world.agent_log();
            outcome
        }));
        if let Err(panic) = outcome.and_then(|outcome| outcome) {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            println!("test {name} ... FAILED\n{}\nthe last agent said:\n{log}", text.unwrap_or_default());
            failures += 1;
        } else {
            println!("test {name} ... ok ({:.1} s)", begin.elapsed().as_secs_f32());
        }
    }
    let result = if failures == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {result}. {} passed; {failures} failed", chosen.len() - failures);
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What the server `port` of a pod says when it is reached.
fn reaches(answer: &Answer, port: u16) {
    assert_eq!(answer.listener(), Some(port), "{answer:?}");
}

/// Two meshed pods with their proxies, and an application in b that serves 8080, 9090 and 9095. Dropping it ends them.
struct Mesh {
    a: Pod,
    _b: Pod,
    _servers: Pod,
}

impl Mesh {
    fn new(world: &World) -> Self {
        let mesh = Self::unmeshed(world);
        world.enrol(world.request("a")).unwrap();
        world.enrol(world.request("b")).unwrap();
        mesh.is_meshed(world);
        mesh
    }

    /// The same processes, before anybody enrols them.
    fn unmeshed(world: &World) -> Self {
        let mut servers = world.pod("b", APP);
        for port in [8080, 9090, 9095] {
            servers.ok(&format!("serve {port}"));
        }
        Self { a: world.proxy_of("a"), _b: world.proxy_of("b"), _servers: servers }
    }

    /// Both directions work, and attest it.
    fn is_meshed(&self, world: &World) {
        let mut app = world.pod("a", APP);
        assert!(app.say("attest").starts_with("flags=3 "), "{}", app.say("attest"));
        for target in ["10.99.0.2:8080", "[fd99::2]:8080"] {
            let answer = app.connect(target);
            reaches(&answer, 4140);
            assert_eq!(answer.field("orig"), target);
            assert_eq!(answer.field("peername"), target);
        }
        reaches(&app.connect("10.99.0.2:9090"), 9090);
        let answer = world.pod("c", APP).connect("10.98.0.2:8080");
        reaches(&answer, 4143);
        assert_eq!(answer.field("orig"), "10.98.0.2:8080");
    }

    /// Connections get around the proxies: the opposite, for tests that would pass without any mesh.
    fn is_open(world: &World) {
        let mut app = world.pod("a", APP);
        reaches(&app.connect("10.99.0.2:8080"), 8080);
        reaches(&world.pod("c", APP).connect("10.98.0.2:8080"), 8080);
    }
}
