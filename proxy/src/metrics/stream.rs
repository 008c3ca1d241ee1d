//! How requests with their responses end, as the families of statuses count it.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;

use super::{
    Counters, Labels,
    bounded::{Bounded, shared_status, status_value},
    label,
    retain::InUse,
};

/// Outcomes of one kind of requests that are found without a lock.
const REMEMBERED: usize = 8;

/// How a request and its response ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamEnd {
    /// The response's status; `None` if there was no response.
    pub(crate) status: Option<u16>,
    /// The gRPC code; `None` if there was none.
    pub(crate) grpc: Option<u16>,
    /// What ended it early, one of Linkerd's names. No empty text stands for none: two of those are compared for each
    /// request, and glibc's `memcmp` with AVX-512 takes 127 ns for two slices of length 0 that point nowhere.
    pub(crate) error: Option<&'static str>,
}

/// The labels of a family of statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatusLabels {
    /// `http_status`, `error`.
    Http,
    /// `grpc_status`, by name, `error`.
    Grpc,
    /// `status`, of HTTP.
    HttpNumber,
    /// `status`, the gRPC code.
    GrpcNumber,
}

/// Counters of one kind of requests by outcome.
#[derive(Debug)]
pub(super) struct Statuses {
    family: Counters,
    kind: StatusLabels,
    labels: Labels,
    in_use: Arc<InUse>,
    seen: [OnceLock<(StreamEnd, Counter)>; REMEMBERED],
    /// Those beyond, which few servers have.
    rest: Mutex<Bounded<StreamEnd, Counter>>,
}

impl StreamEnd {
    /// No response, because of an error.
    pub(crate) const fn failed(error: &'static str) -> Self {
        Self { status: None, grpc: None, error: Some(error) }
    }

    /// With the class of the status that the server chooses; all else is from closed sets.
    fn other(self) -> Self {
        Self { status: self.status.map(shared_status), ..self }
    }
}

impl Statuses {
    pub(super) fn new(family: &Counters, kind: StatusLabels, labels: &Labels, in_use: &Arc<InUse>) -> Self {
        let (family, labels, in_use) = (family.clone(), labels.clone(), Arc::clone(in_use));
        Self { family, kind, labels, in_use, seen: Default::default(), rest: Mutex::default() }
    }

    /// Counts one.
    pub(super) fn count(&self, end: StreamEnd) {
        let end = self.kind.relevant(end);
        for slot in &self.seen {
            let (known, counter) = slot.get_or_init(|| (end, self.look_up(end)));
            if *known == end {
                counter.inc();
                return;
            }
        }
        self.rest.lock().get(end, end.other(), |end| self.look_up(end)).inc();
    }

    fn look_up(&self, end: StreamEnd) -> Counter {
        let mut labels = self.labels.clone();
        let number = |code: Option<u16>| code.map(|code| code.to_string()).unwrap_or_default();
        let status = end.status.map(status_value).unwrap_or_default();
        match self.kind {
            StatusLabels::Http => labels.push(label("http_status", status)),
            StatusLabels::Grpc => labels.push(label("grpc_status", code_name(end.grpc))),
            StatusLabels::HttpNumber => labels.push(label("status", status)),
            StatusLabels::GrpcNumber => labels.push(label("status", number(end.grpc))),
        }
        if matches!(self.kind, StatusLabels::Http | StatusLabels::Grpc) {
            labels.push(label("error", end.error.unwrap_or_default()));
        }
        self.in_use.series(&self.family, &labels)
    }
}

impl StatusLabels {
    /// What the labels tell apart.
    fn relevant(self, end: StreamEnd) -> StreamEnd {
        match self {
            Self::Http => StreamEnd { grpc: None, ..end },
            Self::Grpc => StreamEnd { status: None, ..end },
            Self::HttpNumber => StreamEnd { grpc: None, error: None, ..end },
            Self::GrpcNumber => StreamEnd { status: None, error: None, ..end },
        }
    }
}

/// The name of a gRPC code; unknown codes, and none at all, are `UNKNOWN`.
fn code_name(code: Option<u16>) -> &'static str {
    match code {
        Some(0) => "OK",
        Some(1) => "CANCELLED",
        Some(3) => "INVALID_ARGUMENT",
        Some(4) => "DEADLINE_EXCEEDED",
        Some(5) => "NOT_FOUND",
        Some(6) => "ALREADY_EXISTS",
        Some(7) => "PERMISSION_DENIED",
        Some(8) => "RESOURCE_EXHAUSTED",
        Some(9) => "FAILED_PRECONDITION",
        Some(10) => "ABORTED",
        Some(11) => "OUT_OF_RANGE",
        Some(12) => "UNIMPLEMENTED",
        Some(13) => "INTERNAL",
        Some(14) => "UNAVAILABLE",
        Some(15) => "DATA_LOSS",
        Some(16) => "UNAUTHENTICATED",
        _ => "UNKNOWN",
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::{super::retain::Retained, *};

    #[test]
    fn every_outcome_is_counted_whether_it_is_remembered_or_not() {
        let family = Counters::default();
        let in_use = Arc::new(Retained::default().enter(&family, &Labels::new()));
        let statuses = Statuses::new(&family, StatusLabels::Http, &Labels::new(), &in_use);
        for _ in 0..3 {
            for status in 200..220 {
                // The gRPC code is no label of this family.
                statuses.count(StreamEnd { status: Some(status), grpc: Some(status), error: None });
            }
            statuses.count(StreamEnd::failed("FAIL_FAST"));
        }
        let count = |status: &str, error: &'static str| {
            family.get_or_create(&vec![label("http_status", status.to_owned()), label("error", error)]).get()
        };
        assert!((200..220_u16).all(|status| count(&status.to_string(), "") == 3));
        assert_eq!(count("", "FAIL_FAST"), 3);
    }

    #[test]
    fn statuses_beyond_a_number_share_series_by_class() {
        for (kind, label) in [(StatusLabels::Http, "http_status"), (StatusLabels::HttpNumber, "status")] {
            let family = Counters::default();
            let in_use = Arc::new(Retained::default().enter(&family, &Labels::new()));
            let statuses = Statuses::new(&family, kind, &Labels::new(), &in_use);
            for status in 100..1000 {
                statuses.count(StreamEnd { status: Some(status), ..StreamEnd::default() });
            }
            let mut registry = Registry::default();
            registry.register("statuses", "Statuses", family);
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let series: Vec<_> = text.lines().filter(|line| line.starts_with("statuses_total{")).collect();
            // Eight without a lock, 64 more, and one for each class of the others.
            assert_eq!(series.len(), 8 + 64 + 9, "{text}");
            for (class, expected) in [("1xx", " 28"), ("5xx", " 100"), ("9xx", " 100")] {
                let class = format!(r#"{label}="{class}""#);
                let shared = series.iter().find(|line| line.contains(&class)).unwrap();
                assert!(shared.ends_with(expected), "{shared}");
            }
        }
    }

    #[test]
    fn codes_have_names_and_no_other_values() {
        let names: std::collections::BTreeSet<_> = (0..=u16::MAX).map(|code| code_name(Some(code))).collect();
        assert_eq!((names.len(), code_name(Some(2)), code_name(None)), (17, "UNKNOWN", "UNKNOWN"));
    }
}
