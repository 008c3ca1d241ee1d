//! Connections to a pod's port through the API server, so that the pods' network need not be reachable.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf};

use super::{Cluster, explain};

/// Deadline for opening a port-forward.
const OPEN: Duration = Duration::from_secs(10);
/// Deadline for an HTTP answer, and how much of it is read: answers of admin servers have one line.
const HTTP: Duration = Duration::from_secs(5);
const HTTP_BYTES: u64 = 64 * 1024;

type Failure = Pin<Box<dyn Future<Output = Option<String>> + Send>>;

/// A connection to a pod's port. If the far end fails, the stream ends with an error that contains the reason.
struct Forwarded {
    stream: DuplexStream,
    failure: Option<Failure>,
}

/// An HTTP answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Cluster {
    /// Opens a connection to a port on a pod's loopback address.
    async fn forward(&self, namespace: &str, pod: &str, port: u16) -> io::Result<Forwarded> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let ports = [port];
        let mut forwarder = tokio::time::timeout(OPEN, pods.portforward(pod, &ports))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the API server opened no port-forward in time"))?
            .map_err(|error| io::Error::other(explain(&error)))?;
        let stream = forwarder.take_stream(port).ok_or_else(|| io::Error::other("the port-forward has no stream"))?;
        let failure = forwarder.take_error(port).map(|failure| Box::pin(failure) as Failure);
        Ok(Forwarded { stream, failure })
    }

    /// Sends a GET to an HTTP server in a pod.
    pub(crate) async fn get(&self, namespace: &str, pod: &str, port: u16, path: &str) -> Result<Answer, String> {
        let mut stream = self.forward(namespace, pod, port).await.map_err(|error| error.to_string())?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost:{port}\r\nconnection: close\r\n\r\n");
        let exchange = async {
            stream.write_all(request.as_bytes()).await?;
            let mut answer = Vec::new();
            (&mut stream).take(HTTP_BYTES).read_to_end(&mut answer).await?;
            Ok::<_, io::Error>(answer)
        };
        let answer = match tokio::time::timeout(HTTP, exchange).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_) => return Err(format!("no answer from port {port} within {}s", HTTP.as_secs())),
        };
        parse(&String::from_utf8_lossy(&answer)).ok_or_else(|| format!("port {port} does not speak HTTP"))
    }
}

/// Parses a short answer. Chunks are not joined: a marker line between them does not matter to people.
fn parse(text: &str) -> Option<Answer> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.")?.split_whitespace().nth(1)?.parse().ok()?;
    Some(Answer { status, body: body.trim().to_owned() })
}

impl AsyncRead for Forwarded {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let ended = buf.filled().len() == before && buf.remaining() > 0;
        // The reason precedes the end, if there is one: waiting for it could take as long as the forwarder lives.
        if ended
            && let Some(failure) = &mut self.failure
            && let Poll::Ready(failure) = failure.as_mut().poll(cx)
        {
            self.failure = None;
            if let Some(failure) = failure {
                return Poll::Ready(Err(io::Error::other(failure.trim().to_owned())));
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Forwarded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_a_status_and_a_body() {
        let answer =
            parse("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 20\r\n\r\nnot ready: redirect\n").unwrap();
        assert_eq!(answer, Answer { status: 503, body: "not ready: redirect".to_owned() });
        assert_eq!(parse("SSH-2.0-OpenSSH\r\n\r\n"), None);
    }

    #[tokio::test]
    async fn the_end_of_a_broken_connection_says_why() {
        let (stream, far) = tokio::io::duplex(16);
        drop(far);
        let failure: Failure = Box::pin(std::future::ready(Some("connection refused\n".to_owned())));
        let mut forwarded = Forwarded { stream, failure: Some(failure) };
        let error = forwarded.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!(error.to_string(), "connection refused");
    }
}
