//! ServiceProfiles and policy resources, as their webhooks get them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use weft_k8s_api::{policy::validate, profile, workload};

fuzz_target!(|json: &[u8]| {
    let Ok(object) = serde_json::from_slice::<Value>(json) else { return };
    if let Ok(profile) = profile::read(&object) {
        let _ = profile::validate(&profile);
    }
    if let Ok(server) = serde_json::from_value(object.clone()) {
        let _ = validate::server(&server);
    }
    if let Ok(authorization) = serde_json::from_value(object.clone()) {
        let _ = validate::server_authorization(&authorization);
    }
    if let Ok(policy) = serde_json::from_value(object.clone()) {
        let _ = validate::authorization_policy(&policy);
    }
    if let Ok(authentication) = serde_json::from_value(object.clone()) {
        let _ = validate::network_authentication(&authentication);
    }
    if let Ok(external) = serde_json::from_value(object) {
        let _ = workload::check(&external);
    }
});
