//! Status and headers of an HTTP/1 response.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_proxy::fuzz::response(bytes));
