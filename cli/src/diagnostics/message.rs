//! Messages of Linkerd's API as Linkerd's command prints them: the JSON that Go makes of its structures, or the same as
//! YAML. Fields have the names of the definition, and a choice (`oneof`) is an object of its own, both names in Go's
//! spelling: `{"Kind": {"Detect": {..}}}`.

use anyhow::{Context as _, Result};
use k8s_openapi::ByteString;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MapKey, MessageDescriptor, ReflectMessage as _, Value};
use serde_json::{Map, Value as Json};
use weft_proto::LINKERD_DESCRIPTORS;

/// A message as JSON. `name` is that of its type, e.g. `inbound.Server`.
pub(super) fn json(name: &str, message: &impl Message) -> Result<Json> {
    Ok(object(&dynamic(name, message)?))
}

/// A message whose fields can be walked through by their names.
pub(crate) fn dynamic(name: &str, message: &impl Message) -> Result<DynamicMessage> {
    let pool = DescriptorPool::decode(LINKERD_DESCRIPTORS).context("read the definitions of Linkerd's messages")?;
    let full = format!("io.linkerd.proxy.{name}");
    let descriptor = pool.get_message_by_name(&full).with_context(|| format!("there is no message {full}"))?;
    decode(descriptor, message)
}

fn decode(descriptor: MessageDescriptor, message: &impl Message) -> Result<DynamicMessage> {
    let mut dynamic = DynamicMessage::new(descriptor);
    dynamic.transcode_from(message).context("read a message by its definition")?;
    Ok(dynamic)
}

fn object(message: &DynamicMessage) -> Json {
    let descriptor = message.descriptor();
    let mut object = Map::new();
    for field in descriptor.fields().filter(|field| field.containing_oneof().is_none()) {
        if message.has_field(&field) {
            object.insert(field.name().to_owned(), value(&message.get_field(&field)));
        }
    }
    for choice in descriptor.oneofs() {
        let chosen = choice.fields().find(|field| message.has_field(field));
        let shown = chosen.map_or(Json::Null, |field| {
            Map::from_iter([(in_go(field.name()), value(&message.get_field(&field)))]).into()
        });
        object.insert(in_go(choice.name()), shown);
    }
    object.into()
}

fn value(value: &Value) -> Json {
    match value {
        Value::Bool(is) => (*is).into(),
        Value::I32(number) | Value::EnumNumber(number) => (*number).into(),
        Value::I64(number) => (*number).into(),
        Value::U32(number) => (*number).into(),
        Value::U64(number) => (*number).into(),
        // The shortest decimal that reads as the same number, as in Go: 0.2, not 0.20000000298023224.
        Value::F32(number) => number.to_string().parse::<f64>().map_or(Json::Null, Json::from),
        Value::F64(number) => (*number).into(),
        Value::String(text) => text.as_str().into(),
        Value::Bytes(bytes) => serde_json::to_value(ByteString(bytes.to_vec())).unwrap_or_default(),
        Value::Message(message) => object(message),
        Value::List(list) => list.iter().map(self::value).collect(),
        Value::Map(map) => map.iter().map(|(key, entry)| (text(key), self::value(entry))).collect(),
    }
}

fn text(key: &MapKey) -> String {
    match key {
        MapKey::Bool(is) => is.to_string(),
        MapKey::I32(number) => number.to_string(),
        MapKey::I64(number) => number.to_string(),
        MapKey::U32(number) => number.to_string(),
        MapKey::U64(number) => number.to_string(),
        MapKey::String(text) => text.clone(),
    }
}

/// A name as Go's generator of protobuf code spells it: `http_routes` becomes `HttpRoutes`.
fn in_go(name: &str) -> String {
    let capitalised = |part: &str| {
        let mut characters = part.chars();
        let first = characters.next().map(|first| first.to_ascii_uppercase());
        first.into_iter().chain(characters).collect::<String>()
    };
    name.split('_').map(capitalised).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use weft_proto::linkerd::{
        destination::{DestinationProfile, RetryBudget, WeightedDst},
        inbound::{ProxyProtocol, Server, proxy_protocol},
        meta::{Metadata, Resource, metadata},
        outbound::{self, OutboundPolicy},
    };

    use super::*;

    fn server() -> Server {
        let metadata = Metadata {
            kind: Some(metadata::Kind::Resource(Resource {
                kind: "Server".into(),
                name: "web".into(),
                ..Resource::default()
            })),
        };
        let detect = proxy_protocol::Detect {
            timeout: Some("10s".parse().unwrap()),
            http_routes: vec![weft_proto::linkerd::inbound::HttpRoute {
                metadata: Some(metadata),
                ..Default::default()
            }],
            ..Default::default()
        };
        Server {
            protocol: Some(ProxyProtocol { kind: Some(proxy_protocol::Kind::Detect(detect)) }),
            labels: [("name".to_owned(), "web".to_owned())].into(),
            ..Server::default()
        }
    }

    #[test]
    fn a_server_is_printed_as_by_linkerd() {
        let resource = json!({"Kind": {"Resource": {"kind": "Server", "name": "web"}}});
        let detect = json!({"timeout": {"seconds": 10}, "http_routes": [{"metadata": resource}]});
        let expected = json!({"protocol": {"Kind": {"Detect": detect}}, "labels": {"name": "web"}});
        assert_eq!(json("inbound.Server", &server()).unwrap(), expected);
    }

    #[test]
    fn a_choice_without_a_value_is_null_and_numbers_are_short() {
        let policy = OutboundPolicy { protocol: Some(outbound::ProxyProtocol { kind: None }), ..Default::default() };
        assert_eq!(json("outbound.OutboundPolicy", &policy).unwrap(), json!({"protocol": {"Kind": null}}));
        let budget = RetryBudget { retry_ratio: 0.2, min_retries_per_second: 10, ttl: None };
        let profile = DestinationProfile { retry_budget: Some(budget), ..Default::default() };
        let expected = json!({"retry_budget": {"retry_ratio": 0.2, "min_retries_per_second": 10}});
        assert_eq!(json("destination.DestinationProfile", &profile).unwrap(), expected);
    }

    #[test]
    fn names_are_spelt_as_in_go() {
        assert_eq!(["kind", "http_routes", "ipv4"].map(in_go), ["Kind", "HttpRoutes", "Ipv4"]);
    }

    /// Messages of the generated code are read by the definitions: nothing is left over.
    #[test]
    fn definitions_and_generated_code_agree() {
        let pool = DescriptorPool::decode(LINKERD_DESCRIPTORS).unwrap();
        let by_definition = |name: &str| pool.get_message_by_name(name).unwrap();
        let read = decode(by_definition("io.linkerd.proxy.inbound.Server"), &server()).unwrap();
        assert_eq!(read.unknown_fields().count(), 0);
        assert_eq!(read.encode_to_vec().len(), server().encode_to_vec().len());
        let profile = DestinationProfile {
            fully_qualified_name: "web.shop.svc.cluster.local".into(),
            opaque_protocol: true,
            dst_overrides: vec![WeightedDst { authority: "a:80".into(), weight: 1, ..WeightedDst::default() }],
            ..DestinationProfile::default()
        };
        let read = decode(by_definition("io.linkerd.proxy.destination.DestinationProfile"), &profile).unwrap();
        assert_eq!((read.unknown_fields().count(), read.encode_to_vec().len()), (0, profile.encode_to_vec().len()));
    }
}
