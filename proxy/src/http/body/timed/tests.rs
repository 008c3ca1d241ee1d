//! Tests of deadlines of heads and bodies, on a clock that is paused.

use std::time::Duration;

use http_body_util::BodyExt as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::mpsc::UnboundedSender,
};

use super::*;
use crate::request::terms::Timeouts;

const SECOND: Duration = Duration::from_secs(1);

fn clock(timeouts: Timeouts, head: Option<Duration>) -> Clock {
    let now = Instant::now();
    Clock::new(Deadlines::new(timeouts, head, now, now))
}

/// A body of one chunk each second.
fn drip(chunks: u32) -> Body {
    let (sender, body) = Body::channel();
    tokio::spawn(async move {
        for _ in 0..chunks {
            tokio::time::sleep(SECOND).await;
            if sender.send(Ok(Frame::data(Bytes::from_static(b"x")))).is_err() {
                return;
            }
        }
    });
    body
}

/// A body whose server has sent this number of frames.
fn sent(frames: u32) -> (UnboundedSender<Result<Frame<Bytes>, BodyError>>, Body) {
    let (sender, body) = Body::channel();
    for _ in 0..frames {
        sender.send(Ok(Frame::data(Bytes::from_static(b"x")))).unwrap();
    }
    (sender, body)
}

#[track_caller]
fn assert_unread(error: BodyError, expected: Expired) {
    let BodyError::Unread(cause) = error else { panic!("{error:?}") };
    assert!(matches!(*cause, BodyError::Expired(expired) if expired == expected), "{cause:?}");
}

#[tokio::test(start_paused = true)]
async fn a_head_that_does_not_come_expires() {
    let clock = clock(Timeouts::default(), Some(SECOND));
    let begin = Instant::now();
    assert!(clock.watch_request(Body::Empty).is_end_stream());
    assert_eq!(clock.until_head(std::future::pending::<()>()).await, Err(Expired::Head));
    assert_eq!(begin.elapsed(), SECOND);
}

