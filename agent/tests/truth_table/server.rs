//! Both ends' view of a connection, and servers that send their view to their clients: one line of `name=value` words
//! as soon as they accept, then an echo. Refuses to know which server is a proxy.

use std::{
    fmt::Write as _,
    io::{self, BufRead, BufReader, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    thread,
};

use nix::errno::Errno;
use socket2::{Domain, Socket, Type};

use crate::raw;

const SO_ORIGINAL_DST: i32 = 80;
const IP: (&str, i32) = ("IP", libc::SOL_IP);
const IPV6: (&str, i32) = ("IPV6", libc::SOL_IPV6);
/// A `sockaddr_in` has 16 bytes, a `sockaddr_in6` 28; linkerd's proxy asks with a `sockaddr_storage`.
const ROOMS: [((&str, i32), &[usize]); 2] =
    [(IP, &[0, 8, 15, 16, 17, 28, 32, 128, 8192]), (IPV6, &[0, 16, 27, 28, 32, 128, 8192])];

/// A listening socket that does not accept yet.
pub(crate) fn listen(address: SocketAddr, backlog: i32) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    socket.bind(&address.into())?;
    socket.listen(backlog)?;
    Ok(socket.into())
}

/// Accepts forever.
pub(crate) fn serve(listener: TcpListener) {
    thread::spawn(move || {
        let port = listener.local_addr().unwrap().port();
        for stream in listener.incoming() {
            let Ok(stream) = stream else { continue };
            // The client is gone already.
            thread::spawn(move || greet(&stream, port));
        }
    });
}

fn greet(mut stream: &TcpStream, port: u16) -> io::Result<()> {
    let (local, peer) = (canonical(stream.local_addr()?), canonical(stream.peer_addr()?));
    let original = original(stream, peer.ip());
    let asked = asked(stream, "ask");
    writeln!(stream, "listener={port} orig={original} accepted-local={local} accepted-peer={peer}{asked}")?;
    for line in BufReader::new(stream).lines() {
        writeln!(stream, "echo={}", line?)?;
    }
    Ok(())
}

/// Answers datagrams.
pub(crate) fn echo(address: SocketAddr) -> io::Result<()> {
    let socket = UdpSocket::bind(address)?;
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, peer)) = socket.recv_from(&mut buffer) {
            let peer = canonical(peer);
            let _ = socket.send_to(format!("listener={} accepted-peer={peer}", address.port()).as_bytes(), peer);
        }
    });
    Ok(())
}

pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The address that linkerd's proxy would get: the level follows the peer's family.
pub(crate) fn original(socket: &impl AsRawFd, peer: IpAddr) -> String {
    let ((_, level), room) = if peer.to_canonical().is_ipv4() { (IP, 16) } else { (IPV6, 28) };
    match raw::option(socket, level, SO_ORIGINAL_DST, room) {
        Ok(bytes) => address(&bytes).map_or_else(|| "nonsense".into(), |address| address.to_string()),
        Err(errno) => format!("{errno:?}"),
    }
}

/// SO_ORIGINAL_DST at both levels with all sizes of buffers: `prefix:LEVEL/ROOM=LENGTH:ADDRESS`, or the error.
pub(crate) fn asked(socket: &impl AsRawFd, prefix: &str) -> String {
    let mut text = String::new();
    for ((name, level), rooms) in ROOMS {
        for room in rooms {
            let answer = match raw::option(socket, level, SO_ORIGINAL_DST, *room) {
                Ok(bytes) => match address(&bytes) {
                    Some(address) => format!("{}:{address}", bytes.len()),
                    None => format!("{}:nonsense", bytes.len()),
                },
                Err(errno) => format!("{errno:?}"),
            };
            let _ = write!(text, " {prefix}:{name}/{room}={answer}");
        }
    }
    text
}

/// Reads a `sockaddr_in` or a `sockaddr_in6`.
fn address(bytes: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().unwrap());
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().unwrap());
    let ip = match i32::from(family) {
        libc::AF_INET => Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(4..8)?).unwrap()).into(),
        libc::AF_INET6 => Ipv6Addr::from(<[u8; 16]>::try_from(bytes.get(8..24)?).unwrap()).into(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

/// The name of an error, as `error=NAME`.
pub(crate) fn failure(error: &io::Error) -> String {
    let name = error.raw_os_error().map(|code| format!("{:?}", Errno::from_raw(code)));
    format!("error={}", name.unwrap_or_else(|| format!("{:?}", error.kind())))
}
