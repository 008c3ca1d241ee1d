//! A process in a pod, and the handle by which the test commands it: one line in, one line out.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    getsockopt_impl,
    sched::{CloneFlags, setns, unshare},
    sockopt_impl,
    sys::socket::getsockopt,
    unistd::{Gid, Uid, setgid, setresuid, setuid},
};
use socket2::{Domain, SockRef, Socket, Type};

/// The first argument of a process that is to be one of these.
pub(crate) const SUBCOMMAND: &str = "pod-process";

/// Longest wait for the other side.
const PATIENCE: Duration = Duration::from_secs(5);

const LEVEL: libc::c_int = 0x5745;
const OPTION: libc::c_int = 1;
sockopt_impl!(
    /// The agent's attestation.
    Attestation,
    GetOnly,
    LEVEL,
    OPTION,
    [u32; 4]
);

/// A running process.
pub(crate) struct Pod {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// What a server said about a connection, and what the client saw of it.
#[derive(Debug)]
pub(crate) struct Answer(pub(crate) BTreeMap<String, String>);

impl Answer {
    pub(crate) fn field(&self, name: &str) -> &str {
        self.0.get(name).map_or_else(|| panic!("no {name} in {self:?}"), String::as_str)
    }

    pub(crate) fn port(&self, name: &str) -> u16 {
        self.field(name).rsplit_once(':').unwrap().1.parse().unwrap()
    }

    pub(crate) fn listener(&self) -> Option<u16> {
        self.0.get("listener").and_then(|port| port.parse().ok())
    }
}

impl Pod {
    /// Starts a process in a cgroup and a network namespace, as a user and a group.
    pub(crate) fn start(cgroup: &Path, netns: &str, uid: u32, gid: u32) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([SUBCOMMAND, cgroup.to_str().unwrap(), netns, &uid.to_string(), &gid.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    pub(crate) fn say(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the process ended at {command:?}");
        line.trim_end().to_owned()
    }

    pub(crate) fn ok(&mut self, command: &str) {
        assert_eq!(self.say(command), "ok", "{command}");
    }

    pub(crate) fn answer(&mut self, command: &str) -> Answer {
        let line = self.say(command);
        let fields: BTreeMap<_, _> = line
            .split(' ')
            .filter_map(|field| field.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())))
            .collect();
        assert!(!fields.is_empty(), "{command}: {line}");
        Answer(fields)
    }

    /// The process's id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn connect(&mut self, target: &str) -> Answer {
        self.answer(&format!("connect {target}"))
    }

