//! From a pod's container to a process: environment, command line, mounts. Pure but for [`prepare_volumes`].
//!
//! The rules are Kubernetes': `$(NAME)` in values, commands and arguments stands for an earlier variable, `$$(NAME)`
//! for the text `$(NAME)`, and an unknown field is an error.

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::{Container, EnvVar, ObjectFieldSelector, Pod, Volume};

use super::pki::{Pki, PkiError};
use crate::{
    config::{CLUSTER_DOMAIN, DNS_ADDRESS, NODE_NAME},
    host::container::{Mount, Spec},
};

/// Directory of the programs of the mesh and of the examples, as containers see it; first in their PATH.
pub(super) const BIN_DIR: &str = "/run/weft/bin";
/// Directory of the proxy that replaces Weft's, as containers see it.
pub(super) const PROXY_DIR: &str = "/run/weft/proxy";
const PATH: &str = "/run/weft/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A pod, and its place on the host.
pub(super) struct Placed<'a> {
    pub(super) pod: &'a Pod,
    pub(super) ips: &'a [IpAddr],
    /// The pod's directory.
    pub(super) dir: &'a Path,
    pub(super) netns: &'a Path,
    /// The pod's cgroup, absolute.
    pub(super) cgroup: &'a Path,
    pub(super) bin_dir: &'a Path,
    /// The directory of the proxy that replaces Weft's.
    pub(super) proxy_dir: Option<&'a Path>,
}

