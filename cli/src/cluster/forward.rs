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
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

use super::{Cluster, explain};

/// Deadline for opening a port-forward.
const OPEN: Duration = Duration::from_secs(10);

type Failure = Pin<Box<dyn Future<Output = Option<String>> + Send>>;

/// A connection to a pod's port. If the far end fails, the stream ends with an error that contains the reason.
pub(crate) struct Forwarded {
    stream: DuplexStream,
    failure: Option<Failure>,
}

impl Cluster {
    /// Opens a connection to a port on a pod's loopback address.
    pub(crate) async fn forward(&self, namespace: &str, pod: &str, port: u16) -> io::Result<Forwarded> {
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
    use tokio::io::AsyncReadExt as _;

    use super::*;

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
