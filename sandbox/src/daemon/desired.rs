//! Computes the desired state from manifests. Pure.
//!
//! Deployments become pods with the names, labels and owners that Kubernetes would give them, Services get cluster
//! IPs, and injection uses the injector's own function. Objects that cannot be processed become an error line and are
//! omitted: a pod whose annotations cannot be read is never started outside the mesh.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    net::{IpAddr, Ipv4Addr},
};

use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{Namespace, Pod, Service},
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use weft_k8s_api::{
    inject::{Decision, InjectConfig, Redirection, RedirectionDefaults, inject},
    labels,
    manifest::{Manifests, Object},
};

use super::publish::json_of;
use crate::config::SERVICE_CIDR_V4;

/// The first cluster IP that is allocated, counted from the start of the service CIDR: by convention, the API server's
/// and the name server's are below.
const FIRST_CLUSTER_IP: u32 = 100;

/// The desired state of the sandbox.
#[derive(Debug, Default)]
pub(super) struct Desired {
    /// Pods, injected if they ask for it.
    pub(super) pods: Vec<DesiredPod>,
    /// Services with their cluster IPs.
    pub(super) services: Vec<Service>,
    /// All other objects that the control plane needs: policy, namespaces, service accounts.
    pub(super) objects: Vec<Object>,
    /// Faults in the manifests, one line each.
    pub(super) errors: Vec<String>,
}

/// A pod that should run.
#[derive(Clone, Debug)]
pub(super) struct DesiredPod {
    /// The pod, with its proxy.
    pub(super) pod: Pod,
    /// The agent's enrolment parameters; `None` for a pod without a proxy.
    pub(super) redirection: Option<Redirection>,
    /// Changes if the pod has to be replaced.
    pub(super) template_hash: String,
}

/// Allocates cluster IPs, and remembers them while the sandbox runs.
#[derive(Debug)]
pub(super) struct Allocator {
    given: HashMap<String, IpAddr>,
    next: u32,
}

impl Default for Allocator {
    fn default() -> Self {
        Self { given: HashMap::new(), next: FIRST_CLUSTER_IP }
    }
}

impl Allocator {
    fn cluster_ip(&mut self, service: &str, taken: &BTreeSet<IpAddr>) -> IpAddr {
        if let Some(ip) = self.given.get(service) {
            return *ip;
        }
        let base = u32::from(SERVICE_CIDR_V4.0);
        loop {
            let ip = IpAddr::V4(Ipv4Addr::from(base + self.next));
            self.next += 1;
            if !taken.contains(&ip) {
                self.given.insert(service.to_owned(), ip);
                return ip;
            }
        }
    }
}

/// Computes the desired state.
pub(super) fn desired(objects: Vec<Object>, config: &InjectConfig, allocator: &mut Allocator) -> Desired {
    let mut all = Desired::default();
    let namespaces: BTreeMap<String, Namespace> = objects
        .iter()
        .filter_map(|object| match object {
            Object::Namespace(namespace) => Some((namespace.metadata.name.clone()?, namespace.clone())),
            _ => None,
        })
        .collect();
    let chosen: BTreeSet<IpAddr> = objects.iter().filter_map(chosen_cluster_ip).collect();
    for object in objects {
        match object {
            Object::Deployment(deployment) => {
                for pod in replicas(&deployment) {
                    all.add_pod(pod, &namespaces, config);
                }
            }
            Object::Pod(pod) => all.add_pod(pod, &namespaces, config),
            Object::Service(service) => all.services.push(with_cluster_ip(service, allocator, &chosen)),
            other if is_used(&other) => all.objects.push(other),
            _ => {}
        }
    }
    all
}

/// The objects of kinds that Weft or the sandbox does not use, a line each, with file and line.
pub(super) fn ignored(manifests: &Manifests) -> Vec<String> {
    let unread = manifests.ignored.iter().map(ToString::to_string);
    let unused = manifests.objects.iter().filter(|located| !is_used(&located.object)).map(|located| {
        let (file, object) = (located.file.display(), located.object.reference());
        format!("{file}:{}: {object}: the sandbox does not use this kind; ignored", located.line)
    });
    unread.chain(unused).collect()
}

