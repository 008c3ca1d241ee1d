//! Events for whoever watches. Refuses to block or to fail: an event without room is counted and lost.

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use weft_ebpf_abi::{
    address::Address,
    counter,
    event::{COMMAND_BYTES, Event},
    verdict::{Direction, Verdict},
};

use crate::maps;

/// One end of a connection.
#[derive(Clone, Copy)]
pub(crate) struct End {
    pub(crate) address: Address,
    pub(crate) port: u16,
}

/// Who is calling; nobody inbound.
#[derive(Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) command: [u8; COMMAND_BYTES],
}

impl Caller {
    pub(crate) const NOBODY: Self = Self { pid: 0, uid: 0, command: [0; COMMAND_BYTES] };
}

/// Reports a verdict; ask [`maps::watched`] first.
#[inline(always)]
pub(crate) fn emit(
    netns_cookie: u64,
    direction: Direction,
    verdict: Verdict,
    caller: &Caller,
    source: End,
    original: End,
    new: End,
) {
    let Some(mut entry) = maps::EVENTS.reserve::<Event>(0) else {
        maps::count_at(counter::EVENTS_DROPPED);
        return;
    };
    entry.write(Event {
        // SAFETY: reads a clock.
        time_ns: unsafe { bpf_ktime_get_ns() },
        netns_cookie,
        source: source.address,
        original: original.address,
        new: new.address,
        pid: caller.pid,
        uid: caller.uid,
        source_port: source.port,
        original_port: original.port,
        new_port: new.port,
        direction: direction as u8,
        verdict: verdict as u8,
        command: caller.command,
    });
    entry.submit(0);
}
