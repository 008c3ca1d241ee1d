//! AdmissionReviews, as the webhooks get them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| weft_control_plane::fuzz::review(bytes));
