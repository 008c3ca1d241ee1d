//! The proxy's container and volumes.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{
        Capabilities, Container, ContainerPort, DownwardAPIVolumeFile, DownwardAPIVolumeSource, EmptyDirVolumeSource,
        EnvVar, ExecAction, HTTPGetAction, Lifecycle, LifecycleHandler, ObjectFieldSelector, Pod, PodSpec, Probe,
        ProjectedVolumeSource, ResourceRequirements, SeccompProfile, SecurityContext, ServiceAccountTokenProjection,
        SleepAction, Volume, VolumeMount, VolumeProjection,
    },
    apimachinery::pkg::{api::resource::Quantity, util::intstr::IntOrString},
};

use super::{
    annotations::Settings,
    config::{InjectConfig, ProxyResources},
    env::{self, PodPorts},
    running::is_native_sidecar,
    tuning::{DebugImage, ProbeTiming},
};
use crate::{inject::image_reference, labels, ports::PortSet};

/// Name of the volume for the proxy's key.
const END_ENTITY_VOLUME: &str = "linkerd-identity-end-entity";
/// Name of the volume with the proxy's token.
const TOKEN_VOLUME: &str = "linkerd-identity-token";
/// Name of the volume with the pod's labels, for traces.
const POD_INFO_VOLUME: &str = "linkerd-podinfo";
/// Time that a pod has for its termination, if it does not say (`k8s.io/api/core/v1`).
const DEFAULT_TERMINATION_SECONDS: i64 = 30;
/// Lifetime of the token, Linkerd's.
const TOKEN_SECONDS: i64 = 86_400;
/// Names of containers that mark a pod as meshed already.
const SIDECARS: [&str; 4] = ["linkerd-proxy", "istio-proxy", "linkerd-init", "istio-init"];
/// Image prefixes that mark a pod as meshed already.
const SIDECAR_IMAGES: [&str; 4] =
    ["cr.l5d.io/linkerd/proxy:", "gcr.io/istio-release/proxyv2:", "docker.io/istio/proxyv2:", "istio/proxyv2:"];

/// Whether the pod has a proxy.
pub(super) fn exists(pod: &Pod) -> bool {
    containers(pod).any(|container| {
        let image = container.image.as_deref().unwrap_or_default();
        SIDECARS.contains(&container.name.as_str()) || SIDECAR_IMAGES.iter().any(|prefix| image.starts_with(prefix))
    })
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

/// Containers that serve while the pod runs: the application's and native sidecars.
fn serving(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        let sidecars = spec.init_containers.iter().flatten().filter(|container| is_native_sidecar(container));
        sidecars.chain(&spec.containers)
    })
}

