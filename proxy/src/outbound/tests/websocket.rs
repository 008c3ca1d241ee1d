//! WebSocket through both sides of the proxy: sizes at the borders of its frames, fragments, pings between them, and how it ends.

use futures::{SinkExt as _, StreamExt as _};
use tokio_tungstenite::{
    WebSocketStream, accept_async, client_async,
    tungstenite::{
        Message,
        protocol::{
            CloseFrame,
            frame::{
                Frame,
                coding::{CloseCode, Data, OpCode},
            },
        },
    },
};

use super::{pair::in_front_of, *};

/// A connection to a server that sends each message back, and closes as it was closed.
async fn connected() -> (Proxy, WebSocketStream<TcpStream>) {
    let server = serve_each(|stream| async move {
        let mut socket = accept_async(stream).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if message.is_text() || message.is_binary() {
                socket.send(message).await.unwrap();
            }
        }
    });
    let proxy = in_front_of(server.await).await;
    let (socket, response) = client_async("ws://server.demo/socket", proxy.connect().await).await.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    (proxy, socket)
}

async fn received(socket: &mut WebSocketStream<TcpStream>) -> Message {
    let next = tokio::time::timeout(Duration::from_secs(10), socket.next()).await;
    next.expect("a message within 10 s").unwrap().unwrap()
}

#[tokio::test]
async fn websocket_messages_of_all_sizes_come_back() {
    let (_proxy, mut socket) = connected().await;
    // The length is in 7, 16 or 64 bits.
    for length in [0, 1, 125, 126, 127, 128, 65_535, 65_536, 65_537, 1 << 20] {
        for message in [Message::text("x".repeat(length)), Message::binary(vec![0xfe; length])] {
            socket.send(message.clone()).await.unwrap();
            assert!(received(&mut socket).await == message, "{length} bytes");
        }
    }
}

#[tokio::test]
async fn websocket_fragments_with_pings_between_them_are_one_message() {
    let (_proxy, mut socket) = connected().await;
    for parts in [2, 3, 50] {
        for part in 0..parts {
            let opcode = OpCode::Data(if part == 0 { Data::Text } else { Data::Continue });
            let frame = Frame::message(format!("{part};"), opcode, part + 1 == parts);
            socket.send(Message::Frame(frame)).await.unwrap();
            socket.send(Message::Ping(Bytes::from(vec![7; 125]))).await.unwrap();
        }
        let (mut pongs, mut text) = (0, None);
        while pongs < parts || text.is_none() {
            match received(&mut socket).await {
                Message::Pong(payload) => pongs += usize::from(payload == vec![7; 125]),
                other => text = Some(other),
            }
        }
        let expected: String = (0..parts).map(|part| format!("{part};")).collect();
        assert_eq!(text, Some(Message::text(expected)));
    }
}

#[tokio::test]
async fn websocket_close_codes_and_reasons_come_back() {
    for code in [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999] {
        let (_proxy, mut socket) = connected().await;
        let close = CloseFrame { code: CloseCode::from(code), reason: "enough".into() };
        socket.close(Some(close.clone())).await.unwrap();
        assert_eq!(received(&mut socket).await, Message::Close(Some(close)), "{code}");
        let ended = tokio::time::timeout(Duration::from_secs(10), socket.next()).await;
        assert!(ended.expect("an end within 10 s").is_none_or(|ended| ended.is_err()), "{code}");
    }
}
