//! Where objects come from: one closed event type, and the sources that produce it.
//!
//! A source sends batches; a batch is what it learned at once, and the index publishes its consequences at once. The first
//! batch of a source ends in [`Event::Synced`]. Sources never interpret objects.

pub(crate) mod file;

use weft_k8s_api::manifest::{Object, ObjectRef};

/// A change in the objects that the control plane knows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// An object appeared or changed.
    Apply(Box<Object>),
    /// An object vanished.
    Delete(ObjectRef),
    /// Everything that existed at start has been sent.
    Synced,
}
