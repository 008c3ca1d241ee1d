//! Requests to the policy services, from the bytes on the wire to the answer of an index.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_control_plane::fuzz::policy_request(bytes));