    pub(crate) fn connect_from(&mut self, source: &str, target: &str) -> Answer {
        self.answer(&format!("connect {target} {source}"))
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process itself. `special` answers commands of one test alone, and leaves the others.
pub(crate) fn main(arguments: &[String], mut special: impl FnMut(&[&str]) -> Option<String>) -> ExitCode {
    let [cgroup, netns, uid, gid] = arguments else { return ExitCode::FAILURE };
    std::fs::write(Path::new(cgroup).join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let (uid, gid) = (uid.parse().unwrap(), gid.parse().unwrap());
    setns(std::fs::File::open(netns).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
    setgid(Gid::from_raw(gid)).unwrap();
    setuid(Uid::from_raw(uid)).unwrap();
    let mut kept = Kept::default();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        if let Some(answer) = special(&words) {
            println!("{answer}");
            continue;
        }
        let answer = match words[..] {
            ["proxy"] => proxy(),
            ["serve", port] => listen(&format!("[::]:{port}"), false),
            ["halt", address] => kept.halt(address),
            ["resume"] => kept.resume(),
            ["start", target] => kept.start(target),
            ["finish"] => kept.finish(),
            ["serve-at", address] => listen(address, false),
            ["namespaces", count] => kept.fill_namespaces(count.parse().unwrap()),
            ["users", count] => kept.fill_users(count.parse().unwrap()),
            ["connect", target] => connect(target, None),
            ["connect-by", device, target] => connect_by(device, target),
            ["connect", target, source] => connect(target, Some(source.parse().unwrap())),
            ["reuse", first, second] => reuse(first, second),
            ["load", target, count] => load(target, count.parse().unwrap()),
            ["attest"] => attest(),
            ["accepted", port] => Ok(accepted(port.parse().unwrap())),
            ["echo", port] => serve_echo(&format!("[::]:{port}")),
            ["echo-proxy"] => echo_proxy(),
            ["open", target] => kept.open(target),
            ["ping"] => kept.ping(),
            ["create"] => kept.create(),
            ["dial-in-child", target] => kept.dial_in_child(target),
            ["connect-port", port, target] => connect_port(port.parse().unwrap(), target),
            _ => Err(std::io::Error::other("unknown command")),
        };
        match answer {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("error {:?}", error.kind()),
        }
    }
    ExitCode::SUCCESS
}

fn proxy() -> std::io::Result<String> {
    listen("127.0.0.1:4140", true)?;
    listen("[::1]:4140", true)?;
    listen("[::]:4143", true)
}

/// How many connections each listener of this process accepted, with its port.
static ACCEPTED: Mutex<Vec<(u16, Arc<AtomicUsize>)>> = Mutex::new(Vec::new());

/// How many connections each listener on a port accepted.
fn accepted(port: u16) -> String {
    let listeners = ACCEPTED.lock().unwrap();
    let counts = listeners.iter().filter(|(own, _)| *own == port).map(|(_, count)| count.load(Ordering::Relaxed));
    counts.map(|count| count.to_string()).collect::<Vec<_>>().join(" ")
}

/// Serves an address in a thread: tells each client what the accepted socket knows.
fn listen(address: &str, group: bool) -> std::io::Result<String> {
    let address: SocketAddr = address.parse().unwrap();
    serve(address.port(), listener(address, group, 64)?);
    Ok("ok".into())
}

fn listener(address: SocketAddr, group: bool, backlog: i32) -> std::io::Result<Socket> {
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

fn serve(port: u16, socket: Socket) {
    let listener = TcpListener::from(socket);
    let accepted = Arc::new(AtomicUsize::new(0));
    ACCEPTED.lock().unwrap().push((port, accepted.clone()));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            accepted.fetch_add(1, Ordering::Relaxed);
            // A client that is gone again has no address any more.
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

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn connect(target: &str, source: Option<IpAddr>) -> std::io::Result<String> {
    let target: SocketAddr = target.parse().unwrap();
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
    if let Some(source) = source {
        socket.bind(&SocketAddr::new(source, 0).into())?;
    }
    dial(&socket, target)?;
    describe(socket)
}

/// Connects a socket that is bound to a device.
fn connect_by(device: &str, target: &str) -> std::io::Result<String> {
    let target: SocketAddr = target.parse().unwrap();
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
    socket.bind_device(Some(device.as_bytes()))?;
    dial(&socket, target)?;
    describe(socket)
}

/// Connects a socket, disconnects it, connects it elsewhere.
fn reuse(first: &str, second: &str) -> std::io::Result<String> {
    let (first, second): (SocketAddr, SocketAddr) = (first.parse().unwrap(), second.parse().unwrap());
    let socket = Socket::new(Domain::for_address(first), Type::STREAM, None)?;
    dial(&socket, first)?;
    rustix::net::connect_unspec(socket.as_fd())?;
    dial(&socket, second)?;
    describe(socket)
}

/// Connects again and again; counts the listeners that answered and the failures.
fn load(target: &str, count: usize) -> std::io::Result<String> {
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

fn dial(socket: &Socket, target: SocketAddr) -> std::io::Result<()> {
    socket.connect_timeout(&target.into(), PATIENCE)?;
    socket.set_read_timeout(Some(PATIENCE))
}

fn describe(socket: Socket) -> std::io::Result<String> {
    let mut stream = TcpStream::from(socket);
    let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
    let mut line = String::new();
    stream.read_to_string(&mut line)?;
    Ok(format!("peername={peer} sockname={local} {}", line.trim_end()))
}

fn attest() -> std::io::Result<String> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    Ok(match getsockopt(&socket.as_fd(), Attestation) {
        Ok([flags, generation, low, high]) => {
            format!("flags={flags} generation={generation} cookie={}", u64::from(high) << 32 | u64::from(low))
        }
        Err(errno) => format!("error {errno:?}"),
    })
}

/// The first argument of a process that is to dial with the socket that is its standard input.
#[allow(dead_code, reason = "not every test has children")]
pub(crate) const CHILD: &str = "pod-process-child";

/// What a process keeps from one command to the next.
#[derive(Default)]
struct Kept {
    stream: Option<BufReader<TcpStream>>,
    socket: Option<Socket>,
    listeners: Vec<Socket>,
    halted: Vec<(u16, Socket)>,
    started: Vec<Socket>,
}

impl Kept {
    /// Listens with room for two connections, and accepts none.
    fn halt(&mut self, address: &str) -> std::io::Result<String> {
        let address: SocketAddr = address.parse().unwrap();
        self.halted.push((address.port(), listener(address, false, 1)?));
        Ok("ok".into())
    }

    fn resume(&mut self) -> std::io::Result<String> {
        self.halted.drain(..).for_each(|(port, socket)| serve(port, socket));
        Ok("ok".into())
    }

    /// Begins to connect.
    fn start(&mut self, target: &str) -> std::io::Result<String> {
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

    /// Waits for the oldest connection that was begun.
    fn finish(&mut self) -> std::io::Result<String> {
        let (socket, begin) = (self.started.remove(0), Instant::now());
        while socket.peer_addr().is_err() && begin.elapsed() < PATIENCE {
            thread::yield_now();
        }
        describe(socket)
    }

    /// Makes network namespaces, in each of which a proxy seems to bind its ports.
    fn fill_namespaces(&mut self, count: usize) -> std::io::Result<String> {
        for _ in 0..count {
            unshare(CloneFlags::CLONE_NEWNET)?;
            let up = Command::new("ip").args(["link", "set", "lo", "up"]).status()?;
            assert!(up.success());
            setresuid(Uid::from_raw(2102), Uid::from_raw(0), Uid::from_raw(0))?;
            for address in ["127.0.0.1:4140", "0.0.0.0:4143"] {
                self.listeners.push(listener(address.parse().unwrap(), true, 1)?);
            }
            setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0))?;
        }
        Ok("ok".into())
    }

    /// Listens on a proxy's inbound port as many users, in groups as large as are recorded.
    fn fill_users(&mut self, count: u32) -> std::io::Result<String> {
        for uid in 5000..5000 + count {
            // The effective user decides who may join a group, the real one is who binds.
            setresuid(Uid::from_raw(uid), Uid::from_raw(0), Uid::from_raw(0))?;
            for _ in 0..8 {
                self.listeners.push(listener("0.0.0.0:4143".parse().unwrap(), true, 1)?);
            }
        }
        Ok("ok".into())
    }

    /// Opens a connection to an `echo` and keeps it.
    fn open(&mut self, target: &str) -> std::io::Result<String> {
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

    /// Uses the connection that is kept, in both directions.
    fn ping(&mut self) -> std::io::Result<String> {
        let stream = self.stream.as_mut().unwrap();
        stream.get_mut().write_all(b"ping\n")?;
        let mut line = String::new();
        stream.read_line(&mut line)?;
        Ok(if line == "ping\n" { "ok".into() } else { format!("heard {line:?}") })
    }

    /// Makes an IPv4 socket and keeps it, without using it.
    fn create(&mut self) -> std::io::Result<String> {
        self.socket = Some(Socket::new(Domain::IPV4, Type::STREAM, None)?);
        Ok("ok".into())
    }

    /// Has a child process, another program, connect the socket that is kept.
    fn dial_in_child(&mut self, target: &str) -> std::io::Result<String> {
        let socket = self.socket.take().unwrap();
        // By its path an unprivileged user may not reach it.
        let output = Command::new("/proc/self/exe")
            .args([CHILD, target])
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(socket)))
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }
}

/// The child: connects its standard input.
#[allow(dead_code, reason = "not every test has children")]
pub(crate) fn child(arguments: &[String]) -> ExitCode {
    let target: SocketAddr = arguments[0].parse().unwrap();
    let socket = Socket::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    match dial(&socket, target).and_then(|()| describe(socket)) {
        Ok(answer) => println!("{answer}"),
        Err(error) => println!("error {:?}", error.kind()),
    }
    ExitCode::SUCCESS
}

/// Connects from a port, as often as one likes.
fn connect_port(port: u16, target: &str) -> std::io::Result<String> {
    let target: SocketAddr = target.parse().unwrap();
    let begin = Instant::now();
    loop {
        let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::new(IpAddr::from([0, 0, 0, 0]), port).into())?;
        match dial(&socket, target) {
            // The last connection's end may not have been acknowledged yet.
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable && begin.elapsed() < PATIENCE => {}
            Err(error) => return Err(error),
            Ok(()) => return describe(socket),
        }
    }
}

/// A proxy whose connections last.
fn echo_proxy() -> std::io::Result<String> {
    serve_echo("127.0.0.1:4140")?;
    serve_echo("[::1]:4140")?;
    serve_echo("[::]:4143")
}

/// Serves an address in threads: tells each client where it wanted to go, then repeats what it says.
fn serve_echo(address: &str) -> std::io::Result<String> {
    let address: SocketAddr = address.parse().unwrap();
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    socket.listen(64)?;
    let listener = TcpListener::from(socket);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let original = SockRef::from(&stream).original_dst_v4();
            let original = original.map_or_else(|_| "error".to_owned(), |to| to.as_socket().unwrap().to_string());
            thread::spawn(move || {
                let _ = writeln!(stream, "listener={} orig={original}", address.port());
                let _ = std::io::copy(&mut stream.try_clone().unwrap(), &mut stream);
            });
        }
    });
    Ok("ok".into())
}
