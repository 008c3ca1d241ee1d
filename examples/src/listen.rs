//! Opens listeners on all addresses of both families, as server applications commonly do.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

/// Connections the kernel may queue before they are accepted; Linux caps it at `net.core.somaxconn` (4096).
const BACKLOG: i32 = 4096;

/// Listens on every address at this port: a dual-stack socket, or IPv4 only where the host has no IPv6. Port 0 picks a
/// free one.
///
/// # Errors
/// The port is taken, or the process may not listen there.
pub fn on_all_addresses(port: u16) -> io::Result<TcpListener> {
    match listen(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))
        }
        other => other,
    }
}

/// Listens on exactly this address.
///
/// # Errors
/// As the kernel's `bind` and `listen`.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}
