//! Target and headers of an HTTP/1 request.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_proxy::fuzz::request(bytes));
