//! The clients' end of the gRPC APIs: requests as a proxy sends them, frames, and of the messages only the addresses.
//!
//! The simulated clients share the processors with the control plane, so nothing is decoded that is not needed.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message as _;
use weft_proto::linkerd::{
    destination::GetDestination,
    inbound::PortSpec,
    outbound::{TrafficSpec, traffic_spec::Target},
};

/// Bytes before each message: whether it is compressed, and its length.
const HEAD: usize = 5;

/// A streaming method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Method {
    Get,
    GetProfile,
    OutboundWatch,
    WatchPort,
}

impl Method {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Get => "/io.linkerd.proxy.destination.Destination/Get",
            Self::GetProfile => "/io.linkerd.proxy.destination.Destination/GetProfile",
            Self::OutboundWatch => "/io.linkerd.proxy.outbound.OutboundPolicies/Watch",
            Self::WatchPort => "/io.linkerd.proxy.inbound.InboundServerPolicies/WatchPort",
        }
    }

    /// The name in tables and JSON.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Get => "Destination.Get",
            Self::GetProfile => "Destination.GetProfile",
            Self::OutboundWatch => "OutboundPolicies.Watch",
            Self::WatchPort => "InboundServerPolicies.WatchPort",
        }
    }
}

/// Asks for the endpoints of a Service's name and port.
pub(super) fn get(path: &str, token: &str) -> Bytes {
    destination(path, token)
}

/// Asks for the profile of the address that an application dialled.
pub(super) fn get_profile(address: SocketAddrV4, token: &str) -> Bytes {
    destination(&address.to_string(), token)
}

/// Asks for the policy towards the address that an application dialled.
pub(super) fn outbound_watch(address: SocketAddrV4, workload: &str) -> Bytes {
    let target = Target::Addr(SocketAddr::V4(address).into());
    frame(&TrafficSpec { source_workload: workload.to_owned(), target: Some(target) })
}

/// Asks for the policy of one of a workload's own ports.
pub(super) fn watch_port(workload: &str, port: u16) -> Bytes {
    frame(&PortSpec { workload: workload.to_owned(), port: port.into() })
}

fn destination(path: &str, token: &str) -> Bytes {
    let (scheme, path, context_token) = (String::new(), path.to_owned(), token.to_owned());
    frame(&GetDestination { scheme, path, context_token })
}

fn frame(message: &impl prost::Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(HEAD + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    bytes.put_slice(&message.encode_to_vec());
    bytes.freeze()
}

/// Splits a response's body into messages. Keeps nothing between messages.
#[derive(Debug, Default)]
pub(super) struct Frames {
    partial: Vec<u8>,
}

impl Frames {
    /// Takes the next bytes, and passes on each message that they complete.
    pub(super) fn feed(&mut self, mut bytes: &[u8], mut on_message: impl FnMut(&[u8])) {
        while !bytes.is_empty() {
            if self.partial.is_empty()
                && let Some(message) = length(bytes).and_then(|length| bytes.get(HEAD..HEAD + length))
            {
                on_message(message);
                bytes = bytes.get(HEAD + message.len()..).unwrap_or_default();
                continue;
            }
            let wanted = length(&self.partial).map_or(HEAD, |length| HEAD + length);
            let missing = wanted.saturating_sub(self.partial.len());
            let (head, rest) = bytes.split_at(missing.min(bytes.len()));
            self.partial.extend_from_slice(head);
            bytes = rest;
            if length(&self.partial).is_some_and(|length| self.partial.len() == HEAD + length) {
                let message = std::mem::take(&mut self.partial);
                on_message(message.get(HEAD..).unwrap_or_default());
            }
        }
    }
}

/// The length of the message whose head this begins with.
fn length(bytes: &[u8]) -> Option<usize> {
    let length: [u8; 4] = bytes.get(1..HEAD)?.try_into().ok()?;
    usize::try_from(u32::from_be_bytes(length)).ok()
}

/// One address of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Addressed {
    pub(super) address: Ipv4Addr,
    /// Whether it was added; else it was removed.
    pub(super) added: bool,
}

