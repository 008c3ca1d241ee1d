//! The existing slices, the wanted ones, and the writes that lead from one to the other. Synchronous.

use std::collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry};

use k8s_openapi::{
    api::{
        core::v1::Service,
        discovery::v1::{Endpoint, EndpointSlice},
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference},
};
use tokio::time::Instant;
use weft_k8s_api::{
    labels,
    manifest::{Kind, Object, ObjectRef},
    policy,
    workload::ExternalWorkload,
};

use super::endpoints::{self, Group};
use weft_index::Key;

/// The most endpoints in a slice, Kubernetes' own default.
const MAX_ENDPOINTS: usize = 100;
/// EndpointSlice label: the controller that manages it. Other controllers leave such slices alone.
const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
/// Linkerd's value of that label.
const MANAGER: &str = "linkerd-external-workloads-controller";
/// EndpointSlice label of headless Services.
const HEADLESS: &str = "service.kubernetes.io/headless";
/// Services of this namespace are the cluster's own.
const EXCLUDED_NAMESPACE: &str = "kube-system";

/// A write.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    /// Creates a slice under a name that the API chooses.
    Create(Box<EndpointSlice>),
    /// Replaces a slice, unless it has changed in between.
    Update(Box<EndpointSlice>),
    /// Deletes a slice, unless it has changed in between.
    Delete {
        /// Name.
        name: String,
        /// Resource version.
        version: Option<String>,
    },
}

impl Action {
    /// Name of the slice, or the prefix of a new one's.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Create(slice) => slice.metadata.generate_name.as_deref().unwrap_or_default(),
            Self::Update(slice) => slice.metadata.name.as_deref().unwrap_or_default(),
            Self::Delete { name, .. } => name,
        }
    }

    /// Resource version of the slice that is replaced or deleted.
    pub(super) fn version(&self) -> Option<&str> {
        match self {
            Self::Create(_) => None,
            Self::Update(slice) => slice.metadata.resource_version.as_deref(),
            Self::Delete { version, .. } => version.as_deref(),
        }
    }
}

/// The objects that determine slices.
#[derive(Default)]
pub(super) struct Slices {
    /// Services with a selector.
    services: HashMap<Key, Service>,
    workloads: HashMap<Key, ExternalWorkload>,
    /// Slices that this controller manages, and the Service of each.
    slices: BTreeMap<Key, (Key, EndpointSlice)>,
    slices_of_service: HashMap<Key, BTreeSet<Key>>,
    /// Services to check, and since when they are.
    work: HashMap<Key, Instant>,
    /// How many came to be checked since this was asked.
    added: u64,
    /// Whether another replica checks them.
    paused: bool,
    /// Whether the initial state is complete; nothing is decided before.
    synced: bool,
}

impl Slices {
    /// Applies a new or changed object.
    pub(super) fn apply(&mut self, object: &Object) {
        let key = Key::of(object.metadata());
        match object {
            Object::Service(service) => {
                let relevant = key.namespace != EXCLUDED_NAMESPACE && selector(service).is_some();
                match relevant {
                    true => drop(self.services.insert(key.clone(), service.clone())),
                    false => drop(self.services.remove(&key)),
                }
                // Slices of a Service that lost its selector have to be deleted.
                if relevant || self.slices_of_service.contains_key(&key) {
                    self.check(key);
                }
            }
            Object::ExternalWorkload(workload) => {
                let old = self.workloads.insert(key, workload.clone());
                self.workload_changed([old.as_ref(), Some(workload)].into_iter().flatten().cloned().collect());
            }
            Object::EndpointSlice(slice) => {
                self.forget(&key);
                let Some(service) = service_of(slice) else { return };
                self.slices_of_service.entry(service.clone()).or_default().insert(key.clone());
                self.slices.insert(key, (service.clone(), slice.clone()));
                self.check(service);
            }
            _ => {}
        }
    }

    /// Removes an object.
    pub(super) fn delete(&mut self, reference: &ObjectRef) {
        let key = Key::new(reference.namespace.clone().unwrap_or_default(), reference.name.clone());
        match reference.kind {
            Kind::Service => {
                // Kubernetes deletes its slices with it.
                self.services.remove(&key);
            }
            Kind::ExternalWorkload => {
                let old = self.workloads.remove(&key);
                self.workload_changed(old.into_iter().collect());
            }
            Kind::EndpointSlice => {
                if let Some(service) = self.forget(&key) {
                    self.check(service);
                }
            }
            _ => {}
        }
    }

