//! What a policy controller's codes mean for a port.

use std::{collections::VecDeque, convert::Infallible, net::Ipv4Addr, pin::Pin, sync::atomic::AtomicUsize};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, future::join_all, stream};
use http_body_util::StreamBody;
use hyper::{
    body::{Frame, Incoming},
    server::conn::http2,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;
use tokio::{net::TcpListener, sync::Notify};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};
use weft_proto::linkerd::inbound::{
    Server,
    inbound_server_policies_server::{InboundServerPolicies, InboundServerPoliciesServer},
};

use super::*;
use crate::{
    config::Keepalive,
    control::Trust,
    dns::Dns,
    faults::{Fault, FaultyHop},
    inbound::testing::Mesh,
    testing::{eventually, serve_each},
};

/// Longer than the first pause before a call is repeated, which is 100 ms at most.
const PATIENCE: Duration = Duration::from_millis(250);

/// A controller whose streams end with codes, with a policy before that or without; after the last, with a policy that
/// stays.
#[derive(Clone)]
struct Controller {
    streams: Arc<Mutex<VecDeque<(bool, Code)>>>,
    calls: Arc<AtomicUsize>,
}

impl Controller {
    async fn serve(streams: impl IntoIterator<Item = (bool, Code)>) -> (Self, u16) {
        let controller = Self { streams: Arc::new(Mutex::new(streams.into_iter().collect())), calls: Arc::default() };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server =
            tonic::transport::Server::builder().add_service(InboundServerPoliciesServer::new(controller.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        (controller, port)
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Waits for more calls than these.
    async fn more_than(&self, calls: usize) {
        eventually("the controller is asked again", || self.calls() > calls).await;
    }
}

#[tonic::async_trait]
impl InboundServerPolicies for Controller {
    type WatchPortStream = Pin<Box<dyn Stream<Item = Result<Server, Status>> + Send>>;

    async fn get_port(&self, _request: Request<PortSpec>) -> Result<Response<Server>, Status> {
        Err(Status::unimplemented("only watches"))
    }

    async fn watch_port(&self, _request: Request<PortSpec>) -> Result<Response<Self::WatchPortStream>, Status> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let policy = || stream::iter([Ok(detecting(vec![authz("a", anybody())]))]);
        match self.streams.lock().pop_front() {
            None => Ok(Response::new(policy().chain(stream::pending()).boxed())),
            Some((false, code)) => Err(Status::new(code, "as the test wants")),
            Some((true, code)) => {
                let end = stream::iter([Err(Status::new(code, "as the test wants"))]);
                Ok(Response::new(policy().chain(end).boxed()))
            }
        }
    }
}

/// Policies from the controller on this port.
fn asking(mut config: Config, port: u16) -> Policies {
    config.policy.control.port = port;
    config.inbound.ports = Vec::new();
    let credentials = watch::channel(Some(Mesh::new().credentials(crate::inbound::testing::OWN))).1;
    let dns = Dns::new(Default::default()).unwrap();
    let (trust, limits) = (Trust::Credentials(credentials.clone()), config.control_streams);
    let client = ControlClient::new(config.policy.control.clone(), trust, dns, limits);
    Policies::with(Arc::new(config), client, credentials, Handle::current())
}

#[tokio::test]
async fn a_refusal_is_final_and_keeps_the_policy_and_other_codes_are_asked_about_again() {
    join_all(
        [
            ((false, Code::InvalidArgument), "all-unauthenticated", 1),
            ((false, Code::FailedPrecondition), "all-unauthenticated", 1),
            ((true, Code::InvalidArgument), "web", 1),
            // The pod was not known yet, or the controller has been replaced.
            ((false, Code::NotFound), "web", 2),
            ((false, Code::Unavailable), "web", 2),
            ((true, Code::NotFound), "web", 2),
        ]
        .map(async |(stream, expected, calls)| {
            let (controller, port) = Controller::serve([stream]).await;
            let policies = asking(waiting(), port);
            let begin = Instant::now();
            let policy = policies.port(8080, CLIENT).await;
            assert!(begin.elapsed() < TIMEOUT, "{stream:?} is no answer");
            assert_eq!(name(&policy), expected, "{stream:?}");
            controller.more_than(calls - 1).await;
            let more = tokio::time::timeout(PATIENCE, controller.more_than(calls)).await;
            assert!(more.is_err(), "{stream:?} was asked about again");
            assert_eq!(name(&policy), expected, "{stream:?} takes nothing away");
        }),
    )
    .await;
}

#[tokio::test]
async fn faults_to_the_policy_controller_hang_nothing_and_end() {
    let tried = Fault::at(200, 60).map(async |fault| {
        let (controller, port) = Controller::serve([]).await;
        let faulty = FaultyHop::start(([127, 0, 0, 1], port).into(), move || fault);
        let mut config = waiting();
        config.inbound.policy_timeout = PATIENCE;
        config.inbound.unanswered = Unanswered::Deny;
        // Silence is found out by pings, as with a controller that is not on loopback.
        config.control_streams.keepalive = Some(Keepalive { interval: PATIENCE, timeout: PATIENCE });
        let policies = asking(config, faulty.addr.port());
        let first = tokio::time::timeout(TIMEOUT, policies.port(8080, CLIENT)).await;
        let policy = first.unwrap_or_else(|_| panic!("{fault:?} hangs"));
        assert!(["unanswered", "web"].contains(&&*name(&policy)), "{fault:?}");
        eventually("the connection is cut", || faulty.cuts() > 0).await;
        let calls = controller.calls();
        faulty.heal();
        // What was watched over the connection that was cut is watched again.
        controller.more_than(calls).await;
        eventually("the policy comes", || name(&policy) == "web").await;
    });
    join_all(tried).await;
}

/// A controller whose first stream is these bytes of a message, and whose later ones are a policy that stays, once they
/// are released.
async fn answering(first: Vec<u8>, released: Arc<Notify>) -> u16 {
    let frame = |message: Vec<u8>| {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        Ok::<_, Infallible>(Frame::data(Bytes::from([&[0], &length[..], &message].concat())))
    };
    let first = Arc::new(Mutex::new(Some(first)));
    let addr = serve_each(move |stream| {
        let (first, released) = (Arc::clone(&first), Arc::clone(&released));
        let service = service_fn(move |_: http::Request<Incoming>| {
            let (first, released) = (first.lock().take(), Arc::clone(&released));
            async move {
                let message = match first {
                    Some(first) => first,
                    None => {
                        released.notified().await;
                        detecting(vec![authz("a", anybody())]).encode_to_vec()
                    }
                };
                let body = StreamBody::new(stream::iter([frame(message)]).chain(stream::pending()).boxed());
                http::Response::builder().header("content-type", "application/grpc").body(body)
            }
        });
        http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service)
    });
    addr.await.port()
}

#[tokio::test]
async fn an_answer_that_is_too_long_or_no_message_denies_until_there_is_another() {
    let labels = [("name".to_owned(), "x".repeat(5 << 20))].into();
    let too_long = Server { labels, ..detecting(vec![authz("a", anybody())]) };
    for answer in [too_long.encode_to_vec(), vec![0xff; 32]] {
        let released = Arc::<Notify>::default();
        let policies = asking(waiting(), answering(answer, Arc::clone(&released)).await);
        let policy = policies.port(8080, CLIENT).await;
        assert_eq!(name(&policy), "invalid-policy");
        assert!(policy.borrow().authorizations.is_empty());
        released.notify_one();
        eventually("the next answer is in force", || name(&policy) == "web").await;
    }
}
