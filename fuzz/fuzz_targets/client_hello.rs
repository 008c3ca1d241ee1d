//! The first bytes of a TLS connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_proxy::fuzz::client_hello(bytes));
