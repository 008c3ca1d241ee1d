//! A process that connects in every possible way, and reports what it sees. One command in, one line of `name=value`
//! words out. Refuses to judge.

use std::{
    fs,
    io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, unshare},
    unistd::{Gid, Uid, setgid, setuid},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags},
};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::{
    raw::{self, LinkAddress},
    server::{asked, canonical, echo, failure, listen, original, serve},
};

/// Longer than any retransmission that a case needs.
const PATIENCE: Duration = Duration::from_secs(10);
/// Number of connections that alternate on one source port.
const TURNS: usize = 16;
/// TCP_INFO's `tcpi_options` (include/uapi/linux/tcp.h).
const TCPI_OPTIONS: usize = 5;
const TCPI_OPT_SYN_DATA: u8 = 32;

/// State of a process between commands.
#[derive(Default)]
pub(crate) struct Client {
    halted: Vec<TcpListener>,
    sockets: Vec<Socket>,
    stream: Option<(TcpStream, String)>,
}

impl Client {
    /// Answers a command; `None` if it is not one of this file.
    pub(crate) fn answer(&mut self, words: &[&str]) -> Option<String> {
        let done = |result: io::Result<()>| result.map(|()| "ok".to_owned());
        let result = match *words {
            ["stand", address] => done(listen(resolve(address), 64).map(serve)),
            ["halt", address] => done(listen(resolve(address), 1).map(|listener| self.halted.push(listener))),
            ["resume"] => {
                self.halted.drain(..).for_each(serve);
                done(Ok(()))
            }
            ["echo", address] => done(echo(resolve(address))),
            ["dial", target, ref how @ ..] => dial(resolve(target), how),
            ["create", target] => done(tcp(resolve(target)).map(|socket| self.sockets.push(socket))),
            ["connect-created", target] => connect(self.sockets.remove(0), resolve(target)),
            ["open", target] => done(self.open(resolve(target))),
            ["use"] => self.use_opened(),
            ["lend", path, target] => done(lend(path, resolve(target))),
            ["borrow", path, target] => borrow(path).and_then(|socket| connect(socket, resolve(target))),
            ["cancel", target] => cancel(resolve(target)).map(|source| source.to_string()),
            ["start", target] => done(self.start(resolve(target))),
            ["finish"] => finish(self.sockets.remove(0)),
            ["unshare-users"] => done(unshare(CloneFlags::CLONE_NEWUSER).map_err(io::Error::from)),
            ["become", uid, gid] => done(become_user(uid.parse().unwrap(), gid.parse().unwrap())),
            _ => return None,
        };
        Some(result.unwrap_or_else(|error| failure(&error)))
    }

    fn open(&mut self, target: SocketAddr) -> io::Result<()> {
        let socket = tcp(target)?;
        socket.connect(&target.into())?;
        let stream = TcpStream::from(socket);
        let banner = read_line(&stream)?;
        self.stream = Some((stream, banner));
        Ok(())
    }

    fn use_opened(&mut self) -> io::Result<String> {
        let (mut stream, banner) = self.stream.take().ok_or(io::ErrorKind::NotConnected)?;
        writeln!(stream, "still-there")?;
        let echo = read_line(&stream)?;
        Ok(format!("{} {banner} {echo}", own(&stream)?))
    }

    fn start(&mut self, target: SocketAddr) -> io::Result<()> {
        let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&target.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => self.sockets.push(socket),
        }
        Ok(())
    }
}

