//! The objects of a run in the API server: creates them, and changes them while the run measures.
//!
//! Every change of an endpoint has an address of its own, by which the messages that it causes are recognised.

use std::{
    net::Ipv4Addr,
    sync::atomic::{AtomicU32, Ordering},
    time::Instant,
};

use anyhow::Context as _;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::Value;
use tokio::sync::Mutex;

use super::{
    api::Api,
    objects::{Plan, Slot},
    wire::Addressed,
};

/// Requests at a time while objects are created.
const CONCURRENCY: usize = 32;
const CORE: &str = "/api/v1";
const POLICY: &str = "/apis/policy.linkerd.io";

/// All objects, and the state of the slices.
pub(super) struct World {
    pub(super) plan: Plan,
    api: Api,
    services: Vec<Service>,
    /// Addresses of pods and of changes that were used.
    pod_addresses: AtomicU32,
    change_addresses: AtomicU32,
}

/// A Service that clients may have as target.
pub(super) struct Service {
    pub(super) number: u32,
    pub(super) cluster_ip: Ipv4Addr,
    /// Whether it has endpoints.
    pub(super) has_endpoints: bool,
    slice: Mutex<Slice>,
}

struct Slice {
    slots: Vec<Slot>,
    /// The endpoint that changes next.
    cursor: usize,
}

/// A write that changed what the clients of a Service get.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// The number of the Service.
    pub(super) service: u32,
    pub(super) what: Addressed,
    /// When the API server had answered the write.
    pub(super) answered: Instant,
}

impl World {
    /// Creates everything.
    ///
    /// # Errors
    /// The API server refuses an object.
    pub(super) async fn create(api: Api, plan: Plan) -> anyhow::Result<Self> {
        let size = plan.size;
        let mut world = Self {
            plan,
            api,
            services: Vec::new(),
            pod_addresses: AtomicU32::new(size.pods),
            change_addresses: AtomicU32::new(0),
        };
        let control = world.plan.control_namespace();
        let namespaces: Vec<_> = world.plan.namespaces().iter().chain([&control]).cloned().collect();
        each(namespaces, async |namespace| {
            world.api.create(&format!("{CORE}/namespaces"), &world.plan.namespace_object(&namespace)).await?;
            let accounts = format!("{CORE}/namespaces/{namespace}/serviceaccounts");
            world.api.create(&accounts, &world.plan.account_object()).await
        })
        .await?;
        each(0..size.nodes, async |node| {
            world.api.create(&format!("{CORE}/nodes"), &world.plan.node_object(node)).await
        })
        .await?;
        each(0..size.pods, async |pod| world.create_pod(pod, 0, world.plan.pod_address(pod)?).await).await?;
        world.services = world.create_services(0..size.services).await?;
        let namespace = world.plan.policy_namespace();
        let authentications = format!("{POLICY}/v1alpha1/namespaces/{namespace}/meshtlsauthentications");
        world.api.create(&authentications, &world.plan.authentication_object()).await?;
        world.create_servers(0..size.servers).await?;
        let policies = format!("{POLICY}/v1alpha1/namespaces/{namespace}/authorizationpolicies");
        each(0..size.policies, async |policy| world.api.create(&policies, &world.plan.policy_object(policy)).await)
            .await?;
        Ok(world)
    }

    /// Creates as many Services and Servers again. The new Services have the pods of the first.
    ///
    /// # Errors
    /// The API server refuses an object.
    pub(super) async fn double(&self) -> anyhow::Result<()> {
        let size = self.plan.size;
        self.create_services(size.services..size.services.saturating_mul(2)).await?;
        self.create_servers(size.servers..size.servers.saturating_mul(2)).await
    }

    /// The Services that clients may have as target.
    pub(super) fn services(&self) -> &[Service] {
        &self.services
    }

    /// Removes an endpoint of a Service, or adds the last removed one again with an address of its own.
    ///
    /// # Errors
    /// The API server refuses the slice.
    pub(super) async fn change(&self, service: &Service) -> anyhow::Result<Change> {
        let mut slice = service.slice.lock().await;
        let mut slots = slice.slots.clone();
        let cursor = slice.cursor;
        let slot = slots.get_mut(cursor).context("a Service without endpoints cannot change")?;
        if slot.ready {
            slot.ready = false;
        } else {
            slot.address = Plan::change_address(self.change_addresses.fetch_add(1, Ordering::Relaxed))?;
            slot.ready = true;
        }
        let what = Addressed { address: slot.address, added: slot.ready };
        let next = if slot.ready { (cursor + 1) % slots.len() } else { cursor };
        let answered = self.replace_slice(service.number, &slots).await?;
        *slice = Slice { slots, cursor: next };
        Ok(Change { service: service.number, what, answered })
    }

