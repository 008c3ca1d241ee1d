//! How the kernel recognises the proxy, whose connections it does not redirect, and who may choose that.

use std::str::FromStr;

use k8s_openapi::api::core::v1::{Pod, PodSpec, SecurityContext};

use crate::{field::FieldPath, labels};

/// How the kernel recognises the proxy, whose connections it does not redirect; the later variant is the stricter one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exemption {
    /// By its user, and its group if one is set, as linkerd-init does. An application with the proxy's user passes
    /// too.
    #[default]
    User,
    /// By its container's cgroup alone.
    Cgroup,
}

impl FromStr for Exemption {
    type Err = UnknownExemption;

    fn from_str(text: &str) -> Result<Self, UnknownExemption> {
        match text {
            "user" => Ok(Self::User),
            "cgroup" => Ok(Self::Cgroup),
            _ => Err(UnknownExemption),
        }
    }
}

/// A word that is not an [`Exemption`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("user or cgroup")]
pub struct UnknownExemption;

/// The administrator's rules about connections that are not redirected; the chart's values below `agent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExemptionRules {
    /// Exemption of pods without the annotation `weft.io/proxy-exemption`.
    pub default: Exemption,
    /// Whether pods may not be less strict than the default.
    pub enforced: bool,
    /// Whether annotations may switch a pod's redirection off, or have it skip more than the chart's values say.
    pub bypass_allowed: bool,
}

impl Default for ExemptionRules {
    /// As linkerd-init does, with the choice left to pods.
    fn default() -> Self {
        Self { default: Exemption::default(), enforced: false, bypass_allowed: true }
    }
}

impl ExemptionRules {
    /// The exemption of a pod whose annotation is `own`.
    pub fn exemption(&self, own: Option<Exemption>) -> Exemption {
        match own {
            Some(own) if self.enforced => own.max(self.default),
            own => own.unwrap_or(self.default),
        }
    }
}

/// A container that the kernel could not distinguish from the proxy by user and group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedId {
    /// Name of the container.
    pub(super) container: String,
    /// The field that sets the id.
    pub(super) field: FieldPath,
    pub(super) id: i64,
}

/// The first container besides the proxy that the pod's spec gives the proxy's user or group. The user of an image is
/// not in the spec, and a user that a process switches to by itself (CAP_SETUID) is nowhere.
pub(super) fn shared_id(pod: &Pod, proxy_uid: i64, proxy_gid: Option<i64>) -> Option<SharedId> {
    let spec = pod.spec.as_ref()?;
    let whole = spec.security_context.as_ref();
    applications(spec).find_map(|Application { list, index, name, own }| {
        let ids = [
            ("runAsUser", own.and_then(|own| own.run_as_user), whole.and_then(|whole| whole.run_as_user)),
            ("runAsGroup", own.and_then(|own| own.run_as_group), whole.and_then(|whole| whole.run_as_group)),
        ];
        let mut ids = ids.into_iter().zip([Some(proxy_uid), proxy_gid]);
        let (key, own, id) = ids.find_map(|((key, own, inherited), of_proxy)| {
            let id = own.or(inherited).filter(|id| Some(*id) == of_proxy)?;
            Some((key, own, id))
        })?;
        let holder = match own {
            Some(_) => FieldPath::of("spec").key(list).index(index),
            None => FieldPath::of("spec"),
        };
        Some(SharedId { container: name.to_owned(), field: holder.key("securityContext").key(key), id })
    })
}

/// A container that may run as the proxy's user and sees the proxy's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedProcesses {
    /// Name of the container.
    pub(super) container: String,
    /// The field by which the pod's containers see each other's processes.
    pub(super) field: FieldPath,
}

/// The first such container: the pod's spec gives it the proxy's user, or leaves the user to its image.
pub(super) fn shared_processes(pod: &Pod, proxy_uid: i64) -> Option<SharedProcesses> {
    let spec = pod.spec.as_ref()?;
    let fields = [("shareProcessNamespace", spec.share_process_namespace), ("hostPID", spec.host_pid)];
    let (key, _) = fields.into_iter().find(|(_, shared)| *shared == Some(true))?;
    let whole = spec.security_context.as_ref().and_then(|whole| whole.run_as_user);
    let user = |one: &Application<'_>| one.own.and_then(|own| own.run_as_user).or(whole);
    let found = applications(spec).find(|one| user(one).is_none_or(|uid| uid == proxy_uid))?;
    Some(SharedProcesses { container: found.name.to_owned(), field: FieldPath::of("spec").key(key) })
}

/// A container besides the proxy.
struct Application<'a> {
    /// The field of the pod's spec that lists it.
    list: &'static str,
    index: usize,
    name: &'a str,
    own: Option<&'a SecurityContext>,
}

fn applications(spec: &PodSpec) -> impl Iterator<Item = Application<'_>> {
    let init = spec.init_containers.iter().flatten().map(|it| (it.name.as_str(), it.security_context.as_ref()));
    let main = spec.containers.iter().map(|it| (it.name.as_str(), it.security_context.as_ref()));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let ephemeral = ephemeral.map(|it| (it.name.as_str(), it.security_context.as_ref()));
    let at = |list| move |(index, (name, own))| Application { list, index, name, own };
    let containers = init.enumerate().map(at("initContainers"));
    let containers = containers.chain(main.enumerate().map(at("containers")));
    let containers = containers.chain(ephemeral.enumerate().map(at("ephemeralContainers")));
    containers.filter(|one| one.name != labels::PROXY_CONTAINER)
}