/// TCP ports that the pod's containers declare.
pub(super) fn container_ports(pod: &Pod) -> Vec<u16> {
    let declared = serving(pod).flat_map(|container| container.ports.iter().flatten());
    let tcp = declared.filter(|port| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"));
    let numbers: PortSet = tcp.filter_map(|port| u16::try_from(port.container_port).ok()).collect();
    numbers.iter().collect()
}

/// Ports of HTTP probes that are given as numbers; a port given by name is declared anyway.
fn probe_ports(pod: &Pod) -> impl Iterator<Item = u16> {
    let probes =
        serving(pod).flat_map(|c| [&c.liveness_probe, &c.readiness_probe, &c.startup_probe].into_iter().flatten());
    probes.filter_map(|probe| match probe.http_get.as_ref()?.port {
        IntOrString::Int(port) => u16::try_from(port).ok(),
        IntOrString::String(_) => None,
    })
}

fn named_ports(pod: &Pod, name: &str) -> Vec<u16> {
    let declared = serving(pod).flat_map(|container| container.ports.iter().flatten());
    let named = declared.filter(|port| port.name.as_deref() == Some(name));
    named.filter_map(|port| u16::try_from(port.container_port).ok()).collect()
}

/// Adds the proxy before every other init container, the container for debugging if it is asked for, and their volumes.
/// `inherited` are the namespace's settings.
pub(super) fn add(pod: &mut Pod, config: &InjectConfig, settings: &Settings, inherited: &Settings, ingress: bool) {
    let opaque = match &settings.opaque_ports {
        Some(list) => list.resolve(|name| named_ports(pod, name)),
        None => config.default_opaque_ports.clone(),
    };
    let inbound = container_ports(pod).into_iter().chain(probe_ports(pod)).collect();
    let env = env::env(config, settings, inherited, &PodPorts { inbound, opaque }, ingress);
    let spec = pod.spec.get_or_insert_with(PodSpec::default);
    let termination = spec.termination_grace_period_seconds.unwrap_or(DEFAULT_TERMINATION_SECONDS);
    let proxy =
        Container { lifecycle: wait_before_exit(config, settings, termination), ..container(config, settings, env) };
    spec.init_containers.get_or_insert_default().insert(0, proxy);
    if let Some(debug) = config.tuning.debug.as_ref().filter(|_| settings.debug) {
        spec.containers.push(debug_container(debug, config, settings));
    }
    let volumes = spec.volumes.get_or_insert_default();
    volumes.push(end_entity_volume());
    volumes.push(token_volume());
    if config.tuning.tracing.is_some() {
        volumes.push(pod_info_volume());
    }
}

/// Keeps the proxy running after the pod's termination has begun. The API server refuses to let a container sleep for
/// longer than the pod's termination may take.
fn wait_before_exit(config: &InjectConfig, settings: &Settings, termination: i64) -> Option<Lifecycle> {
    let wanted = i64::from(settings.wait_before_exit.unwrap_or(config.tuning.wait_before_exit));
    let seconds = Some(wanted.min(termination)).filter(|seconds| *seconds > 0)?;
    let sleep = LifecycleHandler { sleep: Some(SleepAction { seconds }), ..LifecycleHandler::default() };
    Some(Lifecycle { pre_stop: Some(sleep), ..Lifecycle::default() })
}

/// Linkerd's container with debugging tools (`linkerd2:charts/partials/templates/_debug.tpl`).
fn debug_container(debug: &DebugImage, config: &InjectConfig, settings: &Settings) -> Container {
    let (name, version) = (settings.debug_image.as_ref(), settings.debug_version.as_ref());
    let policy = settings.debug_pull_policy.as_ref().or(debug.pull_policy.as_ref());
    // Some clusters require probes; these always succeed.
    let succeeds = || {
        let exec = ExecAction { command: Some(vec!["true".to_owned()]) };
        Some(Probe { exec: Some(exec), ..Probe::default() })
    };
    Container {
        name: labels::DEBUG_CONTAINER.to_owned(),
        image: Some(image_reference(name.unwrap_or(&debug.name), version.unwrap_or(&debug.version))),
        image_pull_policy: Some(policy.unwrap_or(&config.image_pull_policy).clone()),
        liveness_probe: succeeds(),
        readiness_probe: succeeds(),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

fn container(config: &InjectConfig, settings: &Settings, env: Vec<EnvVar>) -> Container {
    let admin = settings.admin_port.unwrap_or(config.ports.admin);
    let inbound = settings.inbound_port.unwrap_or(config.ports.inbound);
    let some = |list: &[String]| (!list.is_empty()).then(|| list.to_vec());
    let probes = config.tuning.probes;
    let mut mounts = vec![mount(END_ENTITY_VOLUME, env::IDENTITY_DIR), mount(TOKEN_VOLUME, env::TOKEN_DIR)];
    if config.tuning.tracing.is_some() {
        mounts.push(mount(POD_INFO_VOLUME, env::POD_INFO_DIR));
    }
    Container {
        name: labels::PROXY_CONTAINER.to_owned(),
        image: Some(image(config, settings)),
        image_pull_policy: Some(settings.image_pull_policy.clone().unwrap_or_else(|| config.image_pull_policy.clone())),
        command: some(&config.proxy_command),
        args: some(&config.proxy_args),
        env: Some(env),
        ports: Some(vec![port("linkerd-proxy", inbound), port("linkerd-admin", admin)]),
        liveness_probe: Some(probe("/live", admin, probes.liveness)),
        readiness_probe: Some(probe("/ready", admin, probes.readiness)),
        // The kubelet starts the next container when this succeeds.
        startup_probe: Some(probe("/ready", admin, probes.startup)),
        restart_policy: Some("Always".to_owned()),
        resources: resources(&config.resources, settings),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            // Required by Pod Security `restricted`. Linkerd copies the first container's instead, for its init
            // container.
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
            privileged: Some(false),
            read_only_root_filesystem: Some(true),
            run_as_non_root: Some(true),
            run_as_user: Some(settings.uid.unwrap_or(config.proxy_uid)),
            run_as_group: settings.gid.or(config.proxy_gid).filter(|gid| *gid >= 0),
            seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), localhost_profile: None }),
            ..SecurityContext::default()
        }),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(mounts),
        ..Container::default()
    }
}

