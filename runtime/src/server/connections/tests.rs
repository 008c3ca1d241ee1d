//! Which connections are closed, and when.

use std::time::Duration;

use super::*;

const ATTACKER: Source = remote(6);
const API_SERVER: Source = remote(1);

const fn remote(host: u8) -> Source {
    Source { addr: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, host)), local: false }
}

fn full_at(connections: usize) -> Arc<Connections> {
    Arc::new(Connections::new(Limits { connections, held_bytes: 100, ..Limits::WEBHOOK }))
}

fn is_open(connection: &Connection) -> bool {
    connection.0.connections.table.lock().open.contains_key(&connection.0.id)
}

fn served(connection: &Connection) {
    connection.handle().begin().received();
}

#[tokio::test(start_paused = true)]
async fn a_new_connection_replaces_the_one_that_is_missed_least() {
    let connections = full_at(3);
    let admit = |source| {
        let connections = connections.clone();
        async move {
            tokio::time::advance(Duration::from_secs(1)).await;
            connections.admit(source)
        }
    };
    let asked_before = admit(ATTACKER).await.unwrap();
    served(&asked_before);
    let older = admit(ATTACKER).await.unwrap();
    let younger = admit(ATTACKER).await.unwrap();
    let replacement = admit(ATTACKER).await.unwrap();
    assert!(is_open(&asked_before) && is_open(&younger) && is_open(&replacement), "the oldest silent one goes");
    assert_eq!(older.overdue().await, Overdue::Evicted);
    let being_answered = replacement.handle().begin();
    being_answered.received();
    let still_arriving = younger.handle().begin();
    let last = admit(ATTACKER).await.unwrap();
    assert!(!is_open(&younger) && is_open(&replacement), "a request that has not arrived keeps no place");
    drop(still_arriving);
    served(&last);
    let next = admit(ATTACKER).await.unwrap();
    assert!(!is_open(&asked_before) && is_open(&last) && is_open(&next), "the longest idle goes");
}

#[tokio::test(start_paused = true)]
async fn a_connection_whose_requests_were_refused_goes_before_an_older_one_that_was_of_use() {
    let connections = full_at(2);
    let api_server = connections.admit(API_SERVER).unwrap();
    let review = api_server.handle().begin();
    review.received();
    review.has_use();
    drop(review);
    tokio::time::advance(Duration::from_secs(1)).await;
    // From the same address, as all clients behind the sidecar are.
    let refused = connections.admit(API_SERVER).unwrap();
    served(&refused);
    let replacement = connections.admit(API_SERVER).unwrap();
    assert!(is_open(&api_server) && !is_open(&refused) && is_open(&replacement));
}

#[tokio::test]
async fn the_source_with_most_connections_loses_one() {
    let connections = full_at(4);
    let api_server = connections.admit(API_SERVER).unwrap();
    let flood: Vec<_> = (0..3).map(|_| connections.admit(ATTACKER).unwrap()).collect();
    for connection in &flood {
        served(connection);
    }
    let other = connections.admit(API_SERVER).unwrap();
    assert!(is_open(&api_server) && is_open(&other));
    assert_eq!(flood.iter().filter(|connection| is_open(connection)).count(), 2);
}

#[tokio::test]
async fn a_source_has_as_many_connections_as_one_may_and_displaces_only_its_own() {
    let limits = Limits { connections: 9, source_connections: 2, ..Limits::GRPC };
    let connections = Arc::new(Connections::new(limits));
    let (other, silent) = (connections.admit(API_SERVER).unwrap(), connections.admit(ATTACKER).unwrap());
    let busy = connections.admit(ATTACKER).unwrap();
    let exchange = busy.handle().begin();
    exchange.received();
    let next = connections.admit(ATTACKER).unwrap();
    assert!(is_open(&other) && is_open(&busy) && is_open(&next) && !is_open(&silent));
    let another = next.handle().begin();
    another.received();
    assert!(connections.admit(ATTACKER).is_none(), "both are being answered");
    let sidecar = Source { local: true, ..ATTACKER };
    assert!(connections.admit(sidecar).is_some(), "many clients are behind it");
}

#[tokio::test]
async fn requests_of_a_source_are_bounded_over_its_connections_and_free_when_they_end() {
    let connections = Arc::new(Connections::new(Limits { source_streams: 2, ..Limits::GRPC }));
    let (one, two) = (connections.admit(ATTACKER).unwrap(), connections.admit(ATTACKER).unwrap());
    let (first, second) = (one.handle().begin(), two.handle().begin());
    first.received();
    assert!(!first.is_excess() && !second.is_excess());
    let third = two.handle().begin();
    assert!(third.is_excess());
    assert!(!connections.admit(API_SERVER).unwrap().handle().begin().is_excess(), "another source");
    drop((first, third));
    let fourth = one.handle().begin();
    assert!(!fourth.is_excess(), "one has ended");
    // A connection takes its requests with it.
    drop(two);
    assert!(!one.handle().begin().is_excess());
    drop((second, fourth, one));
    assert!(connections.table.lock().sources.is_empty());
    let sidecar = connections.admit(Source { local: true, ..ATTACKER }).unwrap();
    let many: Vec<_> = (0..9).map(|_| sidecar.handle().begin()).collect();
    assert!(many.iter().all(|exchange| !exchange.is_excess()));
}

#[tokio::test]
async fn connections_in_use_go_only_when_their_source_has_more_than_its_share() {
    let connections = full_at(4);
    let flood: Vec<_> = (0..4).map(|_| connections.admit(ATTACKER).unwrap()).collect();
    let exchanges: Vec<_> = flood.iter().map(|connection| connection.handle().begin()).collect();
    exchanges.iter().for_each(Exchange::received);
    assert!(connections.admit(ATTACKER).is_none(), "more than its share");
    let replacement = connections.admit(API_SERVER).unwrap();
    assert!(is_open(&replacement) && connections.table.lock().open.len() == 4);
    drop((replacement, exchanges, flood));
    assert!(connections.table.lock().open.is_empty() && connections.table.lock().sources.is_empty());
}

#[tokio::test]
async fn the_connection_that_holds_most_bytes_goes() {
    let connections = full_at(9);
    let (greedy, modest) = (connections.admit(ATTACKER).unwrap(), connections.admit(ATTACKER).unwrap());
    let (large, small) = (greedy.handle().begin(), modest.handle().begin());
    assert!(large.receive(60) && small.receive(40));
    assert!(small.receive(1), "the other one held more");
    assert!(!is_open(&greedy) && !large.receive(1));
    small.answered();
    assert_eq!(connections.table.lock().held, 0);
    assert!(!small.receive(101), "no other connection holds bytes");
    assert!(connections.table.lock().open.is_empty());
}

#[tokio::test(start_paused = true)]
async fn deadlines_follow_the_requests() {
    let connections = full_at(9);
    let overdue = async |connection: &Connection| {
        let since = Instant::now();
        let why = connection.overdue().await;
        (why, since.elapsed().as_secs())
    };
    let admit = || {
        let connection = connections.admit(ATTACKER).unwrap();
        connection.handle().clock().start();
        connection
    };
    let silent = admit();
    assert_eq!(overdue(&silent).await, (Overdue::Begin, 10));
    let idle = admit();
    served(&idle);
    assert_eq!(overdue(&idle).await, (Overdue::Idle, 180));
    let slow = admit();
    let exchange = slow.handle().begin();
    exchange.owed();
    assert_eq!(overdue(&slow).await, (Overdue::Receive, 30));
    exchange.received();
    assert_eq!(overdue(&slow).await, (Overdue::Exchange, 30));
}
