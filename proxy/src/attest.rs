//! Asks the kernel whether both directions are redirected, so that the application starts only when they are, and the
//! pod is ready only while they are.
//!
//! The question is a private socket option, which the node agent's programs answer in the pods that they know. Any
//! other kernel answers ENOPROTOOPT, which means "not redirected".

use std::time::Duration;

use nix::{
    errno::Errno,
    sys::socket::{GetSockOpt, sockopt::GetStruct},
};
use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use socket2::{Domain, Socket, Type};
use tokio::time::Instant;
use weft_runtime::{drain, metrics::Metrics, readiness::Gate};

/// The level of Weft's private socket options: "WE".
const LEVEL: libc::c_int = 0x5745;
/// The option that reads the attestation.
const ATTESTATION: libc::c_int = 1;
/// Outbound connections are redirected.
const OUTBOUND: u32 = 1;
/// Inbound connections are redirected.
const INBOUND: u32 = 1 << 1;

/// Interval of questions at first: the pod's other containers wait for the answer.
const EAGER: Duration = Duration::from_millis(5);
/// Interval of questions after [`PATIENCE`]: a few milliseconds no longer matter, and a node may have hundreds of pods
/// that wait for an agent.
const PATIENT: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval of questions with a new socket: on Linux 5.10 a socket that is older than the agent's programs gets no
/// answer.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// Interval of questions while both directions are redirected: short enough for a readiness probe, at two system calls
/// each.
const CHECK_EVERY: Duration = Duration::from_secs(2);
/// How long the answer may be missing before it counts as lost: an agent may be replacing its programs.
const GRACE: Duration = Duration::from_secs(1);
/// Interval of warnings about what is missing.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// The kernel's answer for this pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attestation {
    flags: u32,
    generation: u32,
    netns_cookie: u64,
}

/// The socket option, for `nix`, which makes the call.
#[derive(Clone, Copy, Debug)]
struct Redirect;

nix::getsockopt_impl!(Redirect, LEVEL, ATTESTATION, [u8; 16], GetStruct<[u8; 16]>);

#[derive(Clone, Default)]
struct RedirectMetrics {
    attested: Gauge,
    lost: Counter,
}

/// Keeps the gate open while both directions are redirected.
///
/// # Errors
/// When the process cannot have a socket.
pub(crate) async fn run(gate: Gate, registry: Metrics, drain: drain::Watch) -> anyhow::Result<()> {
    let metrics = registry.register(RedirectMetrics::register);
    let mut asker = Asker { socket: socket()?, made: Instant::now() };
    tokio::select! {
        followed = follow(|| asker.ask(), &gate, &metrics) => followed,
        // A draining proxy no longer listens, and no connection is steered to it.
        () = drain.signaled() => std::future::pending().await,
    }
}

async fn follow(
    mut ask: impl FnMut() -> Result<Attestation, Errno>,
    gate: &Gate,
    metrics: &RedirectMetrics,
) -> anyhow::Result<()> {
    loop {
        let Attestation { generation, netns_cookie, .. } = complete(&mut ask).await;
        tracing::info!(generation, netns_cookie, "kernel redirects both directions");
        metrics.attested.set(1);
        gate.open();
        loop {
            tokio::time::sleep(CHECK_EVERY).await;
            if tokio::time::timeout(GRACE, complete(&mut ask)).await.is_err() {
                break;
            }
        }
        tracing::error!(
            "the kernel no longer redirects this pod, connections bypass the proxy: was the agent unloaded?"
        );
        metrics.attested.set(0);
        metrics.lost.inc();
        gate.close();
        gate.explain("the kernel no longer redirects this pod");
    }
}

impl RedirectMetrics {
    fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "weft_proxy_redirect_attested",
            "Whether the kernel redirects both directions of the pod",
            metrics.attested.clone(),
        );
        registry.register(
            "weft_proxy_redirect_lost",
            "How often the kernel stopped redirecting the pod",
            metrics.lost.clone(),
        );
        metrics
    }
}

/// Asks until both directions are redirected.
async fn complete(mut ask: impl FnMut() -> Result<Attestation, Errno>) -> Attestation {
    let begin = Instant::now();
    let mut warned = begin;
    loop {
        match ask() {
            Ok(attestation) if attestation.is_complete() => return attestation,
            answer if warned.elapsed() >= WARN_EVERY => {
                warned = Instant::now();
                warn(answer);
            }
            _ => {}
        }
        tokio::time::sleep(if begin.elapsed() < PATIENCE { EAGER } else { PATIENT }).await;
    }
}

/// Asks the kernel.
struct Asker {
    socket: Socket,
    made: Instant,
}

impl Asker {
    fn ask(&mut self) -> Result<Attestation, Errno> {
        // If a new socket cannot be created, the old one is used.
        if self.made.elapsed() >= RENEW_EVERY
            && let Ok(socket) = socket()
        {
            *self = Self { socket, made: Instant::now() };
        }
        Redirect.get(&self.socket).map(Attestation::parse)
    }
}

