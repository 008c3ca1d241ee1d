//! Limits of clients: the time for a request's head.

use super::*;

#[tokio::test]
async fn a_client_that_does_not_finish_a_head_is_closed() {
    let limit = |config: &mut Config| config.http1_client_timeout = Duration::from_millis(100);
    let world = World::with(http_app().await, limit).await;
    // A first head that never ends, and a connection that is kept without another request.
    let request = "GET / HTTP/1.1\r\nhost: web.demo\r\n";
    for sent in [request.to_owned(), format!("{request}\r\n")] {
        let mut stream = world.connect(Via::Plain, Some(ELSEWHERE)).await;
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "still open after {}", answer.escape_ascii());
        assert_eq!(answer.starts_with(b"HTTP/1.1 200"), sent.ends_with("\r\n\r\n"), "{}", answer.escape_ascii());
    }
}
