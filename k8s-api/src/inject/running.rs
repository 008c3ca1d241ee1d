//! What the spec of an injected pod says about its proxy. Unlike annotations, it does not change while the pod runs.

use k8s_openapi::api::core::v1::{Container, Pod};

use crate::labels;

/// The proxy's container, among those that run before the others or beside them.
pub fn proxy_container(pod: &Pod) -> Option<&Container> {
    let spec = pod.spec.as_ref()?;
    let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    containers.find(|container| container.name == labels::PROXY_CONTAINER)
}

/// Whether an init container is a sidecar: one that runs beside the containers, which start after it.
pub fn is_native_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// A variable's value; of several variables of one name, the last one's, as for the kubelet.
pub fn variable<'a>(container: &'a Container, name: &str) -> Option<&'a str> {
    let mut variables = container.env.iter().flatten();
    variables.rfind(|variable| variable.name == name)?.value.as_deref()
}

/// The user that the pod's spec gives the proxy.
pub(super) fn proxy_user(pod: &Pod) -> Option<i64> {
    let own = proxy_container(pod)?.security_context.as_ref();
    let whole = pod.spec.as_ref()?.security_context.as_ref().and_then(|whole| whole.run_as_user);
    own.and_then(|own| own.run_as_user).or(whole).filter(|uid| *uid > 0)
}

/// The port of one of the proxy's listeners, by the variable with its address. `None` for a pod that was not injected
/// yet.
pub(super) fn listener_port(pod: &Pod, variable_name: &str) -> Option<u16> {
    let address = variable(proxy_container(pod)?, &format!("LINKERD2_PROXY_{variable_name}"))?;
    // Several addresses have one port, and a name such as `localhost` may be in place of an IP address.
    address.rsplit_once(':')?.1.parse().ok().filter(|port| *port > 0)
}
