//! Indices of the per-CPU counters: one for each direction and verdict, then those of errors.

use crate::verdict::{Direction, Verdict};

/// Events that found no room in the ring buffer.
pub const EVENTS_DROPPED: u32 = (Direction::ALL.len() * Verdict::ALL.len()) as u32;
/// Connections accepted on a proxy's outbound port without an announcement by a redirected client.
pub const FLOW_MISSES: u32 = EVENTS_DROPPED + 1;
/// Redirected connections whose source could not be bound to the pod's address.
pub const BIND_FAILURES: u32 = EVENTS_DROPPED + 2;
/// Listeners of a proxy that could not be recorded.
pub const LISTENERS_LOST: u32 = EVENTS_DROPPED + 3;
/// Network namespaces that the kernel did not enrol by itself, or whose proxy's listeners it did not record, for lack
/// of room: in [`crate::map::PODS`], or in the limits of a cgroup or the node ([`crate::pod::MAX_ADMISSIONS`]).
pub const ADMISSIONS_REFUSED: u32 = EVENTS_DROPPED + 4;
/// How many counters there are.
pub const COUNT: u32 = EVENTS_DROPPED + 5;

/// The counter of a verdict.
#[inline(always)]
#[must_use]
pub const fn of(direction: Direction, verdict: Verdict) -> u32 {
    direction as u32 * Verdict::ALL.len() as u32 + verdict as u32
}