/// The addresses in an update of `Destination.Get`; none of a message that cannot be read.
pub(super) fn addresses(message: &[u8]) -> impl Iterator<Item = Addressed> {
    let Update { add, remove } = Update::decode(message).unwrap_or_default();
    let added = add.into_iter().flat_map(|set| set.addrs).filter_map(|weighted| weighted.addr).map(|addr| (addr, true));
    let removed = remove.into_iter().flat_map(|set| set.addrs).map(|addr| (addr, false));
    added.chain(removed).filter_map(|(addr, added)| Some(Addressed { address: addr.ip?.ipv4?.into(), added }))
}

/// `io.linkerd.proxy.destination.Update`, without what the bench does not read.
#[derive(Clone, PartialEq, prost::Message)]
struct Update {
    #[prost(message, optional, tag = "1")]
    add: Option<Added>,
    #[prost(message, optional, tag = "2")]
    remove: Option<Removed>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Added {
    #[prost(message, repeated, tag = "1")]
    addrs: Vec<Weighted>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Removed {
    #[prost(message, repeated, tag = "1")]
    addrs: Vec<TcpAddress>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Weighted {
    #[prost(message, optional, tag = "1")]
    addr: Option<TcpAddress>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TcpAddress {
    #[prost(message, optional, tag = "1")]
    ip: Option<IpAddress>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct IpAddress {
    #[prost(fixed32, optional, tag = "1")]
    ipv4: Option<u32>,
}

#[cfg(test)]
mod tests {
    use weft_proto::linkerd::destination::{AddrSet, Update, WeightedAddr, WeightedAddrSet, update};

    use super::*;

    fn messages(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let (mut frames, mut got) = (Frames::default(), Vec::new());
        chunks.iter().for_each(|chunk| frames.feed(chunk, |message| got.push(message.to_vec())));
        assert!(frames.partial.is_empty());
        got
    }

    #[test]
    fn messages_are_found_however_they_are_cut() {
        let wire = [&b"\0\0\0\0\x03abc"[..], b"\0\0\0\0\0", b"\0\0\0\0\x02de"].concat();
        let expected = [b"abc".to_vec(), Vec::new(), b"de".to_vec()];
        assert_eq!(messages(&[&wire]), expected);
        for cut in 0..wire.len() {
            assert_eq!(messages(&[&wire[..cut], &wire[cut..]]), expected, "cut at {cut}");
        }
        assert_eq!(messages(&wire.chunks(1).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn addresses_of_the_apis_messages_are_read() {
        let socket: SocketAddr = "100.64.1.2:8080".parse().unwrap();
        let weighted = WeightedAddr { addr: Some(socket.into()), weight: 7, ..WeightedAddr::default() };
        let labels = [("service".to_owned(), "web".to_owned())].into();
        let add = update::Update::Add(WeightedAddrSet { addrs: vec![weighted], metric_labels: labels });
        let remove = update::Update::Remove(AddrSet { addrs: vec![socket.into()] });
        for (update, added) in [(add, true), (remove, false)] {
            let bytes = Update { update: Some(update) }.encode_to_vec();
            let expected = Addressed { address: Ipv4Addr::new(100, 64, 1, 2), added };
            assert_eq!(addresses(&bytes).collect::<Vec<_>>(), [expected]);
        }
        assert_eq!(addresses(b"\xff\xff").count(), 0);
    }

    #[test]
    fn requests_are_the_apis() {
        let bytes = outbound_watch("10.96.0.7:80".parse().unwrap(), "shop:web");
        let spec = TrafficSpec::decode(&bytes[HEAD..]).unwrap();
        let Some(Target::Addr(addr)) = spec.target else { panic!("{spec:?}") };
        assert_eq!((addr.port, spec.source_workload.as_str()), (80, "shop:web"));
        let bytes = get("web.shop.svc.cluster.local:80", "{}");
        assert_eq!(GetDestination::decode(&bytes[HEAD..]).unwrap().path, "web.shop.svc.cluster.local:80");
        assert_eq!(length(&bytes), Some(bytes.len() - HEAD));
    }
}
