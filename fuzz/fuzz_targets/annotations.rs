//! Annotations and specs of pods, as the admission webhook gets them, and annotations of traffic as routes have them.
#![no_main]

use k8s_openapi::api::core::v1::Pod;
use libfuzzer_sys::fuzz_target;
use weft_k8s_api::{
    inject::{check_annotations, check_opaque_ports},
    policy::traffic,
};

fuzz_target!(|json: &[u8]| {
    let Ok(pod) = serde_json::from_slice::<Pod>(json) else { return };
    let _ = check_annotations(&pod.metadata);
    let _ = check_opaque_ports(&pod.metadata);
    let annotations = pod.metadata.annotations.unwrap_or_default();
    let _ = (traffic::http_retry(&annotations), traffic::grpc_retry(&annotations), traffic::timeouts(&annotations));
    let _ = (traffic::load_bias(&annotations), traffic::honor_retry_after(&annotations));
    if let Ok(Some(accrual)) = traffic::failure_accrual(&annotations) {
        assert!(accrual.consecutive.min_penalty <= accrual.consecutive.max_penalty);
        assert!((0.0..=100.0).contains(&accrual.consecutive.jitter_ratio));
    }
});
