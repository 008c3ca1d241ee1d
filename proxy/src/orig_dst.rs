//! Asks the kernel for the original destination of an accepted connection.
//!
//! Owns the question `SO_ORIGINAL_DST`. Refuses to guess: without an answer the connection is dropped. It does not
//! know who answers (conntrack, or an eBPF program).

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use socket2::SockRef;
use tokio::net::TcpStream;

/// Why the original destination is unknown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OrigDstError {
    /// The kernel has no answer: the pod is not redirected, or the connection arrived in another way.
    #[error("SO_ORIGINAL_DST has no answer for the connection: is the pod's redirection in place?")]
    Query(#[source] io::Error),
    /// The answer is not an IP address.
    #[error("SO_ORIGINAL_DST answered with an address that is not IP")]
    Family,
}

/// Returns the address that the client dialled, IPv4-mapped addresses as IPv4.
///
/// The peer's family selects the socket level, because a dual-stack listener accepts IPv4 as mapped IPv6.
pub(crate) fn original_dst(stream: &TcpStream, peer: SocketAddr) -> Result<SocketAddr, OrigDstError> {
    let socket = SockRef::from(stream);
    let answer = match peer.ip().to_canonical() {
        IpAddr::V4(_) => socket.original_dst_v4(),
        IpAddr::V6(_) => socket.original_dst_v6(),
    };
    let addr = answer.map_err(OrigDstError::Query)?.as_socket().ok_or(OrigDstError::Family)?;
    Ok(canonical(addr))
}

/// An address with IPv4-mapped IPv6 converted to IPv4 and without flow labels.
pub(crate) fn canonical(addr: SocketAddr) -> SocketAddr {
    match (addr.ip().to_canonical(), addr) {
        (IpAddr::V6(_), v6) => v6,
        (v4, _) => SocketAddr::new(v4, addr.port()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_addresses_become_ipv4() {
        assert_eq!(canonical("[::ffff:10.0.0.1]:80".parse().unwrap()), "10.0.0.1:80".parse().unwrap());
        assert_eq!(canonical("[fd00::1]:80".parse().unwrap()), "[fd00::1]:80".parse().unwrap());
    }

    #[tokio::test]
    async fn no_answer_is_an_error_and_never_a_guess() {
        // Whether the kernel answers ENOPROTOOPT, ENOENT or the socket's own address depends on its netfilter; a guess
        // of ours would differ from the dialled address.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let local = listener.local_addr().unwrap();
        let _client = TcpStream::connect(local).await.unwrap();
        let (accepted, peer) = listener.accept().await.unwrap();
        match original_dst(&accepted, peer) {
            Ok(addr) => assert_eq!(addr, local),
            Err(error) => assert!(matches!(error, OrigDstError::Query(_))),
        }
    }
}
