//! Manifests, in YAML and JSON, of every kind that Weft reads.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for name in ["fuzz.yaml", "fuzz.json"] {
        let _ = weft_k8s_api::manifest::parse(Path::new(name), text);
    }
});
