//! One HTTP request from inside a network namespace, for the admin port that a pod also serves on loopback.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    thread,
    time::Duration,
};

use nix::sched::{CloneFlags, setns};

/// The longest time for the whole request.
const LIMIT: Duration = Duration::from_secs(5);

/// The body of a 200 answer. Blocks.
///
/// # Errors
/// The namespace is gone, nobody listens, or the answer is another status.
pub(super) fn get(netns: &Path, port: u16, path: &str) -> io::Result<String> {
    let namespace = File::open(netns)?;
    // On its own thread: the change of namespace lasts until the thread ends.
    thread::scope(|scope| {
        let request = scope.spawn(|| {
            setns(&namespace, CloneFlags::CLONE_NEWNET)?;
            request(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), path)
        });
        request.join().unwrap_or_else(|_| Err(io::Error::other("the requesting thread panicked")))
    })
}

/// HTTP/1.0, so that the answer ends with the connection.
fn request(address: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    // In one write: a server that answers before it has read everything resets the connection when it closes.
    stream.write_all(format!("GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| io::Error::other("an answer without a head"))?;
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(io::Error::other(format!("GET {path}: {status}")));
    }
    Ok(body.to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn serve(answer: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.extend(byte);
            }
            stream.write_all(answer.as_bytes()).unwrap();
        });
        address
    }

    #[test]
    fn returns_the_body_of_a_good_answer() {
        assert_eq!(request(serve("HTTP/1.0 200 OK\r\n\r\nx 1\n"), "/metrics").unwrap(), "x 1\n");
    }

    #[test]
    fn another_status_is_an_error_that_names_it() {
        let error = request(serve("HTTP/1.0 503 Service Unavailable\r\n\r\nno\n"), "/ready").unwrap_err();
        assert!(error.to_string().contains("503"), "{error}");
    }
}
