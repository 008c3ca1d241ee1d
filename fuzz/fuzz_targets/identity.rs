//! Names of identities in settings, annotations and certificates.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weft_tls::identity::Identity;

fuzz_target!(|text: &str| {
    if let Ok(identity) = text.parse::<Identity>() {
        assert_eq!(identity.as_str().parse::<Identity>().expect("what is printed can be read"), identity);
    }
});
