//! A program in a pod's container, run through the API server: what it writes and reads, as one stream.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Status};
use kube::{
    Api,
    api::{AttachParams, AttachedProcess},
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf, ReadHalf, SimplexStream, WriteHalf};

use super::{Cluster, explain};

/// How long a program may take to start.
const OPEN: Duration = Duration::from_secs(10);
/// Of each of the program's streams, in bytes: more than a message of the API server has, so that one direction does
/// not wait for the other.
const BUFFER: usize = 64 * 1024;
/// How much is read of what a program that failed says about it.
const STDERR_BYTES: u64 = 4096;

/// Why the program failed, once it has ended; none if it did not.
type Ended = Pin<Box<dyn Future<Output = Option<String>> + Send>>;

enum End {
    Awaited(Ended),
    Known(Option<String>),
}

/// A running program. The stream ends with it, in an error if it failed. Dropping this ends its input.
pub(crate) struct Exec {
    input: WriteHalf<SimplexStream>,
    output: ReadHalf<SimplexStream>,
    end: End,
    /// Copies between these streams and the API server.
    _process: AttachedProcess,
}

impl Cluster {
    /// Starts a program in a container.
    pub(crate) async fn exec(&self, namespace: &str, pod: &str, container: &str, command: &[&str]) -> io::Result<Exec> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let streams = AttachParams::default()
            .container(container)
            .stdin(true)
            .max_stdin_buf_size(BUFFER)
            .max_stdout_buf_size(BUFFER)
            .max_stderr_buf_size(BUFFER);
        let mut process = tokio::time::timeout(OPEN, pods.exec(pod, command.iter().copied(), &streams))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the API server starts no program in time"))?
            .map_err(|error| io::Error::other(explain(&error)))?;
        let (Some(input), Some(output), Some(stderr), Some(status)) =
            (process.stdin(), process.stdout(), process.stderr(), process.take_status())
        else {
            return Err(io::Error::other("the program has no standard streams"));
        };
        let ended = Box::pin(async move {
            match status.await {
                Some(status) => failure(status, stderr).await,
                None => Some("the connection to the API server broke".to_owned()),
            }
        });
        Ok(Exec { input, output, end: End::Awaited(ended), _process: process })
    }
}

/// What a program that failed said first, or else what the container runtime says of it.
async fn failure(status: Status, stderr: impl AsyncRead + Unpin) -> Option<String> {
    if status.status.as_deref() == Some("Success") {
        return None;
    }
    let mut said = Vec::new();
    let _ = stderr.take(STDERR_BYTES).read_to_end(&mut said).await;
    let said = String::from_utf8_lossy(&said);
    let first = said.lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned);
    Some(first.or(status.message).unwrap_or_else(|| "the program failed".to_owned()))
}

impl AsyncRead for Exec {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        // The end first: by the time that it is known, all output is in the buffer.
        if let End::Awaited(ended) = &mut self.end
            && let Poll::Ready(failure) = ended.as_mut().poll(cx)
        {
            self.end = End::Known(failure);
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.output).poll_read(cx, buf);
        if buf.filled().len() > before || buf.remaining() == 0 {
            return read;
        }
        match &mut self.end {
            End::Awaited(_) => Poll::Pending,
            End::Known(failure) => Poll::Ready(failure.take().map_or(Ok(()), |why| Err(io::Error::other(why)))),
        }
    }
}

