//! A sandbox's state, for tests of what is printed about it.

use std::net::Ipv4Addr;

use weft_sandbox::{
    config::Config,
    state::{PodState, PodTimes, State},
};

/// A sandbox that is ready, without an agent.
pub(super) fn state(name: &str, pods: Vec<PodState>) -> State {
    State {
        config: Config::new(name, "/manifests", "/bin").expect("a name"),
        daemon_pid: 1,
        agent_pid: None,
        agent_socket: None,
        node_netns: "/run/netns/node".into(),
        kubepods: "/cgroup".into(),
        ready: true,
        pods,
        services: Vec::new(),
        manifest_errors: Vec::new(),
        ignored_manifests: Vec::new(),
    }
}

/// The meshed pod `shop/web-0`.
pub(super) fn pod(ready: bool, message: &str) -> PodState {
    PodState {
        namespace: "shop".into(),
        name: "web-0".into(),
        uid: String::new(),
        ips: vec![Ipv4Addr::new(10, 244, 0, 10).into()],
        netns: "/run/netns/pod".into(),
        cgroup: "/cgroup/pod".into(),
        meshed: true,
        owners: Vec::new(),
        labels: Default::default(),
        service_account: "default".to_owned(),
        admin_port: None,
        tap_port: None,
        ready,
        message: message.into(),
        containers: Vec::new(),
        times: PodTimes::default(),
    }
}