/// Reads an address in which `%device` may stand for the device's number.
fn resolve(text: &str) -> SocketAddr {
    let resolved = text.split_once('%').and_then(|(head, rest)| {
        let (device, tail) = rest.split_once(']')?;
        Some(format!("{head}%{}]{tail}", if_nametoindex(device).unwrap()))
    });
    resolved.as_deref().unwrap_or(text).parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A socket that gives up after the first retransmission of its SYN, one second.
fn tcp(target: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
    limit(socket)
}

fn limit(socket: Socket) -> io::Result<Socket> {
    socket.set_read_timeout(Some(PATIENCE))?;
    raw::set_option(&socket, libc::IPPROTO_TCP, libc::TCP_SYNCNT, 1)?;
    // Without this, the kernel waits two seconds more for an answer to the retransmission.
    raw::set_option(&socket, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 1000)?;
    Ok(socket)
}

fn connect(socket: Socket, target: SocketAddr) -> io::Result<String> {
    socket.connect(&target.into())?;
    describe(socket)
}

fn dial(target: SocketAddr, how: &[&str]) -> io::Result<String> {
    let address = SockAddr::from(target);
    match *how {
        ["plain"] => connect(tcp(target)?, target),
        ["nonblocking"] => {
            let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            match socket.connect(&address) {
                Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
                _ => finish(socket),
            }
        }
        ["fast-open-send"] => {
            let socket = tcp(target)?;
            socket.send_to_with_flags(b"early", &address, libc::MSG_FASTOPEN)?;
            describe(socket)
        }
        ["fast-open-connect"] => {
            let socket = tcp(target)?;
            raw::set_option(&socket, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 1)?;
            socket.connect(&address)?;
            (&socket).write_all(b"early")?;
            describe(socket)
        }
        ["ring"] => {
            let socket = tcp(target)?;
            raw::connect_by_ring(&socket, &address)?;
            describe(socket)
        }
        ["multipath"] => {
            let socket = Socket::new(Domain::for_address(target), Type::STREAM, Some(Protocol::MPTCP))?;
            socket.set_read_timeout(Some(PATIENCE))?;
            connect(socket, target)
        }
        ["device", device] => {
            let socket = tcp(target)?;
            socket.bind_device(Some(device.as_bytes()))?;
            connect(socket, target)
        }
        ["from", source] => {
            let socket = tcp(target)?;
            socket.set_reuse_address(true)?;
            socket.bind(&resolve(source).into())?;
            connect(socket, target)
        }
        ["from-port", source] => {
            let socket = tcp(target)?;
            let source = resolve(source);
            socket.bind(&SocketAddr::new(source.ip(), free_port(source.ip())?).into())?;
            connect(socket, target)
        }
        ["after", first] => {
            let socket = tcp(target)?;
            socket.connect(&resolve(first).into())?;
            rustix::net::connect_unspec(socket.as_fd())?;
            connect(socket, target)
        }
        ["alternating", first] => alternating(resolve(first), target),
        ["beside", first] => {
            let (first, source) = (resolve(first), source_for(target)?);
            let one = bound(first, SocketAddr::new(source, free_port(source)?))?;
            one.connect(&first.into())?;
            let other = bound(target, one.local_addr()?.as_socket().unwrap())?;
            connect(other, target)
        }
        ["fresh"] => Ok(asked(&tcp(target)?, "own").trim_start().to_owned()),
        ["udp"] => datagram(target),
        ["icmp"] => ping(target),
        ["via", first] => {
            let socket = tcp(target)?;
            raw::set_bytes(&socket, libc::IPPROTO_IPV6, libc::IPV6_RTHDR, &segments(first.parse().unwrap()))?;
            connect(socket, target)
        }
        ["raw-syn"] => own_syn(target, false),
        ["packet-syn"] => own_syn(target, true),
        _ => Err(io::Error::other("unknown way to connect")),
    }
}

/// The source address of the kernel's route to a target; datagrams are never redirected.
fn source_for(target: SocketAddr) -> io::Result<IpAddr> {
    let socket = UdpSocket::bind(if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

fn free_port(ip: IpAddr) -> io::Result<u16> {
    Ok(TcpListener::bind((ip, 0))?.local_addr()?.port())
}

fn bound(target: SocketAddr, source: SocketAddr) -> io::Result<Socket> {
    let socket = tcp(target)?;
    socket.set_reuse_address(true)?;
    socket.bind(&source.into())?;
    Ok(socket)
}

fn alternating(first: SocketAddr, target: SocketAddr) -> io::Result<String> {
    let ip = source_for(target)?;
    let source = SocketAddr::new(ip, free_port(ip)?);
    let mut last = String::new();
    for turn in (0..TURNS).flat_map(|_| [first, target]) {
        // Its port is free again at once, see `describe`.
        last = connect(bound(turn, source)?, turn)?;
        if !last.contains(&format!(" orig={} ", canonical(turn))) {
            return Ok(last);
        }
    }
    Ok(last)
}

/// Waits for a connection in progress.
fn finish(socket: Socket) -> io::Result<String> {
    let timeout = Timespec::try_from(PATIENCE).unwrap();
    if poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&timeout))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    if let Some(error) = socket.take_error()? {
        return Err(error);
    }
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    describe(socket)
}

/// A connect that a signal interrupts. Returns its source.
fn cancel(target: SocketAddr) -> io::Result<SocketAddr> {
    let ip = source_for(target)?;
    let source = SocketAddr::new(ip, free_port(ip)?);
    // Without a timeout: only the signal ends it.
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&source.into())?;
    match raw::interrupted(|| socket.connect(&target.into())) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(source),
        Err(error) => Err(error),
        Ok(()) => Err(io::Error::other("connected before the signal")),
    }
}

