//! Frames of a stack, and which group of work each belongs to, by the names of functions.

use rustc_demangle::demangle;
use serde::Serialize;

/// What a proxy does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// System calls and interrupts that move packets: sockets, TCP, IP, the programs of eBPF.
    KernelNetwork,
    /// The rest of the kernel: epoll, scheduling, memory.
    KernelOther,
    /// rustls, aws-lc, and our handling of TLS; OpenSSL of HAProxy.
    Tls,
    /// Reading and writing HTTP/1.
    Http1,
    /// Reading and writing HTTP/2.
    Http2,
    /// What the proxy decides about a request: routing, policy, balancing, headers.
    Decisions,
    /// Counting.
    Metrics,
    /// malloc and free.
    Allocator,
    /// tokio, mio, wakers, channels.
    Runtime,
    /// What no name tells.
    Other,
}

/// A function in a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) symbol: String,
    kernel: bool,
    /// File of the code.
    object: String,
}

impl Frame {
    /// A line of `perf script`: address, symbol with its offset, object in parentheses.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let (_, rest) = line.trim().split_once(' ')?;
        let (symbol, object) = rest.rsplit_once(" (")?;
        let object = object.strip_suffix(')')?.to_owned();
        let symbol = symbol.rsplit_once("+0x").map_or(symbol, |(symbol, _)| symbol);
        let kernel = object.starts_with("[kernel") || object.starts_with("[bpf") || object.starts_with("bpf_prog");
        Some(Self { symbol: format!("{:#}", demangle(symbol)), kernel, object })
    }
}

/// Beginnings of names of functions in the kernel's network. Most of its other work has no such frame at all.
const NETWORK: [&str; 26] = [
    "tcp_",
    "__tcp_",
    "inet",
    "__inet",
    "ip_",
    "__ip_",
    "ipv6",
    "sock_",
    "__sock",
    "__sys_send",
    "__sys_recv",
    "skb_",
    "__skb",
    "net_rx",
    "__netif",
    "netif",
    "napi",
    "__napi",
    "process_backlog",
    "veth",
    "dev_",
    "__dev",
    "br_",
    "nf_",
    "bpf_prog",
    "unix_",
];

/// Groups by what names contain, in order: `h2` uses `tokio` and is HTTP/2.
const NAMES: [(Group, &[&str]); 7] = [
    (Group::Allocator, &["je_", "_rjem", "tikv_jemallocator", "malloc", "calloc", "realloc", "cfree", "_int_free"]),
    (Group::Metrics, &["prometheus_client::", "weft_proxy::metrics::", "weft_runtime::metrics::"]),
    (
        Group::Tls,
        &[
            "rustls",
            "aws_lc",
            "weft_tls::",
            "aes_",
            "gcm_",
            "ghash",
            "gf_",
            "chacha",
            "sha256",
            "sha512",
            "ecp_",
            "EVP_",
            "SSL_",
        ],
    ),
    (
        Group::Http2,
        &[
            "h2::",
            "hyper::proto::h2",
            "hyper::server::conn::http2",
            "hyper::client::conn::http2",
            "weft_proxy::outbound::h2",
        ],
    ),
    (
        Group::Http1,
        &[
            "httparse",
            "hyper::proto::h1",
            "hyper::server::conn::http1",
            "hyper::client::conn::http1",
            "weft_proxy::outbound::h1",
        ],
    ),
    (
        Group::Runtime,
        &["weft_proxy::io::", "tokio", "mio::", "futures_", "parking_lot", "weft_runtime::", "slab::", "epoll_wait"],
    ),
    (Group::Decisions, &["weft_proxy::", "http::", "hyper"]),
];

impl Group {
    /// All of them.
    pub(super) const ALL: [Self; 10] = [
        Self::KernelNetwork,
        Self::KernelOther,
        Self::Tls,
        Self::Http1,
        Self::Http2,
        Self::Decisions,
        Self::Metrics,
        Self::Allocator,
        Self::Runtime,
        Self::Other,
    ];

