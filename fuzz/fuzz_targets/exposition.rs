//! Metrics of a proxy, as the scraper receives them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_viz_core::fuzz::exposition(bytes));
