//! Which requests a tap is for.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_proxy::fuzz::tap_match(bytes));
