//! Both sides of the proxy with a faulty hop between two of them: what arrives is what was sent, or a failure that the
//! client can tell from an answer, and in time.

use std::sync::atomic::AtomicU32;

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use weft_proto::linkerd::{
    destination::{Http2ClientParams, http2_client_params::KeepAlive},
    outbound::OutboundPolicy,
};

use super::{
    gateway::{Clusters, REMOTE},
    resilience::{changed, ejecting},
    *,
};
use crate::faults::{Cut, Fault, FaultyHop, Toward};

/// By when each request has an answer: `l5d-timeout`, which covers the response.
const DEADLINE: Duration = Duration::from_millis(1500);
/// What tests allow beyond it before they call it a hang.
const SLACK: Duration = Duration::from_secs(8);
/// Clients at a time, and exchanges of each.
const CLIENTS: u32 = 8;
const EXCHANGES: u32 = 6;

/// Where the faults are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hop {
    ToOutbound,
    BetweenProxies,
    ToApplication,
    ToControlPlane,
}

/// Client, proxy, proxy, application, with one faulty hop.
struct Chain {
    proxy: Proxy,
    entry: SocketAddr,
    faulty: FaultyHop,
}

impl Chain {
    async fn start(hop: Hop, policy: OutboundPolicy, script: impl FnMut() -> Fault + Send + 'static) -> Self {
        Self::start_with(hop, policy, true, script).await
    }

    /// Without a second proxy, unless the endpoint is meshed.
    async fn start_with(
        hop: Hop,
        policy: OutboundPolicy,
        is_meshed: bool,
        script: impl FnMut() -> Fault + Send + 'static,
    ) -> Self {
        let app = application_of_everything().await;
        let to_app = (hop == Hop::ToApplication).then_some(app);
        let service = "10.1.2.1:80".parse().unwrap();
        let control = Control::default();
        control.policies.lock().insert(service, policy);
        let (mut script, mut to_controller) = (Some(script), None);
        let settings = |config: &mut Config| {
            impatient(config);
            if hop == Hop::ToControlPlane {
                let controller = SocketAddr::from(([127, 0, 0, 1], config.policy.control.port));
                let hop = FaultyHop::start(controller, script.take().unwrap());
                config.destination.control.port = hop.addr.port();
                config.policy.control.port = hop.addr.port();
                to_controller = Some(hop);
            }
        };
        let proxy = Proxy::start_with(service, control, settings, true).await;
        let mut settings = testing::config();
        impatient(&mut settings);
        let (shared, drain) = testing::shared(settings, &proxy.mesh);
        std::mem::forget(drain);
        let inbound = SocketAddr::from(([127, 0, 0, 1], testing::serve_direct(shared).await));
        let faulty = to_controller.unwrap_or_else(|| {
            let server = match hop {
                Hop::ToOutbound | Hop::ToControlPlane => proxy.addr,
                Hop::BetweenProxies => inbound,
                Hop::ToApplication => app,
            };
            FaultyHop::start(server, script.take().unwrap())
        });
        let inbound = if hop == Hop::BetweenProxies { faulty.addr } else { inbound };
        let meshed = is_meshed.then_some((testing::OWN, inbound.port()));
        let mut endpoint = endpoint(to_app.map_or(app, |_| faulty.addr), meshed);
        // As Linkerd's control plane sends it by default, but faster.
        let keep_alive = KeepAlive {
            interval: resilience::duration(Duration::from_millis(200)),
            timeout: resilience::duration(Duration::from_millis(200)),
            while_idle: true,
        };
        endpoint.http2 = Some(Http2ClientParams { keep_alive: Some(keep_alive), ..Default::default() });
        proxy.control.update(SERVICE, add(vec![endpoint]));
        let entry = if hop == Hop::ToOutbound { faulty.addr } else { proxy.addr };
        Self { proxy, entry, faulty }
    }
}

