//! Bytes without HTTP: one stream, and 64 bytes back and forth.

use std::{net::SocketAddr, rc::Rc, time::Instant};

use anyhow::Context as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{EXCHANGE_WITHIN, Meter, PAUSE, connect, server};

const PING_BYTES: usize = 64;
const READ_BYTES: usize = 256 * 1024;

/// Receives one stream for ever.
pub(super) async fn receive(target: SocketAddr, meter: Rc<Meter>) {
    loop {
        let stream = async {
            let mut stream = connect(target).await?;
            stream.write_all(&[server::SEND]).await?;
            let mut buffer = vec![0; READ_BYTES];
            loop {
                let read =
                    timeout(EXCHANGE_WITHIN, stream.read(&mut buffer)).await.context("the stream stands still")?;
                let count = read?;
                anyhow::ensure!(count > 0, "the stream ended");
                meter.received(count);
            }
        };
        let ended: anyhow::Result<std::convert::Infallible> = stream.await;
        let Err(error) = ended;
        meter.failed(&error);
        sleep(PAUSE).await;
    }
}

/// Sends 64 bytes back and forth for ever.
pub(super) async fn ping(target: SocketAddr, meter: Rc<Meter>) {
    loop {
        let pings = async {
            let mut stream = connect(target).await?;
            stream.write_all(&[server::ECHO]).await?;
            let (message, mut answer) = ([7; PING_BYTES], [0; PING_BYTES]);
            loop {
                let started = Instant::now();
                stream.write_all(&message).await?;
                timeout(EXCHANGE_WITHIN, stream.read_exact(&mut answer)).await.context("no answer in time")??;
                meter.done(started);
            }
        };
        let ended: anyhow::Result<std::convert::Infallible> = pings.await;
        let Err(error) = ended;
        meter.failed(&error);
        sleep(PAUSE).await;
    }
}

/// A connection after one byte went back and forth.
pub(super) async fn once(target: SocketAddr) -> anyhow::Result<TcpStream> {
    let mut stream = connect(target).await?;
    stream.write_all(&[server::ECHO, 7]).await?;
    anyhow::ensure!(stream.read_u8().await? == 7, "the server does not echo");
    Ok(stream)
}
