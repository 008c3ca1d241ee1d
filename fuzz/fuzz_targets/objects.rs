//! Objects of every watched kind, from JSON to the answers of an index.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_control_plane::fuzz::object(bytes));
