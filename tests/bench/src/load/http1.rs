//! HTTP/1.1 requests, without a library between: the generator shares the processors with what it measures.

use std::{net::SocketAddr, rc::Rc, time::Instant};

use anyhow::{Context as _, bail};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{EXCHANGE_WITHIN, Meter, PAUSE, connect};

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: server.bench\r\nuser-agent: weft-bench\r\naccept: */*\r\n\r\n";
const LAST_REQUEST: &[u8] =
    b"GET / HTTP/1.1\r\nhost: server.bench\r\nuser-agent: weft-bench\r\naccept: */*\r\nconnection: close\r\n\r\n";
/// The most header fields of a response.
const FIELDS: usize = 32;
/// The most bytes of a response.
const RESPONSE_BYTES: usize = 64 * 1024;

/// Requests on one connection for ever.
pub(super) async fn keep_asking(target: SocketAddr, meter: Rc<Meter>) {
    loop {
        if let Err(error) = ask_until_it_fails(target, &meter).await {
            meter.failed(&error);
        }
        sleep(PAUSE).await;
    }
}

async fn ask_until_it_fails(target: SocketAddr, meter: &Meter) -> anyhow::Result<()> {
    let mut connection = Connection::open(target).await?;
    loop {
        let started = Instant::now();
        connection.exchange().await?;
        meter.done(started);
    }
}

/// Requests on connections of their own for ever. The server closes first, so that the client's ports do not run out.
pub(super) async fn keep_connecting(target: SocketAddr, meter: Rc<Meter>) {
    loop {
        let started = Instant::now();
        let once = async {
            let mut connection = Connection::open(target).await?;
            connection.send_and_receive(LAST_REQUEST).await?;
            let rest = connection.stream.read_u8().await;
            anyhow::ensure!(rest.is_err(), "more than the response");
            anyhow::Ok(())
        };
        match timeout(EXCHANGE_WITHIN, once).await.context("no response in time").flatten() {
            Ok(()) => meter.done(started),
            Err(error) => {
                meter.failed(&error);
                sleep(PAUSE).await;
            }
        }
    }
}

/// A connection after one request.
pub(super) async fn once(target: SocketAddr) -> anyhow::Result<TcpStream> {
    let mut connection = Connection::open(target).await?;
    connection.exchange().await?;
    Ok(connection.stream)
}

/// A connection without a request in flight.
pub(super) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    pub(super) async fn open(target: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self { stream: connect(target).await?, buffer: Vec::with_capacity(4096) })
    }

    /// One request and its response.
    ///
    /// # Errors
    /// It is not answered with 200 in time.
    pub(super) async fn exchange(&mut self) -> anyhow::Result<()> {
        // One timer for each request is part of the generator's cost, the same for all.
        timeout(EXCHANGE_WITHIN, self.send_and_receive(REQUEST)).await.context("no response in time")?
    }

    async fn send_and_receive(&mut self, request: &[u8]) -> anyhow::Result<()> {
        self.stream.write_all(request).await?;
        self.buffer.clear();
        let mut length = None;
        loop {
            let count = self.stream.read_buf(&mut self.buffer).await?;
            anyhow::ensure!(count > 0, "the connection ended before the response");
            if length.is_none() {
                length = response_bytes(&self.buffer)?;
            }
            match length {
                Some(length) if self.buffer.len() == length => return Ok(()),
                Some(length) if self.buffer.len() > length => bail!("more than the response"),
                _ => anyhow::ensure!(self.buffer.len() <= RESPONSE_BYTES, "a response without an end"),
            }
        }
    }
}

/// The bytes of a response, head and body, once its head is there.
///
/// # Errors
/// It is not a 200 with a length.
fn response_bytes(buffer: &[u8]) -> anyhow::Result<Option<usize>> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut response = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(head) = response.parse(buffer)? else { return Ok(None) };
    anyhow::ensure!(response.code == Some(200), "status {}", response.code.unwrap_or_default());
    let length = response.headers.iter().find(|field| field.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|field| std::str::from_utf8(field.value).ok()?.parse::<usize>().ok());
    Ok(Some(head.saturating_add(length.context("a response without content-length")?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_ends_where_its_head_says() {
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
        assert_eq!(response_bytes(&head[..20]).unwrap(), None);
        assert_eq!(response_bytes(head).unwrap(), Some(head.len() + 5));
        assert!(response_bytes(b"HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n").is_err());
        assert!(response_bytes(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(response_bytes(b"SSH-2.0\r\n").is_err());
    }
}