    /// Records that the initial state is complete.
    pub(super) fn synced(&mut self) {
        self.synced = true;
    }

    /// Takes in the answer to a write, unless the watch has delivered a newer version of the slice in between.
    /// `replaced` is the version on which the write was based, `None` for a slice that was created.
    pub(super) fn wrote(&mut self, replaced: Option<&str>, slice: EndpointSlice) {
        if self.version(&Key::of(&slice.metadata)) == replaced {
            self.apply(&Object::EndpointSlice(slice));
        }
    }

    /// Takes in that a slice was deleted in this version, unless the watch has delivered a newer one in between.
    pub(super) fn deleted(&mut self, key: &Key, version: Option<&str>) {
        if self.version(key) == version {
            self.forget(key);
        }
    }

    fn version(&self, key: &Key) -> Option<&str> {
        self.slices.get(key).and_then(|(_, slice)| slice.metadata.resource_version.as_deref())
    }

    /// Removes a slice, and returns its Service.
    fn forget(&mut self, key: &Key) -> Option<Key> {
        let (service, _) = self.slices.remove(key)?;
        if let Some(slices) = self.slices_of_service.get_mut(&service) {
            slices.remove(key);
            if slices.is_empty() {
                self.slices_of_service.remove(&service);
            }
        }
        Some(service)
    }

    /// Whether Services are waiting to be checked.
    pub(super) fn has_work(&self) -> bool {
        self.synced && !self.work.is_empty()
    }

    /// Services to check, each once, and since when they are to be checked.
    pub(super) fn take_work(&mut self) -> Vec<(Key, Instant)> {
        if self.synced { self.work.drain().collect() } else { Vec::new() }
    }

    /// Number of Services that wait to be checked.
    pub(super) fn waiting(&self) -> usize {
        self.work.len()
    }

    /// Number of Services that came to be checked since the last call.
    pub(super) fn take_added(&mut self) -> u64 {
        std::mem::take(&mut self.added)
    }

    /// Queues every Service to be checked.
    pub(super) fn all_anew(&mut self) {
        self.paused = false;
        let all: Vec<_> = self.services.keys().chain(self.slices_of_service.keys()).cloned().collect();
        all.into_iter().for_each(|service| self.check(service));
    }

    /// Queues nothing until all are to be checked anew.
    pub(super) fn pause(&mut self) {
        self.paused = true;
        self.work.clear();
    }

    fn check(&mut self, service: Key) {
        if let (false, Entry::Vacant(new)) = (self.paused, self.work.entry(service)) {
            new.insert(Instant::now());
            self.added += 1;
        }
    }

    fn workload_changed(&mut self, versions: Vec<ExternalWorkload>) {
        for version in versions {
            let namespace = version.metadata.namespace.clone().unwrap_or_default();
            let selecting =
                self.services.iter().filter(|(key, service)| key.namespace == namespace && selects(service, &version));
            let selecting: Vec<_> = selecting.map(|(key, _)| key.clone()).collect();
            selecting.into_iter().for_each(|service| self.check(service));
        }
    }

