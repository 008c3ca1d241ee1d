//! A process in a pod, and the handle with which a test controls it: an [`Actor`] whose orders are words.
//!
//! The words that most tests need are here: [`serve`] for servers, [`connect`] for clients, [`kept`] for state that a
//! process keeps between orders. A test program may add its own words. The answer is `ok`, `NAME=VALUE` words, or
//! `error KIND` with an [`std::io::ErrorKind`].

pub mod connect;
pub mod kept;
pub mod serve;

use std::{collections::BTreeMap, process::ExitCode};

use crate::{
    actor::{self, Actor, Place},
    wait::block_on,
};

/// The applications' user.
pub const APPLICATION_UID: u32 = 1000;
/// The proxies' user.
pub const PROXY_UID: u32 = 2102;

/// A running process, killed on drop.
pub struct Pod {
    actor: Actor,
}

/// The server's observations of a connection, and the client's.
#[derive(Debug)]
pub struct Answer(pub BTreeMap<String, String>);

impl Answer {
    /// The value of a field, which must exist.
    pub fn field(&self, name: &str) -> &str {
        self.0.get(name).map_or_else(|| panic!("no {name} in {self:?}"), String::as_str)
    }

    /// The port of a field that is an address.
    pub fn port(&self, name: &str) -> u16 {
        self.field(name).rsplit_once(':').unwrap().1.parse().unwrap()
    }

    /// The port of the server that answered.
    pub fn listener(&self) -> Option<u16> {
        self.0.get("listener").and_then(|port| port.parse().ok())
    }

    /// Fails the test unless the server on this port answered.
    pub fn reached(&self, port: u16) {
        assert_eq!(self.listener(), Some(port), "{self:?}");
    }
}

impl Pod {
    /// Starts a process.
    pub fn start(place: &Place) -> Self {
        Self { actor: block_on(Actor::start(place)).unwrap() }
    }

    /// Sends an order and returns the answer.
    pub fn say(&mut self, order: &str) -> String {
        block_on(self.actor.tell(&order)).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Sends an order whose answer must be `ok`.
    pub fn ok(&mut self, order: &str) {
        assert_eq!(self.say(order), "ok", "{order}");
    }

    /// Sends an order whose answer has fields.
    pub fn answer(&mut self, order: &str) -> Answer {
        let line = self.say(order);
        let fields: BTreeMap<_, _> = line
            .split(' ')
            .filter_map(|field| field.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())))
            .collect();
        assert!(!fields.is_empty(), "{order}: {line}");
        Answer(fields)
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.actor.id().unwrap()
    }

    /// Connects to a server of another such process.
    pub fn connect(&mut self, target: &str) -> Answer {
        self.answer(&format!("connect {target}"))
    }

    /// Connects from an address.
    pub fn connect_from(&mut self, source: &str, target: &str) -> Answer {
        self.answer(&format!("connect {target} {source}"))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // A process that has ended cannot be killed.
        let _ = block_on(self.actor.kill());
    }
}

/// Becomes such a process, if this one was started as one: a test program calls this first. `special` answers the words
/// of one program, and `None` for all others.
pub fn run_if_requested(mut special: impl FnMut(&[&str]) -> Option<String>) -> Option<ExitCode> {
    if let Some(target) = kept::child_target() {
        return Some(kept::dial_inherited(&target));
    }
    let place = actor::requested()?;
    let mut kept = kept::Kept::default();
    let result = actor::run(&place, |order: String| {
        let words: Vec<&str> = order.split(' ').collect();
        Ok(special(&words).unwrap_or_else(|| follow(&mut kept, &words)))
    });
    Some(match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("a process of a pod ended: {error:#}");
            ExitCode::FAILURE
        }
    })
}

fn follow(kept: &mut kept::Kept, words: &[&str]) -> String {
    let number = |text: &str| text.parse::<u32>().unwrap();
    let answer = match *words {
        ["proxy"] => serve::proxy(),
        ["serve", port] => serve::listen(&format!("[::]:{port}"), false),
        ["serve-at", address] => serve::listen(address, false),
        ["accepted", port] => Ok(serve::accepted(port.parse().unwrap())),
        ["echo", port] => serve::echo(&format!("[::]:{port}")),
        ["echo-proxy"] => serve::echo_proxy(),
        ["connect", target] => connect::connect(target, None),
        ["connect", target, source] => connect::connect(target, Some(source.parse().unwrap())),
        ["connect-by", device, target] => connect::connect_by(device, target),
        ["connect-port", port, target] => connect::connect_port(port.parse().unwrap(), target),
        ["reuse", first, second] => connect::reuse(first, second),
        ["load", target, count] => connect::load(target, number(count)),
        ["attest"] => connect::attest(),
        ["halt", address] => kept.halt(address),
        ["resume"] => kept.resume(),
        ["start", target] => kept.start(target),
        ["finish"] => kept.finish(),
        ["open", target] => kept.open(target),
        ["ping"] => kept.ping(),
        ["create"] => kept.create(),
        ["dial-in-child", target] => kept.dial_in_child(target),
        ["namespaces", count] => kept.fill_namespaces(number(count)),
        ["users", count] => kept.fill_users(number(count)),
        _ => Err(std::io::Error::other("unknown order")),
    };
    answer.unwrap_or_else(|error| format!("error {:?}", error.kind()))
}