fn warn(answer: Result<Attestation, Errno>) {
    match answer {
        Ok(Attestation { flags, .. }) => {
            tracing::warn!(
                flags,
                "waiting for the kernel to redirect both directions: has the agent enrolled this pod?"
            );
        }
        Err(errno) => {
            tracing::warn!(%errno, "waiting for the kernel to redirect this pod: is the agent running on this node?");
        }
    }
}

/// A socket answers for the network namespace in which it was created, so any socket will do.
fn socket() -> std::io::Result<Socket> {
    Socket::new(Domain::IPV4, Type::STREAM, None).or_else(|_| Socket::new(Domain::IPV6, Type::STREAM, None))
}

impl Attestation {
    /// Reads the kernel's struct: u32 flags, u32 generation, u64 cookie, in the host's byte order.
    fn parse(bytes: [u8; 16]) -> Self {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let [.., a, b, c, d, e, f, g, h] = bytes;
        Self { flags: word(0), generation: word(4), netns_cookie: u64::from_ne_bytes([a, b, c, d, e, f, g, h]) }
    }

    fn is_complete(self) -> bool {
        self.flags & (OUTBOUND | INBOUND) == OUTBOUND | INBOUND
    }
}

#[cfg(test)]
mod tests {
    use weft_runtime::readiness::Readiness;

    use super::*;

    #[test]
    fn both_directions_are_needed() {
        for (flags, expected) in [(0, false), (1, false), (2, false), (3, true), (7, true)] {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&u32::to_ne_bytes(flags));
            bytes[8..].copy_from_slice(&u64::to_ne_bytes(4242));
            let attestation = Attestation::parse(bytes);
            assert_eq!(attestation.is_complete(), expected, "{flags}");
            assert_eq!(attestation.netns_cookie, 4242);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn asks_less_often_after_a_while() {
        let begin = Instant::now();
        let mut asked = Vec::new();
        let complete = complete(|| {
            asked.push(begin.elapsed());
            let flags = if begin.elapsed() < 2 * PATIENCE { OUTBOUND } else { OUTBOUND | INBOUND };
            Ok(Attestation { flags, generation: 7, netns_cookie: 4242 })
        });
        assert_eq!(complete.await.generation, 7);
        let pause = |at: usize| asked[at + 1] - asked[at];
        let eagerly = asked.iter().filter(|at| **at < PATIENCE).count();
        assert!((0..eagerly - 1).all(|at| pause(at) == EAGER), "{asked:?}");
        assert!((eagerly..asked.len() - 1).all(|at| pause(at) == PATIENT), "{asked:?}");
        assert_eq!((eagerly, asked.len() - eagerly), (2_000, 201), "ten seconds of each, and the last question");
    }

    #[tokio::test(start_paused = true)]
    async fn the_gate_follows_the_redirect_for_life() {
        const REDIRECTED: Result<u32, Errno> = Ok(OUTBOUND | INBOUND);
        let readiness = Readiness::new();
        let gate = readiness.gate("redirect");
        let metrics = RedirectMetrics::default();
        let kernel = std::cell::Cell::new(Err(Errno::ENOPROTOOPT));
        let ask = || kernel.get().map(|flags| Attestation { flags, generation: 1, netns_cookie: 1 });
        let observe = async {
            // The kernel's answer, for how long, and whether the pod is ready at the end.
            for (answer, seconds, ready, lost) in [
                (Err(Errno::ENOPROTOOPT), 5, false, 0),
                (REDIRECTED, 5, true, 0),
                // The agent is replacing its programs.
                (Err(Errno::ENOPROTOOPT), 1, true, 0),
                (REDIRECTED, 5, true, 0),
                (Ok(INBOUND), 5, false, 1),
                (REDIRECTED, 5, true, 1),
                (Err(Errno::ENOPROTOOPT), 5, false, 2),
            ] {
                kernel.set(answer);
                tokio::time::sleep(Duration::from_millis(seconds * 1000 - 50)).await;
                assert_eq!(readiness.reasons().is_empty(), ready, "{answer:?}");
                assert_eq!((metrics.attested.get() == 1, metrics.lost.get()), (ready, lost), "{answer:?}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::select! {
            _ = follow(ask, &gate, &metrics) => unreachable!("it never returns"),
            () = observe => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn asks_with_a_new_socket_every_second() {
        let mut asker = Asker { socket: socket().unwrap(), made: Instant::now() };
        let made = asker.made;
        for (at, renewed) in [(0, 0), (999, 0), (1_000, 1_000), (1_999, 1_000), (2_000, 2_000)] {
            let [at, renewed] = [at, renewed].map(Duration::from_millis);
            tokio::time::advance(made + at - Instant::now()).await;
            let _ = asker.ask();
            assert_eq!(asker.made - made, renewed, "{at:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_kernel_without_our_programs_keeps_the_gate_shut() {
        let readiness = Readiness::new();
        let gate = readiness.gate("redirect");
        let (_drain, watch) = drain::Drain::new();
        let asked = tokio::time::timeout(Duration::from_secs(30), run(gate, Metrics::new(), watch)).await;
        assert!(asked.is_err());
        assert_eq!(readiness.reasons(), ["redirect"]);
    }
}
