//! State that a process keeps between orders: sockets, connections, listeners.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd as _, OwnedFd},
    process::{Command, ExitCode, Stdio},
    thread,
    time::Instant,
};

use nix::{
    errno::Errno,
    sched::{CloneFlags, unshare},
    unistd::{Uid, setresuid},
};
use socket2::{Domain, Socket, Type};

use super::PROXY_UID;
use super::{
    connect::{PATIENCE, describe, dial},
    serve::{listener, serve},
};

/// The first argument of a process that connects the socket that is its standard input.
const CHILD: &str = "weft-actor-child";
/// The first user id of [`Kept::fill_users`].
const FIRST_USER: u32 = 5000;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Kept {
    stream: Option<BufReader<TcpStream>>,
    socket: Option<Socket>,
    listeners: Vec<Socket>,
    halted: Vec<(u16, Socket)>,
    started: Vec<Socket>,
}

impl Kept {
    /// Listens with room for two connections, and accepts none.
    pub(super) fn halt(&mut self, address: &str) -> io::Result<String> {
        let address: SocketAddr = address.parse().unwrap();
        self.halted.push((address.port(), listener(address, false, 1)?));
        Ok("ok".into())
    }

    /// Accepts with the halted listeners.
    pub(super) fn resume(&mut self) -> io::Result<String> {
        self.halted.drain(..).for_each(|(port, socket)| serve(port, socket));
        Ok("ok".into())
    }

    /// Starts to connect.
    pub(super) fn start(&mut self, target: &str) -> io::Result<String> {
        let target: SocketAddr = target.parse().unwrap();
        let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&target.into()) {
            Err(error) if error.raw_os_error() != Some(Errno::EINPROGRESS as i32) => return Err(error),
            _ => socket.set_nonblocking(false)?,
        }
        socket.set_read_timeout(Some(PATIENCE))?;
        self.started.push(socket);
        Ok("ok".into())
    }

    /// Waits for the oldest connection that was started.
    pub(super) fn finish(&mut self) -> io::Result<String> {
        let (socket, begin) = (self.started.remove(0), Instant::now());
        while socket.peer_addr().is_err() && begin.elapsed() < PATIENCE {
            thread::yield_now();
        }
        describe(socket)
    }

    /// Opens a connection to an `echo` and keeps it.
    pub(super) fn open(&mut self, target: &str) -> io::Result<String> {
        let target: SocketAddr = target.parse().unwrap();
        let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
        dial(&socket, target)?;
        let stream = TcpStream::from(socket);
        let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line)?;
        self.stream = Some(stream);
        Ok(format!("peername={peer} sockname={local} {}", line.trim_end()))
    }

    /// Uses the kept connection in both directions.
    pub(super) fn ping(&mut self) -> io::Result<String> {
        let stream = self.stream.as_mut().unwrap();
        stream.get_mut().write_all(b"ping\n")?;
        let mut line = String::new();
        stream.read_line(&mut line)?;
        Ok(if line == "ping\n" { "ok".into() } else { format!("got {line:?}") })
    }

    /// Creates an IPv4 socket and keeps it, unused.
    pub(super) fn create(&mut self) -> io::Result<String> {
        self.socket = Some(Socket::new(Domain::IPV4, Type::STREAM, None)?);
        Ok("ok".into())
    }

    /// Starts a child process, another program, that connects the kept socket.
    pub(super) fn dial_in_child(&mut self, target: &str) -> io::Result<String> {
        let socket = self.socket.take().unwrap();
        // An unprivileged user may not be able to open it by its path.
        let output =
            Command::new("/proc/self/exe").args([CHILD, target]).stdin(Stdio::from(OwnedFd::from(socket))).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    /// Creates network namespaces, in each of which a simulated proxy binds its ports.
    pub(super) fn fill_namespaces(&mut self, count: u32) -> io::Result<String> {
        let [root, proxy] = [0, PROXY_UID].map(Uid::from_raw);
        for _ in 0..count {
            unshare(CloneFlags::CLONE_NEWNET)?;
            let up = Command::new("ip").args(["link", "set", "lo", "up"]).status()?;
            assert!(up.success());
            setresuid(proxy, root, root)?;
            for address in ["127.0.0.1:4140", "0.0.0.0:4143"] {
                self.listeners.push(listener(address.parse().unwrap(), true, 1)?);
            }
            setresuid(root, root, root)?;
        }
        Ok("ok".into())
    }

    /// Listens on a proxy's inbound port as many users, in groups as large as the recorded maximum.
    pub(super) fn fill_users(&mut self, count: u32) -> io::Result<String> {
        let root = Uid::from_raw(0);
        for uid in FIRST_USER..FIRST_USER + count {
            // The effective user decides whether a socket may join a group; the real user counts as the one that binds.
            setresuid(Uid::from_raw(uid), root, root)?;
            for _ in 0..8 {
                self.listeners.push(listener("0.0.0.0:4143".parse().unwrap(), true, 1)?);
            }
        }
        Ok("ok".into())
    }
}

/// The target of this process, if it is such a child.
pub(super) fn child_target() -> Option<String> {
    let mut arguments = std::env::args().skip(1);
    arguments.next().filter(|first| first == CHILD)?;
    arguments.next()
}

/// The child: connects its standard input.
pub(super) fn dial_inherited(target: &str) -> ExitCode {
    let target: SocketAddr = target.parse().unwrap();
    let socket = Socket::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
    match dial(&socket, target).and_then(|()| describe(socket)) {
        Ok(answer) => println!("{answer}"),
        Err(error) => println!("error {:?}", error.kind()),
    }
    ExitCode::SUCCESS
}