    /// The writes that make a Service's slices as they should be.
    pub(super) fn plan(&self, key: &Key) -> Vec<Action> {
        let existing = self.slices_of_service.get(key).into_iter().flatten();
        let existing: Vec<_> = existing.filter_map(|slice| self.slices.get(slice)).map(|(_, slice)| slice).collect();
        let Some(service) = self.services.get(key) else {
            return existing.into_iter().map(delete).collect();
        };
        let selected = self.workloads.values().filter(|workload| {
            workload.metadata.namespace.as_ref() == Some(&key.namespace) && selects(service, workload)
        });
        let mut wanted = endpoints::wanted(service, selected);
        // Slices of a former Service of the same name are about to be garbage-collected, with everything that is
        // written to them.
        let (existing, former): (Vec<_>, Vec<_>) = existing.into_iter().partition(|slice| is_owned_by(slice, service));
        let mut actions = Vec::new();
        // Slices keep their endpoints as far as these are still wanted, so that a change touches as few slices as
        // possible.
        let mut kept: Vec<(&EndpointSlice, Group, Vec<Endpoint>)> = Vec::new();
        for slice in existing {
            let group = Group::of(&slice.address_type, slice.ports.as_deref().unwrap_or_default());
            let mut remaining = wanted.get_mut(&group);
            let mut endpoints = Vec::new();
            for endpoint in slice.endpoints.iter().flatten() {
                let address = endpoint.addresses.first().cloned().unwrap_or_default();
                endpoints.extend(remaining.as_mut().and_then(|remaining| remaining.remove(&address)));
            }
            kept.push((slice, group, endpoints));
        }
        for (slice, group, mut endpoints) in kept {
            if let Some(remaining) = wanted.get_mut(&group) {
                while endpoints.len() < MAX_ENDPOINTS
                    && let Some((_, endpoint)) = remaining.pop_first()
                {
                    endpoints.push(endpoint);
                }
            }
            if endpoints.is_empty() {
                actions.push(delete(slice));
                continue;
            }
            let new = EndpointSlice {
                metadata: ObjectMeta { labels: Some(slice_labels(key, service)), ..slice.metadata.clone() },
                ports: Some(group.endpoint_ports(service)),
                endpoints: Some(endpoints),
                ..slice.clone()
            };
            if !says_the_same(&new, slice) {
                actions.push(Action::Update(Box::new(new)));
            }
        }
        for (group, mut remaining) in wanted {
            while !remaining.is_empty() {
                let endpoints: Vec<_> =
                    std::iter::from_fn(|| remaining.pop_first()).take(MAX_ENDPOINTS).map(|(_, e)| e).collect();
                actions.push(Action::Create(Box::new(create(key, service, &group, endpoints))));
            }
        }
        actions.extend(former.into_iter().map(delete));
        actions
    }
}

fn selector(service: &Service) -> Option<LabelSelector> {
    let spec = service.spec.as_ref()?;
    let labels = spec.selector.clone().filter(|selector| !selector.is_empty())?;
    let external = spec.type_.as_deref() == Some("ExternalName");
    (!external).then_some(LabelSelector { match_labels: Some(labels), match_expressions: None })
}

fn selects(service: &Service, workload: &ExternalWorkload) -> bool {
    selector(service).is_some_and(|selector| policy::selects(&selector, workload.metadata.labels.as_ref()))
}

/// The Service of a managed slice.
fn service_of(slice: &EndpointSlice) -> Option<Key> {
    let labels = slice.metadata.labels.as_ref()?;
    let ours = labels.get(MANAGED_BY).is_some_and(|manager| manager == MANAGER);
    let name = labels.get(labels::SERVICE_NAME).filter(|_| ours)?;
    Some(Key::new(slice.metadata.namespace.clone().unwrap_or_default(), name.clone()))
}

fn is_owned_by(slice: &EndpointSlice, service: &Service) -> bool {
    let mut owners = slice.metadata.owner_references.iter().flatten().filter(|owner| owner.kind == "Service");
    owners.any(|owner| Some(&owner.uid) == service.metadata.uid.as_ref())
}

fn delete(slice: &EndpointSlice) -> Action {
    Action::Delete {
        name: slice.metadata.name.clone().unwrap_or_default(),
        version: slice.metadata.resource_version.clone(),
    }
}

fn create(key: &Key, service: &Service, group: &Group, endpoints: Vec<Endpoint>) -> EndpointSlice {
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Service".to_owned(),
        name: key.name.clone(),
        uid: service.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    EndpointSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("linkerd-external-{}-", key.name)),
            namespace: Some(key.namespace.clone()),
            labels: Some(slice_labels(key, service)),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        address_type: group.family.clone(),
        ports: Some(group.endpoint_ports(service)),
        endpoints: Some(endpoints),
    }
}

fn slice_labels(key: &Key, service: &Service) -> BTreeMap<String, String> {
    let mut found = BTreeMap::from([
        (labels::SERVICE_NAME.to_owned(), key.name.clone()),
        (MANAGED_BY.to_owned(), MANAGER.to_owned()),
    ]);
    if endpoints::is_headless(service) {
        found.insert(HEADLESS.to_owned(), String::new());
    }
    found
}

fn says_the_same(new: &EndpointSlice, old: &EndpointSlice) -> bool {
    let group = |slice: &EndpointSlice| Group::of(&slice.address_type, slice.ports.as_deref().unwrap_or_default());
    new.endpoints == old.endpoints && group(new) == group(old) && new.metadata.labels == old.metadata.labels
}

#[cfg(test)]
mod tests;
