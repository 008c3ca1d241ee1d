//! The clients against a server of the same API, on a port that the system chooses.

use tokio::sync::broadcast;
use tokio_stream::{Stream, StreamExt as _, wrappers::BroadcastStream};
use tonic::{Request, Response, Status, transport::Server};
use weft_proto::linkerd::destination::{
    AddrSet, DestinationProfile, GetDestination, Update, destination_server, update::Update as Kind,
};
use weft_test_kit::wait::{eventually, patience};

use super::*;

/// Sends what it is given to every stream, after a first message.
#[derive(Clone)]
struct Fake(broadcast::Sender<Result<Update, Status>>);

type Updates = std::pin::Pin<Box<dyn Stream<Item = Result<Update, Status>> + Send>>;

#[tonic::async_trait]
impl destination_server::Destination for Fake {
    type GetStream = Updates;
    type GetProfileStream = tokio_stream::Empty<Result<DestinationProfile, Status>>;

    async fn get(&self, request: Request<GetDestination>) -> Result<Response<Updates>, Status> {
        let first = tokio_stream::iter((request.get_ref().path != "empty").then(|| Ok(removed(0))));
        let later = BroadcastStream::new(self.0.subscribe()).filter_map(Result::ok);
        Ok(Response::new(Box::pin(first.chain(later))))
    }

    async fn get_profile(&self, _: Request<GetDestination>) -> Result<Response<Self::GetProfileStream>, Status> {
        Err(Status::unavailable("not now"))
    }
}

fn address(number: u8) -> SocketAddr {
    SocketAddr::from(([100, 64, 0, number], 8080))
}

fn removed(number: u8) -> Update {
    Update { update: Some(Kind::Remove(AddrSet { addrs: vec![address(number).into()] })) }
}

/// A server, and clients with one stream each.
struct Served {
    updates: broadcast::Sender<Result<Update, Status>>,
    address: SocketAddr,
    clients: Clients,
    _server: JoinSet<()>,
}

impl Served {
    async fn start(clients: u32, path: &str) -> Self {
        let (updates, _) = broadcast::channel(64);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = destination_server::DestinationServer::new(Fake(updates.clone()));
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let mut server = JoinSet::new();
        server
            .spawn(async move { Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap() });
        let specs = || {
            let get = Spec { method: Method::Get, request: wire::get(path, ""), has_answer: path != "empty" };
            Specs { destination: Arc::new([get]), policy: Arc::new([]) }
        };
        let clients = Clients {
            count: clients,
            per_connection: 1,
            pause: Duration::ZERO,
            subscribers: Vec::new(),
            specs: (0..clients).map(|_| specs()).collect(),
            shared: Arc::default(),
            pace: watch::Sender::new(Pace::Full),
            connections: JoinSet::new(),
        };
        Self { updates, address, clients, _server: server }
    }

    async fn open(&mut self) -> Answers {
        self.clients.open([self.address; 2]).await.unwrap()
    }

    fn send(&self, number: u8) {
        self.updates.send(Ok(removed(number))).unwrap();
    }

    /// Clients that have these numbers' addresses from now on.
    async fn arrive(&self, expected: usize) -> Vec<(u32, u8)> {
        eventually("the arrivals", patience(), async || match self.clients.arrived() {
            arrived if arrived >= expected => Ok(()),
            arrived => Err(format!("{arrived} of {expected}")),
        })
        .await;
        let arrivals = self.clients.take_arrivals();
        arrivals.iter().map(|arrival| (arrival.client, arrival.what.address.octets()[3])).collect()
    }
}

#[tokio::test]
async fn every_stream_has_a_first_answer_and_then_what_changes() {
    let mut served = Served::start(2, "service").await;
    let answers = served.open().await;
    assert_eq!(answers.milliseconds.keys().collect::<Vec<_>>(), [&Method::Get]);
    served.send(7);
    let mut arrived = served.arrive(2).await;
    arrived.sort_unstable();
    assert_eq!(arrived, [(0, 7), (1, 7)], "the first answer is no change");
    let counts = served.clients.counts();
    assert_eq!((counts.messages, counts.ended_streams, counts.lost_connections), (4, 0, 0));
    // All come back.
    served.open().await;
    assert_eq!(served.clients.counts().messages, 6);
}

#[tokio::test]
async fn a_stream_without_a_message_is_answered_when_it_is_open() {
    let mut served = Served::start(1, "empty").await;
    served.open().await;
    assert_eq!(served.clients.counts().messages, 0);
    served.send(7);
    assert_eq!(served.arrive(1).await, [(0, 7)], "its first message is a change");
}

#[tokio::test]
async fn a_client_that_does_not_read_gets_no_messages_and_the_others_do() {
    let mut served = Served::start(2, "service").await;
    served.open().await;
    served.clients.stall();
    // Its windows close when the server has its settings.
    let mut number = 0;
    eventually("the windows close", patience(), async || {
        number += 1;
        served.send(number);
        let arrived = served.arrive(1).await;
        if arrived.contains(&(0, number)) { Err("the client reads") } else { Ok(()) }
    })
    .await;
    served.clients.take_arrivals();
    for number in 101..106 {
        served.send(number);
        assert_eq!(served.arrive(1).await, [(1, number)]);
    }
    assert_eq!(served.clients.counts().lost_connections, 0);
    served.open().await;
    served.send(200);
    assert_eq!(served.arrive(2).await.len(), 2, "it reads again after it has come back");
}

#[tokio::test]
async fn a_stream_that_ends_is_opened_again() {
    let mut served = Served::start(1, "service").await;
    served.open().await;
    served.updates.send(Err(Status::unavailable("going away"))).unwrap();
    eventually("the stream is back", patience(), async || {
        let counts = served.clients.counts();
        if counts.messages == 2 && counts.ended_streams == 1 { Ok(()) } else { Err(format!("{counts:?}")) }
    })
    .await;
    let problem = served.clients.counts().last_problem.unwrap();
    assert!(problem.contains("status 14 going away"), "{problem}");
}
