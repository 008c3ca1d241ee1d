//! `weft-agent connect`: connects standard input and output to a running agent's socket. `weft` runs it in the agent's
//! pod through the API server (`pods/exec`), so that the agent's API listens on no network. Refuses to parse what it
//! copies.

use std::{
    fs::File,
    io::{self, Read, Write},
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    thread,
};

use anyhow::{Context, Result};

/// The default capacity of a pipe.
const BUFFER_BYTES: usize = 64 * 1024;

/// Copies standard input to the agent and the agent's answers to standard output, until one of them ends.
///
/// # Errors
/// When no agent answers, or its answers cannot be written to a client that is still there.
pub(crate) fn run(socket: &Path) -> Result<()> {
    let agent = UnixStream::connect(socket)
        .with_context(|| format!("no agent answers on {}: does `weft-agent run` run there?", socket.display()))?;
    // Files, because the standard library's stdout is line-buffered.
    let input = File::from(io::stdin().as_fd().try_clone_to_owned().context("no standard input")?);
    let output = File::from(io::stdout().as_fd().try_clone_to_owned().context("no standard output")?);
    relay(input, output, agent).context("the connection to the agent broke")
}

fn relay(mut input: impl Read + Send + 'static, mut output: impl Write, mut agent: UnixStream) -> io::Result<()> {
    let mut to_agent = agent.try_clone()?;
    // Not joined: it may wait for input until the process ends.
    thread::Builder::new().name("input".to_owned()).spawn(move || {
        let _ = copy(&mut input, &mut to_agent);
        // A client that closed its input reads no more answers. Without this, the process would outlive a killed
        // client.
        let _ = to_agent.shutdown(Shutdown::Both);
    })?;
    match copy(&mut agent, &mut output) {
        // The client ended first, while the agent still had something to say, such as HTTP/2's farewell.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        ended => ended,
    }
}

/// Copies until end of file. Not [`io::copy`], which splices between pipes and sockets, and stops early when both sides
/// are busy.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => to.write_all(&buffer[..read])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::{fd::OwnedFd, unix::net::UnixListener},
        time::Duration,
    };

    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{
        Request, Response, Status,
        transport::{Endpoint, Server},
    };
    use weft_proto::agent::{StatusRequest, StatusResponse, status_client::StatusClient, status_server};

    use super::*;

    /// Answers with more bytes than pipes and sockets buffer.
    struct Verbose;

    #[tonic::async_trait]
    impl status_server::Status for Verbose {
        async fn get(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
            Ok(Response::new(StatusResponse { node: "n".repeat(1024 * 1024), ..StatusResponse::default() }))
        }
    }

    #[tokio::test]
    async fn a_client_reaches_the_agent_through_it() {
        let directory = tempfile::tempdir().unwrap();
        let (agent, client) = (directory.path().join("agent.sock"), directory.path().join("client.sock"));
        let incoming = UnixListenerStream::new(tokio::net::UnixListener::bind(&agent).unwrap());
        let server = Server::builder().add_service(status_server::StatusServer::new(Verbose));
        tokio::spawn(server.serve_with_incoming(incoming));
        // Stands in for the API server and the container runtime: one stream becomes input and output.
        let listener = UnixListener::bind(&client).unwrap();
        let relayed = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let input = stream.try_clone().unwrap();
            relay(input, stream, UnixStream::connect(agent).unwrap())
        });
        let channel = Endpoint::from_shared(format!("unix://{}", client.display())).unwrap().connect().await.unwrap();
        let mut status = StatusClient::new(channel);
        for _ in 0..3 {
            assert_eq!(status.get(StatusRequest {}).await.unwrap().into_inner().node.len(), 1024 * 1024);
        }
        drop(status);
        let ended = tokio::task::spawn_blocking(move || relayed.join().unwrap());
        tokio::time::timeout(Duration::from_secs(10), ended).await.unwrap().unwrap().unwrap();
    }

    /// Standard input and output are pipes, and both are full.
    #[test]
    fn pipes_carry_more_than_they_hold() {
        const BYTES: usize = 1024 * 1024;
        let file = |end: OwnedFd| File::from(end);
        let ((input, asking), (answers, output)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let (agent, far) = UnixStream::pair().unwrap();
        let mut echo = (far.try_clone().unwrap(), far);
        thread::spawn(move || copy(&mut echo.0, &mut echo.1));
        thread::spawn(move || relay(file(input.into()), file(output.into()), agent));
        let asked = thread::spawn(move || {
            let mut asking = asking;
            asking.write_all(&vec![7; BYTES]).unwrap();
            asking
        });
        let (done_tx, done) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let mut answered = vec![0; BYTES];
            let read = (&answers).read_exact(&mut answered);
            done_tx.send(read.map(|()| answered)).unwrap();
        });
        let answered = done.recv_timeout(Duration::from_secs(20)).expect("it stands still").unwrap();
        assert!(answered.iter().all(|byte| *byte == 7));
        // The input is closed only now: end of input would also end the answers.
        drop(asked.join());
    }

    #[test]
    fn the_end_of_the_input_ends_it() {
        let (agent, mut far) = UnixStream::pair().unwrap();
        relay(&b"ask"[..], io::sink(), agent).unwrap();
        let mut asked = String::new();
        far.read_to_string(&mut asked).unwrap();
        assert_eq!(asked, "ask");
    }

    #[test]
    fn the_end_of_the_agent_ends_it_though_input_may_come() {
        let (agent, mut far) = UnixStream::pair().unwrap();
        let (input, _open) = UnixStream::pair().unwrap();
        far.write_all(b"answer").unwrap();
        drop(far);
        let mut answered = Vec::new();
        relay(input, &mut answered, agent).unwrap();
        assert_eq!(answered, b"answer");
    }

    #[test]
    fn without_an_agent_it_says_where_it_looked() {
        let error = run(Path::new("/nowhere/agent.sock")).unwrap_err();
        assert!(error.to_string().contains("no agent answers on /nowhere/agent.sock"), "{error:#}");
    }
}
