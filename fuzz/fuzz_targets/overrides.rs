//! The headers with which an application sets the terms of a request.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_proxy::fuzz::overrides(bytes));