/// Whether the sandbox runs the object, or publishes it to the control plane. EndpointSlices, ReplicaSets and the Node
/// are its own; manifests of these kinds would conflict with them.
fn is_used(object: &Object) -> bool {
    matches!(object, Object::Deployment(_) | Object::Pod(_) | Object::Service(_)) || json_of(object).is_some()
}

impl Desired {
    fn add_pod(&mut self, mut pod: Pod, namespaces: &BTreeMap<String, Namespace>, config: &InjectConfig) {
        let namespace = pod.metadata.namespace.get_or_insert_with(|| "default".to_owned()).clone();
        let name = pod.metadata.name.clone().unwrap_or_default();
        let template_hash = hash_of(&(&pod.spec.as_ref().map(|spec| serde_json::json!(spec).to_string()), &{
            serde_json::json!([pod.metadata.labels, pod.metadata.annotations]).to_string()
        }));
        let injected = inject(&pod, namespaces.get(&namespace), config).and_then(|decision| match decision {
            Decision::Injected(pod) => {
                let redirection = Redirection::of(&pod, &RedirectionDefaults::default())?;
                Ok((pod, Some(redirection)))
            }
            Decision::Skipped(_) => Ok((pod, None)),
        });
        match injected {
            Ok((pod, redirection)) => self.pods.push(DesiredPod { pod, redirection, template_hash }),
            Err(error) => self.errors.push(format!("Pod {namespace}/{name} is not started: {error}")),
        }
    }
}

/// The pods of a Deployment, named and owned as by Kubernetes' controllers: `NAME-TEMPLATEHASH-REPLICA`.
fn replicas(deployment: &Deployment) -> Vec<Pod> {
    let spec = &deployment.spec;
    let name = deployment.metadata.name.clone().unwrap_or_default();
    let namespace = deployment.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
    let template = &spec.template;
    let hash = hash_of(&serde_json::json!(template).to_string());
    let replica_set = format!("{name}-{hash}");
    let count = u32::try_from(spec.replicas.unwrap_or(1)).unwrap_or(0);
    (0..count)
        .map(|replica| {
            let mut metadata = template.metadata.clone().unwrap_or_default();
            let suffix = &hash_of(&(&namespace, &replica_set, replica))[..5];
            metadata.name = Some(format!("{replica_set}-{suffix}"));
            metadata.namespace = Some(namespace.clone());
            metadata.labels.get_or_insert_default().insert(labels::POD_TEMPLATE_HASH.to_owned(), hash.clone());
            metadata.owner_references = Some(vec![OwnerReference {
                api_version: "apps/v1".to_owned(),
                kind: "ReplicaSet".to_owned(),
                name: replica_set.clone(),
                controller: Some(true),
                ..OwnerReference::default()
            }]);
            Pod { metadata, spec: template.spec.clone(), status: None }
        })
        .collect()
}

fn chosen_cluster_ip(object: &Object) -> Option<IpAddr> {
    let Object::Service(service) = object else { return None };
    service.spec.as_ref()?.cluster_ip.as_ref()?.parse().ok()
}

/// Gives a Service a cluster IP, unless it has one, is headless, or is an alias (ExternalName).
fn with_cluster_ip(mut service: Service, allocator: &mut Allocator, chosen: &BTreeSet<IpAddr>) -> Service {
    let key = format!(
        "{}/{}",
        service.metadata.namespace.as_deref().unwrap_or("default"),
        service.metadata.name.as_deref().unwrap_or_default()
    );
    let spec = service.spec.get_or_insert_default();
    let is_alias = spec.type_.as_deref() == Some("ExternalName");
    if spec.cluster_ip.as_deref().is_none_or(str::is_empty) && !is_alias {
        let ip = allocator.cluster_ip(&key, chosen).to_string();
        spec.cluster_ips = Some(vec![ip.clone()]);
        spec.cluster_ip = Some(ip);
    }
    service
}

