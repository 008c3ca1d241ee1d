//! The server's side of a connection over which metrics are scraped, for doubles of proxies: HTTP/1, with a text for
//! each request, whatever its path is.

use std::io;

use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

/// A client's connection.
#[derive(Debug)]
pub struct ScrapeConnection {
    stream: BufReader<TcpStream>,
    line: String,
}

impl ScrapeConnection {
    /// Serves a connection that was accepted.
    pub fn new(stream: TcpStream) -> Self {
        // Without it, answers are slower and nothing else.
        let _ = stream.set_nodelay(true);
        Self { stream: BufReader::new(stream), line: String::new() }
    }

    /// Waits for the next request, which must not have a body. False at the end of the connection.
    pub async fn next_request(&mut self) -> bool {
        loop {
            self.line.clear();
            match self.stream.read_line(&mut self.line).await {
                Ok(read) if read > 0 => {}
                _ => return false,
            }
            if self.line == "\r\n" {
                return true;
            }
        }
    }

    /// Answers the request.
    ///
    /// # Errors
    /// The client has closed the connection.
    pub async fn answer(&mut self, text: &str) -> io::Result<()> {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n", text.len());
        self.stream.write_all(head.as_bytes()).await?;
        self.stream.write_all(text.as_bytes()).await
    }
}

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncReadExt as _, net::TcpListener};

    use super::*;

    #[tokio::test]
    async fn every_request_of_a_connection_is_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let mut client = ScrapeConnection::new(listener.accept().await.unwrap().0);
            let mut requests = 0;
            while client.next_request().await {
                requests += 1;
                client.answer(&format!("page {requests}\n")).await.unwrap();
            }
            requests
        });
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answers = String::new();
        stream.read_to_string(&mut answers).await.unwrap();
        let pages = ["page 1", "page 2"].map(|page| answers.contains(&format!("content-length: 7\r\n\r\n{page}\n")));
        assert_eq!((pages, server.await.unwrap()), ([true; 2], 2), "{answers}");
    }
}
