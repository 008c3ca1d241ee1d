//! A connection to the API server that a test can disturb.

use std::{io, net::SocketAddr, sync::Arc};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// Forwards TCP connections.
pub(crate) struct Link {
    address: SocketAddr,
    state: watch::Sender<State>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Up,
    /// Requests pass, answers do not.
    Mute,
    Cut,
}

impl Link {
    /// A link to `HOST:PORT`.
    pub(crate) async fn to(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, state) = watch::channel(State::Up);
        let target = Arc::new(target);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                if *state.borrow() != State::Cut {
                    let (target, state) = (Arc::clone(&target), state.clone());
                    tokio::spawn(async move { pass(stream, &target, state).await });
                }
            }
        });
        Self { address, state: sender }
    }

    /// The address that it listens on.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends every connection and accepts no other.
    pub(crate) fn cut(&self) {
        self.state.send_replace(State::Cut);
    }

    /// Holds back answers until the link is mended.
    pub(crate) fn mute(&self) {
        self.state.send_replace(State::Mute);
    }

    /// Lets everything pass again.
    pub(crate) fn mend(&self) {
        self.state.send_replace(State::Up);
    }
}

async fn pass(mut stream: TcpStream, target: &str, mut state: watch::Receiver<State>) {
    let Ok(mut upstream) = TcpStream::connect(target).await else { return };
    let (mut from_client, to_client) = stream.split();
    let (from_server, mut to_server) = upstream.split();
    tokio::select! {
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
        _ = pass_answers(from_server, to_client, state.clone()) => {}
        _ = state.wait_for(|state| *state == State::Cut) => {}
    }
}

async fn pass_answers(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut state: watch::Receiver<State>,
) -> io::Result<()> {
    let mut bytes = [0; 16 * 1024];
    loop {
        let length = from.read(&mut bytes).await?;
        // An error means that the link, and so its test, is gone.
        let _ = state.wait_for(|state| *state != State::Mute).await;
        if length == 0 {
            return Ok(());
        }
        to.write_all(&bytes[..length]).await?;
    }
}
