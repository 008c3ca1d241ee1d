//! Requests to the destination service, from the bytes on the wire to the answer of an index.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_control_plane::fuzz::destination_request(bytes));
