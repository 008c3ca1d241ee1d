//! Destinations outside the cluster: the policy of an EgressNetwork leads to the original destination, and metrics name
//! the host.

use super::{
    fake::{Over, detecting, forward, http_route, of_kind, opaque_route, tls_route},
    raw::{BYTES, named},
    *,
};
use weft_proto::linkerd::{
    meta::{Metadata, Resource, metadata},
    outbound::{OutboundPolicy, proxy_protocol},
    tls_route::sni_match,
};

const HOST: &str = "api.example.com";

/// The policy in the form of the policy controller for an address of an EgressNetwork.
fn of_network(addr: SocketAddr, policy: OutboundPolicy) -> (Control, SocketAddr) {
    let resource = Resource {
        group: "policy.linkerd.io".into(),
        kind: "EgressNetwork".into(),
        namespace: "linkerd-egress".into(),
        name: "all-egress".into(),
        port: addr.port().into(),
        ..Resource::default()
    };
    let metadata = Some(Metadata { kind: Some(metadata::Kind::Resource(resource)) });
    let control = Control::default();
    control.policies.lock().insert(addr, OutboundPolicy { metadata, ..policy });
    (control, addr)
}

async fn proxy((control, addr): (Control, SocketAddr)) -> Proxy {
    Proxy::start_with(addr, control, |config| config.outbound.hostname_labels = true, true).await
}

/// Waits for a series of this value with the labels of the network and all of these.
async fn expect(proxy: &Proxy, name: &str, port: u16, labels: &[String], value: u64) {
    let parent = format!(
        r#"{name}{{parent_group="policy.linkerd.io",parent_kind="EgressNetwork",parent_namespace="linkerd-egress",parent_name="all-egress",parent_port="{port}",parent_section_name="","#
    );
    let is_it = |line: &str| {
        line.starts_with(&parent)
            && line.ends_with(&format!(" {value}"))
            && labels.iter().all(|label| line.contains(label.as_str()))
    };
    eventually(&format!("{parent} with {labels:?} is {value}"), || proxy.scrape().lines().any(is_it)).await;
}

#[tokio::test]
async fn requests_to_an_egress_network_are_counted_by_their_host() {
    let outside = named("outside").await;
    let over = Over::First(vec![forward(outside)]);
    let of = detecting(http_route(&over, vec![]), opaque_route(&over));
    let proxy = proxy(of_network(outside, of)).await;
    for host in [HOST, "other.example.com", HOST] {
        let mut request = get("/");
        request.headers_mut().insert("host", host.parse().unwrap());
        let response = proxy.http1().await.send_request(request).await.unwrap();
        assert_eq!(text(response).await, "outside");
    }
    assert_eq!(proxy.exchange(BYTES).await, "outside");
    let statuses = "outbound_http_route_request_statuses_total";
    let status = r#"http_status="200",error="""#;
    for (host, number) in [(HOST, 2), ("other.example.com", 1)] {
        expect(&proxy, statuses, outside.port(), &[format!(r#"hostname="{host}""#), status.into()], number).await;
    }
    expect(&proxy, "outbound_tcp_route_close_total", outside.port(), &[r#"error="""#.into()], 1).await;
    let balanced = |text: &str| text.lines().any(|line| line.starts_with("outbound_http_balancer_endpoints{"));
    assert!(!balanced(&proxy.scrape()), "there is one address, and nothing to balance");
}

#[tokio::test]
async fn tls_to_an_egress_network_takes_the_route_of_its_server_name() {
    let (outside, elsewhere) = (named("outside").await, named("elsewhere").await);
    let exact = |name: &str| [sni_match::Match::Exact(name.to_owned())];
    let route = |name: &str, addr| tls_route(&exact(name), &Over::First(vec![forward(addr)]));
    let routes = vec![route("other.example.com", elsewhere), route(HOST, outside)];
    let of = of_kind(proxy_protocol::Kind::Tls(proxy_protocol::Tls { routes }));
    let proxy = proxy(of_network(outside, of)).await;
    let hello = crate::detect::client_hello::tests::hello;
    assert_eq!(proxy.exchange(&hello(HOST)).await, "outside");
    assert_eq!(proxy.exchange(&hello("other.example.com")).await, "elsewhere");
    assert_eq!(proxy.exchange(&hello("unknown.example.com")).await, "", "no route takes it");
    for host in [HOST, "other.example.com"] {
        let hostname = format!(r#"hostname="{host}""#);
        expect(&proxy, "outbound_tls_route_open_total", outside.port(), &[hostname], 1).await;
    }
}
