//! The client of the API server, which gives up a connection that is silent, and the pauses between attempts to watch.

use std::time::Duration;

use anyhow::{Context as _, Result};
use kube::{
    Client, Config,
    runtime::{utils::Backoff, watcher::DefaultBackoff},
};

/// Deadline for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence after which a connection is given up. The API server sends bookmarks to every watch each minute
/// (`k8s.io/apiserver:pkg/storage/cacher`, `defaultBookmarkFrequency`).
const SILENCE: Duration = Duration::from_secs(90);
/// The longest pause before the next attempt to watch: kube's own grow to 30 s.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Prepares a client; nothing is sent yet.
///
/// # Errors
/// When neither a kubeconfig nor a pod's service account says how to reach the API server.
pub(crate) async fn connect() -> Result<Client> {
    let config = Config::infer().await.context("cannot tell how to reach the API server")?;
    client(config, SILENCE).context("cannot prepare the client of the API server")
}

fn client(mut config: Config, silence: Duration) -> kube::Result<Client> {
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(silence);
    // A connection that was idle is used again.
    config.reset_reader_on_write = true;
    Client::try_from(config)
}

/// The pauses of a watch that fails: kube's, up to [`LONGEST_PAUSE`].
#[derive(Default)]
pub(super) struct Pauses(DefaultBackoff);

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next().map(|pause| pause.min(LONGEST_PAUSE))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.0.reset();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::StreamExt as _;
    use k8s_openapi::api::core::v1::Pod;
    use kube::{
        Api,
        runtime::{
            WatchStreamExt as _,
            watcher::{self, Event, watcher},
        },
    };
    use tokio::net::TcpListener;

    use super::*;

    /// Without a limit on silence, the list would be waited for as long as the connection lasts.
    #[tokio::test]
    async fn an_api_server_that_accepts_and_says_nothing_is_asked_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let client = client(Config::new(url), Duration::from_millis(200)).unwrap();
        let mut events = pin!(watcher(Api::<Pod>::all(client), watcher::Config::default()).backoff(Pauses::default()));
        let accept_two = async {
            let first = listener.accept().await.unwrap();
            (first, listener.accept().await.unwrap())
        };
        tokio::select! {
            accepted = tokio::time::timeout(Duration::from_secs(20), accept_two) => drop(accepted.unwrap()),
            () = async { while !matches!(events.next().await, None | Some(Ok(Event::InitDone))) {} } => panic!("it answered"),
        }
    }

    #[test]
    fn a_watch_that_fails_is_tried_again_within_seconds() {
        assert_eq!(Pauses::default().take(20).max(), Some(LONGEST_PAUSE));
    }
}
