//! Dumps of the kernel's tables by netlink(7). A pod may determine how long such a table is, so that its reader says
//! when it has enough, and a deadline ends what takes too long. Refuses to know what the tables contain.

use std::{io, ops::ControlFlow, time::Duration};

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP, NLMSG_OVERRUN, NetlinkBuffer, NetlinkHeader,
};
use netlink_sys::{Socket, SocketAddr};

use super::looks::processor_time;

/// The alignment of messages in a datagram (netlink(7)).
const ALIGNMENT: usize = 4;
/// Length of a message's header (netlink(7)).
const HEADER: usize = 16;

/// A question to the kernel.
pub(super) struct Request<'a> {
    /// The netlink protocol.
    pub(super) protocol: isize,
    pub(super) message_type: u16,
    pub(super) payload: &'a [u8],
    /// The processor time of this thread at which reading ends with `TimedOut`, whatever was read. The time of day does
    /// not count: a request may wait in the kernel for those of other namespaces (the RTNL lock), and is answered then.
    pub(super) deadline: Duration,
}

/// Asks in this thread's network namespace, and passes the type and payload of each answer to `take` until it breaks.
///
/// # Errors
/// Those of the kernel and of `take`, and `TimedOut`.
pub(super) fn dump(
    request: &Request<'_>,
    mut take: impl FnMut(u16, &[u8]) -> io::Result<ControlFlow<()>>,
) -> io::Result<()> {
    let socket = Socket::new(request.protocol)?;
    // Without it, rtnetlink ignores filters (Linux 4.20).
    socket.set_netlink_get_strict_chk(true)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&serialized(request), 0)?;
    loop {
        if processor_time() > request.deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = datagram.as_slice();
        while !rest.is_empty() {
            let message = NetlinkBuffer::new_checked(rest).map_err(io::Error::other)?;
            let length = message.length() as usize;
            match message.message_type() {
                NLMSG_DONE | NLMSG_ERROR => return error_code(message.payload()),
                NLMSG_NOOP => {}
                NLMSG_OVERRUN => return Err(io::Error::from_raw_os_error(libc::ENOBUFS)),
                message_type => {
                    if take(message_type, message.payload())?.is_break() {
                        return Ok(());
                    }
                }
            }
            rest = rest.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        }
    }
}

fn serialized(request: &Request<'_>) -> Vec<u8> {
    let length = HEADER + request.payload.len();
    let mut bytes = vec![0; length];
    let mut header = NetlinkHeader::default();
    header.length = u32::try_from(length).unwrap_or(u32::MAX);
    header.message_type = request.message_type;
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    netlink_packet_core::Emitable::emit(&header, &mut bytes);
    bytes[HEADER..].copy_from_slice(request.payload);
    bytes
}

/// The result at the end of an answer; 0 is none, others are negative errors.
fn error_code(payload: &[u8]) -> io::Result<()> {
    match payload.first_chunk().map(|code| i32::from_ne_bytes(*code)) {
        None | Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
    }
}
