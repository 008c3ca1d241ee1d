//! The HTTP server of the dashboard: limits of connections, of questions and of what one may cost.

use std::{convert::Infallible, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet};
use weft_viz_core::page::{self, Body, Guard};

/// Connections at a time: a browser opens six, and a person has some tabs.
const CONNECTIONS: usize = 64;
/// Deadline for the head of a request, and for its content.
const READ: Duration = Duration::from_secs(10);

/// What answers questions.
pub(super) trait Answers: Send + Sync + 'static {
    /// Answers the question of this name; `None` if there is none.
    fn answer(&self, name: &str, content: &[u8]) -> impl Future<Output = Option<Response<Body>>> + Send;
}

/// Serves until it is dropped.
pub(super) async fn serve(listener: TcpListener, guard: Guard, answers: Arc<impl Answers>) -> Result<()> {
    let (guard, places) = (Arc::new(guard), Arc::new(Semaphore::new(CONNECTIONS)));
    let mut connections = JoinSet::new();
    loop {
        let place = Arc::clone(&places).acquire_owned().await.context("wait for a connection to end")?;
        // Those that have ended are forgotten.
        while connections.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) if is_of_one_connection(&error) => continue,
            Err(error) => return Err(error).context("accept a connection"),
        };
        let (guard, answers) = (Arc::clone(&guard), Arc::clone(&answers));
        connections.spawn(async move {
            let _place = place;
            let service = service_fn(move |request| {
                let (guard, answers) = (Arc::clone(&guard), Arc::clone(&answers));
                async move { Ok::<_, Infallible>(respond(request, &guard, &*answers).await) }
            });
            let mut server = http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(READ);
            // A browser that goes is not worth a line.
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

fn is_of_one_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
}

async fn respond(request: Request<Incoming>, guard: &Guard, answers: &impl Answers) -> Response<Body> {
    let (head, body) = request.into_parts();
    let path = head.uri.path();
    let Some(name) = path.strip_prefix(page::API) else {
        if let Err(refused) = guard.admit_page(&head.headers) {
            return refused;
        }
        return match (head.method, page::asset(path)) {
            (Method::GET | Method::HEAD, Some(asset)) => asset,
            (_, Some(_)) => page::failure(StatusCode::METHOD_NOT_ALLOWED, "a page is read with GET"),
            (_, None) => page::failure(StatusCode::NOT_FOUND, "there is no such page"),
        };
    };
    if let Err(refused) = guard.admit_question(&head.headers) {
        return refused;
    }
    if head.method != Method::POST {
        return page::failure(StatusCode::METHOD_NOT_ALLOWED, "a question is sent with POST");
    }
    let content = match tokio::time::timeout(READ, Limited::new(body, page::QUESTION_BYTES).collect()).await {
        Ok(Ok(content)) => content.to_bytes(),
        Ok(Err(_)) => return page::failure(StatusCode::PAYLOAD_TOO_LARGE, "the question is cut off or too long"),
        Err(_) => return page::failure(StatusCode::REQUEST_TIMEOUT, "the question did not arrive"),
    };
    let answer = answers.answer(name, &content).await;
    answer.unwrap_or_else(|| page::failure(StatusCode::NOT_FOUND, "there is no such question"))
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;

    /// Answers with the question.
    struct Echo;

    impl Answers for Echo {
        async fn answer(&self, name: &str, content: &[u8]) -> Option<Response<Body>> {
            (name == "echo").then(|| page::json(&String::from_utf8_lossy(content)))
        }
    }

    /// Sends this and returns the status line and the rest of the answer.
    async fn exchange(request: impl FnOnce(u16) -> String) -> (u16, String) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(serve(listener, Guard::new(port, "key".to_owned()), Arc::new(Echo)));
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        stream.write_all(request(port).as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        server.abort();
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
        (status, answer)
    }

    fn post(path: &'static str, key: &'static str, content: String) -> impl FnOnce(u16) -> String {
        move |port| {
            format!(
                "POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n\
                 connection: close\r\ncontent-length: {}\r\n\r\n{content}",
                content.len()
            )
        }
    }

    #[tokio::test]
    async fn the_page_needs_no_key_and_questions_do() {
        let get = |path: &'static str| {
            move |port| format!("GET {path} HTTP/1.1\r\nhost: localhost:{port}\r\nconnection: close\r\n\r\n")
        };
        let (status, page) = exchange(get("/")).await;
        assert!(status == 200 && page.contains("<!doctype html>"), "{page}");
        assert_eq!(exchange(get("/nothing.js")).await.0, 404);
        assert_eq!(exchange(get("/api/v1/echo")).await.0, 401);
        let (status, echo) = exchange(post("/api/v1/echo", "key", "{}".to_owned())).await;
        assert!(status == 200 && echo.ends_with("\"{}\""), "{echo}");
        assert_eq!(exchange(post("/api/v1/echo", "other", "{}".to_owned())).await.0, 401);
        assert_eq!(exchange(post("/api/v1/nothing", "key", "{}".to_owned())).await.0, 404);
        assert_eq!(exchange(post("/", "key", "{}".to_owned())).await.0, 405);
    }

    #[tokio::test]
    async fn another_name_of_this_machine_is_another_site() {
        let rebound = |_| "GET / HTTP/1.1\r\nhost: evil.example.org\r\nconnection: close\r\n\r\n".to_owned();
        assert_eq!(exchange(rebound).await.0, 421);
    }

    #[tokio::test]
    async fn a_question_has_a_bound() {
        let long = "x".repeat(page::QUESTION_BYTES + 1);
        assert_eq!(exchange(post("/api/v1/echo", "key", long)).await.0, 413);
    }
}
