//! Spans that wait for their export: from the workers to the control thread, without a lock and without waiting.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::SystemTime,
};

use tokio::sync::{Notify, mpsc};

use super::{Kind, attributes::Attributes, metrics::TraceMetrics};

/// Spans that wait at most. A span has some 700 bytes, and at most 11 KiB (a name and nine attributes of 1 KiB that a
/// client chooses, and a `tracestate`): 22 MiB if all of them are as large as they can be.
pub(super) const CAPACITY: usize = 2048;
/// Spans of one export, as many as of Linkerd's proxy. A full batch does not wait for the interval.
pub(super) const BATCH: usize = 1000;

/// One span that has ended.
#[derive(Debug)]
pub(crate) struct Span {
    pub(super) trace_id: u128,
    pub(super) span_id: u64,
    pub(super) parent_id: u64,
    pub(super) trace_state: Option<Box<str>>,
    pub(super) name: Box<str>,
    pub(super) kind: Kind,
    pub(super) began: SystemTime,
    pub(super) ended: SystemTime,
    pub(super) attributes: Attributes,
}

/// The side of the requests.
#[derive(Clone, Debug)]
pub(super) struct Sender {
    spans: mpsc::Sender<Span>,
    state: Arc<State>,
}

/// The side of the export.
#[derive(Debug)]
pub(crate) struct Spans {
    spans: mpsc::Receiver<Span>,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    metrics: TraceMetrics,
    /// Spans that wait or are being exported.
    pending: AtomicUsize,
    /// Notified when a batch is full.
    full: Notify,
    /// Notified when there is none pending.
    done: Notify,
}

pub(super) fn channel(metrics: TraceMetrics) -> (Sender, Spans) {
    let (sender, receiver) = mpsc::channel(CAPACITY);
    let state = Arc::new(State { metrics, pending: AtomicUsize::new(0), full: Notify::new(), done: Notify::new() });
    (Sender { spans: sender, state: Arc::clone(&state) }, Spans { spans: receiver, state })
}

impl Sender {
    /// Adds a span, or drops it if there is no room.
    pub(super) fn send(&self, span: Span) {
        let Ok(permit) = self.spans.try_reserve() else {
            self.state.metrics.dropped_full.inc();
            return;
        };
        self.state.pending.fetch_add(1, Ordering::Relaxed);
        permit.send(span);
        if self.spans.max_capacity() - self.spans.capacity() >= BATCH {
            self.state.full.notify_one();
        }
    }

    #[cfg(test)]
    pub(super) fn metrics(&self) -> &TraceMetrics {
        &self.state.metrics
    }

    /// Waits until no span is pending.
    pub(super) async fn flush(&self) {
        loop {
            // Created before the number is read, it gets every notification that the read came too early for.
            let done = self.state.done.notified();
            if self.state.pending.load(Ordering::Acquire) == 0 {
                return;
            }
            done.await;
        }
    }
}

impl Spans {
    /// The next span; `None` when nothing can send any more.
    pub(super) async fn next(&mut self) -> Option<Span> {
        self.spans.recv().await
    }

    /// The next span, if there is one.
    pub(super) fn take(&mut self) -> Option<Span> {
        self.spans.try_recv().ok()
    }

    /// Waits until a batch is full but for one span. Cancel safe.
    pub(super) async fn filled(&self) {
        while self.spans.len() + 1 < BATCH {
            self.state.full.notified().await;
        }
    }

    /// Counts spans that were exported or dropped.
    pub(super) fn finished(&self, spans: usize) {
        if self.state.pending.fetch_sub(spans, Ordering::Release) == spans {
            self.state.done.notify_waiters();
        }
    }

    pub(super) fn metrics(&self) -> &TraceMetrics {
        &self.state.metrics
    }
}
