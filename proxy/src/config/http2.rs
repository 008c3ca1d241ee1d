//! HTTP/2 settings: flow control and liveness of connections that the proxy makes, and of those that it accepts.
//!
//! Owns the bounds of what RFC 9113 allows: the HTTP/2 library panics beyond them.

use std::time::Duration;

use super::{
    Keepalive,
    env::{ConfigError, Env},
};

/// The HTTP/2 connection window in bytes: 256 streams with Linkerd's window of 65,535.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// What unread small DATA frames may cost a connection, in bytes of memory. Beyond it, h2 closes the connection with
/// all its streams. h2 counts a frame of less than 256 bytes as the bytes that it lacks, about what its place in the
/// queue takes. A stream's window full of messages of 20 bytes costs 773 KB; so this is enough for 21 such streams
/// whose readers are slow, or for the 256 streams of a connection with messages of 128 bytes. h2's default is half the
/// connection's window, 8 MiB, which 11 such streams use up. More would let a few clients fill a small pod's memory.
pub(crate) const SMALL_FRAMES: usize = 16 << 20;
/// Streams of a connection that were reset and whose late frames are ignored for a second: four times the 256 that a
/// proxy of ours puts on one. h2's default is 50, fewer than one client may leave, or have refused, at once.
pub(crate) const RESET_STREAMS: usize = 4 * 256;
/// Frames of forgotten streams, and malformed requests, in the life of a connection, beyond which h2 ends it. h2's
/// default is 1,024, which such clients use up in time. A bound is needed because each is answered from memory.
pub(crate) const LATE_FRAMES: usize = 16 * 1024;
/// The largest window (RFC 9113 section 6.9.1).
pub(crate) const MAX_WINDOW: u32 = (1 << 31) - 1;

/// HTTP/2 in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Http2Config {
    /// Those of connections that the proxy makes.
    pub(crate) windows: Windows,
    /// Connections from the application.
    pub(crate) outbound_server: Http2ServerConfig,
    /// Connections from others.
    pub(crate) inbound_server: Http2ServerConfig,
}

/// What the other side may send before it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Windows {
    /// Initial stream window in bytes. Linkerd's default: 65,535.
    pub(crate) stream: u32,
    /// Initial connection window in bytes. 16 MiB, where Linkerd's default is 1 MiB: a window of the size of N streams'
    /// windows lets N slow readers share a connection without stalling others, and the outbound side puts no more on
    /// one.
    pub(crate) connection: u32,
}

/// Connections that one side accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Http2ServerConfig {
    /// Whether windows follow the measured bandwidth, instead of the next two.
    pub(crate) adaptive_window: bool,
    /// Initial stream window in bytes.
    pub(crate) stream_window: u32,
    /// Connection window in bytes; `None` begins with Linkerd's 1 MiB and grows with the uploads.
    pub(crate) connection_window: Option<u32>,
    /// Pings to silent clients.
    pub(crate) keepalive: Option<Keepalive>,
    /// Streams at a time on one connection. Outbound 200, hyper's default; inbound 10,000: another proxy sends all of
    /// its pod's requests over one connection, and would have to wait; without a limit one client could hold any
    /// number.
    pub(crate) max_streams: u32,
    /// The largest frame in bytes that clients may send; `None` is the protocol's default, 16,384.
    pub(crate) max_frame_size: Option<u32>,
    /// The largest head in bytes, as RFC 9113 section 6.5.2 counts them; `None` is the same as HTTP/1's.
    pub(crate) max_header_list_size: Option<u32>,
    /// The age at which a connection takes no more requests; `None` is no limit.
    pub(crate) max_connection_age: Option<Duration>,
    /// Streams that a client has reset before the proxy has looked at them, beyond which the connection ends. h2's
    /// default of 20 is too few for a client that cancels its requests at once while the proxy is busy: its other
    /// requests would fail too, and on a connection from another proxy those of other clients. 200 is as many as the
    /// outbound side lets a client have open.
    pub(crate) max_pending_resets: usize,
    /// The most bytes of a response that one stream buffers; `None` is hyper's 400 KiB.
    pub(crate) max_send_buffer: Option<u32>,
}

impl Http2Config {
    pub(super) fn parse(env: &Env<'_>) -> Result<Self, ConfigError> {
        let stream_window = window(env, "HTTP2_INITIAL_STREAM_WINDOW_SIZE")?.unwrap_or(65_535);
        let connection_window = window(env, "HTTP2_INITIAL_CONNECTION_WINDOW_SIZE")?;
        let windows = (stream_window, connection_window);
        let server = |group, max_streams| Http2ServerConfig::parse(env, group, windows, max_streams);
        Ok(Self {
            windows: Windows { stream: stream_window, connection: connection_window.unwrap_or(CONNECTION_WINDOW) },
            outbound_server: server("OUTBOUND_SERVER_HTTP2", 200)?,
            inbound_server: server("INBOUND_SERVER_HTTP2", 10_000)?,
        })
    }
}

impl Http2ServerConfig {
    fn parse(env: &Env<'_>, group: &str, windows: (u32, Option<u32>), max_streams: u32) -> Result<Self, ConfigError> {
        let name = |setting| format!("{group}{setting}");
        let frame_size = "a number of bytes from 16384 to 16777215";
        Ok(Self {
            adaptive_window: env.flag(&name("_ADAPTIVE_FLOW_CONTROL"))?.unwrap_or(false),
            stream_window: window(env, &name("_INITIAL_STREAM_WINDOW_SIZE"))?.unwrap_or(windows.0),
            connection_window: window(env, &name("_INITIAL_CONNECTION_WINDOW_SIZE"))?.or(windows.1),
            keepalive: env.http2_keepalive(group)?,
            max_streams: env.number(&name("_MAX_CONCURRENT_STREAMS"))?.unwrap_or(max_streams),
            max_frame_size: env.number_in(&name("_MAX_FRAME_SIZE"), 16_384..=16_777_215, frame_size)?,
            max_header_list_size: env.number(&name("_MAX_HEADER_LIST_SIZE"))?,
            max_connection_age: env.duration(&name("_MAX_CONNECTION_AGE"))?.filter(|age| !age.is_zero()),
            max_pending_resets: env.number(&name("_MAX_PENDING_ACCEPT_RESET_STREAMS"))?.unwrap_or(200),
            max_send_buffer: env.number(&name("_MAX_SEND_BUF_SIZE"))?,
        })
    }
}

fn window(env: &Env<'_>, name: &str) -> Result<Option<u32>, ConfigError> {
    env.number_in(name, 1..=MAX_WINDOW, "a number of bytes from 1 to 2147483647")
}