    /// Restarts a pod as a Deployment does: deletes it, creates one of another name and address, and updates the slice.
    ///
    /// # Errors
    /// The API server refuses one of the requests.
    pub(super) async fn restart(&self, pod: u32) -> anyhow::Result<Vec<Change>> {
        let number = self.plan.service_of(pod);
        let service = self.services.get(number as usize).context("a pod without a Service cannot be restarted")?;
        let mut slice = service.slice.lock().await;
        let mut slots = slice.slots.clone();
        let slot = slots.iter_mut().find(|slot| slot.pod == pod).context("a Service lacks an endpoint of its pod")?;
        let mut changes = Vec::new();
        let (namespace, old) = (self.plan.namespace(number), self.plan.pod_name(pod, slot.generation));
        self.api.delete(&format!("{CORE}/namespaces/{namespace}/pods/{old}")).await?;
        if slot.ready {
            let what = Addressed { address: slot.address, added: false };
            changes.push(Change { service: number, what, answered: Instant::now() });
        }
        let address = self.plan.pod_address(self.pod_addresses.fetch_add(1, Ordering::Relaxed))?;
        *slot = Slot { pod, generation: slot.generation + 1, address, ready: true };
        self.create_pod(pod, slot.generation, address).await?;
        let answered = self.replace_slice(number, &slots).await?;
        changes.push(Change { service: number, what: Addressed { address, added: true }, answered });
        slice.slots = slots;
        Ok(changes)
    }

    async fn replace_slice(&self, service: u32, slots: &[Slot]) -> anyhow::Result<Instant> {
        let (slices, name) = (self.slices(service), Plan::service_name(service));
        self.api.replace(&format!("{slices}/{name}"), &self.plan.slice_object(service, slots)).await?;
        Ok(Instant::now())
    }

    async fn create_pod(&self, pod: u32, generation: u32, address: Ipv4Addr) -> anyhow::Result<()> {
        let pods = format!("{CORE}/namespaces/{}/pods", self.plan.namespace(self.plan.service_of(pod)));
        self.api.create(&pods, &self.plan.pod_object(pod, generation)).await?;
        let status = format!("{pods}/{}/status", self.plan.pod_name(pod, generation));
        self.api.merge(&status, &Plan::pod_status(address)).await.map(drop)
    }

    /// Creates Services with their slices, and returns them in order.
    async fn create_services(&self, numbers: std::ops::Range<u32>) -> anyhow::Result<Vec<Service>> {
        let create = async |number: u32| {
            let services = format!("{CORE}/namespaces/{}/services", self.plan.namespace(number));
            let created = self.api.create(&services, &self.plan.service_object(number)).await?;
            let cluster_ip = cluster_ip(&created)?;
            let slots = self.plan.pods_of(number).map(|pod| {
                let address = self.plan.pod_address(pod)?;
                Ok(Slot { pod, generation: 0, address, ready: true })
            });
            let slots = slots.collect::<anyhow::Result<Vec<_>>>()?;
            let has_endpoints = !slots.is_empty();
            if has_endpoints {
                self.api.create(&self.slices(number), &self.plan.slice_object(number, &slots)).await?;
            }
            Ok(Service { number, cluster_ip, has_endpoints, slice: Mutex::new(Slice { slots, cursor: 0 }) })
        };
        stream::iter(numbers).map(create).buffered(CONCURRENCY).try_collect().await
    }

    async fn create_servers(&self, numbers: std::ops::Range<u32>) -> anyhow::Result<()> {
        let servers = format!("{POLICY}/v1beta3/namespaces/{}/servers", self.plan.policy_namespace());
        each(numbers, async |server| self.api.create(&servers, &self.plan.server_object(server)).await).await
    }

    /// The collection of the slices beside a Service.
    fn slices(&self, service: u32) -> String {
        format!("/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices", self.plan.namespace(service))
    }
}

/// Does something for each, some at a time.
async fn each<T, R, F: Future<Output = anyhow::Result<R>>>(
    items: impl IntoIterator<Item = T>,
    act: impl FnMut(T) -> F,
) -> anyhow::Result<()> {
    stream::iter(items).map(act).buffer_unordered(CONCURRENCY).try_for_each(async |_| Ok(())).await
}

fn cluster_ip(service: &Value) -> anyhow::Result<Ipv4Addr> {
    let text = service["spec"]["clusterIP"].as_str().unwrap_or_default();
    text.parse().with_context(|| format!("a Service has no IPv4 cluster address: {text:?}"))
}
