//! Cases after the suite of Autobahn, by its sections 1 to 7, 9 and 10, from the client's side: each has to end through
//! both proxies with the bytes with which it ends without them, those that a server answers with an error included.

use super::*;

const TEXT: u8 = 0x1;
const BINARY: u8 = 0x2;
const CLOSE: u8 = 0x8;
const PING: u8 = 0x9;
const PONG: u8 = 0xa;
/// The last frame of a message.
const FIN: u8 = 0x80;

/// A case, by its section, and the bytes that its client sends after the handshake.
type Case = (String, Vec<u8>);

fn whole(opcode: u8, payload: &[u8]) -> Vec<u8> {
    frame(FIN | opcode, payload)
}

/// A message in frames of `size` bytes, with `between` before each but the first.
fn fragments(opcode: u8, payload: &[u8], size: usize, between: &[u8]) -> Vec<u8> {
    let count = payload.len().div_ceil(size);
    let pieces = payload.chunks(size).enumerate().map(|(at, piece)| {
        let first = if at == 0 { opcode } else { 0 } | if at + 1 == count { FIN } else { 0 };
        [if at == 0 { &[] } else { between }, &frame(first, piece)].concat()
    });
    pieces.collect::<Vec<_>>().concat()
}

fn close(code: u16, reason: &[u8]) -> Vec<u8> {
    whole(CLOSE, &[&code.to_be_bytes(), reason].concat())
}

/// Cases that end with a close of the client's, unless the server has ended them before.
fn messages() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: String, frames: Vec<u8>| cases.push((name, [frames, close(1000, b"")].concat()));
    for (kind, opcode) in [("text", TEXT), ("binary", BINARY)] {
        for length in [0, 1, 125, 126, 127, 128, 65_535, 65_536, 65_537] {
            add(format!("1: {kind} of {length} bytes"), whole(opcode, &vec![b'*'; length]));
        }
        for size in [64, 1000, 4096, 65_536, 200_000] {
            add(format!("9, 10: {kind} in frames of {size} bytes"), fragments(opcode, &vec![b'*'; 300_000], size, &[]));
        }
    }
    for length in [0, 5, 125, 126] {
        add(format!("2: ping of {length} bytes"), whole(PING, &vec![0xfe; length]));
        add(format!("2: pong of {length} bytes"), whole(PONG, &vec![0xfe; length]));
    }
    add("2: ten pings".into(), whole(PING, b"ping").repeat(10));
    add("2: pong, then ping".into(), [whole(PONG, b"unsolicited"), whole(PING, b"ping")].concat());
    for bits in 1..8 {
        let reserved = |opcode: u8| frame(FIN | bits << 4 | opcode, b"reserved");
        for (kind, opcode) in [("text", TEXT), ("binary", BINARY), ("ping", PING), ("close", CLOSE)] {
            add(format!("3: {kind} with reserved bits {bits}"), reserved(opcode));
        }
        add(format!("3: reserved bits {bits} after a text"), [whole(TEXT, b"text"), reserved(TEXT)].concat());
    }
    for opcode in (0x3..=0x7).chain(0xb..=0xf) {
        for payload in [&b""[..], b"reserved"] {
            let after_text = [whole(TEXT, b"text"), whole(opcode, payload), whole(PING, b"ping")].concat();
            add(format!("4: opcode {opcode:#x}, {} bytes", payload.len()), after_text);
        }
    }
    let ping = whole(PING, b"between");
    for size in [1, 3, 7] {
        for (name, between) in [("", &b""[..]), (" and pings", &ping)] {
            add(format!("5: frames of {size} bytes{name}"), fragments(TEXT, b"fragments of a text", size, between));
        }
    }
    for (kind, opcode) in [("ping", PING), ("pong", PONG), ("close", CLOSE)] {
        add(format!("5: {kind} in two frames"), [frame(opcode, b"\x03"), frame(FIN, b"\xe8")].concat());
    }
    for first in [0, FIN] {
        add(format!("5: nothing to continue ({first:#x})"), [frame(first, b"rest"), whole(TEXT, b"text")].concat());
    }
    add("5: a text within a text".into(), [frame(TEXT, b"one"), whole(TEXT, b"two")].concat());
    add("5: no end".into(), frame(TEXT, b"begun"));
    let texts: [&[u8]; 16] = [
        "κόσμε".as_bytes(),
        "\u{0}\u{7f}\u{80}\u{7ff}\u{800}\u{ffff}\u{10000}\u{10ffff}".as_bytes(),
        b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce\xbc\xce\xb5\xed\xa0\x80\x65\x64\x69\x74\x65\x64",
        b"\xf4\x90\x80\x80",
        b"\xf8\x88\x80\x80\x80",
        b"\xfc\x84\x80\x80\x80\x80",
        b"\x80",
        b"\x80\xbf\x80\xbf",
        b"\xc0\xaf",
        b"\xe0\x80\xaf",
        b"\xf0\x80\x80\xaf",
        b"\xed\xbf\xbf",
        b"\xce",
        b"\xe1\xbd",
        b"\xfe",
        b"\xff",
    ];
    for text in texts {
        for size in [text.len(), 1] {
            let frames = fragments(TEXT, text, size, &[]);
            add(format!("6: text {} in frames of {size} bytes", text.escape_ascii()), frames);
        }
    }
    cases
}

