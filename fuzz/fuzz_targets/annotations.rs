//! Annotations and specs of pods, as the admission webhook gets them.
#![no_main]

use k8s_openapi::api::core::v1::Pod;
use libfuzzer_sys::fuzz_target;
use weft_k8s_api::inject::{check_annotations, check_opaque_ports};

fuzz_target!(|json: &[u8]| {
    let Ok(pod) = serde_json::from_slice::<Pod>(json) else { return };
    let _ = check_annotations(&pod.metadata);
    let _ = check_opaque_ports(&pod.metadata);
});
