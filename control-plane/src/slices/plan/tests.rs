//! Objects in, writes out; the writes are applied to the objects.

use serde_json::{Value, json};
use weft_k8s_api::manifest;

use super::*;

/// The known objects. It plays the API server's part: written slices get names and versions.
struct World {
    slices: Slices,
    version: u32,
}

fn service(name: &str, spec: Value) -> Value {
    let mut object = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": "shop", "uid": format!("uid-{name}")},
        "spec": {"selector": {"app": "vm"}, "clusterIP": "10.96.0.1", "ipFamilies": ["IPv4"],
            "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}});
    for (field, value) in spec.as_object().unwrap() {
        object["spec"][field] = value.clone();
    }
    object
}

fn workload(name: &str, ips: &[&str], ports: Value, ready: bool) -> Value {
    let ips: Vec<_> = ips.iter().map(|ip| json!({"ip": ip})).collect();
    json!({"apiVersion": "workload.linkerd.io/v1beta1", "kind": "ExternalWorkload",
        "metadata": {"name": name, "namespace": "shop", "labels": {"app": "vm", "topology.kubernetes.io/zone": "z"}},
        "spec": {"meshTLS": {"identity": "i", "serverName": "s"}, "ports": ports, "workloadIPs": ips},
        "status": {"conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }, "reason": "",
            "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}})
}

fn http() -> Value {
    json!([{"name": "http", "port": 8080}])
}

impl World {
    fn new() -> Self {
        let mut slices = Slices::default();
        slices.synced();
        Self { slices, version: 0 }
    }

    fn apply(&mut self, object: &Value) {
        let read = manifest::parse("test.json".as_ref(), &object.to_string());
        assert!(read.errors.is_empty(), "{:?}", read.errors);
        self.slices.apply(&read.objects[0].object);
    }

    fn delete(&mut self, kind: Kind, name: &str) {
        let reference = ObjectRef { kind, namespace: Some("shop".to_owned()), name: name.to_owned() };
        self.slices.delete(&reference);
    }

    /// Plans and writes everything; returns what was written, as `+`, `~` and `-` with the number of endpoints.
    fn settle(&mut self) -> Vec<String> {
        let mut done = Vec::new();
        let mut work = self.slices.take_work();
        work.sort();
        for (service, _) in work {
            for action in self.slices.plan(&service) {
                self.version += 1;
                let count = |slice: &EndpointSlice| slice.endpoints.as_ref().map_or(0, Vec::len);
                let replaced;
                let mut written = match action {
                    Action::Create(mut slice) => {
                        replaced = None;
                        done.push(format!("+{} {}", slice.address_type, count(&slice)));
                        let prefix = slice.metadata.generate_name.take().unwrap();
                        slice.metadata.name = Some(format!("{prefix}{:03}", self.version));
                        slice
                    }
                    Action::Update(slice) => {
                        replaced = slice.metadata.resource_version.clone();
                        done.push(format!("~{} {}", slice.address_type, count(&slice)));
                        slice
                    }
                    Action::Delete { name, version } => {
                        assert!(version.is_some());
                        done.push("-".to_owned());
                        self.slices.deleted(&Key::new("shop", name), version.as_deref());
                        continue;
                    }
                };
                written.metadata.resource_version = Some(self.version.to_string());
                self.slices.wrote(replaced.as_deref(), *written);
            }
        }
        // After the writes, nothing is left to write.
        for (service, _) in self.slices.take_work() {
            assert_eq!(self.slices.plan(&service), [], "{service} does not settle");
        }
        done
    }

    fn only(&self) -> &EndpointSlice {
        assert_eq!(self.slices.slices.len(), 1);
        &self.slices.slices.values().next().unwrap().1
    }
}

#[test]
fn a_selected_workload_becomes_an_endpoint_and_ceases_to_be_one() {
    let mut world = World::new();
    world.apply(&service("web", json!({})));
    assert_eq!(world.settle(), [""; 0]);
    world.apply(&workload("vm", &["192.0.2.1"], http(), false));
    assert_eq!(world.settle(), ["+IPv4 1"]);
    let slice = serde_json::to_value(world.only()).unwrap();
    assert_eq!(slice["metadata"]["labels"]["kubernetes.io/service-name"], "web");
    assert_eq!(
        slice["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"],
        "linkerd-external-workloads-controller"
    );
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "uid-web");
    assert_eq!(slice["ports"], json!([{"name": "http", "port": 8080, "protocol": "TCP"}]));
    let endpoint = &slice["endpoints"][0];
    assert_eq!(endpoint["conditions"]["ready"], false);
    assert_eq!((&endpoint["targetRef"]["kind"], &endpoint["zone"]), (&json!("ExternalWorkload"), &json!("z")));
    assert_eq!(endpoint.get("hostname"), None);

    world.apply(&workload("vm", &["192.0.2.1"], http(), true));
    assert_eq!(world.settle(), ["~IPv4 1"]);
    world.apply(&workload("vm", &["192.0.2.1"], http(), true));
    assert_eq!(world.settle(), [""; 0]);
    world.delete(Kind::ExternalWorkload, "vm");
    assert_eq!(world.settle(), ["-"]);
}

#[test]
fn who_is_selected() {
    let cases = [
        ("selected", service("web", json!({})), vec!["+IPv4 1"]),
        ("other labels", service("web", json!({"selector": {"app": "api"}})), vec![]),
        ("no selector", service("web", json!({"selector": {}})), vec![]),
        ("a name elsewhere", service("web", json!({"type": "ExternalName"})), vec![]),
        ("a port that the workload does not list", service("web", json!({"ports": [{"port": 9}]})), vec![]),
        ("a port by name", service("web", json!({"ports": [{"port": 9, "targetPort": "http"}]})), vec!["+IPv4 1"]),
        ("both families", service("web", json!({"ipFamilies": ["IPv4", "IPv6"]})), vec!["+IPv4 1", "+IPv6 1"]),
        (
            "headless without families",
            service("web", json!({"ipFamilies": [], "clusterIP": "None"})),
            vec!["+IPv4 1", "+IPv6 1"],
        ),
    ];
    for (name, service, expected) in cases {
        let mut world = World::new();
        world.apply(&workload("vm", &["192.0.2.1", "2001:db8::1"], http(), true));
        world.apply(&service);
        assert_eq!(world.settle(), expected, "{name}");
    }
    let mut system = service("web", json!({}));
    system["metadata"]["namespace"] = json!("kube-system");
    let mut vm = workload("vm", &["192.0.2.1"], http(), true);
    vm["metadata"]["namespace"] = json!("kube-system");
    let mut world = World::new();
    world.apply(&system);
    world.apply(&vm);
    assert_eq!(world.settle(), [""; 0]);
}

#[test]
fn endpoints_of_a_headless_service_have_the_hostnames_that_can_be_ones() {
    let mut world = World::new();
    world.apply(&service("web", json!({"clusterIP": "None"})));
    let long = "a".repeat(64);
    for (name, ip) in [("vm", "192.0.2.1"), ("vm.rack-1", "192.0.2.2"), (long.as_str(), "192.0.2.3")] {
        world.apply(&workload(name, &[ip], http(), true));
    }
    assert_eq!(world.settle(), ["+IPv4 3"]);
    let endpoints = world.only().endpoints.iter().flatten();
    let mut hostnames: Vec<_> = endpoints.map(|one| (one.addresses[0].as_str(), one.hostname.as_deref())).collect();
    hostnames.sort_unstable();
    assert_eq!(hostnames, [("192.0.2.1", Some("vm")), ("192.0.2.2", None), ("192.0.2.3", None)]);
}

#[test]
fn a_service_that_loses_its_selector_loses_its_slices() {
    let mut world = World::new();
    world.apply(&workload("vm", &["192.0.2.1"], http(), true));
    world.apply(&service("web", json!({})));
    assert_eq!(world.settle(), ["+IPv4 1"]);
    world.apply(&service("web", json!({"selector": {}})));
    assert_eq!(world.settle(), ["-"]);
}

#[test]
fn slices_are_full_and_a_change_touches_one() {
    let mut world = World::new();
    world.apply(&service("web", json!({})));
    let vm =
        |n: usize, ready| workload(&format!("vm-{n}"), &[&format!("192.0.{}.{}", n / 250, n % 250 + 1)], http(), ready);
    for n in 0..250 {
        world.apply(&vm(n, true));
    }
    assert_eq!(world.settle(), ["+IPv4 100", "+IPv4 100", "+IPv4 50"]);
    world.apply(&vm(9, false));
    assert_eq!(world.settle(), ["~IPv4 100"]);
    world.delete(Kind::ExternalWorkload, "vm-9");
    assert_eq!(world.settle(), ["~IPv4 99"]);
    world.apply(&vm(300, true));
    assert_eq!(world.settle(), ["~IPv4 100"]);
    // Slices differ by ports: here the port's name has another number.
    world.apply(&service("web", json!({"ports": [{"name": "http", "port": 80, "targetPort": "http"}]})));
    assert_eq!(world.settle(), [""; 0]);
    world.apply(&workload("odd", &["198.51.100.1"], json!([{"name": "http", "port": 9}]), true));
    assert_eq!(world.settle(), ["+IPv4 1"]);
}

/// The watch may be faster than the answer to a write, and then has the newer version.
#[test]
fn an_answer_that_arrives_late_does_not_put_an_old_slice_back() {
    let mut world = World::new();
    world.apply(&service("web", json!({})));
    world.apply(&workload("vm", &["192.0.2.1"], http(), true));
    world.settle();
    let first = world.only().clone();
    let at = |version: &str| {
        let mut slice = first.clone();
        slice.metadata.resource_version = Some(version.to_owned());
        slice
    };
    let version = |world: &World| world.only().metadata.resource_version.clone().unwrap();
    let base = first.metadata.resource_version.as_deref();
    world.slices.wrote(base, at("8"));
    assert_eq!(version(&world), "8");
    world.slices.apply(&Object::EndpointSlice(at("10")));
    world.slices.wrote(Some("8"), at("9"));
    assert_eq!(version(&world), "10");
    world.slices.wrote(None, at("7"));
    assert_eq!(version(&world), "10");
    let key = Key::of(&first.metadata);
    world.slices.deleted(&key, Some("9"));
    assert_eq!(version(&world), "10");
    world.slices.deleted(&key, Some("10"));
    assert!(world.slices.slices.is_empty());
}

#[test]
fn slices_of_a_former_service_are_replaced() {
    let mut world = World::new();
    world.apply(&workload("vm", &["192.0.2.1"], http(), true));
    world.apply(&service("web", json!({})));
    assert_eq!(world.settle(), ["+IPv4 1"]);
    world.delete(Kind::Service, "web");
    let mut again = service("web", json!({}));
    again["metadata"]["uid"] = json!("uid-web-again");
    world.apply(&again);
    assert_eq!(world.settle(), ["+IPv4 1", "-"]);
    let owner = &world.only().metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!(owner.uid, "uid-web-again");
}

#[test]
fn nothing_is_decided_before_everything_is_known() {
    let mut world = World { slices: Slices::default(), version: 0 };
    world.apply(&service("web", json!({})));
    world.apply(&workload("vm", &["192.0.2.1"], http(), true));
    assert!(!world.slices.has_work());
    assert_eq!(world.settle(), [""; 0]);
    world.slices.synced();
    assert!(world.slices.has_work());
    assert_eq!(world.settle(), ["+IPv4 1"]);
}

#[test]
fn slices_of_others_are_left_alone() {
    let mut world = World::new();
    world.apply(&json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web",
            "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"}},
        "endpoints": [{"addresses": ["10.244.0.1"]}], "ports": []}));
    world.apply(&service("web", json!({})));
    assert_eq!(world.settle(), [""; 0]);
}
