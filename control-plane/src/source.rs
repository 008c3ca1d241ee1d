//! Where objects come from: one closed event type, and the sources that produce it.
//!
//! A source sends batches; a batch holds what the source learned at once, and the index publishes its consequences at
//! once. After everything that existed at the start a source sends [`Event::Synced`], once. Sources never interpret
//! objects.

pub(crate) mod file;
pub(crate) mod kube;

use weft_k8s_api::manifest::{Object, ObjectRef};

/// A change of the objects that the control plane knows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// An object was created or changed.
    Apply(Box<Object>),
    /// An object was deleted.
    Delete(ObjectRef),
    /// Everything that existed at start has been sent.
    Synced,
}
