//! From a watched snapshot to a gRPC stream.
//!
//! The stream is pulled: nothing is computed for a client while it is slow, and its next message has the newest state.

use std::{collections::VecDeque, pin::Pin};

use futures::{Stream, stream};
use tokio::sync::watch;
use tonic::{Code, Status};
use weft_runtime::drain;

use crate::metrics::Call;

/// The stream type that tonic sends.
pub(crate) type Messages<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

/// What to do with one snapshot.
pub(crate) enum Step<M> {
    /// Send these messages.
    Send(Vec<M>),
    /// End the stream.
    End,
}

struct State<T, F, M> {
    snapshots: watch::Receiver<T>,
    step: F,
    pending: VecDeque<M>,
    first: bool,
    drain: drain::Watch,
    call: Call,
}

/// Sends the messages that `step` returns for the first and every later snapshot. The stream ends with OK when `step`
/// says so, when the index drops the subscription, and when the process drains: clients reconnect, to another replica
/// if there is one.
pub(crate) fn messages<T, M, F>(snapshots: watch::Receiver<T>, drain: drain::Watch, call: Call, step: F) -> Messages<M>
where
    T: Clone + Send + Sync + 'static,
    M: Send + 'static,
    F: FnMut(&T) -> Step<M> + Send + 'static,
{
    let state = State { snapshots, step, pending: VecDeque::new(), first: true, drain, call };
    Box::pin(stream::unfold(state, |mut state| async move {
        loop {
            if let Some(message) = state.pending.pop_front() {
                return Some((Ok(message), state));
            }
            if !state.first {
                tokio::select! {
                    () = state.drain.signaled() => {
                        state.call.end(Code::Ok);
                        return None;
                    }
                    changed = state.snapshots.changed() => if changed.is_err() {
                        state.call.end(Code::Ok);
                        return None;
                    }
                }
            }
            state.first = false;
            let snapshot = state.snapshots.borrow_and_update().clone();
            match (state.step)(&snapshot) {
                Step::Send(messages) => state.pending.extend(messages),
                Step::End => {
                    state.call.end(Code::Ok);
                    return None;
                }
            }
        }
    }))
}
