//! The agent against the real kernel: every check has its own [`World`], in which this program, started again, runs as
//! the pods' proxies and applications. Needs root, cgroup2 and iproute2, and fails without them.

#![expect(clippy::unwrap_used, reason = "a test ends where its expectation does")]

mod enrolment;
mod lifecycle;
mod redirection;
mod trace;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use weft_test_kit::{
    pod::{self, Pod},
    world::World,
};

const AGENT: &str = env!("CARGO_BIN_EXE_weft-agent");

type Check = (&'static str, fn(&mut World));

const CHECKS: [Check; 35] = [
    ("an unenrolled namespace notices nothing", enrolment::unenrolled_notices_nothing),
    ("a request that cannot be used names its field", enrolment::bad_requests_are_refused),
    ("enrolment is attested and idempotent", enrolment::enrolment_is_attested_and_idempotent),
    ("outbound reaches the proxy with the original destination", redirection::outbound_is_redirected),
    ("inbound reaches the proxy with the original destination", redirection::inbound_is_steered),
    ("loopback, own address, skipped ports and the proxy pass", redirection::exemptions_pass),
    ("inbound skipped ports and subnets pass", redirection::inbound_exemptions_pass),
    ("a socket used again forgets its first destination", redirection::reused_sockets_forget),
    ("the application's own source address stays", redirection::chosen_source_stays),
    ("a socket bound to a device is redirected or refused", redirection::device_bound_is_redirected),
    ("a link-local address is one link's", redirection::link_local_addresses_are_one_links),
    ("the control port is the proxy's alone", redirection::control_port_is_the_proxys),
    ("the admin port is the proxy's alone, in each family", redirection::admin_port_is_the_proxys),
    ("the admin port of a proxy that runs already is found", redirection::admin_port_of_a_running_proxy),
    ("traces tell who, where from, where to and why", trace::traces_tell),
    ("a filter leaves out the rest", trace::traces_filter),
    ("a group of listeners outlives its members", lifecycle::listener_group_outlives_members),
    ("another user's listener is not the proxy", lifecycle::foreign_listener_is_ignored),
    ("without its proxy a pod is refused, never open", lifecycle::refuses_without_proxy),
    ("a killed agent is not missed, and the next one takes over", lifecycle::agent_restarts),
    ("other programs replace those in force in place", lifecycle::programs_are_replaced),
    ("a pod's own program is a stub", lifecycle::pods_program_is_a_stub),
    ("no connection is lost while agents come and go", lifecycle::nothing_is_lost_under_load),
    ("unloading leaves nothing", lifecycle::unload_leaves_nothing),
    ("proxies that listened before the programs did are found", lifecycle::running_proxies_are_found),
    (
        "of two namespaces of one name, the one that was enrolled last answers",
        lifecycle::latest_namespace_of_a_name_answers,
    ),
    ("without an agent the kernel enrols a pod when its proxy listens", enrolment::kernel_enrols_by_itself),
    ("a new agent stops the kernel from enrolling, and keeps what it enrolled", enrolment::kernel_stops_enrolling),
    ("inbound is attested when the proxy listens", enrolment::attestation_wants_a_listener),
    ("a proxy that starts again while its pod is withdrawn is found", enrolment::restart_while_withdrawn_is_found),
    ("a proxy is known by its group, or by its cgroup alone", enrolment::proxies_are_known_by_group_or_cgroup),
    ("a strict pod's ports are its proxy's alone", enrolment::strict_pods_have_no_impostors),
    ("bypass of a pod and of the node is complete and reported", enrolment::bypass_is_complete_and_reported),
    ("an accepted connection finds its verdict", trace::acceptance_is_matched),
    ("what is explained is what happens", trace::explanations_come_true),
];

fn main() -> ExitCode {
    if let Some(code) = pod::run_if_requested(|_| None) {
        return code;
    }
    let trials: Vec<Trial> = CHECKS.iter().map(|(name, check)| World::trial("datapath", AGENT, name, *check)).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Processes in two meshed pods, b and c: their proxies, and an application in b. Dropping this ends them.
struct Pair {
    b: Pod,
    c: Pod,
    servers: Pod,
}

impl Pair {
    fn new(world: &World) -> Self {
        let servers = world.servers("b", &[8080, 8081, 9090]);
        let pair = Self { b: world.proxy("b"), c: world.proxy("c"), servers };
        world.mesh("b");
        world.mesh("c");
        pair
    }
}
