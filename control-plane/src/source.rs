//! Where objects come from: the sources of the index's events.
//!
//! A source sends batches; a batch holds what the source learned at once, and the index publishes its consequences at
//! once. After everything that existed at the start a source sends [`Event::Synced`], once. Sources never interpret
//! objects.

pub(crate) mod file;
pub(crate) mod kube;
