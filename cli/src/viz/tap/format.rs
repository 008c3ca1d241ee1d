//! An event as a line and as JSON, in Linkerd's forms.

use std::{collections::HashMap, fmt::Write as _};

use serde_json::{Map, Value, json};
use weft_proto::viz::{Direction, Header, TapEvent, tap_end, tap_event};

use super::super::render::micros;
use crate::kind::Kind;

/// What an end of a request belongs to, best first.
const OWNERS: [Kind; 6] = [Kind::Deployment, Kind::StatefulSet, Kind::DaemonSet, Kind::Job, Kind::CronJob, Kind::Pod];

/// `req id=0:1 proxy=in  src=10.0.0.1:4000 dst=10.0.0.2:80 tls=true :method=GET :authority=web :path=/`
pub(super) fn line(event: &TapEvent, wide: bool) -> String {
    let mut line = common(event, wide);
    let _ = match &event.event {
        Some(tap_event::Event::Request(request)) => {
            line.insert_str(0, "req ");
            write!(line, " :method={} :authority={} :path={}", request.method, request.authority, request.path)
        }
        Some(tap_event::Event::Response(response)) => {
            line.insert_str(0, "rsp ");
            write!(line, " :status={} latency={}", response.status, micros(response.since_request_us))
        }
        Some(tap_event::Event::End(end)) => {
            line.insert_str(0, "end ");
            let outcome = match end.outcome {
                Some(tap_end::Outcome::GrpcStatus(code)) => format!(" grpc-status={}", grpc_name(code)),
                Some(tap_end::Outcome::ResetCode(code)) => format!(" reset-error={code}"),
                None => String::new(),
            };
            // As by Linkerd: since the response began, or since the request if there was none.
            let duration = if end.since_response_us > 0 { end.since_response_us } else { end.since_request_us };
            write!(line, "{outcome} duration={} response-length={}B", micros(duration), end.response_bytes)
        }
        Some(tap_event::Event::Problem(_)) | None => Ok(()),
    };
    line
}

/// What all events of a request have in common.
pub(super) fn common(event: &TapEvent, wide: bool) -> String {
    let proxy = if event.direction() == Direction::Inbound { "in " } else { "out" };
    let mut line =
        format!("id={} proxy={proxy} src={} dst={} tls={}", event.id, event.source, event.destination, tls(event));
    if wide {
        let _ = write!(line, " pod={}/{}", event.namespace, event.pod);
        for (end, labels) in [("src", &event.source_labels), ("dst", &event.destination_labels)] {
            if let Some(owner) = owner(labels) {
                let _ = write!(line, " {end}_res={owner}");
            }
            if let Some(namespace) = labels.get("namespace") {
                let _ = write!(line, " {end}_ns={namespace}");
            }
            for id in ["client_id", "server_id"] {
                if let Some(identity) = labels.get(id) {
                    let _ = write!(line, " {id}={identity}");
                }
            }
        }
        let mut route: Vec<_> = event.route_labels.iter().collect();
        route.sort();
        for (name, value) in route {
            let _ = write!(line, " rt_{name}={value}");
        }
    }
    line
}

/// Whether the connection between proxies has mutual TLS: `true`, or why not.
fn tls(event: &TapEvent) -> &str {
    let labels = if event.direction() == Direction::Inbound { &event.source_labels } else { &event.destination_labels };
    labels.get("tls").map_or("", String::as_str)
}

fn owner(labels: &HashMap<String, String>) -> Option<String> {
    // Prometheus has a label `job` of its own.
    let label = |kind: Kind| if kind == Kind::Job { "k8s_job" } else { kind.long() };
    let mut kinds = OWNERS.into_iter();
    kinds.find_map(|kind| Some(format!("{}/{}", kind.short(), labels.get(label(kind))?)))
}

/// Linkerd's object, with the pod and the id as text beside it.
pub(super) fn json(event: &TapEvent) -> Value {
    let end = |address: &str, labels: &HashMap<String, String>| {
        let (ip, port) = address.rsplit_once(':').unwrap_or((address, "0"));
        json!({"ip": ip.trim_matches(['[', ']']), "port": port.parse::<u16>().unwrap_or_default(), "metadata": labels})
    };
    let mut object = Map::new();
    object.insert("namespace".to_owned(), json!(event.namespace));
    object.insert("pod".to_owned(), json!(event.pod));
    object.insert("source".to_owned(), end(&event.source, &event.source_labels));
    object.insert("destination".to_owned(), end(&event.destination, &event.destination_labels));
    object.insert("routeMeta".to_owned(), json!(event.route_labels));
    let direction = if event.direction() == Direction::Inbound { "INBOUND" } else { "OUTBOUND" };
    object.insert("proxyDirection".to_owned(), json!(direction));
    let (base, stream) = event.id.split_once(':').unwrap_or(("0", "0"));
    let id =
        json!({"base": base.parse::<u64>().unwrap_or_default(), "stream": stream.parse::<u64>().unwrap_or_default()});
    let (name, value) = match &event.event {
        Some(tap_event::Event::Request(request)) => (
            "requestInitEvent",
            json!({"id": id, "method": request.method, "scheme": request.scheme.to_uppercase(), "authority": request.authority,
                "path": request.path, "headers": headers(&request.headers)}),
        ),
        Some(tap_event::Event::Response(response)) => (
            "responseInitEvent",
            json!({"id": id, "sinceRequestInit": duration(response.since_request_us), "httpStatus": response.status,
                "headers": headers(&response.headers)}),
        ),
        Some(tap_event::Event::End(end)) => {
            let mut value = json!({"id": id, "sinceRequestInit": duration(end.since_request_us),
                "sinceResponseInit": duration(end.since_response_us), "responseBytes": end.response_bytes,
                "trailers": headers(&end.trailers)});
            match end.outcome {
                Some(tap_end::Outcome::GrpcStatus(code)) => value["grpcStatusCode"] = json!(code),
                Some(tap_end::Outcome::ResetCode(code)) => value["resetErrorCode"] = json!(code),
                None => {}
            }
            ("responseEndEvent", value)
        }
        Some(tap_event::Event::Problem(_)) | None => return Value::Object(object),
    };
    object.insert(name.to_owned(), value);
    Value::Object(object)
}

