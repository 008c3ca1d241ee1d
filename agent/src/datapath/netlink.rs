//! Dumps of the kernel's tables by netlink(7). A pod may determine how long such a table is, so that its reader says
//! how much it wants, and a deadline ends what takes too long. Refuses to know what the tables contain.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP, NLMSG_OVERRUN, NetlinkBuffer, NetlinkHeader,
};
use netlink_sys::{Socket, SocketAddr};

use super::scans::processor_time;

/// The alignment of messages in a datagram (netlink(7)).
const ALIGNMENT: usize = 4;
/// Length of a message's header (netlink(7)).
const HEADER: usize = 16;
/// Length of the buffer. The kernel makes no longer datagrams for it, unless one message is longer (netlink(7)).
const BUFFER_BYTES: usize = 8192;

/// A question to the kernel.
pub(super) struct Request<'a> {
    pub(super) message_type: u16,
    pub(super) payload: &'a [u8],
    /// How many entries are read at most.
    pub(super) most: usize,
    /// The processor time of this thread at which reading ends with `TimedOut`, whatever was read. The time of day does
    /// not count: a request may wait in the kernel for those of other namespaces (the RTNL lock), and is answered then.
    pub(super) deadline: Duration,
}

/// A socket for dumps of one protocol in the network namespace in which it was opened.
pub(super) struct Connection {
    protocol: isize,
    socket: Socket,
    buffer: Vec<u8>,
    /// Whether answers to a request that was not read to its end may be in the socket.
    is_unfinished: bool,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// Connects to the kernel in this thread's network namespace.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(super) fn open(protocol: isize) -> io::Result<Self> {
        Ok(Self { protocol, socket: connect(protocol)?, buffer: vec![0; BUFFER_BYTES], is_unfinished: false })
    }

    /// Asks, and returns what `read` makes of the type and payload of each message: the first entries, if there are
    /// more than are wanted.
    ///
    /// # Errors
    /// Those of the kernel and of `read`, and `TimedOut`.
    pub(super) fn dump<T>(
        &mut self,
        request: &Request<'_>,
        mut read: impl FnMut(u16, &[u8]) -> io::Result<Option<T>>,
    ) -> io::Result<Vec<T>> {
        let mut entries = Vec::new();
        self.send(request)?;
        loop {
            if processor_time() > request.deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let length = self.socket.recv(&mut self.buffer.as_mut_slice(), libc::MSG_TRUNC)?;
            let Some(datagram) = self.buffer.get(..length) else {
                // Its end is lost, so the dump begins again.
                self.buffer.resize(length, 0);
                entries.clear();
                self.send(request)?;
                continue;
            };
            let mut rest = datagram;
            while !rest.is_empty() {
                let message = NetlinkBuffer::new_checked(rest).map_err(io::Error::other)?;
                let length = message.length() as usize;
                match message.message_type() {
                    NLMSG_DONE | NLMSG_ERROR => {
                        self.is_unfinished = false;
                        return error_code(message.payload()).map(|()| entries);
                    }
                    NLMSG_NOOP => {}
                    NLMSG_OVERRUN => return Err(io::Error::from_raw_os_error(libc::ENOBUFS)),
                    _ if entries.len() == request.most => return Ok(entries),
                    message_type => entries.extend(read(message_type, message.payload())?),
                }
                rest = rest.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
            }
        }
    }

    fn send(&mut self, request: &Request<'_>) -> io::Result<()> {
        if std::mem::replace(&mut self.is_unfinished, true) {
            self.socket = connect(self.protocol)?;
        }
        self.socket.send(&serialized(request), 0).map(drop)
    }
}

fn connect(protocol: isize) -> io::Result<Socket> {
    let socket = Socket::new(protocol)?;
    // Without it, rtnetlink ignores filters (Linux 4.20).
    socket.set_netlink_get_strict_chk(true)?;
    // From then on no other process's datagrams are received.
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
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

#[cfg(test)]
mod tests {
    use netlink_sys::protocols::NETLINK_ROUTE;

    use super::*;

    /// How often loopback, which every namespace has, is among the links.
    fn loopbacks(connection: &mut Connection, most: usize) -> usize {
        let deadline = processor_time() + Duration::from_secs(20);
        let request = Request { message_type: libc::RTM_GETLINK, payload: &[0; 16], most, deadline };
        // The index, in struct ifinfomsg.
        let index = |payload: &[u8]| payload.get(4..8).map(<[u8]>::to_vec);
        let links = connection.dump(&request, |_, payload| Ok(index(payload))).unwrap();
        assert!(links.len() <= most);
        links.iter().filter(|index| **index == 1_u32.to_ne_bytes()).count()
    }

    #[test]
    fn a_dump_that_ends_early_leaves_no_answers_to_the_next() {
        let mut connection = Connection::open(NETLINK_ROUTE).unwrap();
        for (most, expected) in [(usize::MAX, 1), (0, 0), (usize::MAX, 1)] {
            assert_eq!(loopbacks(&mut connection, most), expected, "{most}");
        }
    }

    #[test]
    fn a_datagram_that_is_longer_than_the_buffer_is_read() {
        let mut connection = Connection::open(NETLINK_ROUTE).unwrap();
        connection.buffer.truncate(HEADER);
        assert_eq!(loopbacks(&mut connection, usize::MAX), 1);
        assert!(connection.buffer.len() > HEADER);
    }
}
