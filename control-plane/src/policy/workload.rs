//! The name of a workload in a proxy's request.

use serde::Deserialize;
use tonic::Status;

use weft_index::Key;

use crate::authority;

/// The longest name of a namespace or a workload (RFC 1123): a stream keeps them.
const MAX_NAME: usize = 253;

/// A workload.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Workload {
    /// A pod.
    Pod(Key),
    /// A machine outside the cluster.
    External(Key),
}

impl Workload {
    pub(crate) fn namespace(&self) -> &str {
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
pub(crate) fn parse(text: &str) -> Result<Workload, Status> {
    let shown = authority::excerpt(text);
    let invalid =
        || Status::invalid_argument(format!("invalid workload: {shown:?}, expected {{\"ns\", \"pod\"}} or ns:pod"));
    let key = |namespace: &str, name: &str| {
        let valid = |part: &str| (1..=MAX_NAME).contains(&part.len());
        (valid(namespace) && valid(name)).then(|| Key::new(namespace, name)).ok_or_else(invalid)
    };
    if text.starts_with('{') {
        let json: Json = serde_json::from_str(text).map_err(|_| invalid())?;
        return match (json.pod, json.external_workload) {
            (Some(pod), None) => key(&json.ns, &pod).map(Workload::Pod),
            (None, Some(name)) => key(&json.ns, &name).map(Workload::External),
            _ => Err(invalid()),
        };
    }
    let (namespace, pod) = text.split_once(':').ok_or_else(invalid)?;
    key(namespace, pod).map(Workload::Pod)
}

/// Parses a port.
///
/// # Errors
/// `InvalidArgument` unless it is 1 to 65535.
pub(crate) fn port(port: u32) -> Result<u16, Status> {
    u16::try_from(port)
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| Status::invalid_argument(format!("invalid port: {port}, expected 1-65535")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_not_kept() {
        let (short, long) = ("n".repeat(253), "n".repeat(254));
        assert_eq!(parse(&format!("{short}:{short}")).ok(), Some(Workload::Pod(Key::new(&short, &short))));
        for text in [
            format!("shop:{long}"),
            format!("{long}:web-0"),
            format!(r#"{{"ns":"{long}", "pod":"web-0"}}"#),
            format!(r#"{{"ns":"shop", "external_workload":"{long}"}}"#),
        ] {
            assert_eq!(parse(&text).unwrap_err().code(), tonic::Code::InvalidArgument);
        }
    }

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
