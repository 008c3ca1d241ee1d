//! Metrics of a connection: its opening, its bytes, its end.

use std::io;

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};

use super::{Counters, Labels, ProxyMetrics, label, retain::InUse};

/// Counters of one kind of connection, looked up once and shared by all connections of that kind.
#[derive(Debug)]
pub(crate) struct TransportMetrics {
    open: Counter,
    open_connections: Gauge,
    read_bytes: Counter,
    write_bytes: Counter,
    close_clean: Counter,
    close: Counters,
    labels: Labels,
    in_use: InUse,
}

impl TransportMetrics {
    pub(super) fn new(metrics: &ProxyMetrics, labels: Labels) -> Self {
        let in_use = metrics.retained.enter(labels.clone());
        in_use.has("tcp_open", &metrics.tcp_open, &labels);
        in_use.has("tcp_open_connections", &metrics.tcp_open_connections, &labels);
        in_use.has("tcp_read_bytes", &metrics.tcp_read_bytes, &labels);
        in_use.has("tcp_write_bytes", &metrics.tcp_write_bytes, &labels);
        in_use.has("tcp_close", &metrics.tcp_close, &with_errno(&labels, None));
        let close_clean = metrics.tcp_close.get_or_create_owned(&with_errno(&labels, None));
        Self {
            open: metrics.tcp_open.get_or_create_owned(&labels),
            open_connections: metrics.tcp_open_connections.get_or_create_owned(&labels),
            read_bytes: metrics.tcp_read_bytes.get_or_create_owned(&labels),
            write_bytes: metrics.tcp_write_bytes.get_or_create_owned(&labels),
            close_clean,
            close: metrics.tcp_close.clone(),
            labels,
            in_use,
        }
    }

    /// Counts an opened connection.
    pub(crate) fn opened(&self) {
        self.open.inc();
        self.open_connections.inc();
    }

    /// Counts a closed connection, with the error that closed it.
    pub(crate) fn closed(&self, error: Option<&io::Error>) {
        self.open_connections.dec();
        match error {
            None => {
                self.close_clean.inc();
            }
            Some(error) => {
                let labels = with_errno(&self.labels, Some(error));
                self.in_use.has("tcp_close", &self.close, &labels);
                self.close.get_or_create(&labels).inc();
            }
        }
    }

    /// Counts bytes read from the peer.
    pub(crate) fn read(&self, bytes: u64) {
        self.read_bytes.inc_by(bytes);
    }

    /// Counts bytes written to the peer.
    pub(crate) fn written(&self, bytes: u64) {
        self.write_bytes.inc_by(bytes);
    }
}

fn with_errno(labels: &Labels, error: Option<&io::Error>) -> Labels {
    let mut labels = labels.clone();
    labels.push(label("errno", error.map_or("", errno)));
    labels
}

/// A closed set of error names, to limit the number of labels.
fn errno(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "ECONNREFUSED",
        io::ErrorKind::ConnectionReset => "ECONNRESET",
        io::ErrorKind::ConnectionAborted => "ECONNABORTED",
        io::ErrorKind::BrokenPipe => "EPIPE",
        io::ErrorKind::NotConnected => "ENOTCONN",
        io::ErrorKind::TimedOut => "ETIMEDOUT",
        io::ErrorKind::HostUnreachable => "EHOSTUNREACH",
        io::ErrorKind::NetworkUnreachable => "ENETUNREACH",
        io::ErrorKind::UnexpectedEof => "EOF",
        io::ErrorKind::InvalidData => "EINVAL",
        _ => "EIO",
    }
}
