//! Which connections are read from, when more requests wait for this process than it should keep.
//!
//! ```text
//! read ──> request arrived ──> answered
//!   │ more than the bound wait           │
//!   └──> pause: a turn for each source <─┘
//! ```
//!
//! A request waits for this process from its arrival until its answer begins, but not while its client owes a part of
//! it. When as many wait as there is room for, connections are not read from, so that what they send stays with their
//! clients, and each answer lets another one read. Sources take turns, and so do the connections of a source, so that
//! one with thousands of requests delays others by its share. Nothing is refused: all requests are answered in the
//! order in which they are read, as fast as they can be.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    net::IpAddr,
    task::Waker,
};

/// The part of the room that one source may take: one of this many.
const SHARE: usize = 16;
/// Requests that a read may bring: 8 KiB of small ones.
const READ: usize = 64;

/// Who takes turns: an address, or a connection of the sidecar, with many clients behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Member {
    Address(IpAddr),
    Sidecar(u64),
}

/// See above.
#[derive(Debug)]
pub(super) struct Gate {
    room: usize,
    /// Requests that wait.
    waiting: usize,
    members: HashMap<Member, OfMember>,
    /// Members with paused connections, that may have more requests.
    turns: VecDeque<Member>,
    /// Connections that may read once.
    granted: HashSet<u64>,
    /// How to wake connections that wait for their turn.
    paused: HashMap<u64, Waker>,
}

#[derive(Debug, Default)]
struct OfMember {
    waiting: usize,
    paused: VecDeque<u64>,
    /// Whether it is in `turns`.
    queued: bool,
}

/// Connections that may read now.
#[must_use = "they wait to be woken"]
#[derive(Debug, Default)]
pub(super) struct Granted(Vec<Waker>);

impl Granted {
    /// Wakes them. To be called without locks.
    pub(super) fn wake(self) {
        self.0.into_iter().for_each(Waker::wake);
    }
}

impl Gate {
    /// A gate with room for this many requests.
    pub(super) fn new(room: usize) -> Self {
        let (turns, granted, paused) = Default::default();
        Self { room, waiting: 0, members: HashMap::new(), turns, granted, paused }
    }

    /// Whether a connection may read; it is woken later if not.
    pub(super) fn may_read(&mut self, member: Member, connection: u64, reader: &Waker) -> bool {
        if self.granted.contains(&connection) {
            return true;
        }
        if let Some(paused) = self.paused.get_mut(&connection) {
            paused.clone_from(reader);
            return false;
        }
        let waiting = self.members.get(&member).map_or(0, |of| of.waiting);
        let has_room = waiting < self.room_of(member);
        if has_room && self.turns.is_empty() && self.has_room() {
            return true;
        }
        let of = self.members.entry(member).or_default();
        of.paused.push_back(connection);
        self.paused.insert(connection, reader.clone());
        if has_room && !std::mem::replace(&mut of.queued, true) {
            self.turns.push_back(member);
        }
        false
    }

    /// A connection has read, whether there was something or not.
    pub(super) fn has_read(&mut self, connection: u64) -> Granted {
        if self.granted.remove(&connection) { self.grant() } else { Granted::default() }
    }

    /// A request waits.
    pub(super) fn waits(&mut self, member: Member) {
        self.waiting += 1;
        self.members.entry(member).or_default().waiting += 1;
    }

    /// A request waits no longer.
    pub(super) fn waits_no_longer(&mut self, member: Member) -> Granted {
        self.waiting = self.waiting.saturating_sub(1);
        if let Some(of) = self.members.get_mut(&member) {
            of.waiting = of.waiting.saturating_sub(1);
            if of.paused.is_empty() && of.waiting == 0 {
                self.members.remove(&member);
            } else if !of.paused.is_empty() && !std::mem::replace(&mut of.queued, true) {
                self.turns.push_back(member);
            }
        }
        self.grant()
    }

    /// A connection has ended.
    pub(super) fn ended(&mut self, member: Member, connection: u64) -> Granted {
        let paused = self.paused.remove(&connection).is_some();
        if let Some(of) = self.members.get_mut(&member) {
            if paused {
                of.paused.retain(|paused| *paused != connection);
            }
            if of.paused.is_empty() && of.waiting == 0 {
                self.members.remove(&member);
            }
        }
        self.granted.remove(&connection);
        self.grant()
    }

