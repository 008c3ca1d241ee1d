//! Metrics of a connection: its opening, its bytes, its end.

use nix::errno::Errno;
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
    /// `outbound_tcp_transfer_cost_bytes_total`, received and sent, of connections to endpoints.
    transfer_cost: Option<(Counter, Counter)>,
    labels: Labels,
    in_use: InUse,
}

impl TransportMetrics {
    pub(super) fn new(metrics: &ProxyMetrics, labels: Labels) -> Self {
        let in_use = metrics.retained.enter(&metrics.tcp_open, &labels);
        let close = metrics.tcp_close.clone();
        Self {
            open: in_use.series(&metrics.tcp_open, &labels),
            open_connections: in_use.series(&metrics.tcp_open_connections, &labels),
            read_bytes: in_use.series(&metrics.tcp_read_bytes, &labels),
            write_bytes: in_use.series(&metrics.tcp_write_bytes, &labels),
            close_clean: in_use.series(&close, &with_errno(&labels, None)),
            close,
            transfer_cost: None,
            labels,
            in_use,
        }
    }

    /// Counts the connection's bytes under the endpoint's zone too.
    pub(super) fn with_transfer_cost(mut self, family: &Counters, zone_locality: &str) -> Self {
        // The values are few: a controller's others must not become series.
        let zone = match zone_locality {
            "local" => "local",
            "remote" => "remote",
            _ => "unknown",
        };
        let counter = |op: &'static str| family.get_or_create(&vec![label("op", op), label("zone_locality", zone)]);
        self.transfer_cost = Some((counter("Recv"), counter("Send")));
        self
    }

    /// Counts an opened connection.
    pub(crate) fn opened(&self) {
        self.open.inc();
        self.open_connections.inc();
    }

    /// Counts a closed connection, with the number of the error that closed it.
    pub(crate) fn closed(&self, errno: Option<i32>) {
        self.open_connections.dec();
        match errno {
            None => {
                self.close_clean.inc();
            }
            Some(_) => {
                let labels = with_errno(&self.labels, errno);
                self.in_use.series(&self.close, &labels).inc();
            }
        }
    }

    /// Counts bytes read from the peer.
    pub(crate) fn read(&self, bytes: u64) {
        self.read_bytes.inc_by(bytes);
        if let Some((received, _)) = &self.transfer_cost {
            received.inc_by(bytes);
        }
    }

    /// Counts bytes written to the peer.
    pub(crate) fn written(&self, bytes: u64) {
        self.write_bytes.inc_by(bytes);
        if let Some((_, sent)) = &self.transfer_cost {
            sent.inc_by(bytes);
        }
    }
}

fn with_errno(labels: &Labels, errno: Option<i32>) -> Labels {
    let mut labels = labels.clone();
    labels.push(label("errno", errno.map_or_else(String::new, name)));
    labels
}

/// The name of one of the operating system's errors, as Linkerd's proxy has it.
fn name(errno: i32) -> String {
    match Errno::from_raw(errno) {
        Errno::UnknownErrno => "UNKNOWN_ERRNO".to_owned(),
        known => format!("{known:?}"),
    }
}
