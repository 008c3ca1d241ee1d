//! Requests to the identity service, which anybody may send.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_control_plane::fuzz::certify_request(bytes));
