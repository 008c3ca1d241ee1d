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
    core::v1::{Pod, ServiceAccount},
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
use weft_viz_core::relay::Credentials;
pub(crate) use weft_viz_core::relay::NAMESPACE;

use crate::{
    cluster::{ANSWER, Cluster, ClusterArgs, root_cause, within},
    mesh::pods,
};

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
}

/// The component; `None` if this user sees none.
///
/// # Errors
/// It is there, and cannot be reached, or this user has no token for it; the error says what is missing.
pub(crate) async fn find(args: &ClusterArgs) -> Result<Option<Component>> {
    let cluster = args.cluster().await?;
    if ready_pod(&cluster).await?.is_none() {
        return Ok(None);
    }
    let tokens = Tokens { args: args.clone(), cluster: cluster.clone() };
    let authorization = tokens.header().await?;
    let channel = channel(cluster).await.map_err(|error| anyhow!("{error}"))?;
    Ok(Some(Component { channel, authorization, tokens }))
}

/// A channel to a pod that is ready. A dashboard outlives pods: at each connection the pod is looked for.
async fn channel(cluster: Cluster) -> Result<Channel, String> {
    // The address is not used: the connector finds the pod.
    let endpoint = Endpoint::from_static("http://weft-viz").http2_keep_alive_interval(PING).keep_alive_timeout(PING);
    let channel = endpoint.connect_with_connector(tower::service_fn(move |_| {
        let cluster = cluster.clone();
        async move {
            let pod = ready_pod(&cluster).await.map_err(|error| io::Error::other(error.to_string()))?;
            let pod = pod.ok_or_else(|| io::Error::other(format!("no pod of weft-viz is ready in {NAMESPACE}")))?;
            let stream = cluster.forward(NAMESPACE, &pod, PORT).await;
            let named = |error| io::Error::other(format!("Pod {NAMESPACE}/{pod}, port {PORT}: {error}"));
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
            None => token(&self.cluster).await?,
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

async fn ready_pod(cluster: &Cluster) -> Result<Option<String>> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    let listing = async {
        match api.list(&ListParams::default().labels(SELECTOR)).await {
            // Who may not see it, cannot forward a port to it either.
            Err(kube::Error::Api(status)) if status.code == 403 => Ok(Vec::new()),
            listed => listed.map(|listed| listed.items),
        }
    };
    let listed = within(ANSWER, listing).await.map_err(|error| anyhow!("pods of namespace {NAMESPACE}: {error}"))?;
    Ok(listed.iter().find(|pod| pods::is_ready(pod) && !pods::is_leaving(pod)).map(Pod::name_any))
}

/// A token of the first account that this user may speak for.
async fn token(cluster: &Cluster) -> Result<HeaderValue> {
    let spec = TokenRequestSpec {
        audiences: Some(vec![AUDIENCE.to_owned()]),
        expiration_seconds: Some(TOKEN_SECONDS),
        ..TokenRequestSpec::default()
    };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let api: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    let mut refused = String::new();
    for account in ACCOUNTS {
        match within(ANSWER, api.create_token_request(account, &PostParams::default(), &request)).await {
            Ok(answer) => {
                let token = answer.status.and_then(|status| status.token).unwrap_or_default();
                let mut header = HeaderValue::try_from(format!("Bearer {token}"))?;
                header.set_sensitive(true);
                return Ok(header);
            }
            Err(error) => refused = format!("ServiceAccount {NAMESPACE}/{account}: {error}"),
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
