//! Clients and servers in other languages, and the command line's: each speaks HTTP/1 and HTTP/2 through both proxies,
//! as its library does, and the server says what arrived.

use std::time::Duration;

use serde_json::Value;
use weft_test_kit::{mesh::Mesh, wait::eventually};

use super::{MESH, server};

/// The servers in other languages.
pub(super) fn servers() -> String {
    let python = server("python", &["/usr/bin/python3", "-c", include_str!("server.py"), "8080"], &[8080]);
    let node = ["/usr/bin/node", "-e", include_str!("server.js"), "8080", "8081"];
    let go = server("go", &["go-http", "server", "8080"], &[8080]);
    [python, server("node", &node, &[8080, 8081]), go].concat()
}

/// The identity by which a server knows the client.
const CLIENT: &str = "client.shop.serviceaccount.identity.linkerd.cluster.local";
/// A body of 100,000 times the digit 0, and none.
const LARGE: (u64, &str) = (100_000, "1120a8195b1b31db766febc0bebe9f500cb97ecb982bfdac33156e6c537064dd");
const EMPTY: (u64, &str) = (0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");

/// What a program prints in the client's pod.
async fn run(mesh: &Mesh, command: &[&str]) -> Result<String, String> {
    let client = mesh.pod_of("shop", "client").await.unwrap();
    let output = mesh.exec("shop", &client, command).await.unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(said.into_owned()) } else { Err(format!("{}: {said}{complained}", command[0])) }
}

/// The server's words: who it is, with which version it was asked, and with what.
fn got(line: &str) -> (String, String, String, (u64, String)) {
    let said: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    assert_eq!(said["client"], CLIENT, "{line}");
    let text = |key: &str| said[key].as_str().unwrap().to_owned();
    (text("server"), text("version"), text("method"), (said["length"].as_u64().unwrap(), text("sha256")))
}

fn expected(server: &str, version: &str, method: &str, body: (u64, &str)) -> (String, String, String, (u64, String)) {
    (server.to_owned(), version.to_owned(), method.to_owned(), (body.0, body.1.to_owned()))
}

async fn answers(mesh: &Mesh) {
    for target in ["http://python.shop:8080/", "http://node.shop:8080/", "http://go.shop:8080/"] {
        eventually("the servers answer", Duration::from_secs(60), async || run(mesh, &["curl", "-fsS", target]).await)
            .await;
    }
}

#[test]
fn curl_speaks_every_version_to_servers_in_python_node_and_go() {
    MESH.test(async |mesh| {
        answers(mesh).await;
        let servers = [
            ("python", "8080", &[("--http1.0", "1.0"), ("--http1.1", "1.1")][..]),
            ("node", "8080", &[("--http1.0", "1.0"), ("--http1.1", "1.1")]),
            ("node", "8081", &[("--http2-prior-knowledge", "2.0")]),
            ("go", "8080", &[("--http1.0", "1.0"), ("--http1.1", "1.1"), ("--http2-prior-knowledge", "2.0")]),
        ];
        for (server, port, versions) in servers {
            for (flag, version) in versions {
                let url = format!("http://{server}.shop:{port}/");
                let curl =
                    |more: &str| format!("head -c 100000 /dev/zero | tr '\\0' 0 | curl -fsS {flag} {more} {url}");
                let ask = async |more: &str| run(mesh, &["sh", "-c", &curl(more)]).await.unwrap();
                assert_eq!(got(&ask("").await), expected(server, version, "GET", EMPTY));
                let posted = expected(server, version, "POST", LARGE);
                assert_eq!(got(&ask("--data-binary @-").await), posted);
                assert_eq!(got(&ask("--data-binary @- -H 'Expect: 100-continue'").await), posted);
                if *version != "1.0" {
                    assert_eq!(got(&ask("-X POST -T - -H 'Transfer-Encoding: chunked'").await), posted);
                }
                let head = ask("--head").await;
                let line = if *version == "2.0" { "HTTP/2 200" } else { "HTTP/1.1 200" };
                assert!(head.starts_with(line) || head.starts_with("HTTP/1.0 200"), "{server} {flag}: {head}");
            }
        }
    });
}

#[test]
fn clients_in_python_node_and_go_keep_their_connections_and_get_trailers() {
    MESH.test(async |mesh| {
        answers(mesh).await;
        let hosts = ["python.shop:8080", "node.shop:8080"];
        let python = ["/usr/bin/python3", "-c", include_str!("client.py"), hosts[0], hosts[1]];
        let said = run(mesh, &python).await.unwrap();
        let of = |server: &str| {
            [("GET", EMPTY), ("POST", LARGE), ("POST", LARGE), ("GET", EMPTY)]
                .map(|(method, body)| expected(server, "1.1", method, body))
        };
        assert_eq!(said.lines().map(got).collect::<Vec<_>>(), [of("python"), of("node")].concat());

        let node = ["/usr/bin/node", "-e", include_str!("client.js"), "http://node.shop:8080", "http://node.shop:8081"];
        let said = run(mesh, &node).await.unwrap();
        let said: Vec<_> = said.lines().map(got).collect();
        for version in ["1.1", "2.0"] {
            let expected = expected("node", version, "POST", LARGE);
            assert_eq!(said.iter().filter(|got| **got == expected).count(), 20, "{version}: {said:?}");
        }

        for (version, server, port) in
            [("1.1", "node", "8080"), ("2.0", "node", "8081"), ("1.1", "go", "8080"), ("2.0", "go", "8080")]
        {
            let url = format!("http://{server}.shop:{port}/");
            let said = run(mesh, &["go-http", "client", version, &url]).await.unwrap();
            let said: Vec<_> = said.lines().map(got).collect();
            assert_eq!(said, vec![expected(server, version, "POST", LARGE); 20], "{url}");
        }
    });
}

#[test]
fn h2load_and_nghttp_lose_nothing() {
    MESH.test(async |mesh| {
        answers(mesh).await;
        for (protocol, target) in [
            ("--h1", "http://python.shop:8080/"),
            ("--h1", "http://node.shop:8080/"),
            ("--no-tls-proto=h2c", "http://node.shop:8081/"),
        ] {
            let said = run(mesh, &["h2load", protocol, "-n", "200", "-c", "4", "-m", "8", target]).await.unwrap();
            assert!(said.contains("200 done, 200 succeeded, 0 failed, 0 errored, 0 timeout"), "{target}: {said}");
        }
        let posted =
            run(mesh, &["sh", "-c", "head -c 100000 /dev/zero | tr '\\0' 0 | nghttp -v -d - http://node.shop:8081/"]);
        let said = posted.await.unwrap();
        for part in [":status: 200", "x-length: 100000", LARGE.1] {
            assert!(said.contains(part), "no {part}: {said}");
        }
    });
}