/// An annotated version replaces the tag or the digest of the image. An annotated image without either has the mesh's
/// version, as with Linkerd.
fn image(config: &InjectConfig, settings: &Settings) -> String {
    let image = settings.image.as_ref().unwrap_or(&config.proxy_image);
    let untagged = image.split_once('@').map_or(image.as_str(), |(name, _)| name);
    let name = match untagged.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => untagged,
    };
    let default = settings.image.as_ref().filter(|own| *own == name).map(|_| &config.proxy_version);
    settings.version.as_ref().or(default).map_or_else(|| image.clone(), |version| image_reference(name, version))
}

fn resources(defaults: &ProxyResources, settings: &Settings) -> Option<ResourceRequirements> {
    let list = |choices: [(&str, &Option<String>, &Option<String>); 3]| {
        let set =
            choices.into_iter().filter_map(|(name, own, default)| Some((name, own.as_ref().or(default.as_ref())?)));
        let set: BTreeMap<_, _> = set.map(|(name, value)| (name.to_owned(), Quantity(value.clone()))).collect();
        Some(set).filter(|set| !set.is_empty())
    };
    let requests = list([
        ("cpu", &settings.cpu.0, &defaults.cpu_request),
        ("memory", &settings.memory.0, &defaults.memory_request),
        ("ephemeral-storage", &settings.storage.0, &defaults.storage_request),
    ]);
    let limits = list([
        ("cpu", &settings.cpu.1, &defaults.cpu_limit),
        ("memory", &settings.memory.1, &defaults.memory_limit),
        ("ephemeral-storage", &settings.storage.1, &defaults.storage_limit),
    ]);
    (requests.is_some() || limits.is_some()).then(|| ResourceRequirements {
        requests,
        limits,
        ..ResourceRequirements::default()
    })
}

fn port(name: &str, number: u16) -> ContainerPort {
    ContainerPort { name: Some(name.to_owned()), container_port: number.into(), ..ContainerPort::default() }
}

fn probe(path: &str, port: u16, timing: ProbeTiming) -> Probe {
    let action =
        HTTPGetAction { path: Some(path.to_owned()), port: IntOrString::Int(port.into()), ..HTTPGetAction::default() };
    Probe {
        http_get: Some(action),
        initial_delay_seconds: timing.initial_delay_seconds.map(i32::from),
        period_seconds: timing.period_seconds.map(i32::from),
        timeout_seconds: timing.timeout_seconds.map(i32::from),
        success_threshold: timing.success_threshold.map(i32::from),
        failure_threshold: timing.failure_threshold.map(i32::from),
        ..Probe::default()
    }
}

fn mount(name: &str, path: &str) -> VolumeMount {
    VolumeMount { name: name.to_owned(), mount_path: path.to_owned(), ..VolumeMount::default() }
}

fn end_entity_volume() -> Volume {
    let memory = EmptyDirVolumeSource { medium: Some("Memory".to_owned()), ..EmptyDirVolumeSource::default() };
    Volume { name: END_ENTITY_VOLUME.to_owned(), empty_dir: Some(memory), ..Volume::default() }
}

fn token_volume() -> Volume {
    let token = ServiceAccountTokenProjection {
        audience: Some(labels::IDENTITY_AUDIENCE.to_owned()),
        expiration_seconds: Some(TOKEN_SECONDS),
        path: env::TOKEN_FILE.to_owned(),
        ..ServiceAccountTokenProjection::default()
    };
    let source = VolumeProjection { service_account_token: Some(token), ..VolumeProjection::default() };
    let projected = ProjectedVolumeSource { sources: Some(vec![source]), ..ProjectedVolumeSource::default() };
    Volume { name: TOKEN_VOLUME.to_owned(), projected: Some(projected), ..Volume::default() }
}

fn pod_info_volume() -> Volume {
    let field_ref = ObjectFieldSelector { api_version: None, field_path: "metadata.labels".to_owned() };
    let file = DownwardAPIVolumeFile { field_ref: Some(field_ref), path: "labels".to_owned(), ..Default::default() };
    let source = DownwardAPIVolumeSource { items: Some(vec![file]), ..DownwardAPIVolumeSource::default() };
    Volume { name: POD_INFO_VOLUME.to_owned(), downward_api: Some(source), ..Volume::default() }
}
