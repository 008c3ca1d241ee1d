//! Where objects come from: the sources of the index's events.
//!
//! A source sends batches of [`weft_index::Event`]; a batch holds what the source learned at once, and the index
//! publishes its consequences at once. After everything that existed at the start a source sends `Synced`, once.
//! Sources never interpret objects.

pub(crate) mod file;
pub(crate) mod kube;
