//! Failures around the agent, against the real kernel: each failure has a defined outcome here, and
//! docs/interception.md has a table of them. Needs root, cgroup2 and iproute2, and fails without them.
//!
//! Every check has its own [`World`], in which `a` and `b` are meshed, so that checks can run alone and in parallel:
//! `cargo test -p weft-agent --test failures -- pins`.

#![expect(clippy::print_stdout, reason = "this program is started again as others, which print")]
#![expect(clippy::unwrap_used, reason = "a test ends where its expectation does")]

mod confined;
mod crashes;
mod flood;
mod hung;
mod kernel;
mod load;
mod map_full;
mod migration;
mod pins;
mod pods;
mod privilege;
mod traced;
mod versions;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use weft_test_kit::{pod, world::World};

const AGENT: &str = env!("CARGO_BIN_EXE_weft-agent");

type Check = (&'static str, fn(&mut World));

const CHECKS: [Check; 49] = [
    ("agent: ten crashes in a row are not noticed", crashes::ten_crashes_in_a_row),
    ("agent: killed at any step of a first start, the next one completes it", crashes::killed_while_starting),
    ("agent: killed at any step of an update, the next one completes it", crashes::killed_while_updating),
    ("agent: killed at any step of an enrolment, the pod is never half open", crashes::killed_while_enrolling),
    (
        "agent: killed at any step after the kernel enrolled a pod, it stays redirected",
        crashes::killed_while_completing,
    ),
    ("agent: killed at any step of a change of rules, old or new ones are in force", crashes::killed_while_changing),
    ("agent: a second one on the same pins is refused, on a Kubernetes node it waits", crashes::one_at_a_time),
    ("programs: another build replaces them in place", versions::upgrade_in_place),
    ("programs: one that the kernel refuses changes nothing", versions::refused_program),
    ("layout: a newer one is left alone", versions::newer_layout_is_left_alone),
    ("layout: pods come over from an older one without a gap", migration::pods_come_over),
    ("layout: an older one stays while a pod needs it", migration::stays_while_needed),
    ("layout: an older one stays until the node's pods are known", migration::stays_until_pods_are_known),
    ("layout: a bypass of the node includes an older one", migration::bypass_includes_the_older),
    ("pins: removed under a running agent, they are made again", pins::removed_under_the_agent),
    ("pins: removed without an agent, pods are open until enrolled again", pins::removed_without_an_agent),
    ("pins: a bpffs unmounted under the agent is not missed", pins::unmounted_under_the_agent),
    ("pins: a directory elsewhere is refused", pins::not_on_a_bpffs),
    ("pins: unloading under a running agent ends it", pins::unloaded_under_the_agent),
    ("pins: unloading without an agent leaves nothing in the kernel", pins::unload_leaves_nothing),
    ("map full: PODS", map_full::pods),
    ("map full: PORTS", map_full::ports),
    ("map full: PORTS, for the pods of one namespace", map_full::ports_of_one_namespace),
    ("map full: CLIENTS", map_full::clients),
    ("map full: WAITING", map_full::waiting),
    ("map full: FLOWS", map_full::flows),
    ("map full: FLOWS, while a connection waits for its proxy", map_full::flows_while_waiting),
    ("map full: LISTENERS", map_full::listeners),
    ("map full: PROXIES", map_full::proxies),
    ("map full: ADMISSIONS", map_full::admissions),
    ("map full: one container fills none", map_full::one_container),
    ("ring buffer full: connections go on and the loss is reported", map_full::events),
    (
        "trace: a pod that floods delays no enrolment, and its flood is not read without a watcher",
        flood::delays_nothing,
    ),
    ("pod: a proxy with thousands of descriptors is taken over", pods::proxy_with_many_descriptors),
    ("pod: a proxy that listens already loses no connection when its pod comes", pods::running_proxy_keeps_its_clients),
    ("pod: a descriptor whose close hangs delays no other pod", hung::delays_nobody_else),
    ("pod: a proxy that crashes again and again is back with its listener", pods::proxy_crash_loop),
    ("pod: a source port used again has its own destination", pods::source_port_reuse),
    ("pod: what a client dialled is forgotten when its socket closes", pods::clients_are_forgotten),
    ("pod: sockets of other processes and of before the enrolment", pods::inherited_sockets),
    ("pod: a namespace without an entry, and the cookie 0", pods::unknown_cookies),
    ("pod: an entry that is replaced while a program reads it lets nothing pass", pods::replaced_while_read),
    ("privilege: the chart's capabilities are enough", privilege::enough),
    ("privilege: none of the capabilities is too much", privilege::not_too_much),
    ("privilege: what the confinement forbids", privilege::confinement),
    ("privilege: the chart asks for the same", privilege::as_in_the_chart),
    ("privilege: a proxy opens none of the kernel's maps", privilege::of_a_proxy),
    ("privilege: where no listener can be taken, pods of an older agent follow their rules", privilege::no_duplicates),
    ("privilege: where no listener can be taken, a refusal is explained", privilege::refusals_are_explained),
];

fn main() -> ExitCode {
    if let Some(code) = pod::run_if_requested(|words| pods::follow(words).or_else(|| privilege::follow(words))) {
        return code;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some(traced::SUBCOMMAND) => return traced::main(&arguments[1..]),
        Some(confined::SUBCOMMAND) => return confined::main(&arguments[1..]),
        Some(confined::RIGHTS) => return confined::rights(&arguments[1..]),
        Some(confined::PROBE) => return confined::probe(&arguments[1..]),
        _ => {}
    }
    let trials: Vec<Trial> = CHECKS.iter().map(|(name, check)| World::trial("failures", AGENT, name, *check)).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