    fn has_room(&self) -> bool {
        self.waiting + self.granted.len() * READ < self.room
    }

    fn room_of(&self, member: Member) -> usize {
        match member {
            Member::Address(_) => (self.room / SHARE).max(1),
            Member::Sidecar(_) => self.room,
        }
    }

    /// Gives turns while there is room.
    fn grant(&mut self) -> Granted {
        let mut granted = Granted::default();
        while self.has_room()
            && let Some(member) = self.turns.pop_front()
        {
            let room = self.room_of(member);
            let Some(of) = self.members.get_mut(&member) else { continue };
            of.queued = false;
            // Its next answer queues it again.
            if of.waiting >= room {
                continue;
            }
            let Some(connection) = of.paused.pop_front() else { continue };
            if !of.paused.is_empty() {
                of.queued = true;
                self.turns.push_back(member);
            }
            if let Some(reader) = self.paused.remove(&connection) {
                self.granted.insert(connection);
                granted.0.push(reader);
            }
        }
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn address(host: u8) -> Member {
        Member::Address(IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, host)))
    }

    /// Which of these connections may read; none is asked that has not paused.
    fn granted(gate: &mut Gate, connections: impl IntoIterator<Item = u64>) -> Vec<u64> {
        connections.into_iter().filter(|connection| gate.granted.contains(connection)).collect()
    }

    fn may_read(gate: &mut Gate, member: Member, connection: u64) -> bool {
        gate.may_read(member, connection, Waker::noop())
    }

    #[test]
    fn sources_take_turns_and_so_do_their_connections() {
        let mut gate = Gate::new(32);
        let (flood, other) = (address(6), address(1));
        assert!(may_read(&mut gate, Member::Sidecar(9), 9));
        (0..32).for_each(|_| gate.waits(Member::Sidecar(9)));
        for connection in [1, 2, 3] {
            assert!(!may_read(&mut gate, flood, connection));
        }
        assert!(!may_read(&mut gate, other, 4) && !may_read(&mut gate, Member::Sidecar(9), 9));
        let mut order = Vec::new();
        for _ in 0..5 {
            gate.waits_no_longer(Member::Sidecar(9)).wake();
            let now = granted(&mut gate, [1, 2, 3, 4, 9]);
            assert_eq!(now.len(), 1, "an answer lets one connection read");
            assert!(may_read(&mut gate, flood, now[0]));
            // What it reads is a request.
            gate.waits(Member::Sidecar(9));
            gate.has_read(now[0]).wake();
            order.extend(now);
        }
        assert_eq!(order, [1, 4, 9, 2, 3]);
        assert!(gate.turns.is_empty() && gate.paused.is_empty() && gate.granted.is_empty());
    }

    #[test]
    fn a_source_has_its_share_of_the_room() {
        let mut gate = Gate::new(64);
        let (flood, other) = (address(6), address(1));
        (0..64 / SHARE).for_each(|_| gate.waits(flood));
        assert!(!may_read(&mut gate, flood, 1), "it has its share");
        assert!(may_read(&mut gate, other, 2));
        gate.waits_no_longer(flood).wake();
        assert_eq!(granted(&mut gate, [1]), [1]);
        gate.has_read(1).wake();
        // All go.
        (1..64 / SHARE).for_each(|_| gate.waits_no_longer(flood).wake());
        assert!(gate.members.is_empty() && gate.waiting == 0);
    }

    #[test]
    fn a_reader_that_finds_nothing_or_goes_lets_the_next_one_read() {
        let mut gate = Gate::new(32);
        (0..32).for_each(|_| gate.waits(address(1)));
        for connection in 1..=4 {
            assert!(!may_read(&mut gate, address(10 + connection as u8), connection));
        }
        gate.ended(address(12), 2).wake();
        gate.waits_no_longer(address(1)).wake();
        assert_eq!(granted(&mut gate, 1..=4), [1]);
        gate.has_read(1).wake();
        assert_eq!(granted(&mut gate, 1..=4), [3], "the second one has gone");
        gate.ended(address(13), 3).wake();
        assert_eq!(granted(&mut gate, 1..=4), [4]);
        gate.has_read(4).wake();
        for connection in [1, 4] {
            gate.ended(address(10 + connection as u8), connection).wake();
        }
        (1..32).for_each(|_| gate.waits_no_longer(address(1)).wake());
        assert!(gate.members.is_empty() && gate.paused.is_empty() && gate.granted.is_empty());
    }
}
