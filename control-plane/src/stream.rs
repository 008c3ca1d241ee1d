//! From a view of the index to the stream of one client.
//!
//! ```text
//! index ──ask──> view ─snapshots─> frames (shared by all clients of the view) ──> client
//!   ^                       │ the view ended: the client counts differently now
//!   └────────── ask again ──┘
//! ```
//!
//! The stream is pulled: nothing is computed for a client while it is slow, and it then gets the newest state. It holds
//! the snapshot that it sent last, which all clients of the view share.

use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, TryFutureExt as _, stream};
use tokio::sync::watch;
use tonic::Status;
use weft_index::{Index, SharedIndex, Snapshot, Unanswered};
use weft_runtime::drain;

use crate::metrics::GrpcMetrics;

/// What every service that answers from the index needs.
#[derive(Clone)]
pub(crate) struct Answering {
    /// The index that answers.
    pub(crate) index: SharedIndex,
    /// Ends the streams.
    pub(crate) drain: drain::Watch,
    /// Counts the calls.
    pub(crate) metrics: GrpcMetrics,
}

/// How to subscribe to a view: asked at the start, and again when the view ended.
pub(crate) type Ask<V> = Arc<dyn Fn(&mut Index) -> Result<watch::Receiver<V>, Status> + Send + Sync>;

/// What comes next on a stream.
pub(crate) enum Next {
    /// Whole messages; none if there is nothing to say.
    Send(Bytes),
    /// The end, with OK: the client asks again.
    End,
}

impl Answering {
    /// Asks the index.
    ///
    /// # Errors
    /// `Unavailable` when the answer takes too long; clients try again.
    pub(crate) fn ask<R: Send + 'static, Q: FnOnce(&mut Index) -> R + Send + 'static>(
        &self,
        question: Q,
    ) -> impl Future<Output = Result<R, Status>> + Send + use<R, Q> {
        ask(&self.index, question)
    }

    /// Subscribes to a view, and follows it.
    ///
    /// # Errors
    /// Those of `ask`, and `Unavailable`.
    pub(crate) async fn subscribe<V: View, S: Step<V>>(
        &self,
        ask: Ask<V>,
        step: S,
    ) -> Result<impl Stream<Item = Bytes> + use<V, S>, Status> {
        let asked = ask.clone();
        let view = self.ask(move |index| asked(index)).await??;
        Ok(self.follow(view, Some(ask), step))
    }

    /// The first and every later snapshot of a view, as frames: `step` gets the one that the client has, and the next.
    /// The stream ends when `step` says so, when the process drains, and when the view ended and `again` leads to no
    /// other.
    pub(crate) fn follow<V: View, S: Step<V>>(
        &self,
        view: watch::Receiver<V>,
        again: Option<Ask<V>>,
        step: S,
    ) -> impl Stream<Item = Bytes> + use<V, S> {
        let client = Client { index: self.index.clone(), drain: self.drain.clone(), view, again, step, sent: None };
        stream::unfold(client, |mut client| async move { Some((client.next().await?, client)) })
    }
}

/// Asks an index.
///
/// # Errors
/// `Unavailable` when the answer takes too long; clients try again.
pub(crate) fn ask<R: Send + 'static, Q: FnOnce(&mut Index) -> R + Send + 'static>(
    index: &SharedIndex,
    question: Q,
) -> impl Future<Output = Result<R, Status>> + Send + use<R, Q> {
    index.ask(question).map_err(|error: Unanswered| Status::unavailable(error.to_string()))
}

/// What views publish.
pub(crate) trait View: Clone + Send + Sync + 'static {}

impl<V: Clone + Send + Sync + 'static> View for V {}

/// What to send, given the snapshot that the client has and the next one.
pub(crate) trait Step<V>: Fn(Option<&V>, &V) -> Next + Send + 'static {}

impl<V, F: Fn(Option<&V>, &V) -> Next + Send + 'static> Step<V> for F {}

/// One client of a view.
struct Client<V, S> {
    index: SharedIndex,
    drain: drain::Watch,
    view: watch::Receiver<V>,
    again: Option<Ask<V>>,
    step: S,
    /// The snapshot that the client has.
    sent: Option<V>,
}

impl<V: View, S: Step<V>> Client<V, S> {
    /// The next frames, or `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if self.sent.is_some() {
                tokio::select! {
                    () = self.drain.signaled() => return None,
                    changed = self.view.changed() => if changed.is_err() {
                        let again = self.again.clone()?;
                        // On the heap: it is rare, and would take room in every stream.
                        self.view = Box::pin(self.index.ask(move |index| again(index))).await.ok()?.ok()?;
                    }
                }
            }
            let snapshot = self.view.borrow_and_update().clone();
            match (self.step)(self.sent.as_ref(), &snapshot) {
                Next::End => return None,
                Next::Send(frames) => {
                    self.sent = Some(snapshot);
                    if !frames.is_empty() {
                        return Some(frames);
                    }
                }
            }
        }
    }
}

/// Sends a snapshot as one message, unless the client has the same already.
pub(crate) fn whole<T: PartialEq>(
    sent: Option<&Arc<Snapshot<T>>>,
    snapshot: &Arc<Snapshot<T>>,
    encode: impl FnOnce(&T) -> Bytes,
) -> Next {
    let same = sent.is_some_and(|sent| sent == snapshot);
    Next::Send(if same { Bytes::new() } else { snapshot.whole(encode) })
}

/// Sends a snapshot that may not be there as one message, unless the client has the same already; `None` is the end.
pub(crate) fn whole_or_end<T: PartialEq>(
    sent: Option<&Option<Arc<Snapshot<T>>>>,
    snapshot: &Option<Arc<Snapshot<T>>>,
    encode: impl FnOnce(&T) -> Bytes,
) -> Next {
    match snapshot {
        Some(snapshot) => whole(sent.and_then(Option::as_ref), snapshot, encode),
        None => Next::End,
    }
}
