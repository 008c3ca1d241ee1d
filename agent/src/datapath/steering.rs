//! The programs that steer pods' inbound connections. The kernel runs a program of a network namespace and does not
//! tell it which: so each pod has a stub of a few instructions with its cookie, and one program does the work for all
//! of them. A stub takes some 100 us to load, for which a hundred pods that start at once would wait: so some are
//! always loaded without a pod. Until a stub has a cookie it would refuse every connection, and it is not attached.
//!
//! ```text
//! connection arrives ─> the pod's stub: context and cookie into LOOKUPS ─tail call by STEERING─> weft_sk_lookup
//! ```
//!
//! Between the two, another look-up may run on the same processor. The shared program takes a cookie only if it was
//! left with the address of its own context, which no other look-up has at the same time; else it refuses the
//! connection. Refuses to create or change pinned maps, but for the one element of STEERING.

use std::{
    io,
    mem::offset_of,
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use aya::{
    maps::{Map, MapData, MapError, ProgramArray},
    programs::ProgramFd,
};
use aya_obj::generated::bpf_insn;
use weft_ebpf_abi::{map, socket::Lookup};
use weft_runtime::error::chain;

use crate::datapath::{
    bpf::{self, instruction, load_map, load_value},
    pins::Pins,
};

/// The name of the stubs in the kernel.
const STUB: &str = "weft_sk_stub";
/// Number of stubs in advance: nearly as many as the pods that a kubelet starts by default. Each takes 4 KiB of the
/// kernel's memory.
const SPARES: usize = 96;
/// Pause before new ones are loaded: after one is taken, more may follow, and need the processors.
const BURST: Duration = Duration::from_secs(1);

/// The maps that a stub uses.
#[derive(Debug)]
pub(crate) struct Steering {
    lookups: MapData,
    shared: MapData,
}

/// A stub without a pod.
#[derive(Debug)]
pub(crate) struct Spare {
    program: OwnedFd,
    cookie: OwnedFd,
}

/// Stubs loaded in advance.
#[derive(Debug)]
pub(crate) struct Spares(Receiver<Spare>);

/// Why inbound connections cannot be steered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SteeringError {
    #[error("cannot open map {name}")]
    OpenMap { name: &'static str, source: MapError },
    #[error("cannot write map {}", map::STEERING)]
    Share(#[source] MapError),
    #[error("cannot make the constant of a pod's program {STUB}")]
    Constant(#[source] io::Error),
    #[error("the kernel refused a pod's program {STUB}")]
    Verify(#[source] io::Error),
}

impl Steering {
    /// Opens the maps, which are pinned by now.
    ///
    /// # Errors
    /// When one is not.
    pub(crate) fn open(pins: &Pins) -> Result<Self, SteeringError> {
        Ok(Self { lookups: open(pins, map::LOOKUPS)?, shared: open(pins, map::STEERING)? })
    }

    /// Has all pods' stubs call this program from now on.
    ///
    /// # Errors
    /// When the map is not pinned, or the kernel refuses.
    pub(crate) fn share(pins: &Pins, program: &ProgramFd) -> Result<(), SteeringError> {
        let mut shared = ProgramArray::try_from(Map::ProgramArray(open(pins, map::STEERING)?))
            .map_err(|source| SteeringError::OpenMap { name: map::STEERING, source })?;
        shared.set(0, program, 0).map_err(SteeringError::Share)
    }

    /// Loads a stub.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn spare(&self) -> Result<Spare, SteeringError> {
        let cookie = bpf::create_constant().map_err(SteeringError::Constant)?;
        let [lookups, shared] = [&self.lookups, &self.shared].map(|map| map.fd().as_fd());
        let stub = stub(load_map(1, lookups), load_value(1, cookie.as_fd()), load_map(2, shared));
        let program = bpf::load_sk_lookup(STUB, &stub, c"GPL").map_err(SteeringError::Verify)?;
        Ok(Spare { program, cookie })
    }
}

impl Spare {
    /// Assigns a stub to a pod, permanently.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn assign(self, netns_cookie: u64) -> Result<OwnedFd, SteeringError> {
        bpf::set_constant(self.cookie.as_fd(), netns_cookie).map_err(SteeringError::Constant)?;
        Ok(self.program)
    }
}

impl Spares {
    /// Keeps stubs loaded in advance, in a low-priority thread that ends with the receiver.
    ///
    /// # Errors
    /// When a thread cannot be created.
    pub(crate) fn keep(steering: Arc<Steering>) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(SPARES);
        thread::Builder::new().name("spares".into()).spawn(move || {
            // Failure only costs priority.
            let _ = rustix::process::nice(19);
            if let Err(error) = refill(&steering, &sender) {
                tracing::warn!(error = chain(&error), "pods' programs are not loaded in advance");
            }
        })?;
        Ok(Self(receiver))
    }

    /// Takes a stub, if there is one.
    pub(crate) fn take(&self) -> Option<Spare> {
        self.0.try_recv().ok()
    }
}

fn refill(steering: &Steering, sender: &SyncSender<Spare>) -> Result<(), SteeringError> {
    loop {
        match sender.try_send(steering.spare()?) {
            Ok(()) => {}
            Err(TrySendError::Disconnected(_)) => return Ok(()),
            Err(TrySendError::Full(spare)) => {
                if sender.send(spare).is_err() {
                    return Ok(());
                }
                thread::sleep(BURST);
            }
        }
    }
}

fn open(pins: &Pins, name: &'static str) -> Result<MapData, SteeringError> {
    MapData::from_pin(pins.map(name)).map_err(|source| SteeringError::OpenMap { name, source })
}

/// The instructions of a stub. `lookups` loads that map into r1, `cookie` the address of the cookie, `shared` loads
/// STEERING into r2.
fn stub(lookups: [bpf_insn; 2], cookie: [bpf_insn; 2], shared: [bpf_insn; 2]) -> Vec<bpf_insn> {
    // Operations (include/uapi/linux/bpf.h).
    const MOVE: u8 = 0xbf;
    const MOVE_CONSTANT: u8 = 0xb7;
    const SHIFT_RIGHT: u8 = 0x77;
    const ADD_CONSTANT: u8 = 0x07;
    const LOAD_WORD: u8 = 0x61;
    const LOAD_DOUBLE_WORD: u8 = 0x79;
    const STORE_WORD: u8 = 0x63;
    const STORE_DOUBLE_WORD: u8 = 0x7b;
    const JUMP_IF_EQUAL: u8 = 0x15;
    const JUMP_IF_NOT_EQUAL: u8 = 0x55;
    const CALL: u8 = 0x85;
    const EXIT: u8 = 0x95;
    // Helpers.
    const LOOK_UP: i32 = 1;
    const PROCESSOR: i32 = 8;
    const TAIL_CALL: i32 = 12;
    const LOCK: i32 = 93;
    const UNLOCK: i32 = 94;
    // The result of a program, and a field of the context: `struct bpf_sk_lookup`.
    const DROP: i32 = 0;
    const PASS: i32 = 1;
    const PROTOCOL: i16 = 12;
    const TCP: i32 = 6;

    let field = |offset: usize| i16::try_from(offset).unwrap_or_default();
    let call = |helper| instruction(CALL, 0, 0, 0, helper);
    let mut stub = vec![
        instruction(MOVE, 6, 1, 0, 0),
        instruction(MOVE_CONSTANT, 0, 0, 0, PASS),
        instruction(LOAD_WORD, 2, 6, PROTOCOL, 0),
        instruction(JUMP_IF_NOT_EQUAL, 2, 0, 0, TCP),
        call(PROCESSOR),
        instruction(STORE_WORD, 10, 0, -4, 0),
        instruction(MOVE, 2, 10, 0, 0),
        instruction(ADD_CONSTANT, 2, 0, 0, -4),
    ];
    stub.extend(lookups);
    // Without an element the result is 0, which drops.
    stub.extend([call(LOOK_UP), instruction(JUMP_IF_EQUAL, 0, 0, 0, 0)]);
    stub.push(instruction(MOVE, 7, 0, 0, 0));
    stub.extend(cookie);
    stub.extend([instruction(LOAD_DOUBLE_WORD, 8, 1, 0, 0), instruction(MOVE, 1, 7, 0, 0), call(LOCK)]);
    stub.push(instruction(STORE_DOUBLE_WORD, 7, 6, field(offset_of!(Lookup, context)), 0));
    stub.push(instruction(STORE_DOUBLE_WORD, 7, 8, field(offset_of!(Lookup, netns_cookie)), 0));
    stub.extend([instruction(MOVE, 1, 7, 0, 0), call(UNLOCK), instruction(MOVE, 1, 6, 0, 0)]);
    stub.extend(shared);
    // The index is 0, which the verifier must not know: for a constant one, the kernel patches a jump into the
    // program's text on x86, and interrupts every processor for that. Cookies of namespaces count up from 1, so that
    // none has the highest bit; with it, the call would fail, and the connection be dropped.
    stub.extend([instruction(MOVE, 3, 8, 0, 0), instruction(SHIFT_RIGHT, 3, 0, 0, 63), call(TAIL_CALL)]);
    // A call that succeeds does not return.
    stub.extend([instruction(MOVE_CONSTANT, 0, 0, 0, DROP), instruction(EXIT, 0, 0, 0, 0)]);
    // Both jumps lead to the end; they count from the next instruction.
    let end = stub.len() - 1;
    for (at, jump) in
        stub.iter_mut().enumerate().filter(|(_, one)| [JUMP_IF_EQUAL, JUMP_IF_NOT_EQUAL].contains(&one.code))
    {
        jump.off = i16::try_from(end - at - 1).unwrap_or_default();
    }
    stub
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stub_is_small_and_ends_at_its_end() {
        let none = [instruction(0x18, 1, 1, 0, 0), instruction(0, 0, 0, 0, 0)];
        let stub = stub(none, none, none);
        assert_eq!(stub.len(), 30);
        let ends: Vec<i16> = stub.iter().filter(|one| one.off > 0 && one.code & 7 == 5).map(|one| one.off).collect();
        assert_eq!(ends, [25, 17], "both jumps lead to the last instruction");
    }
}