/// A hash of ten characters, from the alphabet that Kubernetes uses in generated names (no vowels).
fn hash_of(value: &impl Hash) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    let mut rest = hasher.finish();
    let radix = ALPHABET.len() as u64;
    (0..10)
        .map(|_| {
            let at = usize::try_from(rest % radix).unwrap_or(0);
            rest /= radix;
            char::from(ALPHABET[at])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const MESHED: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop, annotations: {linkerd.io/inject: enabled}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: x, command: [web]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Pod
metadata: {name: legacy, namespace: other}
spec: {containers: [{name: legacy, image: x, command: [legacy]}]}
";

    fn check(text: &str, allocator: &mut Allocator) -> Desired {
        let manifests = weft_k8s_api::manifest::parse(Path::new("test.yaml"), text);
        assert!(manifests.errors.is_empty(), "{:?}", manifests.errors);
        let objects = manifests.objects.into_iter().map(|located| located.object).collect();
        desired(objects, &InjectConfig::new("proxy", "test", "anchors"), allocator)
    }

    #[test]
    fn deployments_become_pods_with_stable_names_and_owners() {
        let first = check(MESHED, &mut Allocator::default());
        let again = check(MESHED, &mut Allocator::default());
        let names = |desired: &Desired| -> Vec<String> {
            desired.pods.iter().map(|pod| pod.pod.metadata.name.clone().unwrap()).collect()
        };
        assert_eq!(names(&first), names(&again));
        assert_eq!(first.pods.len(), 4);
        let web = &first.pods[0];
        assert!(names(&first)[0].starts_with("web-"), "{:?}", names(&first));
        assert_eq!(web.pod.metadata.labels.as_ref().unwrap()["linkerd.io/proxy-deployment"], "web");
    }

    #[test]
    fn only_pods_of_meshed_namespaces_get_a_proxy() {
        let desired = check(MESHED, &mut Allocator::default());
        let meshed: Vec<bool> = desired.pods.iter().map(|pod| pod.redirection.is_some()).collect();
        assert_eq!(meshed, [true, true, true, false]);
    }

    #[test]
    fn a_pod_with_an_unreadable_policy_is_not_started() {
        let text = MESHED.replace(
            "{labels: {app: web}}",
            "{labels: {app: web}, annotations: {config.linkerd.io/default-inbound-policy: sometimes}}",
        );
        let manifests = weft_k8s_api::manifest::parse(Path::new("test.yaml"), &text);
        let objects = manifests.objects.into_iter().map(|located| located.object).collect();
        let desired = desired(objects, &InjectConfig::new("proxy", "test", "anchors"), &mut Allocator::default());
        assert!(desired.pods.iter().all(|pod| pod.redirection.is_none()));
    }

    #[test]
    fn objects_of_kinds_that_the_sandbox_does_not_use_are_named() {
        let parse = |text: &str| weft_k8s_api::manifest::parse(Path::new("a.yaml"), text);
        let text = "\
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: shop}
---
apiVersion: batch/v1
kind: Job
metadata: {name: migrate, namespace: shop}
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: report, namespace: shop}
---
apiVersion: v1
kind: Node
metadata: {name: node}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: web, namespace: shop}
";
        let manifests = parse(text);
        assert!(manifests.errors.is_empty(), "{:?}", manifests.errors);
        let expected = [
            "a.yaml:9: CronJob report: Weft does not use this kind (batch/v1); ignored",
            "a.yaml:1: ConfigMap shop/settings: the sandbox does not use this kind; ignored",
            "a.yaml:5: Job shop/migrate: the sandbox does not use this kind; ignored",
            "a.yaml:13: Node node: the sandbox does not use this kind; ignored",
        ];
        assert_eq!(ignored(&manifests), expected);
        assert_eq!(ignored(&parse(MESHED)), [""; 0]);
    }

    #[test]
    fn cluster_ips_stay_and_headless_services_have_none() {
        let mut allocator = Allocator::default();
        let ip = |desired: &Desired| desired.services[0].spec.as_ref().unwrap().cluster_ip.clone();
        let first = ip(&check(MESHED, &mut allocator));
        assert_eq!(first, ip(&check(MESHED, &mut allocator)));
        let headless =
            MESHED.replace("spec: {selector: {app: web}, ports", "spec: {clusterIP: None, selector: {app: web}, ports");
        assert_eq!(ip(&check(&headless, &mut allocator)).as_deref(), Some("None"));
    }
}