impl AsyncWrite for Exec {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.input).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.input).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.input).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures::{SinkExt as _, StreamExt as _};
    use http::HeaderValue;
    use tokio::{
        io::AsyncWriteExt as _,
        net::{TcpListener, TcpStream},
    };
    use tokio_tungstenite::{
        WebSocketStream, accept_hdr_async,
        tungstenite::{
            Message,
            handshake::server::{ErrorResponse, Request, Response},
        },
    };

    use super::*;

    // Channels of Kubernetes' protocol v5.channel.k8s.io.
    const STDIN: u8 = 0;
    const STDOUT: u8 = 1;
    const STDERR: u8 = 2;
    const STATUS: u8 = 3;
    const SUCCESS: &str = r#"{"status": "Success"}"#;
    const FAILURE: &str = r#"{"status": "Failure", "message": "exit code 1"}"#;

    type Socket = WebSocketStream<TcpStream>;

    /// An API server that runs `program` for one client, which asked for the right one.
    async fn started<F: Future<Output = ()> + Send>(program: impl FnOnce(Socket) -> F + Send + 'static) -> Exec {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            program(accept_hdr_async(stream, upgrade).await.unwrap()).await;
        });
        let client = kube::Client::try_from(kube::Config::new(server.parse().unwrap())).unwrap();
        let cluster = Cluster { client, namespace: "linkerd".into(), default_namespace: "default".into(), server };
        cluster.exec("linkerd", "weft-agent-1", "agent", &["/weft-agent", "connect"]).await.unwrap()
    }

    #[expect(clippy::result_large_err, reason = "tungstenite's signature")]
    fn upgrade(request: &Request, mut response: Response) -> Result<Response, ErrorResponse> {
        assert_eq!(request.uri().path(), "/api/v1/namespaces/linkerd/pods/weft-agent-1/exec");
        let query = request.uri().query().unwrap();
        assert!(query.contains("container=agent&command=%2Fweft-agent&command=connect"), "{query}");
        let protocol = HeaderValue::from_static("v5.channel.k8s.io");
        response.headers_mut().insert(http::header::SEC_WEBSOCKET_PROTOCOL, protocol);
        Ok(response)
    }

    fn message(channel: u8, bytes: &[u8]) -> Message {
        Message::binary([&[channel], bytes].concat())
    }

    #[tokio::test]
    async fn what_is_written_is_read_back_from_a_program_that_echoes() {
        let mut exec = started(|mut socket| async move {
            let mut left = 3 * BUFFER;
            while left > 0
                && let Some(Ok(Message::Binary(bytes))) = socket.next().await
            {
                assert_eq!(bytes[0], STDIN);
                left -= bytes.len() - 1;
                socket.send(message(STDOUT, &bytes[1..])).await.unwrap();
            }
            socket.send(message(STATUS, SUCCESS.as_bytes())).await.unwrap();
        })
        .await;
        let asked: Vec<u8> = (0..3 * BUFFER).map(|n| (n % 251) as u8).collect();
        let (mut reader, mut writer) = tokio::io::split(&mut exec);
        let mut answered = Vec::new();
        let (written, read) = tokio::join!(writer.write_all(&asked), reader.read_to_end(&mut answered));
        written.unwrap();
        read.unwrap();
        assert!(answered == asked);
    }

    #[tokio::test]
    async fn a_program_that_fails_says_why_after_its_output() {
        let mut exec = started(|mut socket| async move {
            for (channel, text) in [(STDOUT, "part"), (STDERR, "no agent answers\nor so\n"), (STATUS, FAILURE)] {
                socket.send(message(channel, text.as_bytes())).await.unwrap();
            }
        })
        .await;
        let mut output = Vec::new();
        let error = exec.read_to_end(&mut output).await.unwrap_err();
        assert_eq!((output.as_slice(), error.to_string().as_str()), (&b"part"[..], "no agent answers"));
    }

    #[tokio::test]
    async fn a_failure_without_a_word_is_the_runtimes() {
        let mut exec = started(|mut socket| async move {
            socket.send(message(STATUS, FAILURE.as_bytes())).await.unwrap();
        })
        .await;
        assert_eq!(exec.read_to_end(&mut Vec::new()).await.unwrap_err().to_string(), "exit code 1");
    }

    #[tokio::test]
    async fn a_connection_that_breaks_is_no_end() {
        let mut exec = started(|mut socket| async move {
            socket.send(message(STDOUT, b"part")).await.unwrap();
        })
        .await;
        let error = exec.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert!(error.to_string().contains("connection to the API server broke"), "{error}");
    }
}