/// Waits for a process that connects to `path`, and passes it a new socket.
fn lend(path: &str, target: SocketAddr) -> io::Result<()> {
    let socket = tcp(target)?;
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777))?;
    thread::spawn(move || -> io::Result<()> {
        let (stream, _) = listener.accept()?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let sockets = [socket.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&sockets)));
        rustix::net::sendmsg(&stream, &[IoSlice::new(b"s")], &mut ancillary, SendFlags::empty())?;
        // The lender keeps the socket as long as the borrower keeps the stream.
        let _ = io::copy(&mut &stream, &mut io::sink());
        Ok(())
    });
    Ok(())
}

fn borrow(path: &str) -> io::Result<Socket> {
    let stream = UnixStream::connect(path)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(&stream, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::empty())?;
    let mut sockets = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<OwnedFd>>()),
        _ => None,
    });
    let socket = sockets.next().and_then(|mut fds| fds.pop()).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(socket.into())
}

fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    setgid(Gid::from_raw(gid))?;
    setuid(Uid::from_raw(uid))?;
    Ok(())
}

fn datagram(target: SocketAddr) -> io::Result<String> {
    let socket = UdpSocket::bind(if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect(target)?;
    socket.send(b"x")?;
    let mut buffer = [0; 256];
    let length = socket.recv(&mut buffer)?;
    let answer = String::from_utf8_lossy(&buffer[..length]).into_owned();
    Ok(format!("peername={} sockname={} {answer}{}", socket.peer_addr()?, socket.local_addr()?, asked(&socket, "own")))
}

fn ping(target: SocketAddr) -> io::Result<String> {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    // An echo request (type 8) with sequence number 1; the checksum is the complement of the sum of the words.
    socket.send_to(&[8, 0, 0xf7, 0xfe, 0, 0, 0, 1], &SocketAddr::new(target.ip(), 0).into())?;
    let mut packet = [0; 128];
    let length = (&socket).read(&mut packet)?;
    // Behind an IPv4 header without options: 0 is an echo reply.
    packet[..length].get(20).map(|kind| format!("icmp-type={kind}")).ok_or(io::ErrorKind::UnexpectedEof.into())
}

/// A segment routing header (RFC 8754, section 2) with one segment before the destination, for which the kernel fills
/// in the last one.
fn segments(first: Ipv6Addr) -> Vec<u8> {
    // Next header, length beyond the first 8 bytes in units of 8, type 4, segments left, last entry, flags, tag.
    let mut header = vec![0, 4, 4, 1, 1, 0, 0, 0];
    header.extend([0; 16]);
    header.extend(first.octets());
    header
}

/// Sends a SYN that bypasses the kernel's TCP, or its IP, too, and reports which address answers.
fn own_syn(target: SocketAddr, is_packet: bool) -> io::Result<String> {
    const SYN: u8 = 2;
    const SYN_AND_ACK: u8 = 0x12;
    let (SocketAddr::V4(target), IpAddr::V4(source)) = (target, source_for(target)?) else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    let port = free_port(source.into())?;
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::TCP))?;
    // Shorter than a retransmission timeout: nothing here retransmits.
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut segment = [0; 20];
    segment[..2].copy_from_slice(&port.to_be_bytes());
    segment[2..4].copy_from_slice(&target.port().to_be_bytes());
    // A header of five words, and some window.
    (segment[12], segment[13], segment[14]) = (5 << 4, SYN, 0x10);
    // The checksum covers addresses, protocol and length, too (RFC 9293, section 3.1).
    let pseudo = [&source.octets()[..], &target.ip().octets(), &[0, 6, 0, 20], &segment].concat();
    segment[16..18].copy_from_slice(&checksum(&pseudo));
    if is_packet {
        let packet = [&ip_header(source, *target.ip(), segment.len())[..], &segment].concat();
        let next = raw::link_address(&LinkAddress::of_neighbour(*target.ip())?)?;
        Socket::new(Domain::PACKET, Type::DGRAM, None)?.send_to(&packet, &next)?;
    } else {
        socket.send_to(&segment, &SocketAddr::new(target.ip().to_owned().into(), 0).into())?;
    }
    let mut packet = [0; 256];
    loop {
        let length = (&socket).read(&mut packet)?;
        let header = usize::from(packet[0] & 0xf) * 4;
        let Some(answer) = packet[..length].get(header..header + 20) else { continue };
        let ends = (u16::from_be_bytes([answer[0], answer[1]]), u16::from_be_bytes([answer[2], answer[3]]));
        if ends == (target.port(), port) && answer[13] == SYN_AND_ACK {
            return Ok(format!("syn-ack={}", Ipv4Addr::new(packet[12], packet[13], packet[14], packet[15])));
        }
    }
}

