//! The index from outside: events in, snapshots out.

mod addresses;
mod destination;
mod endpoints;
mod linked;
mod mirrored;
mod model;
mod outbound;
mod outbound_routes;
mod policy;
mod policy_routes;
mod random;
mod status;
mod views;
mod workload;

use std::cell::{RefCell, RefMut};

use serde_json::{Value, json};
use tokio::sync::watch;
use weft_k8s_api::{
    inject,
    manifest::{self, Kind},
    policy::DefaultPolicy,
    ports,
};

use super::*;

/// An index, asked and changed in turn.
struct World(RefCell<Index>);

/// Settings of a cluster.
pub(crate) fn cluster() -> Cluster {
    Cluster {
        control_namespace: "linkerd".to_owned(),
        cluster_domain: "cluster.local".to_owned(),
        trust_domain: "cluster.local".to_owned(),
        networks: inject::default_cluster_networks(),
        probe_networks: vec!["0.0.0.0/0".parse().unwrap()],
        default_policy: DefaultPolicy::AllUnauthenticated,
        default_opaque_ports: ports::default_opaque_ports(),
        allowed_skips: None,
        transport_mode: TransportMode::TransportHeader,
        egress_namespace: "linkerd-egress".to_owned(),
        require_reference_grants: false,
        ipv6: false,
        h2_upgrade: true,
        endpoints_from: EndpointsFrom::Slices,
    }
}

impl World {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut Cluster)) -> Self {
        let mut cluster = cluster();
        change(&mut cluster);
        Self(RefCell::new(Index::new(cluster)))
    }

    fn index(&self) -> RefMut<'_, Index> {
        self.0.borrow_mut()
    }

    /// Applies an object given as JSON.
    fn apply(&self, object: Value) {
        self.apply_all([object]);
    }

    fn apply_all<const N: usize>(&self, objects: [Value; N]) {
        let batch = objects.into_iter().map(|object| {
            let read = manifest::parse("test.json".as_ref(), &object.to_string());
            assert!(read.errors.is_empty(), "{:?}", read.errors);
            Event::Apply(Box::new(read.objects.into_iter().next().unwrap().object))
        });
        self.index().apply(batch.collect());
    }

    /// Applies an object of which parts cannot be used.
    fn apply_unreadable(&self, object: &Value) {
        self.index().apply(vec![Event::Apply(Box::new(unreadable(object)))]);
    }

    fn delete(&self, kind: Kind, namespace: &str, name: &str) {
        let reference = manifest::ObjectRef { kind, namespace: Some(namespace.to_owned()), name: name.to_owned() };
        self.index().apply(vec![Event::Delete(reference)]);
    }
}

/// An object of which parts cannot be used, as a reader gets it that must deny what it cannot read.
fn unreadable(object: &Value) -> manifest::Object {
    let read = manifest::parse("test.json".as_ref(), &object.to_string());
    *read.errors.into_iter().find_map(|error| error.restrictive).unwrap()
}

/// The snapshot, if it has not been seen yet.
fn changed<T: Clone>(rx: &mut watch::Receiver<T>) -> Option<T> {
    rx.has_changed().unwrap().then(|| rx.borrow_and_update().clone())
}

/// A client's stream: it asks again when its view ends, and receives the differences.
struct Stream<'a, T> {
    ask: Box<dyn Fn() -> View<T> + 'a>,
    view: View<T>,
    sent: Option<Arc<Snapshot<T>>>,
}

impl<'a, T: PartialEq> Stream<'a, T> {
    fn new(ask: impl Fn() -> View<T> + 'a) -> Self {
        Self { view: ask(), ask: Box::new(ask), sent: None }
    }

    /// The snapshot, if the client does not have it.
    fn next(&mut self) -> Option<Arc<Snapshot<T>>> {
        if self.view.has_changed().is_err() {
            self.view = (self.ask)();
        }
        let new = self.view.borrow_and_update().clone();
        let old = self.sent.replace(new.clone());
        (old.as_ref() != Some(&new)).then_some(new)
    }
}

/// The value of a snapshot that may not be there.
fn value<T>(snapshot: &Option<Arc<Snapshot<T>>>) -> Option<&T> {
    snapshot.as_ref().map(|snapshot| &***snapshot)
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn service(name: &str, ip: &str, spec: Value) -> Value {
    let mut object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "shop"},
        "spec": {"clusterIP": ip, "ports": [{"name": "http", "port": 80}]}});
    merge(&mut object, json!({"spec": spec}));
    object
}

fn slice(service: &str, pods: &[(&str, &str)], port: u16) -> Value {
    let endpoints: Vec<_> = pods
        .iter()
        .map(|(pod, ip)| json!({"addresses": [ip], "targetRef": {"kind": "Pod", "name": pod, "namespace": "shop"}}))
        .collect();
    json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": format!("{service}-1"), "namespace": "shop", "labels": {"kubernetes.io/service-name": service}},
        "ports": [{"name": "http", "port": port}], "endpoints": endpoints})
}

/// A meshed pod; `change` is merged over it.
fn pod(name: &str, ip: &str, change: Value) -> Value {
    let env = |name: &str, port: u16| json!({"name": format!("LINKERD2_PROXY_{name}_LISTEN_ADDR"), "value": format!("0.0.0.0:{port}")});
    let mut object = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "labels": {"app": "web", "linkerd.io/control-plane-ns": "linkerd"}},
        "spec": {"serviceAccountName": "web", "nodeName": "node-1",
            "initContainers": [{"name": "linkerd-proxy", "restartPolicy": "Always",
                "env": [env("INBOUND", 4143), env("ADMIN", 4191), env("CONTROL", 4190)]}],
            "containers": [{"name": "app", "ports": [{"name": "http", "containerPort": 8080}]}]},
        "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}});
    merge(&mut object, change);
    object
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}
