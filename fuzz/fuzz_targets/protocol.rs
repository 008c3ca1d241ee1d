//! The first bytes of a connection that may be HTTP.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_proxy::fuzz::protocol(bytes));
