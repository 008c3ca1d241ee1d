//! Entry points of the fuzz targets: what a pod can send to those who read its metrics.
//!
//! Each function panics if a reader violates its guarantee, and returns nothing.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::exposition::{Exposition, Lines, MOST_LINES, Page};

/// Reads a page of metrics, whole and in pieces whose length the first byte says: both are the same, and bounded.
pub fn exposition(bytes: &[u8]) {
    let Some((length, text)) = bytes.split_first() else { return };
    let (Ok(whole), Ok(pieces)) = (read(std::iter::once(text)), read(text.chunks(usize::from(*length) + 1))) else {
        return;
    };
    assert!(whole.lines.len() <= MOST_LINES && whole.new.len() <= whole.lines.len());
    // The bits, because a number that is not one does not equal itself.
    let values = |page: &Page| page.lines.iter().map(|line| line.value.to_bits()).collect::<Vec<_>>();
    assert_eq!(values(&whole), values(&pieces));
    assert_eq!((whole.started, whole.excess, whole.new.len()), (pieces.started, pieces.excess, pieces.new.len()));
    assert!(whole.lines.iter().all(|line| line.value.is_finite() && line.value >= 0.0));
}

fn read<'a>(mut pieces: impl Iterator<Item = &'a [u8]>) -> Result<Page, String> {
    let interner = Mutex::default();
    let mut exposition = Exposition::new(Arc::new(Lines::default()), &interner);
    pieces.try_for_each(|piece| exposition.read(piece))?;
    Ok(exposition.end())
}
