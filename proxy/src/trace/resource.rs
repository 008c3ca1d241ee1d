//! What all spans of this proxy share: the service, the process, the pod and its labels.
//!
//! Of the same name, what the operator set for the process takes precedence over what the injector set, and that over
//! the pod's labels and the service's name (`linkerd2-proxy:linkerd/app/src/env/trace.rs`).

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _},
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use weft_proto::otlp::{AnyValue, KeyValue, Resource, any_value::Value};

use crate::config::TraceConfig;

/// Bytes that are read of the file with the pod's labels; Kubernetes' limit for all of a pod's annotations is 256 KiB,
/// labels are smaller.
const MAX_LABELS: u64 = 256 << 10;

/// The attributes of this process. The pod's labels are read once.
pub(crate) fn resource(config: &TraceConfig) -> Resource {
    let mut named = BTreeMap::from([("service.name".to_owned(), config.service_name.clone())]);
    if let Some(path) = &config.labels {
        match read(path) {
            Ok(labels) => named.extend(parse(&labels)),
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "cannot read the pod's labels, spans will not have them");
            }
        }
    }
    named.extend(parse(&config.attributes));
    // The specification separates by commas, Linkerd's proxy by lines.
    named.extend(parse(&config.otel_attributes.replace(',', "\n")));
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut attributes: Vec<KeyValue> =
        named.into_iter().map(|(name, value)| attribute(name, Value::StringValue(value))).collect();
    attributes.extend([
        attribute("process.pid", Value::IntValue(i64::from(std::process::id()))),
        attribute("process.start_timestamp", Value::IntValue(i64::try_from(started).unwrap_or(i64::MAX))),
        attribute("host.name", Value::StringValue(config.hostname.clone())),
    ]);
    Resource { attributes }
}

/// An attribute with its value.
pub(super) fn attribute(name: impl Into<String>, value: Value) -> KeyValue {
    KeyValue { key: name.into(), value: Some(AnyValue { value: Some(value) }) }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_LABELS).read_to_string(&mut text)?;
    Ok(text)
}

/// `name=value`, one a line; the kubelet writes values of labels in quotes. Lines of another form are left out.
fn parse(lines: &str) -> impl Iterator<Item = (String, String)> {
    lines.lines().filter_map(|line| {
        let (name, value) = line.trim().split_once('=')?;
        Some((name.to_owned(), value.trim_matches('"').to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(config: &TraceConfig) -> BTreeMap<String, String> {
        let of = |attribute: KeyValue| match attribute.value.unwrap().value.unwrap() {
            Value::StringValue(value) => Some((attribute.key, value)),
            _ => None,
        };
        resource(config).attributes.into_iter().filter_map(of).collect()
    }

    #[test]
    fn lines_are_attributes() {
        let lines = "cluster=\"one\"\nzone=eu\nworkload=\nkind=\"\"\nkey1=\"=\"\nkey2==value2\nkey3\n\n=key4\n";
        let expected = [
            ("", "key4"),
            ("cluster", "one"),
            ("key1", "="),
            ("key2", "=value2"),
            ("kind", ""),
            ("workload", ""),
            ("zone", "eu"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(parse(lines).collect::<BTreeMap<_, _>>(), expected.into());
    }

    #[test]
    fn later_settings_take_precedence() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "app=\"web\"\nzone=\"a\"\nservice.name=\"by-label\"\n").unwrap();
        let config = TraceConfig {
            service_name: "linkerd-proxy".to_owned(),
            labels: Some(file.path().to_owned()),
            attributes: "k8s.pod.ip=10.0.0.1\nzone=b\n".to_owned(),
            otel_attributes: "zone=c, team=shop".to_owned(),
            hostname: "web-0".to_owned(),
            ..TraceConfig::to("127.0.0.1", 4317)
        };
        let expected = [
            ("app", "web"),
            ("host.name", "web-0"),
            ("k8s.pod.ip", "10.0.0.1"),
            ("service.name", "by-label"),
            ("team", "shop"),
            ("zone", "c"),
        ];
        assert_eq!(texts(&config), expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        let missing = TraceConfig { labels: Some("/nonexistent".into()), ..config };
        assert_eq!(texts(&missing)["service.name"], "linkerd-proxy");
    }
}
