//! Conditions in statuses of custom resources.

use schemars::{Schema, SchemaGenerator, json_schema};

/// Schema of a list of conditions, which Kubernetes' own type lacks. As with Linkerd's ExternalWorkload, `reason` and
/// `message` may be absent.
pub(crate) fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "nullable": true,
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime"],
            "properties": {
                "type": { "type": "string" },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                "lastTransitionTime": { "type": "string", "format": "date-time" },
                "lastProbeTime": { "type": "string", "format": "date-time" },
                "observedGeneration": { "type": "integer", "format": "int64" },
                "reason": { "type": "string" },
                "message": { "type": "string" }
            }
        }
    })
}
