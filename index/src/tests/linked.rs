//! Services of linked clusters, seen from here, and Services of this cluster, seen from there.

use super::*;

fn web() -> Key {
    Key::new("shop", "web")
}

fn labelled(cluster: &str) -> Value {
    let mut object = service("web", "10.96.0.1", json!({}));
    let labels =
        json!({"multicluster.linkerd.io/remote-discovery": cluster, "multicluster.linkerd.io/remote-service": "web"});
    merge(&mut object, json!({"metadata": {"labels": labels}}));
    object
}

#[test]
fn discovery_of_a_service_is_followed_until_it_is_deleted() {
    let world = World::new();
    assert!(world.index().watch_discovery(&web()).is_none());
    world.apply(service("web", "10.96.0.1", json!({})));
    let mut rx = world.index().watch_discovery(&web()).unwrap();
    assert_eq!(*rx.borrow_and_update(), Some(Discovery::Local));
    world.apply(labelled("east"));
    let linked = Discovery::Linked { cluster: "east".to_owned(), service: Some("web".to_owned()) };
    assert_eq!(changed(&mut rx), Some(Some(linked)));
    world.delete(Kind::Service, "shop", "web");
    assert_eq!(changed(&mut rx), Some(None));
}

#[test]
fn clients_ask_again_when_a_services_endpoints_move_to_another_cluster() {
    let world = World::new();
    world.apply(service("web", "10.96.0.1", json!({})));
    let query = EndpointsQuery { port: 80, node: None, hostname: None };
    let rx = world.index().watch_endpoints(&web(), query);
    world.apply(service("web", "10.96.0.1", json!({"ports": [{"name": "http", "port": 81}]})));
    assert!(rx.has_changed().is_ok());
    world.apply(labelled("east"));
    assert!(rx.has_changed().is_err());
}

#[test]
fn topology_does_not_concern_clients_in_other_clusters() {
    let world = World::new();
    let mut zoned = slice("web", &[("web-1", "10.244.0.1"), ("web-2", "10.244.0.2")], 8080);
    for (index, zone) in [(0, "a"), (1, "b")] {
        merge(
            &mut zoned["endpoints"][index],
            json!({"zone": zone, "nodeName": "n", "hints": {"forZones": [{"name": zone}]}}),
        );
    }
    world.apply_all([
        service("web", "10.96.0.1", json!({})),
        zoned,
        pod("web-1", "10.244.0.1", json!({})),
        pod("web-2", "10.244.0.2", json!({})),
    ]);
    let found = |zone: Option<&str>| {
        world.index().watch_endpoints_from_afar(&web(), 80, None, zone.map(str::to_owned)).borrow().clone()
    };
    let locality = |found: &Endpoints, at: &str| found.locality(&found.by_addr[&addr(at)]);
    let near = found(Some("a"));
    assert_eq!(near.by_addr.len(), 2, "hints do not apply");
    assert_eq!(
        (locality(&near, "10.244.0.1:8080"), locality(&near, "10.244.0.2:8080")),
        (Locality::Local, Locality::Remote)
    );
    assert_eq!(locality(&found(None), "10.244.0.1:8080"), Locality::Unknown);
    let rx = world.index().watch_endpoints_from_afar(&web(), 80, None, None);
    world.apply(service("web", "10.96.0.1", json!({"internalTrafficPolicy": "Local"})));
    assert_eq!(found(None).by_addr.len(), 2, "nor does the policy of internal traffic");
    assert!(rx.has_changed().is_ok());
    world.apply(super::destination::node("n", "a"));
    assert!(rx.has_changed().is_ok(), "nor a node");
    assert_eq!(world.index().zone_of("n").as_deref(), Some("a"));
    assert_eq!(world.index().zone_of("m"), None);
}

#[test]
fn one_endpoint_of_a_linked_service_is_found_by_its_hostname() {
    let world = World::new();
    let mut named = slice("web", &[("web-1", "10.244.0.1"), ("web-2", "10.244.0.2")], 8080);
    merge(&mut named["endpoints"][1], json!({"hostname": "web-2"}));
    world.apply_all([
        service("web", "10.96.0.1", json!({})),
        named,
        pod("web-1", "10.244.0.1", json!({})),
        pod("web-2", "10.244.0.2", json!({})),
    ]);
    let rx = world.index().watch_endpoints_from_afar(&web(), 80, Some("web-2".to_owned()), None);
    assert_eq!(rx.borrow().by_addr.keys().collect::<Vec<_>>(), [&addr("10.244.0.2:8080")]);
}
