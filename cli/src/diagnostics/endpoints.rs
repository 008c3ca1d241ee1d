//! `weft diagnostics endpoints`: the addresses that proxies get for authorities.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result};
use clap::Args;
use futures::future::try_join_all;
use serde::Serialize;
use tonic::transport::Channel;
use weft_proto::linkerd::destination::{
    GetDestination, WeightedAddr, WeightedAddrSet, destination_client::DestinationClient, protocol_hint::Protocol,
    tls_identity::Strategy, update::Update,
};

use super::api::{ApiArgs, ProxyApi, answer};
use crate::output::{self, WideFormat, note, or_nothing, progress, table};

/// Time for the first endpoints. Without endpoints, Weft's discovery answers at once about a local Service, but sends
/// nothing about a linked or federated one, and Linkerd's about none.
const FIRST_WITHIN: Duration = Duration::from_secs(3);

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft diagnostics endpoints web.shop.svc.cluster.local:80
  weft diagnostics endpoints web.shop.svc.cluster.local:80 api.shop.svc.cluster.local:8080 -o json
  weft diagnostics endpoints web-0.web.shop.svc.cluster.local:80 -o wide   one pod of a headless Service
  weft diagnostics endpoints web.shop.svc.cluster.local:80 --token '{\"ns\":\"shop\",\"nodeName\":\"node-a\"}'
                                                                           as for a client on that node

Ends with 0 when there are no endpoints, and with 1 when the control plane refuses an authority.")]
pub(super) struct EndpointsArgs {
    /// SERVICE.NAMESPACE.svc.DOMAIN:PORT, as proxies name it; the port is 80 unless it is given
    #[arg(required = true, value_name = "AUTHORITY")]
    authorities: Vec<String>,
    /// Context token of the proxy to answer as: {"ns", "nodeName", "pod"}
    #[arg(long, default_value = "", hide_default_value = true)]
    token: String,
    /// Output format: wide adds weight, zone, protocol and identity
    #[arg(short, long, value_enum, default_value_t)]
    output: WideFormat,
    #[command(flatten)]
    api: ApiArgs,
}

/// An endpoint. The first five fields are Linkerd's columns.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Row {
    namespace: String,
    ip: String,
    port: u16,
    pod: String,
    service: String,
    weight: u32,
    /// `h2`, `opaque`, or empty: the protocol that the proxy uses between proxies.
    protocol: &'static str,
    /// The identity that the endpoint's certificate must have; empty without mutual TLS.
    identity: String,
    labels: BTreeMap<String, String>,
}

pub(super) async fn execute(args: EndpointsArgs) -> Result<()> {
    let sets = progress::during("the control plane's endpoints", sets(&args)).await?;
    print(&rows(&args.authorities, &sets)?, args.output)?;
    for authority in without_endpoints(&args.authorities, &sets) {
        note(&format!("{authority}: no endpoints found"));
    }
    Ok(())
}

/// What the control plane answers, in the order of the authorities.
async fn sets(args: &EndpointsArgs) -> Result<Vec<Option<WeightedAddrSet>>> {
    let (channel, _) = args.api.connect(ProxyApi::Destination).await?;
    let asked = args.authorities.iter().map(|authority| first(channel.clone(), authority, &args.token));
    try_join_all(asked).await
}

fn without_endpoints<'a>(authorities: &'a [String], sets: &[Option<WeightedAddrSet>]) -> Vec<&'a str> {
    let all = authorities.iter().zip(sets);
    let without = all.filter(|(_, set)| set.as_ref().is_none_or(|set| set.addrs.is_empty()));
    without.map(|(authority, _)| authority.as_str()).collect()
}

fn rows(authorities: &[String], sets: &[Option<WeightedAddrSet>]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (set, authority) in sets.iter().zip(authorities) {
        for endpoint in set.iter().flat_map(|set| &set.addrs) {
            let labels = set.as_ref().map(|set| &set.metric_labels).into_iter().flatten();
            rows.push(row(endpoint, labels).with_context(|| format!("{authority}: an endpoint has no address"))?);
        }
    }
    rows.sort();
    rows.dedup();
    Ok(rows)
}

/// The first endpoints; `None` when there are none.
async fn first(channel: Channel, authority: &str, token: &str) -> Result<Option<WeightedAddrSet>> {
    let request =
        GetDestination { scheme: "k8s".to_owned(), path: authority.to_owned(), context_token: token.to_owned() };
    let mut client = DestinationClient::new(channel);
    let mut updates = answer(authority, client.get(request)).await?.into_inner();
    let Ok(first) = tokio::time::timeout(FIRST_WITHIN, updates.message()).await else { return Ok(None) };
    let update = first.map_err(|status| super::api::refused(authority, &status))?;
    Ok(match update.and_then(|update| update.update) {
        Some(Update::Add(set)) => Some(set),
        Some(Update::Remove(_) | Update::NoEndpoints(_)) | None => None,
    })
}

