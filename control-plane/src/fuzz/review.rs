//! AdmissionReviews as an API server, or any other client that reaches the webhooks, sends them.

use futures::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use weft_k8s_api::inject::{Decision, InjectConfig, inject};

use crate::webhook::{
    Admission,
    injector::{is_complete, patch},
    object, server,
};

/// The longest answer, in bytes: warnings and messages quote what they are about.
const MAX_ANSWER: usize = 256 * 1024;

/// Reviews an object. The answer is about this request, and is the same when it is asked again; what injection adds to
/// a pod is what the patch adds to the object as it was sent.
pub(super) fn review(body: &[u8]) {
    let Ok(request) = server::read(body) else { return };
    for admission in [Admission::Profiles, Admission::Policies] {
        let answer = || admission.answer(&request).now_or_never().expect("it waits for nothing").into_review();
        let (answer, again) = (answer(), answer());
        let written = serde_json::to_vec(&answer).expect("an answer is JSON");
        assert!(written.len() <= MAX_ANSWER + 8 * body.len(), "{} bytes", written.len());
        assert_eq!(written, serde_json::to_vec(&again).expect("an answer is JSON"));
        assert_eq!(answer.response.map(|response| response.uid), Some(request.uid.clone()));
    }
    let Ok(mut raw) = object(&request) else { return };
    let Ok(pod) = serde_json::from_value::<Pod>(raw.clone()) else { return };
    if !is_complete(&pod) {
        return;
    }
    let config = InjectConfig::new("weft/proxy:1", "1", "anchors");
    if let Ok(Decision::Injected(after)) = inject(&pod, None, &config) {
        json_patch::patch(&mut raw, &patch::pod(&pod, &after)).expect("the patch applies");
        assert_eq!(serde_json::from_value::<Pod>(raw).expect("still a pod"), after);
    }
}
