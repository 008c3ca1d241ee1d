//! Events for watchers. Refuses to block or to fail: an event without room is counted and lost.

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use weft_ebpf_abi::{
    counter,
    event::{self, COMMAND_BYTES, Event},
    verdict::{Direction, Verdict},
};

use crate::{context::End, maps};

/// The calling process; none inbound.
#[derive(Clone, Copy)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) command: [u8; COMMAND_BYTES],
}

impl Process {
    pub(crate) const NONE: Self = Self { pid: 0, uid: 0, command: [0; COMMAND_BYTES] };
}

/// Reports a verdict; the caller checks [`maps::watched`] first.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "an event has that many parts")]
pub(crate) fn verdict(
    netns_cookie: u64,
    generation: u32,
    direction: Direction,
    verdict: Verdict,
    process: &Process,
    source: End,
    original: End,
    new: End,
) {
    emit(event::kind::VERDICT, netns_cookie, generation, direction, verdict, process, source, original, new);
}

/// Reports an established connection; the caller checks [`maps::watched`] first.
#[inline(always)]
pub(crate) fn accepted(
    netns_cookie: u64,
    generation: u32,
    direction: Direction,
    source: End,
    original: End,
    local: End,
) {
    let kind = event::kind::ACCEPTED;
    let verdict = Verdict::Redirect;
    emit(kind, netns_cookie, generation, direction, verdict, &Process::NONE, source, original, local);
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "an event has that many parts")]
fn emit(
    kind: u8,
    netns_cookie: u64,
    generation: u32,
    direction: Direction,
    verdict: Verdict,
    process: &Process,
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
        pid: process.pid,
        uid: process.uid,
        source_port: source.port,
        original_port: original.port,
        new_port: new.port,
        direction: direction as u8,
        verdict: verdict as u8,
        command: process.command,
        generation,
        kind,
        pad: [0; 3],
    });
    entry.submit(0);
}
