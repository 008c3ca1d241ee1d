//! A connection to an API server, or to its etcd, that a test can disturb.

use std::{
    fs::File,
    io,
    net::SocketAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use nix::sched::{CloneFlags, setns};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// Forwards TCP connections.
pub(crate) struct Link {
    address: SocketAddr,
    state: watch::Sender<State>,
    counts: Arc<Counts>,
}

/// Connections.
#[derive(Default)]
struct Counts {
    begun: AtomicU64,
    open: AtomicUsize,
}

#[derive(Clone)]
struct State {
    /// `HOST:PORT` of new connections.
    target: Arc<str>,
    flow: Flow,
    /// Connections before this one are ended.
    severed: u64,
    /// Connections before this one get no more answers, and no end.
    hung: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Up,
    /// Requests pass, answers do not.
    Mute,
    Cut,
}

impl Link {
    /// A link to `HOST:PORT`.
    pub(crate) async fn to(target: String) -> Self {
        let (link, forward) = Self::bind(target).await;
        tokio::spawn(forward);
        link
    }

    /// A link in a network namespace, between its processes.
    pub(crate) fn within(netns: &Path, target: String) -> Self {
        let netns = File::open(netns).unwrap();
        let (link_tx, link_rx) = mpsc::channel();
        thread::spawn(move || {
            setns(netns, CloneFlags::CLONE_NEWNET).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
            runtime.block_on(async {
                let (link, forward) = Self::bind(target).await;
                link_tx.send(link).unwrap();
                forward.await;
            });
        });
        link_rx.recv().unwrap()
    }

    async fn bind(target: String) -> (Self, impl Future<Output = ()> + Send) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = State { target: target.into(), flow: Flow::Up, severed: 0, hung: 0 };
        let (sender, state) = watch::channel(state);
        let counts = Arc::new(Counts::default());
        let link = Self { address, state: sender, counts: Arc::clone(&counts) };
        (link, forward(listener, state, counts))
    }

    /// The address that it listens on.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends every connection and accepts no other.
    pub(crate) fn cut(&self) {
        self.state.send_modify(|state| state.flow = Flow::Cut);
    }

    /// Holds back answers until the link is mended.
    pub(crate) fn mute(&self) {
        self.state.send_modify(|state| state.flow = Flow::Mute);
    }

    /// Lets everything pass again.
    pub(crate) fn mend(&self) {
        self.state.send_modify(|state| state.flow = Flow::Up);
    }

    /// Ends every connection; new ones pass, to this address from now on.
    pub(crate) fn sever(&self, target: Option<&str>) {
        let begun = self.begun();
        self.state.send_modify(|state| {
            state.severed = begun;
            if let Some(target) = target {
                state.target = target.into();
            }
        });
    }

    /// Holds back the answers of every connection for ever; new ones pass.
    pub(crate) fn hang(&self) {
        let begun = self.begun();
        self.state.send_modify(|state| state.hung = begun);
    }

    /// Number of connections so far.
    pub(crate) fn begun(&self) -> u64 {
        self.counts.begun.load(Ordering::Relaxed)
    }

    /// Number of connections now.
    pub(crate) fn open(&self) -> usize {
        self.counts.open.load(Ordering::Relaxed)
    }
}

/// Accepts connections until the link is dropped.
async fn forward(listener: TcpListener, state: watch::Receiver<State>, counts: Arc<Counts>) {
    let mut gone = state.clone();
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted.unwrap().0,
            _ = gone.wait_for(|_| false) => return,
        };
        if state.borrow().flow == Flow::Cut {
            continue;
        }
        let (state, counts) = (state.clone(), Arc::clone(&counts));
        let number = counts.begun.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            counts.open.fetch_add(1, Ordering::Relaxed);
            pass(stream, number, state).await;
            counts.open.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

async fn pass(mut stream: TcpStream, number: u64, mut state: watch::Receiver<State>) {
    let target = Arc::clone(&state.borrow().target);
    let Ok(mut upstream) = TcpStream::connect(&*target).await else { return };
    let (mut from_client, to_client) = stream.split();
    let (from_server, mut to_server) = upstream.split();
    tokio::select! {
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
        _ = pass_answers(from_server, to_client, number, state.clone()) => {}
        _ = state.wait_for(|state| state.flow == Flow::Cut || number < state.severed) => {}
    }
}

async fn pass_answers(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    number: u64,
    mut state: watch::Receiver<State>,
) -> io::Result<()> {
    let mut bytes = [0; 16 * 1024];
    loop {
        let length = from.read(&mut bytes).await?;
        // An error means that the link, and so its test, is gone.
        let _ = state.wait_for(|state| state.flow != Flow::Mute && number >= state.hung).await;
        if length == 0 {
            return Ok(());
        }
        to.write_all(&bytes[..length]).await?;
    }
}
