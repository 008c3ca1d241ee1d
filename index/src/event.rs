//! What the index learns: one closed type of event, whatever the source.

use weft_k8s_api::manifest::{Object, ObjectRef};

/// A change of the objects that the control plane knows.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// An object was created or changed.
    Apply(Box<Object>),
    /// An object was deleted.
    Delete(ObjectRef),
    /// Everything that existed at start has been sent.
    Synced,
}