fn row<'a>(endpoint: &WeightedAddr, of_set: impl Iterator<Item = (&'a String, &'a String)>) -> Option<Row> {
    let address = SocketAddr::try_from(endpoint.addr?).ok()?;
    let mut labels: BTreeMap<String, String> = of_set.map(|(name, value)| (name.clone(), value.clone())).collect();
    labels.extend(endpoint.metric_labels.clone());
    let label = |name: &str| labels.get(name).cloned().unwrap_or_default();
    let namespace = label("namespace");
    let protocol = match endpoint.protocol_hint.as_ref().and_then(|hint| hint.protocol.as_ref()) {
        Some(Protocol::H2(_)) => "h2",
        Some(Protocol::Opaque(_)) => "opaque",
        None => "",
    };
    let identity = match endpoint.tls_identity.as_ref().and_then(|tls| tls.strategy.as_ref()) {
        Some(Strategy::DnsLikeIdentity(dns)) => dns.name.clone(),
        Some(Strategy::UriLikeIdentity(uri)) => uri.uri.clone(),
        None => String::new(),
    };
    Some(Row {
        ip: address.ip().to_string(),
        port: address.port(),
        pod: label("pod"),
        service: format!("{}.{namespace}", label("service")),
        namespace,
        weight: endpoint.weight,
        protocol,
        identity,
        labels,
    })
}

fn print(rows: &[Row], format: WideFormat) -> Result<()> {
    if let Some(data) = format.data() {
        return data.print(&rows);
    }
    if rows.is_empty() {
        return Ok(());
    }
    Ok(output::print(&if format == WideFormat::Wide { wide(rows) } else { narrow(rows) })?)
}

fn narrow(rows: &[Row]) -> comfy_table::Table {
    let mut shown = table(["NAMESPACE", "IP", "PORT", "POD", "SERVICE"]);
    for row in rows {
        shown.add_row([&row.namespace, &row.ip, &row.port.to_string(), &or_nothing(&row.pod), &row.service]);
    }
    shown
}

fn wide(rows: &[Row]) -> comfy_table::Table {
    let mut shown = table(["NAMESPACE", "IP", "PORT", "POD", "SERVICE", "WEIGHT", "ZONE", "PROTOCOL", "IDENTITY"]);
    for row in rows {
        let zone = row.labels.get("zone").map(String::as_str).unwrap_or_default();
        shown.add_row([
            row.namespace.clone(),
            row.ip.clone(),
            row.port.to_string(),
            or_nothing(&row.pod),
            row.service.clone(),
            row.weight.to_string(),
            or_nothing(zone),
            or_nothing(row.protocol),
            or_nothing(&row.identity),
        ]);
    }
    shown
}

#[cfg(test)]
mod tests {
    use weft_proto::linkerd::{
        destination::{ProtocolHint, TlsIdentity, protocol_hint::H2, tls_identity::DnsLikeIdentity},
        net::TcpAddress,
    };

    use super::*;

    const IDENTITY: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";

    fn endpoint(address: &str) -> WeightedAddr {
        let strategy = Strategy::DnsLikeIdentity(DnsLikeIdentity { name: IDENTITY.to_owned() });
        let hint = ProtocolHint { protocol: Some(Protocol::H2(H2 {})), ..ProtocolHint::default() };
        WeightedAddr {
            addr: Some(TcpAddress::from(address.parse::<SocketAddr>().unwrap())),
            weight: 10000,
            metric_labels: [("pod", "web-0"), ("zone", "west")].map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            tls_identity: Some(TlsIdentity { strategy: Some(strategy), server_name: None }),
            protocol_hint: Some(hint),
            ..WeightedAddr::default()
        }
    }

    fn set() -> WeightedAddrSet {
        WeightedAddrSet {
            addrs: ["10.244.0.9:8080", "[fd00::9]:8080"].map(endpoint).into(),
            metric_labels: [("namespace", "shop"), ("service", "web")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into(),
        }
    }

    fn rows() -> Vec<Row> {
        super::rows(&["web.shop.svc.cluster.local:8080".to_owned()], &[Some(set())]).unwrap()
    }

    #[test]
    fn authorities_without_endpoints_are_named() {
        let names = ["web", "empty", "unknown"].map(str::to_owned);
        let sets = [Some(set()), Some(WeightedAddrSet::default()), None];
        assert_eq!(without_endpoints(&names, &sets), ["empty", "unknown"]);
    }

    #[test]
    fn an_endpoint_is_a_row_with_linkerds_columns() {
        let text = narrow(&rows()).trim_fmt();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].split_whitespace().collect::<Vec<_>>(), ["NAMESPACE", "IP", "PORT", "POD", "SERVICE"]);
        assert_eq!(
            lines[1].split_whitespace().collect::<Vec<_>>(),
            ["shop", "10.244.0.9", "8080", "web-0", "web.shop"]
        );
        assert!(lines[2].contains("fd00::9"), "{text}");
    }

    #[test]
    fn wide_and_json_say_how_it_is_reached() {
        let text = wide(&rows()).trim_fmt();
        assert!(text.contains(IDENTITY) && text.contains("h2") && text.contains("west"), "{text}");
        let json = serde_json::to_value(rows()).unwrap();
        assert_eq!(json[0]["identity"], IDENTITY);
        assert_eq!(json[0]["labels"]["namespace"], "shop");
    }

    #[test]
    fn an_endpoint_without_an_address_is_no_row() {
        let broken = WeightedAddr { addr: None, ..endpoint("10.0.0.1:1") };
        assert_eq!(row(&broken, std::iter::empty()), None);
    }
}
