//! Servers that send the accepted socket's observations to their clients.

use std::{
    io::{self, Write as _},
    net::{SocketAddr, TcpListener},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use nix::errno::Errno;
use socket2::{Domain, SockRef, Socket, Type};

/// Backlog of a server's queue.
const BACKLOG: i32 = 64;

/// The number of connections that each listener of this process accepted, with its port.
static ACCEPTED: Mutex<Vec<(u16, Arc<AtomicUsize>)>> = Mutex::new(Vec::new());

/// Listens on a proxy's addresses.
pub(super) fn proxy() -> io::Result<String> {
    listen("127.0.0.1:4140", true)?;
    listen("[::1]:4140", true)?;
    listen("[::]:4143", true)
}

/// A proxy with long-lived connections.
pub(super) fn echo_proxy() -> io::Result<String> {
    echo("127.0.0.1:4140")?;
    echo("[::1]:4140")?;
    echo("[::]:4143")
}

/// The number of connections that each listener on a port accepted.
pub(super) fn accepted(port: u16) -> String {
    let listeners = ACCEPTED.lock().unwrap();
    let counts = listeners.iter().filter(|(own, _)| *own == port).map(|(_, count)| count.load(Ordering::Relaxed));
    counts.map(|count| count.to_string()).collect::<Vec<_>>().join(" ")
}

/// Serves an address in a thread, as one of a group of listeners or alone.
pub(super) fn listen(address: &str, group: bool) -> io::Result<String> {
    let address: SocketAddr = address.parse().unwrap();
    serve(address.port(), listener(address, group, BACKLOG)?);
    Ok("ok".into())
}

/// A listening socket that does not accept yet.
pub(super) fn listener(address: SocketAddr, group: bool, backlog: i32) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(group)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    socket.listen(backlog)?;
    Ok(socket)
}

/// Accepts in a thread, and sends each client the accepted socket's observations.
pub(super) fn serve(port: u16, socket: Socket) {
    let listener = TcpListener::from(socket);
    let accepted = Arc::new(AtomicUsize::new(0));
    ACCEPTED.lock().unwrap().push((port, accepted.clone()));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            accepted.fetch_add(1, Ordering::Relaxed);
            // A client that has disconnected has no address.
            let (Ok(local), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else { continue };
            let (local, peer) = (canonical(local), canonical(peer));
            let socket = SockRef::from(&stream);
            let original = if peer.is_ipv4() { socket.original_dst_v4() } else { socket.original_dst_v6() };
            let original = match original {
                Ok(address) => address.as_socket().unwrap().to_string(),
                Err(error) => format!("error:{:?}", error.raw_os_error().map(Errno::from_raw)),
            };
            let _ = writeln!(
                stream,
                "listener={port} orig={original} accepted-local={local} accepted-peer={peer} pid={}",
                std::process::id()
            );
        }
    });
}

/// Serves an address in threads: sends each client its original destination, then echoes.
pub(super) fn echo(address: &str) -> io::Result<String> {
    let address: SocketAddr = address.parse().unwrap();
    let listener = TcpListener::from(listener(address, false, BACKLOG)?);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let original = SockRef::from(&stream).original_dst_v4();
            let original = original.map_or_else(|_| "error".to_owned(), |to| to.as_socket().unwrap().to_string());
            thread::spawn(move || {
                let _ = writeln!(stream, "listener={} orig={original}", address.port());
                let _ = io::copy(&mut stream.try_clone().unwrap(), &mut stream);
            });
        }
    });
    Ok("ok".into())
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
