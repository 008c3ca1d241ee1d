//! WebSocket through both sides of the proxy: sizes at the borders of its frames, fragments, pings between them, and
//! how it ends.

use std::collections::HashSet;

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

use super::{pair::in_front_of, raw::read_head, *};

mod cases;

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

/// A connection to a server that agrees to compression if that is offered, and then sends every byte back.
async fn compressing() -> (Proxy, TcpStream) {
    let server = serve_each(|mut stream| async move {
        let head = read_head(&mut stream).await.unwrap();
        let is_offered = head.contains("\r\nsec-websocket-extensions: permessage-deflate; client_max_window_bits\r\n");
        let agreed = if is_offered { "permessage-deflate; server_no_context_takeover" } else { "nothing" };
        let answer = format!(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nsec-websocket-extensions: {agreed}\r\n\r\n"
        );
        stream.write_all(answer.as_bytes()).await.unwrap();
        let (mut read, mut write) = stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    });
    let proxy = in_front_of(server.await).await;
    let mut stream = proxy.connect().await;
    let request = "GET /socket HTTP/1.1\r\nhost: server.demo\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
                   sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
                   sec-websocket-extensions: permessage-deflate; client_max_window_bits\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = read_head(&mut stream).await.unwrap();
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    for agreed in ["extensions: permessage-deflate; server_no_context_takeover", "accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="]
    {
        assert!(head.contains(&format!("\r\nsec-websocket-{agreed}\r\n")), "{head}");
    }
    (proxy, stream)
}

/// A client's frame with this first byte.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    const MASK: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];
    let length = match payload.len() {
        length @ 0..=125 => vec![0x80 | u8::try_from(length).unwrap()],
        length @ 126..=0xffff => [&[0x80 | 126][..], &u16::try_from(length).unwrap().to_be_bytes()].concat(),
        length => [&[0x80 | 127][..], &u64::try_from(length).unwrap().to_be_bytes()].concat(),
    };
    let masked = payload.iter().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask);
    [first].into_iter().chain(length).chain(MASK).chain(masked).collect()
}

/// Sends bytes, and waits until the same come back.
async fn echoed(stream: &mut TcpStream, bytes: &[u8]) {
    let mut back = vec![0; bytes.len()];
    stream.write_all(bytes).await.unwrap();
    let read = tokio::time::timeout(Duration::from_secs(10), stream.read_exact(&mut back)).await;
    read.expect("an answer within 10 s").unwrap();
    assert_eq!(back, bytes);
}

/// RFC 7692, section 7.2.3.1: "Hello", compressed.
const COMPRESSED: &[u8] = &[0xf2, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00];

#[tokio::test]
async fn websocket_extensions_are_agreed_end_to_end_and_their_frames_pass_unchanged() {
    let (_proxy, mut stream) = compressing().await;
    // A whole message with RSV1, one in two fragments, and bits that no extension has.
    let (first, second) = COMPRESSED.split_at(3);
    for frames in
        [frame(0xc1, COMPRESSED), [frame(0x41, first), frame(0x80, second)].concat(), frame(0xb1, b"RSV2, RSV3")]
    {
        echoed(&mut stream, &frames).await;
    }
    // Reserved opcodes, of data and of control.
    for opcode in (0x3..=0x7).chain(0xb..=0xf) {
        echoed(&mut stream, &frame(0x80 | opcode, b"reserved")).await;
    }
}

#[tokio::test]
async fn websocket_frames_in_single_bytes_pass_as_they_come() {
    let (_proxy, mut stream) = compressing().await;
    for frames in [frame(0x81, b"text"), frame(0x89, b""), frame(0xc1, COMPRESSED)] {
        for byte in frames {
            // Nothing waits for the rest of a frame.
            echoed(&mut stream, &[byte]).await;
        }
    }
}
