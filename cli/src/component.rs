//! The component weft-viz of a cluster: how the commands reach it that ask it where it is installed.
//!
//! It is reached by port-forward, and knows the caller by a bearer token: that of the kubeconfig, or, where the
//! kubeconfig has a certificate or another user is impersonated, a short one of a ServiceAccount of the component,
//! which RBAC allows or not.

use std::{io, time::Duration};

use anyhow::{Result, anyhow, bail};
use http::{HeaderValue, Request, Response, header::AUTHORIZATION};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::{ConfigMap, Pod, ServiceAccount},
};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, PostParams},
    client::{Body, ConfigExt as _},
};
use tonic::{
    metadata::AsciiMetadataValue,
    transport::{Channel, Endpoint},
};
use tower::{BoxError, Layer as _, ServiceExt as _, util::BoxService};
use weft_k8s_api::values::Values;
use weft_viz_core::relay::Credentials;
pub(crate) use weft_viz_core::relay::NAMESPACE;

use crate::{
    cluster::{ANSWER, Cluster, ClusterArgs, root_cause, within},
    mesh::pods,
};

/// Name of the Deployment and of its ServiceAccount.
pub(crate) const NAME: &str = "weft-viz";
/// The label of every object of its chart.
pub(crate) const SELECTOR: &str = "app.kubernetes.io/name=weft-viz";
/// Port of the API.
const PORT: u16 = 8085;
/// Audience of tokens that are for the component alone.
const AUDIENCE: &str = "viz.weft.io";
/// Lifetime of such a token, in seconds: a tap stays open for hours, and ends with it. What asks again gets a new one.
const TOKEN_SECONDS: i64 = 12 * 3600;
/// How long a connection may be silent during a request before it is pinged, and how long that answer may take: a node
/// that dies sends nothing.
const PING: Duration = Duration::from_secs(15);
/// The accounts that stand for callers without a token: the first may watch live requests, too.
const ACCOUNTS: [&str; 2] = ["weft-viz-tapper", "weft-viz-viewer"];

/// A component that can be asked.
pub(crate) struct Component {
    /// Where it runs.
    pub(crate) namespace: String,
    /// Connects again to a pod that is ready then, when its connection breaks.
    pub(crate) channel: Channel,
    /// The header `authorization` of every request.
    pub(crate) authorization: AsciiMetadataValue,
    /// Where another one comes from.
    pub(crate) tokens: Tokens,
}

/// The tokens by which the component knows this user.
pub(crate) struct Tokens {
    args: ClusterArgs,
    cluster: Cluster,
    namespace: String,
}

/// The component; `None` if this user sees none.
///
/// # Errors
/// It is there, and cannot be reached, or this user has no token for it; the error says what is missing.
pub(crate) async fn find(args: &ClusterArgs) -> Result<Option<Component>> {
    let cluster = args.cluster().await?;
    let namespace = namespace(&cluster).await?;
    if ready_pod(&cluster, &namespace).await?.is_none() {
        return Ok(None);
    }
    let tokens = Tokens { args: args.clone(), cluster: cluster.clone(), namespace: namespace.clone() };
    let authorization = tokens.header().await?;
    let channel = channel(cluster, namespace.clone()).await.map_err(|error| anyhow!("{error}"))?;
    Ok(Some(Component { namespace, channel, authorization, tokens }))
}

/// The namespace of the component: the one that the mesh names to proxies, or the default, where this user may not read
/// that. A pod of any other namespace must not get this user's token, whatever its labels are.
async fn namespace(cluster: &Cluster) -> Result<String> {
    let api: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let asking = async {
        match api.get_opt("linkerd-config").await {
            Err(kube::Error::Api(status)) if status.code == 403 => Ok(None),
            found => found,
        }
    };
    let config = within(ANSWER, asking).await;
    let config = config.map_err(|error| anyhow!("ConfigMap {}/linkerd-config: {error}", cluster.namespace))?;
    let values = config.and_then(|config| config.data?.remove("values"));
    Ok(values.and_then(|values| named_namespace(&values)).unwrap_or_else(|| NAMESPACE.to_owned()))
}

/// The namespace that the mesh's values name to proxies; `None` if they name no component of ours.
fn named_namespace(values: &str) -> Option<String> {
    let client = Values::parse(values).ok()?.inject_config("", "").ok()?.tap?;
    (client.service_account == NAME).then_some(client.namespace)
}

/// A channel to a pod that is ready. A dashboard outlives pods: at each connection the pod is looked for.
async fn channel(cluster: Cluster, namespace: String) -> Result<Channel, String> {
    // The address is not used: the connector finds the pod.
    let endpoint = Endpoint::from_static("http://weft-viz").http2_keep_alive_interval(PING).keep_alive_timeout(PING);
    let channel = endpoint.connect_with_connector(tower::service_fn(move |_| {
        let (cluster, namespace) = (cluster.clone(), namespace.clone());
        async move {
            let pod = ready_pod(&cluster, &namespace).await.map_err(|error| io::Error::other(error.to_string()))?;
            let pod = pod.ok_or_else(|| io::Error::other(format!("no pod of weft-viz is ready in {namespace}")))?;
            let stream = cluster.forward(&namespace, &pod, PORT).await;
            let named = |error| io::Error::other(format!("Pod {namespace}/{pod}, port {PORT}: {error}"));
            stream.map(TokioIo::new).map_err(named)
        }
    }));
    channel.await.map_err(|error| root_cause(&error))
}

