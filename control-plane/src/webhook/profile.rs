//! sp-validator: invalid ServiceProfiles are not stored; parts that Weft does not act on cause a warning.

use kube::core::{
    DynamicObject,
    admission::{AdmissionRequest, AdmissionResponse},
};
use weft_k8s_api::profile::{self, GROUP};

use super::{denied, needs_no_check, object, warned};

/// Allows a valid ServiceProfile, one that is being deleted, and objects of other kinds.
pub(super) fn answer(request: &AdmissionRequest<DynamicObject>) -> AdmissionResponse {
    if needs_no_check(request) || request.kind.group != GROUP || request.kind.kind != "ServiceProfile" {
        return request.into();
    }
    let read = object(request).map_err(|error| error.to_string());
    let problems = match read.map(|object| profile::read(&object).map(|profile| profile::validate(&profile))) {
        Err(problem) => problem,
        Ok(Err(invalid)) => invalid.to_string(),
        Ok(Ok(found)) if found.is_empty() => return warned(request),
        Ok(Ok(found)) => found.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
    };
    denied(request, format!("ServiceProfile {:?}: {problems}", request.name))
}
