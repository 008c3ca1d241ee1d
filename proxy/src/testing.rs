//! What tests of every part need: servers on loopback, waiting for what comes later, the log, and processes of their
//! own.

use std::{
    fmt::Display,
    io,
    net::SocketAddr,
    process::Command,
    sync::{Arc, LazyLock},
    time::Duration,
};

use parking_lot::Mutex;
use socket2::SockRef;
use tokio::{
    net::{TcpListener, TcpStream},
    time::Instant,
};
use tracing::{
    Dispatch,
    subscriber::{DefaultGuard, NoSubscriber},
};
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use crate::{config::SocketConfig, listen};

/// Set in processes that [`alone`] starts.
const ROLE: &str = "WEFT_TEST_ROLE";

/// Passes each connection to a new address on loopback to `serve`, as long as the test runs.
pub(crate) async fn serve_each<F>(mut serve: impl FnMut(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output: Send> + Send + 'static,
{
    // tokio's own queue has 128 places. A connection that finds none takes a second, more than the proxy waits for the
    // application.
    let listener = TcpListener::from_std(listen::bind("127.0.0.1:0".parse().unwrap(), 1).unwrap().remove(0)).unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve(stream));
        }
    });
    addr
}

/// Both ends of a connection on loopback: the client's, and the accepted one.
pub(crate) async fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (client, listener.accept().await.unwrap().0)
}

/// Options that no socket has by default.
pub(crate) const SOCKET_OPTIONS: SocketConfig =
    SocketConfig { keepalive: Some(Duration::from_secs(10)), user_timeout: Some(Duration::from_secs(30)) };

/// The options that a socket has, as the kernel says.
pub(crate) fn socket_options(stream: &TcpStream) -> SocketConfig {
    let socket = SockRef::from(stream);
    let keepalive = socket.keepalive().unwrap().then(|| socket.tcp_keepalive_time().unwrap());
    SocketConfig { keepalive, user_timeout: socket.tcp_user_timeout().unwrap() }
}

/// An address that refuses connections as long as the test's process runs: no other process listens there.
pub(crate) fn unused_addr() -> SocketAddr {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let addr = socket.local_addr().unwrap();
    std::mem::forget(socket);
    addr
}

/// Waits until a condition holds; `what` says which one if it does not within half a minute.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    settled(async || if holds() { Ok(()) } else { Err(what) }).await;
}

/// Waits until a check succeeds; its last error says what is wrong if it does not within half a minute.
pub(crate) async fn settled<E: Display>(mut check: impl AsyncFnMut() -> Result<(), E>) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while let Err(wrong) = check().await {
        assert!(Instant::now() < deadline, "{wrong}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// This program, to run again with nothing but the test of this name, for which [`role`] is `role` then.
pub(crate) fn alone(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(ROLE, role);
    command
}

/// What this process was started for by [`alone`]; `None` if it runs tests as usual.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// The filter that a stock injector sets, with the levels that `weft_runtime::telemetry` adds for this crate.
pub(crate) const INJECTORS_FILTER: &str = "warn,linkerd=info,hickory=error,[{headers}]=off,[{request}]=off,weft=info";

/// A second subscriber of the process. While there is one alone, tracing asks the thread that comes to a line first,
/// which may be another test's, and then leaves the line out everywhere.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::default()));

/// What a thread logs.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    /// Gets what this thread logs and the filter lets pass, until the guard is dropped.
    pub(crate) fn of_this_thread(&self, filter: &str) -> DefaultGuard {
        LazyLock::force(&SECOND);
        let log = tracing_subscriber::fmt().with_writer(self.clone()).with_ansi(false);
        tracing::subscriber::set_default(log.with_env_filter(EnvFilter::new(filter)).finish())
    }

    /// The lines so far.
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