fn impatient(config: &mut Config) {
    config.outbound.connect_timeout = Duration::from_millis(300);
    fails_fast(config);
    config.inbound.connect_timeout = Duration::from_millis(300);
    config.inbound.detect_timeout = Duration::from_millis(300);
    config.control_streams.initial = Some(Duration::from_millis(300));
    let (interval, timeout) = (Duration::from_millis(200), Duration::from_millis(200));
    config.control_streams.keepalive = Some(crate::config::Keepalive { interval, timeout });
}

/// The policy of a service whose clients may set timeouts.
fn with_headers() -> OutboundPolicy {
    changed(|rule| rule.allow_l5d_request_headers = true)
}

/// Echoes bytes that begin with 0, HTTP of both versions with trailers, and what comes after an upgrade.
pub(super) async fn application_of_everything() -> SocketAddr {
    serve_each(move |mut stream| async move {
        let mut first = [0];
        if stream.peek(&mut first).await.is_ok() && first == [0] {
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
            let _ = to.shutdown().await;
            return;
        }
        let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
        let _ = server.serve_connection_with_upgrades(TokioIo::new(stream), service_fn(echo)).await;
    })
    .await
}

type Echoed = Response<http_body_util::combinators::BoxBody<Bytes, hyper::Error>>;

async fn echo(mut request: Request<Incoming>) -> Result<Echoed, Infallible> {
    let response = Response::builder().header("seen", request.uri().path());
    if request.headers().contains_key("upgrade") {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let Ok(upgraded) = upgrade.await else { return };
            let (mut from, mut to) = tokio::io::split(TokioIo::new(upgraded));
            let _ = tokio::io::copy(&mut from, &mut to).await;
            let _ = to.shutdown().await;
        });
        let switching = response.status(101).header("connection", "upgrade").header("upgrade", "websocket");
        return Ok(switching.body(Empty::new().map_err(|never| match never {}).boxed()).unwrap());
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("seen", request.uri().path().parse().unwrap());
    let body = request.into_body().with_trailers(async move { Some(Ok(trailers)) });
    Ok(response.body(body.boxed()).unwrap())
}

/// What a client sends, different for each exchange, so that a mixture of two is noticed.
fn message(id: u32, opaque: bool) -> Bytes {
    let length = [1, 300, 20_000, 150_000][(id % 4) as usize];
    let pattern = StdRng::seed_from_u64(u64::from(id)).random::<[u8; 251]>();
    let first = if opaque { 0 } else { pattern[0] };
    std::iter::once(first).chain(pattern.iter().copied().cycle()).take(length).collect::<Vec<u8>>().into()
}

/// How an exchange ended without an error of the proxy's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// With what was sent.
    Whole,
    /// With a failure that the client can tell from an answer.
    Failed,
    /// With the proxy's answer to a request that was cut off.
    CutOff,
}

async fn exchange(entry: SocketAddr, id: u32) -> Result<Ended, String> {
    match id / 4 % 4 {
        0 => http(entry, id, Version::HTTP_11).await,
        1 => http(entry, id, Version::HTTP_2).await,
        2 => opaque(entry, id).await,
        _ => tunnel(entry, id).await,
    }
}

