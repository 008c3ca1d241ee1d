//! A node with three network namespaces in a row and a running agent: the fixture of most tests of the agent.
//!
//! ```text
//!   a ───10.99.0.0/24, fd99::/64─── b ───10.98.0.0/24, fd98::/64─── c
//!   .1 and .11                     .2 .2                            .3 and, in skipped networks, .77
//! ```

use std::{
    ops::{Deref, DerefMut},
    path::PathBuf,
};

use libtest_mimic::{Failed, Trial};
use weft_proto::agent::{EnrolRequest, EnrolResponse, PortRange};

use crate::{
    check::catch,
    node::{Node, as_on_linux},
    pod::{APPLICATION_UID, PROXY_UID, Pod},
};

/// See the module's documentation.
pub struct World {
    node: Node,
}

impl World {
    /// Starts this program as agent, which has enrolled none of the three yet.
    pub fn new(purpose: &str, agent: impl Into<PathBuf>) -> Self {
        let mut node = Node::new(purpose, agent).unwrap();
        for name in ["a", "b", "c"] {
            node.add_netns(name);
        }
        node.join(("a", 1), ("b", 2), 99);
        node.join(("c", 3), ("b", 2), 98);
        // Second addresses; a connection has to bind one of them to use it as source.
        for address in ["10.98.0.77/24", "fd98::77/64"] {
            node.ip("c", &format!("addr add {address} dev to98 nodad preferred_lft 0"));
        }
        node.ip("a", "addr add 10.99.0.11/24 dev to99");
        node.start_agent(&[]);
        Self { node }
    }

    /// A test with its own world; a failure is reported with the agent's log.
    pub fn trial(purpose: &'static str, agent: &'static str, name: &str, check: fn(&mut Self)) -> Trial {
        Trial::test(name, move || {
            let mut world = catch(|| Self::new(purpose, agent))?;
            let outcome = catch(|| check(&mut world));
            outcome.map_err(|error| Failed::from(format!("{error}\nthe last agent's log:\n{}", world.agent_log())))
        })
    }

    /// A request to enrol one of the three, as a sandbox would send it.
    pub fn request(&self, name: &str) -> EnrolRequest {
        let ips = match name {
            "a" => vec!["10.99.0.1", "fd99::1"],
            "b" => vec!["10.99.0.2", "fd99::2", "10.98.0.2", "fd98::2"],
            "c" => vec!["10.98.0.3", "fd98::3"],
            _ => panic!("{name} is not meshed"),
        };
        EnrolRequest {
            pod: Some(Node::pod_ref(name)),
            uid: String::new(),
            netns_path: self.netns(name).display().to_string(),
            ips: ips.into_iter().map(Into::into).collect(),
            proxy_uid: PROXY_UID,
            outbound_port: 4140,
            inbound_port: 4143,
            skip_outbound_ports: vec![PortRange { first: 9090, last: 9090 }, PortRange { first: 4567, last: 4568 }],
            skip_inbound_ports: vec![PortRange { first: 9000, last: 9100 }],
            skip_subnets: vec!["10.98.0.64/27".into(), "fd98::77/128".into()],
            ..EnrolRequest::default()
        }
    }

    /// Enrols one of the three with these rules.
    pub fn mesh(&self, name: &str) -> EnrolResponse {
        self.enrol(self.request(name)).unwrap()
    }

    /// Starts an application that listens on these ports.
    pub fn servers(&self, netns: &str, ports: &[u16]) -> Pod {
        let mut servers = self.pod(netns, APPLICATION_UID);
        for port in ports {
            servers.ok(&format!("serve {port}"));
        }
        servers
    }

    /// Waits until the answer is there, and fails the test with the agent's log if it does not come.
    pub fn eventually<T>(&self, what: &str, mut ask: impl FnMut(&Self) -> Option<T>) -> T {
        self.node.eventually(what, |_| ask(self))
    }

    /// The number of programs that an agent attaches to the cgroup: one more as on Linux 5.10, where sockets store
    /// cookies.
    pub fn cgroup_programs() -> usize {
        8 + usize::from(as_on_linux().next().is_some())
    }
}

impl Deref for World {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Node {
        &mut self.node
    }
}

/// Processes in two meshed pods, a and b: their proxies, and an application in b that serves 8080, 8081, 9090 and 9095.
/// Dropping this ends them.
pub struct Mesh {
    /// The proxy of a.
    pub a: Pod,
    /// The proxy of b.
    pub b: Pod,
    /// The application in b.
    pub servers: Pod,
}

impl Mesh {
    /// Starts the processes, enrols the pods, and checks that both directions are redirected.
    pub fn new(world: &World) -> Self {
        let mesh = Self::unmeshed(world);
        world.mesh("a");
        world.mesh("b");
        mesh.is_meshed(world);
        mesh
    }

    /// The same processes, in pods that are not enrolled.
    pub fn unmeshed(world: &World) -> Self {
        let servers = world.servers("b", &[8080, 8081, 9090, 9095]);
        Self { a: world.proxy("a"), b: world.proxy("b"), servers }
    }

    /// Asserts that both directions are redirected and attested.
    pub fn is_meshed(&self, world: &World) {
        let mut app = world.pod("a", APPLICATION_UID);
        assert!(app.say("attest").starts_with("flags=3 "), "{}", app.say("attest"));
        for target in ["10.99.0.2:8080", "[fd99::2]:8080"] {
            let answer = app.connect(target);
            answer.reached(4140);
            assert_eq!(answer.field("orig"), target);
            assert_eq!(answer.field("peername"), target);
        }
        app.connect("10.99.0.2:9090").reached(9090);
        let answer = world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080");
        answer.reached(4143);
        assert_eq!(answer.field("orig"), "10.98.0.2:8080");
    }

    /// Asserts that connections bypass the proxies: the opposite, for tests that would pass without any mesh.
    pub fn is_open(world: &World) {
        let mut app = world.pod("a", APPLICATION_UID);
        app.connect("10.99.0.2:8080").reached(8080);
        world.pod("c", APPLICATION_UID).connect("10.98.0.2:8080").reached(8080);
    }
}