#[tokio::test(start_paused = true)]
async fn the_heads_time_begins_when_the_request_was_sent() {
    let clock = clock(Timeouts::default(), Some(SECOND));
    let begin = Instant::now();
    let request = clock.watch_request(drip(3));
    tokio::spawn(request.collect());
    assert_eq!(clock.until_head(std::future::pending::<()>()).await, Err(Expired::Head));
    assert_eq!(begin.elapsed(), 4 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_response_that_never_pauses_ends_with_its_time() {
    for (timeouts, expected) in [
        (Timeouts { response: Some(5 * SECOND / 2), ..Timeouts::default() }, Expired::Response),
        (Timeouts { request: Some(5 * SECOND / 2), ..Timeouts::default() }, Expired::Request),
    ] {
        let clock = clock(timeouts, None);
        clock.until_head(async {}).await.unwrap();
        let (_sender, body) = sent(100);
        let mut body = clock.watch_response(body);
        for _ in 0..3 {
            assert!(body.frame().await.unwrap().is_ok(), "{expected:?}");
            tokio::time::sleep(SECOND).await;
        }
        assert_unread(body.frame().await.unwrap().unwrap_err(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_that_nobody_reads_ends_with_its_time() {
    for (timeouts, expected) in [
        (Timeouts { response: Some(SECOND), ..Timeouts::default() }, Expired::Response),
        (Timeouts { request: Some(SECOND), ..Timeouts::default() }, Expired::Request),
    ] {
        let begin = Instant::now();
        let clock = clock(timeouts, None);
        clock.until_head(async {}).await.unwrap();
        let (sender, body) = sent(2);
        let mut body = clock.watch_response(body);
        assert!(body.frame().await.unwrap().is_ok());
        // The server's stream ends although the client does not read the second frame.
        tokio::time::timeout(2 * SECOND, sender.closed()).await.unwrap();
        assert_eq!(begin.elapsed(), SECOND);
        assert!(!body.is_end_stream(), "it is not whole");
        assert_unread(body.frame().await.unwrap().unwrap_err(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_that_has_ended_in_time_is_whole_however_late_it_is_read() {
    for timeouts in [
        Timeouts { response: Some(SECOND), ..Timeouts::default() },
        Timeouts { request: Some(SECOND), ..Timeouts::default() },
        Timeouts { idle: Some(SECOND), ..Timeouts::default() },
    ] {
        let clock = clock(timeouts, None);
        clock.until_head(async {}).await.unwrap();
        let (sender, body) = sent(3);
        sender.send(Ok(Frame::trailers(http::HeaderMap::new()))).unwrap();
        let mut body = clock.watch_response(body);
        assert!(body.frame().await.unwrap().is_ok());
        if timeouts.idle.is_none() {
            tokio::time::timeout(2 * SECOND, sender.closed()).await.expect("its stream keeps its place");
        }
        for _ in 0..2 {
            tokio::time::sleep(5 * SECOND).await;
            assert!(body.frame().await.unwrap().unwrap().is_data());
        }
        tokio::time::sleep(5 * SECOND).await;
        assert!(!body.is_end_stream());
        assert!(body.frame().await.unwrap().unwrap().is_trailers());
        assert!(body.frame().await.is_none());
    }
}

/// The connection's task takes nothing from its buffer while the body is not polled.
#[tokio::test(start_paused = true)]
async fn a_response_of_http1_that_has_ended_in_time_is_whole_however_late_it_is_read() {
    const LENGTH: usize = 200 * 1024;
    let clock = clock(Timeouts { response: Some(SECOND), ..Timeouts::default() }, None);
    let (client, mut server) = tokio::io::duplex(2 * LENGTH);
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(client)).await.unwrap();
    tokio::spawn(connection);
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LENGTH}\r\n\r\n");
    let answer = async {
        server.read_exact(&mut [0; 14]).await.unwrap();
        server.write_all(&[head.as_bytes(), &[7; LENGTH]].concat()).await.unwrap();
    };
    let request = sender.send_request(http::Request::new(Body::Empty));
    let (response, ()) = tokio::join!(clock.until_head(request), answer);
    let mut body = clock.watch_response(Body::Incoming(response.unwrap().unwrap().into_body()));
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.len() < LENGTH, "nothing is left to read late");
    tokio::time::sleep(5 * SECOND).await;
    assert_eq!(first.len() + body.collect().await.unwrap().to_bytes().len(), LENGTH);
}

#[tokio::test(start_paused = true)]
async fn an_end_beyond_what_is_read_at_the_deadline_is_too_late() {
    for (frames, length) in [(5_000, 1), (20, 64 * 1024)] {
        let clock = clock(Timeouts { response: Some(SECOND), ..Timeouts::default() }, None);
        clock.until_head(async {}).await.unwrap();
        let frames = (0..frames).map(|_| Frame::data(Bytes::from(vec![7; length])));
        let mut body = clock.watch_response(Body::frames(frames));
        assert!(body.frame().await.unwrap().is_ok());
        tokio::time::sleep(2 * SECOND).await;
        assert_unread(body.frame().await.unwrap().unwrap_err(), Expired::Response);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_frames_wait_for_the_client_is_not_idle() {
    let clock = clock(Timeouts { idle: Some(SECOND), ..Timeouts::default() }, None);
    clock.until_head(async {}).await.unwrap();
    let (sender, body) = sent(5);
    let mut body = clock.watch_response(body);
    for _ in 0..5 {
        assert!(body.frame().await.unwrap().is_ok());
        tokio::time::sleep(20 * SECOND).await;
    }
    // By then the server had sent nothing for a second.
    assert!(sender.is_closed());
    assert_unread(body.frame().await.unwrap().unwrap_err(), Expired::Idle);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_goes_on_ends_with_the_time_of_its_response() {
    let clock = clock(Timeouts { response: Some(SECOND), ..Timeouts::default() }, None);
    let (_client, request) = Body::channel();
    let mut request = clock.watch_request(request);
    clock.until_head(async {}).await.unwrap();
    let (_server, response) = Body::channel();
    let mut response = clock.watch_response(response);
    let (sent, read) = tokio::time::timeout(2 * SECOND, async { tokio::join!(request.frame(), response.frame()) })
        .await
        .expect("the request goes on");
    for end in [sent, read] {
        let error = end.unwrap().unwrap_err();
        assert!(matches!(error, BodyError::Expired(Expired::Response)), "{error:?}");
    }
    assert!(std::future::poll_fn(|cx| Poll::Ready(request.poll_superseded(cx))).await.is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_response_that_was_read_to_its_end_does_not_expire() {
    let timeouts = Timeouts { request: Some(SECOND), ..Timeouts::default() };
    let clock = clock(timeouts, None);
    clock.until_head(async {}).await.unwrap();
    let mut body = clock.watch_response(Body::frames([b"x", b"y"].map(|data| Frame::data(Bytes::from_static(data)))));
    for _ in 0..2 {
        assert!(body.frame().await.unwrap().is_ok());
    }
    tokio::time::sleep(2 * SECOND).await;
    assert!(body.is_end_stream());
}

#[tokio::test(start_paused = true)]
async fn a_response_that_drips_is_not_idle_and_ends_with_its_time() {
    for (timeouts, expected) in [
        (Timeouts { idle: Some(3 * SECOND / 2), ..Timeouts::default() }, None),
        (Timeouts { idle: Some(SECOND / 2), ..Timeouts::default() }, Some(Expired::Idle)),
        (Timeouts { response: Some(5 * SECOND / 2), ..Timeouts::default() }, Some(Expired::Response)),
        (Timeouts { request: Some(SECOND / 2), ..Timeouts::default() }, Some(Expired::Request)),
    ] {
        let clock = clock(timeouts, None);
        clock.until_head(async {}).await.unwrap();
        let read = clock.watch_response(drip(5)).collect().await;
        match (read, expected) {
            (Ok(body), None) => assert_eq!(body.to_bytes().len(), 5),
            (Err(BodyError::Expired(expired)), Some(expected)) => assert_eq!(expired, expected),
            (read, expected) => panic!("{read:?} instead of {expected:?}"),
        }
    }
}
