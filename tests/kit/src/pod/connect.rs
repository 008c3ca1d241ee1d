//! Clients, each a single connection that ends with the answer, and the attestation query.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read as _},
    net::{IpAddr, SocketAddr, TcpStream},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use nix::{getsockopt_impl, sockopt_impl, sys::socket::getsockopt};
use socket2::{Domain, Socket, Type};
use weft_ebpf_abi::socket::attest;

/// Timeout for the other side.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

sockopt_impl!(
    /// The private option with which a proxy queries what is in force: flags, generation, and the netns cookie in two
    /// halves.
    Attestation,
    GetOnly,
    attest::LEVEL,
    attest::OPTION,
    [u32; 4]
);

/// The kernel's answer to a proxy's attestation query: flags, generation and netns cookie.
///
/// # Errors
/// ENOPROTOOPT or EOPNOTSUPP, by kernel version, where nothing is enrolled.
pub fn attestation() -> nix::Result<(u32, u32, u64)> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).map_err(|_| nix::errno::Errno::EMFILE)?;
    let [flags, generation, low, high] = getsockopt(&socket.as_fd(), Attestation)?;
    Ok((flags, generation, u64::from(high) << 32 | u64::from(low)))
}

pub(super) fn attest() -> io::Result<String> {
    Ok(match attestation() {
        Ok((flags, generation, cookie)) => format!("flags={flags} generation={generation} cookie={cookie}"),
        Err(errno) => format!("error {errno:?}"),
    })
}

pub(super) fn connect(target: &str, source: Option<IpAddr>) -> io::Result<String> {
    let target: SocketAddr = target.parse().unwrap();
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
    if let Some(source) = source {
        socket.bind(&SocketAddr::new(source, 0).into())?;
    }
    dial(&socket, target)?;
    describe(socket)
}

/// Connects a socket that is bound to a device.
pub(super) fn connect_by(device: &str, target: &str) -> io::Result<String> {
    let target: SocketAddr = target.parse().unwrap();
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
    socket.bind_device(Some(device.as_bytes()))?;
    dial(&socket, target)?;
    describe(socket)
}

/// Connects from a given port; may be repeated.
pub(super) fn connect_port(port: u16, target: &str) -> io::Result<String> {
    let target: SocketAddr = target.parse().unwrap();
    let begin = Instant::now();
    loop {
        let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::new(IpAddr::from([0, 0, 0, 0]), port).into())?;
        match dial(&socket, target) {
            // The end of the previous connection may not be acknowledged yet.
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable && begin.elapsed() < PATIENCE => {}
            Err(error) => return Err(error),
            Ok(()) => return describe(socket),
        }
    }
}

/// Connects a socket, disconnects it, connects it elsewhere.
pub(super) fn reuse(first: &str, second: &str) -> io::Result<String> {
    let (first, second): (SocketAddr, SocketAddr) = (first.parse().unwrap(), second.parse().unwrap());
    let socket = Socket::new(Domain::for_address(first), Type::STREAM, None)?;
    dial(&socket, first)?;
    rustix::net::connect_unspec(socket.as_fd())?;
    dial(&socket, second)?;
    describe(socket)
}

/// Connects repeatedly; counts the listeners that answered and the failures.
pub(super) fn load(target: &str, count: u32) -> io::Result<String> {
    let mut answers = BTreeMap::<String, usize>::new();
    for _ in 0..count {
        let outcome = match connect(target, None) {
            Ok(answer) => {
                let field =
                    |name: &str| answer.split(' ').find_map(|field| field.strip_prefix(name)).map(str::to_owned);
                let (listener, original) = (field("listener=").unwrap(), field("orig=").unwrap());
                if original == target { listener } else { format!("wrong-{original}") }
            }
            Err(error) => format!("{:?}", error.kind()),
        };
        *answers.entry(outcome).or_default() += 1;
    }
    Ok(answers.into_iter().map(|(outcome, count)| format!("{outcome}={count}")).collect::<Vec<_>>().join(" "))
}

pub(super) fn dial(socket: &Socket, target: SocketAddr) -> io::Result<()> {
    socket.connect_timeout(&target.into(), PATIENCE)?;
    socket.set_read_timeout(Some(PATIENCE))
}

/// Both ends' view of a connection: the client's, and the server's output until the end.
pub(super) fn describe(socket: Socket) -> io::Result<String> {
    let mut stream = TcpStream::from(socket);
    let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
    let mut line = String::new();
    stream.read_to_string(&mut line)?;
    Ok(format!("peername={peer} sockname={local} {}", line.trim_end()))
}