impl Tokens {
    /// The token of the kubeconfig, or one of the component's accounts, as a header.
    async fn header(&self) -> Result<AsciiMetadataValue> {
        let header = match self.args.authorization().await? {
            Some(header) => header,
            None => token(&self.cluster, &self.namespace).await?,
        };
        let mut header = AsciiMetadataValue::try_from(header.as_bytes())?;
        header.set_sensitive(true);
        Ok(header)
    }
}

impl Credentials for Tokens {
    async fn renew(&self) -> Result<AsciiMetadataValue, String> {
        self.header().await.map_err(|error| format!("{error:#}"))
    }
}

async fn ready_pod(cluster: &Cluster, namespace: &str) -> Result<Option<String>> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let listing = async {
        match api.list(&ListParams::default().labels(SELECTOR)).await {
            // Who may not see it, cannot forward a port to it either.
            Err(kube::Error::Api(status)) if status.code == 403 => Ok(Vec::new()),
            listed => listed.map(|listed| listed.items),
        }
    };
    let listed = within(ANSWER, listing).await.map_err(|error| anyhow!("pods of namespace {namespace}: {error}"))?;
    Ok(listed.iter().find(|pod| pods::is_ready(pod) && !pods::is_leaving(pod)).map(Pod::name_any))
}

/// A token of the first account that this user may speak for.
async fn token(cluster: &Cluster, namespace: &str) -> Result<HeaderValue> {
    let spec = TokenRequestSpec {
        audiences: Some(vec![AUDIENCE.to_owned()]),
        expiration_seconds: Some(TOKEN_SECONDS),
        ..TokenRequestSpec::default()
    };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let api: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), namespace);
    let mut refused = String::new();
    for account in ACCOUNTS {
        match within(ANSWER, api.create_token_request(account, &PostParams::default(), &request)).await {
            Ok(answer) => {
                let token = answer.status.and_then(|status| status.token).unwrap_or_default();
                let mut header = HeaderValue::try_from(format!("Bearer {token}"))?;
                header.set_sensitive(true);
                return Ok(header);
            }
            Err(error) => refused = format!("ServiceAccount {namespace}/{account}: {error}"),
        }
    }
    bail!(
        "your kubeconfig has no token by which weft-viz could know you, and may not request one of its accounts: {refused}"
    )
}

impl ClusterArgs {
    /// The bearer token that requests to the API server have, as a header; `None` where they have none, or speak for
    /// another user.
    ///
    /// # Errors
    /// When the kubeconfig, or the program that it names, gives no credentials.
    pub(crate) async fn authorization(&self) -> Result<Option<HeaderValue>> {
        let config = self.config().await?;
        if self.impersonate.is_some() || config.auth_info.impersonate.is_some() {
            return Ok(None);
        }
        let failed = |error: &dyn std::fmt::Display| anyhow!("credentials of the kubeconfig: {error}");
        let Some(layer) = config.auth_layer().map_err(|error| failed(&error))? else { return Ok(None) };
        // The layer is what knows every kind of credentials: what it adds to a request that is sent nowhere is the
        // header.
        let seen = BoxService::new(layer.layer(tower::service_fn(|request: Request<Body>| {
            let header = request.headers().get(AUTHORIZATION).cloned();
            std::future::ready(Ok::<_, BoxError>(Response::new(header)))
        })));
        let seen = seen.oneshot(Request::new(Body::empty())).await.map_err(|error| failed(&error))?;
        Ok(seen.into_body().filter(|header| header.as_bytes().starts_with(b"Bearer ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn header(user: &str, impersonate: Option<&str>) -> Option<String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config");
        let config = format!(
            "{{apiVersion: v1, kind: Config, current-context: c, clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:1'}}}}], \
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}], users: [{{name: u, user: {user}}}]}}"
        );
        std::fs::write(&file, config).unwrap();
        let impersonate = impersonate.map(str::to_owned);
        let args = ClusterArgs { kubeconfig: Some(file), impersonate, ..ClusterArgs::default() };
        args.authorization().await.unwrap().map(|header| header.to_str().unwrap().to_owned())
    }

    #[test]
    fn the_mesh_names_the_namespace_of_no_other_component() {
        let named = |tap: &str| named_namespace(&format!("proxy: {{image: {{name: a, version: b}}, tap: {tap}}}"));
        assert_eq!(named("{serviceAccountName: weft-viz, namespace: monitoring}").as_deref(), Some("monitoring"));
        assert_eq!(named("{serviceAccountName: tap, namespace: monitoring}"), None);
        assert_eq!((named("{}"), named_namespace("proxy: [")), (None, None));
    }

    #[tokio::test]
    async fn the_kubeconfigs_token_is_found_however_it_is_given() {
        assert_eq!(header("{token: abc}", None).await.as_deref(), Some("Bearer abc"));
        let exec = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: echo, interactiveMode: Never, args: \
                    ['{\"apiVersion\": \"client.authentication.k8s.io/v1\", \"kind\": \"ExecCredential\", \"status\": {\"token\": \"run\"}}']}}";
        assert_eq!(header(exec, None).await.as_deref(), Some("Bearer run"));
        assert_eq!(header("{}", None).await, None);
        assert_eq!(header("{username: a, password: b}", None).await, None, "no bearer token");
        // The token is not the impersonated user's.
        assert_eq!(header("{token: abc}", Some("jane")).await, None);
    }
}