async fn http(entry: SocketAddr, id: u32, version: Version) -> Result<Ended, String> {
    let path = format!("/{id}");
    let request = Request::post(format!("http://server.demo{path}"))
        .header("host", "server.demo")
        .header("te", "trailers")
        .header("l5d-timeout", format!("{}ms", DEADLINE.as_millis()))
        .body(Full::new(message(id, false)))
        .unwrap();
    let answered = async {
        let stream = TokioIo::new(TcpStream::connect(entry).await.ok()?);
        let response = if version == Version::HTTP_2 {
            let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.ok()?;
            tokio::spawn(connection);
            sender.send_request(request).await.ok()?
        } else {
            let (mut sender, connection) = conn::http1::handshake(stream).await.ok()?;
            tokio::spawn(connection);
            sender.send_request(request).await.ok()?
        };
        let (head, body) = response.into_parts();
        if head.status != StatusCode::OK {
            // The application never answers like this. What a peer's proxy says about the reason stays between proxies.
            return Some(match head.status.as_u16() {
                400 => Ok(Ended::CutOff),
                502..=504 => Ok(Ended::Failed),
                _ => Err(format!("{} {:?}", head.status, head.headers)),
            });
        }
        let seen = head.headers.get("seen").cloned();
        if seen.as_ref().is_none_or(|seen| seen != path.as_str()) {
            return Some(Err(format!("the answer to {seen:?} came for {path}")));
        }
        let body = body.collect().await.ok()?;
        let trailer = body.trailers().and_then(|trailers| trailers.get("seen")).cloned();
        if trailer.as_ref().is_some_and(|trailer| trailer != path.as_str()) {
            return Some(Err(format!("the trailers of {trailer:?} came for {path}")));
        }
        // gRPC depends on trailers; hyper sends none to HTTP/1 clients here.
        if version == Version::HTTP_2 && trailer.is_none() {
            return Some(Err(format!("{path} ended without its trailers")));
        }
        let body = body.to_bytes();
        Some(if body == message(id, false) { Ok(Ended::Whole) } else { Err(differs(id, &body, false)) })
    };
    match tokio::time::timeout(DEADLINE + SLACK, answered).await {
        Ok(ended) => ended.unwrap_or(Ok(Ended::Failed)),
        Err(_) => Err(format!("{version:?} {path} hangs")),
    }
}

async fn opaque(entry: SocketAddr, id: u32) -> Result<Ended, String> {
    let Ok(stream) = TcpStream::connect(entry).await else { return Ok(Ended::Failed) };
    echoed(stream, id, true).await
}

async fn tunnel(entry: SocketAddr, id: u32) -> Result<Ended, String> {
    let tunnel = async {
        let stream = TokioIo::new(TcpStream::connect(entry).await.ok()?);
        let (mut sender, connection) = conn::http1::handshake(stream).await.ok()?;
        tokio::spawn(connection.with_upgrades());
        let mut request = get(&format!("/{id}"));
        request.headers_mut().insert("connection", "upgrade".parse().unwrap());
        request.headers_mut().insert("upgrade", "websocket".parse().unwrap());
        request.headers_mut().insert("l5d-timeout", format!("{}ms", DEADLINE.as_millis()).parse().unwrap());
        let mut response = sender.send_request(request).await.ok()?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return None;
        }
        Some(TokioIo::new(hyper::upgrade::on(&mut response).await.ok()?))
    };
    match tokio::time::timeout(DEADLINE + SLACK, tunnel).await {
        Ok(Some(stream)) => echoed(stream, id, false).await,
        Ok(None) => Ok(Ended::Failed),
        Err(_) => Err(format!("the upgrade {id} hangs")),
    }
}

/// Sends and receives bytes. What arrives is a beginning of what was sent; a tunnel has no deadline of the proxy's.
async fn echoed<S>(stream: S, id: u32, opaque: bool) -> Result<Ended, String>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + 'static,
{
    let sent = message(id, opaque);
    let (mut from, mut to) = tokio::io::split(stream);
    let mut received = Vec::new();
    let writing = async {
        let _ = to.write_all(&sent).await;
        let _ = to.shutdown().await;
    };
    let reading = async {
        let _ = from.read_to_end(&mut received).await;
    };
    let _silent = tokio::time::timeout(DEADLINE, async { tokio::join!(writing, reading) }).await;
    match sent.strip_prefix(&received[..]) {
        Some([]) => Ok(Ended::Whole),
        Some(_) => Ok(Ended::Failed),
        None => Err(differs(id, &received, opaque)),
    }
}

fn differs(id: u32, received: &[u8], opaque: bool) -> String {
    let sent = message(id, opaque);
    let at = sent.iter().zip(received).position(|(sent, received)| sent != received);
    format!("{} bytes of {} arrived for {id}, different from {at:?}", received.len(), sent.len())
}

