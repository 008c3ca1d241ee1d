//! Certificate signing requests, which anybody may send to the identity service.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weft_tls::ca::SigningRequest;

fuzz_target!(|der: &[u8]| {
    if let Ok(request) = SigningRequest::parse(der) {
        let _ = request.check("web.demo");
    }
});
