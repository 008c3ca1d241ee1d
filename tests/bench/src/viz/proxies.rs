//! What answers as the pods' proxies: one server, which knows by its own address which of them is asked.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpStream};
use weft_test_kit::scrape::ScrapeConnection;

use super::page::Page;

/// The proxies. They answer until the process ends.
pub(super) struct Proxies {
    /// The port of each one's metrics.
    pub(super) port: u16,
    state: Arc<State>,
}

struct State {
    /// By workload: pods take turns.
    pages: Vec<Page>,
    /// Scrapes of each pod.
    scrapes: Vec<AtomicU64>,
    rounds: Mutex<Vec<Round>>,
}

/// The scrapes of all pods that have the same number.
#[derive(Clone, Copy, Debug)]
struct Round {
    began: Instant,
    ended: Instant,
    answered: u32,
}

/// The address of a pod, in 127.1.0.0/16: all of 127.0.0.0/8 is this host's.
pub(super) fn address(pod: u32) -> Ipv4Addr {
    let [_, _, high, low] = pod.to_be_bytes();
    Ipv4Addr::new(127, 1, high, low)
}

impl Proxies {
    /// Serves `pods` proxies.
    ///
    /// # Errors
    /// When no port can be bound.
    pub(super) async fn serve(pods: u32, pages: Vec<Page>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.context("serve the proxies' metrics")?;
        let port = listener.local_addr()?.port();
        let scrapes = (0..pods).map(|_| AtomicU64::new(0)).collect();
        let state = Arc::new(State { pages, scrapes, rounds: Mutex::default() });
        tokio::spawn(accept(listener, Arc::clone(&state)));
        Ok(Self { port, state })
    }

    /// Counts from 0 again, for another scraper.
    pub(super) fn reset(&self) {
        self.state.scrapes.iter().for_each(|scrapes| scrapes.store(0, Ordering::Relaxed));
        self.state.rounds.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Scrapes of all pods so far.
    pub(super) fn scrapes(&self) -> u64 {
        self.state.scrapes.iter().map(|scrapes| scrapes.load(Ordering::Relaxed)).sum()
    }

    /// Scrapes of the pod that has the fewest.
    pub(super) fn rounds(&self) -> u64 {
        self.state.scrapes.iter().map(|scrapes| scrapes.load(Ordering::Relaxed)).min().unwrap_or_default()
    }

    /// The seconds from the first question of each complete round to its last answer, without the first two, which the
    /// first answer to a caller waits for.
    pub(super) fn round_seconds(&self) -> Vec<f64> {
        let rounds = self.state.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        let complete = rounds.iter().skip(2).filter(|round| round.answered as usize == self.state.scrapes.len());
        complete.map(|round| round.ended.duration_since(round.began).as_secs_f64()).collect()
    }
}

impl State {
    fn began(&self, scrape: u64) {
        let now = Instant::now();
        let mut rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        if rounds.len() as u64 == scrape {
            rounds.push(Round { began: now, ended: now, answered: 0 });
        }
    }

    fn answered(&self, scrape: u64) {
        let mut rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(round) = usize::try_from(scrape).ok().and_then(|scrape| rounds.get_mut(scrape)) {
            round.ended = Instant::now();
            round.answered += 1;
        }
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let Ok(IpAddr::V4(asked)) = stream.local_addr().map(|address| address.ip()) else { continue };
        let [127, 1, high, low] = asked.octets() else { continue };
        let pod = usize::from(u16::from_be_bytes([high, low]));
        if pod < state.scrapes.len() {
            tokio::spawn(answer(stream, pod, Arc::clone(&state)));
        }
    }
}

/// Answers the requests of a connection.
async fn answer(stream: TcpStream, pod: usize, state: Arc<State>) {
    let mut client = ScrapeConnection::new(stream);
    while client.next_request().await {
        let scrape = state.scrapes[pod].fetch_add(1, Ordering::Relaxed);
        state.began(scrape);
        let page = state.pages[pod % state.pages.len()].at(scrape);
        if client.answer(&page).await.is_err() {
            return;
        }
        state.answered(scrape);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    async fn scrape(port: u16, pod: u32) -> String {
        let mut stream = TcpStream::connect((address(pod), port)).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let mut buffer = [0; 4096];
        while !answer.ends_with(b"process_start_time_seconds 1700000000\n") {
            let read = stream.read(&mut buffer).await.unwrap();
            assert!(read > 0, "{}", String::from_utf8_lossy(&answer));
            answer.extend(&buffer[..read]);
        }
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn a_round_is_over_when_every_pod_was_asked() {
        let pages = (0..2).map(|workload| Page::new(workload, 50, 1)).collect();
        let proxies = Proxies::serve(300, pages).await.unwrap();
        let page = scrape(proxies.port, 299).await;
        assert!(page.contains("srv_name=\"service-1-http\""), "{page}");
        assert_eq!((proxies.scrapes(), proxies.rounds()), (1, 0));
        for _ in 0..3 {
            for pod in 0..299 {
                scrape(proxies.port, pod).await;
            }
        }
        assert_eq!((proxies.scrapes(), proxies.rounds()), (3 * 299 + 1, 1));
        assert!(proxies.round_seconds().is_empty(), "the third round lacks a pod");
        for _ in 0..2 {
            scrape(proxies.port, 299).await;
        }
        // The last answer is counted after it was written.
        let counted = weft_test_kit::wait::until(std::time::Duration::from_secs(30), async || {
            proxies.round_seconds().first().copied().context("the third round is not complete")
        });
        assert!(counted.await.unwrap() >= 0.0);
        proxies.reset();
        assert_eq!((proxies.scrapes(), proxies.rounds(), proxies.round_seconds().len()), (0, 0, 0));
    }
}