    /// The name in tables.
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::KernelNetwork => "kernel: network",
            Self::KernelOther => "kernel: other",
            Self::Tls => "TLS",
            Self::Http1 => "HTTP/1",
            Self::Http2 => "HTTP/2",
            Self::Decisions => "decisions",
            Self::Metrics => "metrics",
            Self::Allocator => "allocator",
            Self::Runtime => "runtime",
            Self::Other => "other",
        }
    }

    /// The group of a stack, innermost frame first.
    pub(super) fn of(frames: &[Frame]) -> Self {
        if frames.first().is_some_and(|frame| frame.kernel) {
            let mut kernel = frames.iter().take_while(|frame| frame.kernel);
            let network = kernel.any(|frame| NETWORK.iter().any(|name| frame.symbol.starts_with(name)));
            return if network { Self::KernelNetwork } else { Self::KernelOther };
        }
        frames.iter().find_map(Frame::group).unwrap_or(Self::Other)
    }
}

impl Frame {
    /// The group that the frame names. Functions of the standard library name none: they work for their caller.
    fn group(&self) -> Option<Group> {
        if self.object.contains("libssl") || self.object.contains("libcrypto") {
            return Some(Group::Tls);
        }
        let name = self.symbol.trim_start_matches(['<', '&']);
        if ["core::", "alloc::", "std::", "dyn ", "["].iter().any(|library| name.starts_with(library)) {
            return None;
        }
        // The path of the type or function itself, without its parameters: they name other code.
        let own = name.split(['<', ' ']).next().unwrap_or(name);
        let named = |names: &&[&str]| names.iter().any(|part| own.starts_with(part));
        NAMES.iter().find(|(_, names)| named(names)).map(|(group, _)| *group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(symbol: &str, object: &str) -> Frame {
        Frame::parse(&format!("  1234 {symbol}+0x12 ({object})")).unwrap()
    }

    #[test]
    fn each_group_has_its_functions() {
        for (symbol, object, expected) in [
            ("tcp_recvmsg", "[kernel.kallsyms]", Group::KernelNetwork),
            ("bpf_prog_6deef7357e7b4530_sock_ops", "bpf_prog_6deef7357e7b4530", Group::KernelNetwork),
            ("ep_poll", "[kernel.kallsyms]", Group::KernelOther),
            ("_aesni_ctr32_ghash_6x", "/usr/lib/libcrypto.so.3", Group::Tls),
            ("aws_lc_0_47_0_gcm_ghash_avx", "/opt/weft-proxy", Group::Tls),
            ("<h2::codec::framed_write::FramedWrite<T, B>>::flush", "/opt/weft-proxy", Group::Http2),
            ("hyper::proto::h1::role::Server::encode", "/opt/weft-proxy", Group::Http1),
            ("weft_proxy::outbound::http::exchange::Exchange::run", "/opt/weft-proxy", Group::Decisions),
            ("weft_proxy::metrics::http::Requests::count", "/opt/weft-proxy", Group::Metrics),
            ("_rjem_malloc", "/opt/weft-proxy", Group::Allocator),
            ("malloc", "/usr/lib/libc.so.6", Group::Allocator),
            ("<tokio::runtime::io::driver::Driver>::turn", "/opt/weft-proxy", Group::Runtime),
            ("[unknown]", "/usr/sbin/haproxy", Group::Other),
        ] {
            assert_eq!(Group::of(&[frame(symbol, object)]), expected, "{symbol}");
        }
    }

    #[test]
    fn what_the_standard_library_does_counts_for_its_caller() {
        let stack = [
            frame("core::ptr::drop_in_place::<tokio::sync::Semaphore>", "/opt/weft-proxy"),
            frame("<alloc::vec::Vec<h2::frame::Frame>>::push", "/opt/weft-proxy"),
            frame("<weft_tls::stream::Stream<tokio::net::TcpStream>>::read", "/opt/weft-proxy"),
            frame("tokio::runtime::task::raw::poll", "/opt/weft-proxy"),
        ];
        assert_eq!(Group::of(&stack), Group::Tls);
    }
}