/// A random fault; faults of both directions, before, in and after heads, handshakes and bodies.
fn random(rng: &mut StdRng, hop: Hop) -> Fault {
    let bytes = match rng.random_range(0..4) {
        0 => rng.random_range(0..64),
        1 => rng.random_range(64..4096),
        _ => rng.random_range(4096..200_000),
    };
    let toward = if rng.random() { Toward::Server } else { Toward::Client };
    match rng.random_range(0..10) {
        0..3 => Fault::None,
        3 => Fault::Delay(Duration::from_millis(rng.random_range(1..10))),
        4..6 => Fault::After(toward, bytes, Cut::Reset),
        6..8 => Fault::After(toward, bytes, Cut::Close),
        8 => Fault::After(toward, bytes, Cut::HalfClose),
        // A client that receives nothing more, because its own connection is silent, has to have its own deadline.
        _ if hop == Hop::ToOutbound => Fault::After(toward, bytes, Cut::Reset),
        _ => Fault::After(toward, bytes, Cut::Silence),
    }
}

/// Random faults at a hop, while clients of all protocols send. Afterwards everything works again.
async fn survives(hop: Hop) {
    let seed: u64 = rand::random();
    let mut rng = StdRng::seed_from_u64(seed);
    // One connection to the control plane serves all clients, with some hundred bytes: the first ones are cut in any
    // case.
    let mut first = if hop == Hop::ToControlPlane {
        [Cut::Reset, Cut::Silence].map(|cut| Fault::After(Toward::Client, rng.random_range(0..100), cut)).to_vec()
    } else {
        Vec::new()
    };
    let chain = Chain::start(hop, with_headers(), move || first.pop().unwrap_or_else(|| random(&mut rng, hop))).await;
    let what = format!("seed {seed}, {hop:?}");
    let ended = clients_survive(&what, chain.entry, &chain.faulty, || chain.proxy.scrape()).await;
    let cut_off = ended.iter().filter(|ended| **ended == Ended::CutOff).count();
    let cuts = if hop == Hop::ToOutbound { chain.faulty.cuts() } else { 0 };
    assert!(cut_off <= cuts, "{what}: {cut_off} requests are called cut off, {cuts} were");
}

/// The same with a gateway between the client's proxy and the application, and faults before or behind it.
async fn survives_through_a_gateway(faults_before: bool) {
    let seed: u64 = rand::random();
    let mut rng = StdRng::seed_from_u64(seed);
    let script = move || random(&mut rng, Hop::BetweenProxies);
    let service = "10.1.3.1:80".parse().unwrap();
    let control = Control::default();
    control.policies.lock().insert(service, with_headers());
    let client = Proxy::start_with(service, control, impatient, true).await;
    let mut clusters = Clusters::behind(client, impatient).await;
    let app = application_of_everything().await;
    let (app, faulty) = if faults_before {
        let faulty = FaultyHop::start(SocketAddr::from(([127, 0, 0, 1], clusters.port)), script);
        clusters.port = faulty.addr.port();
        (app, faulty)
    } else {
        let faulty = FaultyHop::start(app, script);
        (faulty.addr, faulty)
    };
    let service = format!("{REMOTE}:80");
    clusters.serve(&service, endpoint(app, None));
    clusters.mirror(&service);
    let what = format!("seed {seed}, before the gateway: {faults_before}");
    let ended = clients_survive(&what, clusters.client.addr, &faulty, || clusters.client.scrape()).await;
    assert!(!ended.contains(&Ended::CutOff), "{what}: none was cut off");
}