fn headers(headers: &[Header]) -> Vec<Value> {
    headers.iter().map(|header| json!({"name": header.name, "valueStr": header.value})).collect()
}

fn duration(us: u64) -> Value {
    json!({"seconds": us / 1_000_000, "nanos": us % 1_000_000 * 1000})
}

fn grpc_name(code: u32) -> String {
    let names = [
        "OK",
        "Canceled",
        "Unknown",
        "InvalidArgument",
        "DeadlineExceeded",
        "NotFound",
        "AlreadyExists",
        "PermissionDenied",
        "ResourceExhausted",
        "FailedPrecondition",
        "Aborted",
        "OutOfRange",
        "Unimplemented",
        "Internal",
        "Unavailable",
        "DataLoss",
        "Unauthenticated",
    ];
    names.get(code as usize).map_or_else(|| format!("Code({code})"), |name| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use weft_proto::viz::{TapEnd, TapRequestInit, TapResponseInit};

    use super::*;

    fn event(direction: Direction, event: tap_event::Event) -> TapEvent {
        TapEvent {
            namespace: "shop".to_owned(),
            pod: "web-0".to_owned(),
            direction: direction.into(),
            id: "0:1".to_owned(),
            source: "10.0.0.1:4000".to_owned(),
            destination: "[fd00::2]:80".to_owned(),
            source_labels: [("tls".to_owned(), "true".to_owned()), ("client_id".to_owned(), "client.shop".to_owned())]
                .into(),
            destination_labels: [
                ("tls".to_owned(), "loopback".to_owned()),
                ("deployment".to_owned(), "web".to_owned()),
            ]
            .into(),
            event: Some(event),
            ..TapEvent::default()
        }
    }

    #[test]
    fn lines_are_linkerds() {
        let request = TapRequestInit {
            method: "GET".to_owned(),
            authority: "web:80".to_owned(),
            path: "/".to_owned(),
            ..TapRequestInit::default()
        };
        assert_eq!(
            line(&event(Direction::Inbound, tap_event::Event::Request(request.clone())), false),
            "req id=0:1 proxy=in  src=10.0.0.1:4000 dst=[fd00::2]:80 tls=true :method=GET :authority=web:80 :path=/"
        );
        let response = TapResponseInit { status: 200, since_request_us: 1234, ..TapResponseInit::default() };
        assert_eq!(
            line(&event(Direction::Outbound, tap_event::Event::Response(response)), false),
            "rsp id=0:1 proxy=out src=10.0.0.1:4000 dst=[fd00::2]:80 tls=loopback :status=200 latency=1234µs"
        );
        let end = TapEnd {
            since_request_us: 9,
            since_response_us: 7,
            response_bytes: 5,
            outcome: Some(tap_end::Outcome::GrpcStatus(5)),
            ..TapEnd::default()
        };
        assert_eq!(
            line(&event(Direction::Inbound, tap_event::Event::End(end)), false),
            "end id=0:1 proxy=in  src=10.0.0.1:4000 dst=[fd00::2]:80 tls=true grpc-status=NotFound duration=7µs response-length=5B"
        );
        let wide = line(&event(Direction::Inbound, tap_event::Event::Request(request)), true);
        assert!(wide.contains(" pod=shop/web-0 client_id=client.shop dst_res=deploy/web :method="), "{wide}");
    }

    #[test]
    fn json_is_linkerds() {
        let end = TapEnd {
            since_request_us: 2_000_009,
            response_bytes: 5,
            outcome: Some(tap_end::Outcome::ResetCode(8)),
            ..TapEnd::default()
        };
        let value = json(&event(Direction::Inbound, tap_event::Event::End(end)));
        assert_eq!(value["destination"]["ip"], "fd00::2");
        assert_eq!(value["destination"]["port"], 80);
        assert_eq!(value["proxyDirection"], "INBOUND");
        let end = &value["responseEndEvent"];
        assert_eq!(
            (&end["id"]["stream"], &end["resetErrorCode"], &end["responseBytes"]),
            (&json!(1), &json!(8), &json!(5))
        );
        assert_eq!(end["sinceRequestInit"], json!({"seconds": 2, "nanos": 9000}));
    }
}