/// Why a container cannot be started here, although Kubernetes might start it.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// There is no image to take the command from.
    #[error("container {0} has no command: the sandbox runs programs of this host, not images; set `command`")]
    NoCommand(String),
    /// The environment refers to something that the sandbox does not have.
    #[error("container {container}: env {name}: {problem}")]
    Env {
        /// Name of the container.
        container: String,
        /// Name of the variable.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The sandbox does not support this kind of volume.
    #[error("volume {0}: the sandbox knows emptyDir, hostPath and projected serviceAccountToken volumes only")]
    Volume(String),
    /// A mount of a volume that the pod does not have.
    #[error("container {container} mounts volume {volume}, which the pod does not have")]
    Mount {
        /// Name of the container.
        container: String,
        /// Name of the volume.
        volume: String,
    },
    /// A volume could not be created.
    #[error("cannot prepare volume {volume}: {source}")]
    Prepare {
        /// Name of the volume.
        volume: String,
        /// Error of the system.
        source: io::Error,
    },
    /// A token could not be created.
    #[error(transparent)]
    Token(#[from] PkiError),
}

/// The process of a container.
pub(super) fn container_spec(placed: &Placed<'_>, container: &Container) -> Result<Spec, SpecError> {
    let env = environment(placed, container)?;
    let command = container.command.iter().flatten().chain(container.args.iter().flatten());
    let argv: Vec<String> = command.map(|argument| expand(argument, &env)).collect();
    if container.command.as_ref().is_none_or(Vec::is_empty) {
        return Err(SpecError::NoCommand(container.name.clone()));
    }
    let context = container.security_context.as_ref();
    let pod_context = placed.pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let user = context.and_then(|c| c.run_as_user).or(pod_context.and_then(|c| c.run_as_user));
    let group = context.and_then(|c| c.run_as_group).or(pod_context.and_then(|c| c.run_as_group)).or(user);
    Ok(Spec {
        netns: Some(placed.netns.to_owned()),
        cgroup: placed.cgroup.join(&container.name),
        uid: user.and_then(|id| u32::try_from(id).ok()),
        gid: group.and_then(|id| u32::try_from(id).ok()),
        working_dir: container.working_dir.as_ref().map(PathBuf::from),
        mounts: mounts(placed, container)?,
        env,
        argv,
    })
}

fn environment(placed: &Placed<'_>, container: &Container) -> Result<Vec<(String, String)>, SpecError> {
    let hostname = placed.pod.metadata.name.clone().unwrap_or_default();
    let mut env = vec![("PATH".to_owned(), PATH.to_owned()), ("HOSTNAME".to_owned(), hostname)];
    for variable in container.env.iter().flatten() {
        let value = value_of(placed, variable, &env).map_err(|problem| SpecError::Env {
            container: container.name.clone(),
            name: variable.name.clone(),
            problem,
        })?;
        env.retain(|(name, _)| *name != variable.name);
        env.push((variable.name.clone(), value));
    }
    Ok(env)
}

fn value_of(placed: &Placed<'_>, variable: &EnvVar, env: &[(String, String)]) -> Result<String, String> {
    let Some(source) = &variable.value_from else {
        return Ok(expand(variable.value.as_deref().unwrap_or_default(), env));
    };
    match &source.field_ref {
        Some(selector) => field(placed, selector),
        None => Err("the sandbox knows `value` and `valueFrom.fieldRef` only".to_owned()),
    }
}

/// The fields of Kubernetes' downward API.
fn field(placed: &Placed<'_>, selector: &ObjectFieldSelector) -> Result<String, String> {
    let metadata = &placed.pod.metadata;
    let spec = placed.pod.spec.as_ref();
    let text = |value: &Option<String>| Ok(value.clone().unwrap_or_default());
    let in_map = |map: &Option<BTreeMap<String, String>>, prefix: &str| {
        let key = selector.field_path.strip_prefix(prefix)?.strip_prefix("['")?.strip_suffix("']")?;
        Some(map.as_ref().and_then(|map| map.get(key)).cloned().unwrap_or_default())
    };
    match selector.field_path.as_str() {
        "metadata.name" => text(&metadata.name),
        "metadata.namespace" => text(&metadata.namespace),
        "metadata.uid" => text(&metadata.uid),
        "spec.nodeName" => Ok(NODE_NAME.to_owned()),
        "spec.serviceAccountName" => {
            let name = spec.and_then(|spec| spec.service_account_name.clone());
            Ok(name.unwrap_or_else(|| "default".to_owned()))
        }
        "status.podIP" => Ok(placed.ips.first().map(ToString::to_string).unwrap_or_default()),
        "status.podIPs" => Ok(placed.ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")),
        "status.hostIP" => Ok(DNS_ADDRESS.to_string()),
        path => in_map(&metadata.labels, "metadata.labels")
            .or_else(|| in_map(&metadata.annotations, "metadata.annotations"))
            .ok_or_else(|| format!("there is no field `{path}`")),
    }
}

/// Replaces `$(NAME)` with the value of a variable that is set; unknown names stay unchanged.
fn expand(text: &str, env: &[(String, String)]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix("$$") {
            out.push('$');
            rest = after;
            continue;
        }
        let reference = rest.strip_prefix("$(").and_then(|inner| inner.split_once(')'));
        match reference {
            Some((name, after)) if env.iter().any(|(known, _)| known == name) => {
                let value = env.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
                out.push_str(value.unwrap_or_default());
                rest = after;
            }
            _ => {
                out.push('$');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

fn mounts(placed: &Placed<'_>, container: &Container) -> Result<Vec<Mount>, SpecError> {
    let read_only = |source: &Path, target: &str| Mount {
        source: source.to_owned(),
        target: PathBuf::from(target),
        read_only: true,
    };
    let mut all = vec![
        read_only(&resolv_conf(placed.dir), "/etc/resolv.conf"),
        // The programs may be in a directory that only root may enter; after the bind mount, every user can run them.
        read_only(placed.bin_dir, BIN_DIR),
    ];
    all.extend(placed.proxy_dir.map(|dir| read_only(dir, PROXY_DIR)));
    let volumes = placed.pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
    for mount in container.volume_mounts.iter().flatten() {
        let volume = volumes
            .iter()
            .find(|volume| volume.name == mount.name)
            .ok_or_else(|| SpecError::Mount { container: container.name.clone(), volume: mount.name.clone() })?;
        all.push(Mount {
            source: volume_source(placed.dir, volume),
            target: PathBuf::from(&mount.mount_path),
            read_only: mount.read_only.unwrap_or(false),
        });
    }
    Ok(all)
}

fn volume_source(dir: &Path, volume: &Volume) -> PathBuf {
    match &volume.host_path {
        Some(host) => PathBuf::from(&host.path),
        None => dir.join("volumes").join(&volume.name),
    }
}

fn resolv_conf(dir: &Path) -> PathBuf {
    dir.join("resolv.conf")
}

/// Creates the pod's directories, its resolv.conf and its volumes. May be called again, which renews tokens.
pub(super) fn prepare_volumes(dir: &Path, pod: &Pod, pki: &Pki) -> Result<(), SpecError> {
    let failed = |volume: &str| {
        let volume = volume.to_owned();
        move |source| SpecError::Prepare { volume, source }
    };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let spec = pod.spec.clone().unwrap_or_default();
    let account = spec.service_account_name.unwrap_or_else(|| "default".to_owned());
    fs::create_dir_all(dir).map_err(failed("of the pod's own files"))?;
    let text = format!(
        "nameserver {DNS_ADDRESS}\nsearch {namespace}.svc.{CLUSTER_DOMAIN} svc.{CLUSTER_DOMAIN} {CLUSTER_DOMAIN}\noptions ndots:5\n"
    );
    fs::write(resolv_conf(dir), text).map_err(failed("resolv.conf"))?;
    for volume in spec.volumes.iter().flatten() {
        let source = volume_source(dir, volume);
        if volume.host_path.is_some() {
            continue;
        }
        let is_known = volume.empty_dir.is_some() || volume.projected.is_some();
        if !is_known {
            return Err(SpecError::Volume(volume.name.clone()));
        }
        fs::create_dir_all(&source).map_err(failed(&volume.name))?;
        if volume.empty_dir.is_some() {
            // Any user of the pod may write, as in Kubernetes.
            fs::set_permissions(&source, fs::Permissions::from_mode(0o777)).map_err(failed(&volume.name))?;
        }
        for projection in volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten()) {
            let token =
                projection.service_account_token.as_ref().ok_or_else(|| SpecError::Volume(volume.name.clone()))?;
            let text = pki.token(namespace, &account)?;
            crate::state::write_atomically(&source.join(&token.path), text.as_bytes()).map_err(failed(&volume.name))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_expanded_as_kubernetes_does() {
        let env = vec![("A".to_owned(), "1".to_owned()), ("B".to_owned(), "2".to_owned())];
        for (text, expected) in [
            ("$(A)-$(B)", "1-2"),
            ("$$(A)", "$(A)"),
            ("$(UNKNOWN) $(A", "$(UNKNOWN) $(A"),
            ("$A 5$", "$A 5$"),
            ("", ""),
        ] {
            assert_eq!(expand(text, &env), expected, "{text}");
        }
    }

    fn check(container: serde_json::Value) -> Result<Spec, SpecError> {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web-0", "namespace": "shop", "labels": {"app": "web"}},
            "spec": {"serviceAccountName": "web", "containers": [],
                     "volumes": [{"name": "scratch", "emptyDir": {}}]}
        }))
        .unwrap();
        let placed = Placed {
            pod: &pod,
            ips: &["10.244.0.10".parse().unwrap(), "fd00::a".parse().unwrap()],
            dir: Path::new("/d"),
            netns: Path::new("/n"),
            cgroup: Path::new("/c"),
            bin_dir: Path::new("/b"),
            proxy_dir: None,
        };
        container_spec(&placed, &serde_json::from_value(container).unwrap())
    }

    #[test]
    fn a_container_becomes_a_process() {
        let spec = check(serde_json::json!({
            "name": "web", "command": ["web"], "args": ["--name=$(POD)"],
            "env": [
                {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "IPS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIPs"}}},
                {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
                {"name": "FULL", "value": "$(POD).$(APP)"}
            ],
            "securityContext": {"runAsUser": 1000},
            "volumeMounts": [{"name": "scratch", "mountPath": "/run/scratch"}]
        }))
        .unwrap();
        assert_eq!(spec.argv, ["web", "--name=web-0"]);
        let value = |name: &str| spec.env.iter().find(|(known, _)| known == name).unwrap().1.clone();
        assert_eq!(value("IPS"), "10.244.0.10,fd00::a");
        assert_eq!(value("FULL"), "web-0.web");
        assert_eq!((spec.uid, spec.gid), (Some(1000), Some(1000)));
        assert!(spec.mounts.iter().any(|mount| mount.source == Path::new("/d/volumes/scratch")));
    }

    #[test]
    fn what_the_sandbox_lacks_is_named() {
        let error = |container| check(container).unwrap_err().to_string();
        assert!(error(serde_json::json!({"name": "web"})).contains("command"));
        let secret = serde_json::json!({"name": "web", "command": ["web"],
            "env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]});
        assert!(error(secret).contains("KEY"));
        let mount = serde_json::json!({"name": "web", "command": ["web"],
            "volumeMounts": [{"name": "missing", "mountPath": "/x"}]});
        assert!(error(mount).contains("missing"));
    }
}
