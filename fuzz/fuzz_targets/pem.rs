//! Trust anchors and certificate chains of Secrets and ConfigMaps.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weft_tls::{anchors::TrustAnchors, inspect, serving};

fuzz_target!(|text: &str| {
    let _ = TrustAnchors::from_pem(text);
    let _ = inspect::certificates(text);
    let _ = serving::still_valid(text, std::time::UNIX_EPOCH, 4);
});
