//! The first message of a direct connection between proxies.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_proxy::fuzz::transport_header(bytes));