async fn clients_survive(what: &str, entry: SocketAddr, faulty: &FaultyHop, scrape: impl Fn() -> String) -> Vec<Ended> {
    let next = Arc::new(AtomicU32::new(0));
    let clients = (0..CLIENTS).map(|_| {
        let next = Arc::clone(&next);
        tokio::spawn(async move {
            let mut ended = Vec::new();
            for _ in 0..EXCHANGES {
                ended.push(exchange(entry, next.fetch_add(1, Ordering::Relaxed)).await);
            }
            ended
        })
    });
    let ended = futures::future::join_all(clients).await.into_iter().flat_map(Result::unwrap);
    let ended: Vec<Ended> = ended.map(|ended| ended.unwrap_or_else(|wrong| panic!("{what}: {wrong}"))).collect();
    assert!(faulty.cuts() > 0, "{what}: nothing was cut");
    assert!(ended.contains(&Ended::Whole), "{what}: nothing passes at all");

    faulty.heal();
    let recovered = async {
        for id in 1000..1016 {
            // The endpoint may rest, and connections that were silent take their time to be found out.
            while exchange(entry, id).await != Ok(Ended::Whole) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    let recovered = tokio::time::timeout(SLACK, recovered).await;
    assert!(recovered.is_ok(), "{what}: it does not recover\n{}", scrape());
    ended
}

#[tokio::test]
async fn faults_between_a_client_and_its_proxy_mix_and_hang_nothing() {
    survives(Hop::ToOutbound).await;
}

#[tokio::test]
async fn faults_between_two_proxies_mix_and_hang_nothing() {
    survives(Hop::BetweenProxies).await;
}

#[tokio::test]
async fn faults_between_a_proxy_and_its_application_mix_and_hang_nothing() {
    survives(Hop::ToApplication).await;
}

#[tokio::test]
async fn faults_between_a_proxy_and_its_control_plane_mix_and_hang_nothing() {
    survives(Hop::ToControlPlane).await;
}

#[tokio::test]
async fn faults_between_a_proxy_and_a_gateway_mix_and_hang_nothing() {
    survives_through_a_gateway(true).await;
}

#[tokio::test]
async fn faults_behind_a_gateway_mix_and_hang_nothing() {
    survives_through_a_gateway(false).await;
}

#[tokio::test]
async fn clients_that_break_off_blame_no_endpoint() {
    for (id, is_meshed) in [(2, true), (6, true), (2, false), (6, false)] {
        for cut in [Cut::Reset, Cut::Close, Cut::HalfClose] {
            // In the middle of the request's body, or of the answer's.
            for toward in [Toward::Server, Toward::Client] {
                let policy = ejecting(with_headers(), 1);
                let script = move || Fault::After(toward, 9000, cut);
                let chain = Chain::start_with(Hop::ToOutbound, policy, is_meshed, script).await;
                let _broken = exchange(chain.entry, id).await;
                assert_eq!(chain.faulty.cuts(), 1);
                chain.faulty.heal();
                let next = exchange(chain.entry, id).await;
                let scrape = chain.proxy.scrape();
                assert_eq!(next, Ok(Ended::Whole), "{cut:?} {toward:?}, {id}, meshed: {is_meshed}\n{scrape}");
            }
        }
    }
}

#[tokio::test]
async fn a_client_that_half_closes_while_it_is_answered_is_not_waited_for_and_blames_nobody() {
    // Begins its answer at once, and would end it after the request.
    let app = serve_each(|mut stream| async move {
        let mut request = vec![0; 4096];
        let _head = stream.read(&mut request).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nfirst").await.unwrap();
        while stream.read(&mut request).await.is_ok_and(|length| length > 0) {}
    })
    .await;
    let service = "10.1.2.1:80".parse().unwrap();
    let control = Control::default();
    control.policies.lock().insert(service, ejecting(with_headers(), 1));
    let proxy = Proxy::start_with(service, control, impatient, true).await;
    proxy.control.update(SERVICE, add(vec![endpoint(app, None)]));
    // One failure would eject the endpoint.
    for _ in 0..3 {
        let mut client = TcpStream::connect(proxy.addr).await.unwrap();
        client.write_all(b"POST / HTTP/1.1\r\nhost: web\r\ncontent-length: 100\r\n\r\npart").await.unwrap();
        let mut answer = Vec::new();
        let began = tokio::time::timeout(SLACK, async {
            while !answer.ends_with(b"first") {
                assert_ne!(client.read_buf(&mut answer).await.unwrap(), 0, "{}", answer.escape_ascii());
            }
        });
        began.await.unwrap_or_else(|_| panic!("no answer"));
        client.shutdown().await.unwrap();
        let ended = tokio::time::timeout(SLACK, client.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "still open after {}", answer.escape_ascii());
    }
}
