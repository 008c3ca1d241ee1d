//! The name of a workload in a proxy's request.

use serde::Deserialize;
use tonic::Status;

use weft_index::Key;

use crate::authority;

/// A workload.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Workload {
    /// A pod.
    Pod(Key),
    /// A machine outside the cluster.
    External(Key),
}

impl Workload {
    /// The namespace.
    pub(super) fn namespace(&self) -> &str {
        let (Self::Pod(key) | Self::External(key)) = self;
        &key.namespace
    }
}

#[derive(Deserialize)]
struct Json {
    ns: String,
    pod: Option<String>,
    external_workload: Option<String>,
}

/// Parses `namespace:pod`, `{"ns","pod"}` or `{"ns","external_workload"}`.
///
/// # Errors
/// `InvalidArgument` for anything else.
pub(super) fn parse(text: &str) -> Result<Workload, Status> {
    let shown = authority::excerpt(text);
    let invalid =
        || Status::invalid_argument(format!("invalid workload: {shown:?}, expected {{\"ns\", \"pod\"}} or ns:pod"));
    if text.starts_with('{') {
        let json: Json = serde_json::from_str(text).map_err(|_| invalid())?;
        return match (json.pod, json.external_workload) {
            (Some(pod), None) if !json.ns.is_empty() && !pod.is_empty() => Ok(Workload::Pod(Key::new(json.ns, pod))),
            (None, Some(name)) if !json.ns.is_empty() && !name.is_empty() => {
                Ok(Workload::External(Key::new(json.ns, name)))
            }
            _ => Err(invalid()),
        };
    }
    match text.split_once(':') {
        Some((namespace, pod)) if !namespace.is_empty() && !pod.is_empty() => {
            Ok(Workload::Pod(Key::new(namespace, pod)))
        }
        _ => Err(invalid()),
    }
}

/// Parses a port.
///
/// # Errors
/// `InvalidArgument` unless it is 1 to 65535.
pub(super) fn port(port: u32) -> Result<u16, Status> {
    u16::try_from(port)
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| Status::invalid_argument(format!("invalid port: {port}, expected 1-65535")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads() {
        let pod = || Some(Workload::Pod(Key::new("shop", "web-0")));
        for (text, expected) in [
            ("shop:web-0", pod()),
            (r#"{"ns":"shop", "pod":"web-0"}"#, pod()),
            ("{\"ns\":\"shop\", \"pod\":\"web-0\"}\n", pod()),
            (r#"{"ns":"shop", "external_workload":"vm"}"#, Some(Workload::External(Key::new("shop", "vm")))),
            (r#"{"ns":"shop"}"#, None),
            (r#"{"pod":"web-0"}"#, None),
            ("{", None),
            ("shop", None),
            (":web", None),
            ("", None),
        ] {
            assert_eq!(parse(text).ok(), expected, "{text:?}");
        }
        for (number, expected) in [(0, None), (1, Some(1)), (65535, Some(65535)), (65536, None)] {
            assert_eq!(port(number).ok(), expected, "{number}");
        }
    }
}