/// Cases of closes.
fn closes() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: &str, frames: Vec<u8>| cases.push((format!("7: {name}"), frames));
    add("without a code", whole(CLOSE, b""));
    add("half a code", whole(CLOSE, b"\x03"));
    add("twice", close(1000, b"").repeat(2));
    add("then a ping", [close(1000, b""), whole(PING, b"ping")].concat());
    add("then a text", [close(1000, b""), whole(TEXT, b"text")].concat());
    add("in a text", [frame(TEXT, b"begun"), close(1000, b""), frame(FIN, b"rest")].concat());
    add("longest reason", close(1000, &[b'*'; 123]));
    add("reason that is too long", close(1000, &[b'*'; 124]));
    add("reason that is no text", close(1000, b"\xce\xba\xe1\xbd\xb9\xed\xa0\x80"));
    let known = [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014, 3000, 3999, 4000, 4999];
    let unknown = [0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65_535];
    for code in known.into_iter().chain(unknown) {
        add(&format!("code {code}"), close(code, b"reason"));
    }
    cases
}

/// Sends a case's bytes, in pieces of `size`, and returns what the server answers after its head.
async fn run(mut stream: TcpStream, bytes: &[u8], size: usize) -> Vec<u8> {
    let request = "GET /socket HTTP/1.1\r\nhost: server.demo\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
                   sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 101 "));
    let (mut read, mut write) = stream.split();
    let send = async {
        for piece in bytes.chunks(size) {
            write.write_all(piece).await.unwrap();
        }
        // The server waits for the rest of what is half.
        write.shutdown().await.unwrap();
    };
    let mut answer = Vec::new();
    let exchange = async { tokio::join!(send, read.read_to_end(&mut answer)).1.unwrap() };
    tokio::time::timeout(Duration::from_secs(20), exchange).await.expect("an end within 20 s");
    answer
}

#[tokio::test]
async fn autobahns_cases_end_as_they_do_without_a_proxy() {
    let server = serve_each(|stream| async move {
        let mut socket = accept_async(stream).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if (message.is_text() || message.is_binary()) && socket.send(message).await.is_err() {
                break;
            }
        }
        // Unread bytes would make its end a reset, which may overtake what it has sent.
        let mut stream = socket.into_inner();
        stream.shutdown().await.unwrap();
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    })
    .await;
    let proxy = in_front_of(server).await;
    let cases = [messages(), closes()].concat();
    let mut answers = HashSet::new();
    for (name, bytes) in &cases {
        let direct = run(TcpStream::connect(server).await.unwrap(), bytes, bytes.len()).await;
        // Whole, and the short ones also in pieces that end in the middle of frames.
        for size in [bytes.len(), 7].into_iter().filter(|size| bytes.len() / size < 1000) {
            let proxied = run(proxy.connect().await, bytes, size).await;
            assert!(proxied == direct, "{name}, in pieces of {size}: {} bytes, {}", proxied.len(), direct.len());
        }
        answers.insert(direct);
    }
    // Echoes, errors and closes differ.
    assert!(answers.len() > cases.len() / 4, "{} different answers to {} cases", answers.len(), cases.len());
}
