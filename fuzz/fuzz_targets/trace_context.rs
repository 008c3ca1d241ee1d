//! The headers that say which trace a request belongs to.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_proxy::fuzz::trace_context(bytes));