/// The Internet checksum (RFC 1071) of a whole number of words.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let sum: u32 = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    (!(((folded & 0xffff) + (folded >> 16)) as u16)).to_be_bytes()
}

/// An IPv4 header without options of a packet of TCP.
fn ip_header(source: Ipv4Addr, target: Ipv4Addr, payload: usize) -> [u8; 20] {
    const TIME_TO_LIVE: u8 = 64;
    let mut header = [0; 20];
    (header[0], header[8], header[9]) = (0x45, TIME_TO_LIVE, 6);
    let total = (header.len() + payload) as u16;
    header[2..4].copy_from_slice(&total.to_be_bytes());
    header[12..16].copy_from_slice(&source.octets());
    header[16..].copy_from_slice(&target.octets());
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum);
    header
}

impl LinkAddress {
    /// Of a host on the same link.
    fn of_neighbour(host: Ipv4Addr) -> io::Result<Self> {
        let find = || -> Option<Self> {
            let table = fs::read_to_string("/proc/self/net/arp").ok()?;
            // Address, hardware type, flags, hardware address, mask, device.
            let fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            let entry = fields.into_iter().find(|fields| fields[0] == host.to_string() && fields[2] == "0x2")?;
            let bytes: Vec<u8> = entry[3].split(':').filter_map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
            Some(Self { bytes: bytes.try_into().ok()?, interface: if_nametoindex(entry[5]).ok()? })
        };
        // A datagram to a closed port has the kernel ask for it.
        let probe = UdpSocket::bind("0.0.0.0:0")?;
        probe.connect((host, 9))?;
        let begin = Instant::now();
        loop {
            let _ = probe.send(b"x");
            match find() {
                None if begin.elapsed() < PATIENCE => thread::yield_now(),
                found => return found.ok_or(io::ErrorKind::HostUnreachable.into()),
            }
        }
    }
}

/// The client's own view of its connection.
fn own(stream: &TcpStream) -> io::Result<String> {
    let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
    let original = original(stream, peer.ip());
    let info = raw::option(stream, libc::IPPROTO_TCP, libc::TCP_INFO, 256).unwrap_or_default();
    let syn_data = info.get(TCPI_OPTIONS).is_some_and(|options| options & TCPI_OPT_SYN_DATA != 0);
    let asked = asked(stream, "own");
    Ok(format!("peername={peer} sockname={local} own-orig={original} syn-data={}{asked}", u8::from(syn_data)))
}

/// Both ends' view of a connection.
fn describe(socket: Socket) -> io::Result<String> {
    // Closed with a reset, so that no segment follows. After a normal close on a busy machine, the end may be
    // acknowledged twice, and the kernel looks up a listener for segments that arrive after the other end is gone.
    socket.set_linger(Some(Duration::ZERO))?;
    let stream = TcpStream::from(socket);
    let banner = read_line(&stream)?;
    Ok(format!("{} {banner}", own(&stream)?))
}

fn read_line(stream: &TcpStream) -> io::Result<String> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    if line.is_empty() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(line.trim_end().to_owned()) }
}
