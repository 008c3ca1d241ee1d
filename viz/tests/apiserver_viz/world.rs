//! Namespaces, accounts and processes of one test.

use std::{
    net::SocketAddr,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use http_body_util::BodyExt as _;
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec, TokenReview, TokenReviewSpec},
    authorization::v1::SubjectAccessReview,
    core::v1::{Namespace, ServiceAccount},
    rbac::v1::{Role, RoleBinding},
};
use kube::{
    Api, Client,
    api::{DeleteParams, PostParams},
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::{Request, Status, Streaming, metadata::AsciiMetadataValue, transport::Channel};
use weft_proto::viz::{Resource, StatRequest, StatResponse, TapEvent, TapRequest, viz_client::VizClient};
use weft_test_kit::{process, wait::eventually};
use weft_viz_core::{
    page,
    relay::{Credentials, Relay},
};

/// Longest wait for something that should happen soon, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// The audience of tokens for the component alone.
pub(crate) const AUDIENCE: &str = "viz.weft.io";

/// Numbers the namespaces of this process.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// One test's part of the cluster.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) namespace: String,
}

/// The running component.
pub(crate) struct Viz {
    pub(crate) process: process::Process,
    pub(crate) channel: Channel,
    admin: SocketAddr,
    client: VizClient<Channel>,
}

/// A resource, as a request names it.
pub(crate) fn resource(kind: &str, namespace: &str, name: &str) -> Option<Resource> {
    Some(Resource { namespace: namespace.to_owned(), kind: kind.to_owned(), name: name.to_owned() })
}

impl World {
    /// Creates a namespace.
    pub(crate) async fn new(name: &str) -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        assert!(
            std::env::var_os("KUBECONFIG").is_some(),
            "KUBECONFIG is not set: `cargo xtask test cluster` runs these tests against an API server of their own"
        );
        let client = Client::try_default().await.unwrap();
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
        let namespace = format!("viz-{name}-{since_epoch}-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let object: Namespace = object(json!({"metadata": {"name": namespace}}));
        Api::all(client.clone()).create(&PostParams::default(), &object).await.unwrap();
        Self { client, namespace }
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates a ServiceAccount with these verbs of resources of `viz.weft.io` in its namespace.
    pub(crate) async fn account(&self, name: &str, rules: &[(&str, &str)]) {
        let (params, namespace) = (PostParams::default(), &self.namespace);
        let account: ServiceAccount = object(json!({"metadata": {"name": name}}));
        self.api().create(&params, &account).await.unwrap();
        let rule = |(verb, resource): &(&str, &str)| json!({"apiGroups": ["viz.weft.io"], "verbs": [verb], "resources": [resource]});
        let granted: Vec<Value> = rules.iter().map(rule).collect();
        let role: Role = object(json!({"metadata": {"name": name}, "rules": granted}));
        self.api().create(&params, &role).await.unwrap();
        let binding: RoleBinding = object(json!({
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }));
        self.api().create(&params, &binding).await.unwrap();
        // The API server learns of rights by a watch, and the component keeps its answers.
        for (verb, resource) in rules {
            let review: SubjectAccessReview = object(json!({"metadata": {}, "spec": {
                "user": format!("system:serviceaccount:{namespace}:{name}"),
                "resourceAttributes": {"namespace": namespace, "group": "viz.weft.io", "verb": verb, "resource": resource},
            }}));
            eventually("the API server knows the right", PATIENCE, async || {
                let asked = Api::all(self.client.clone()).create(&params, &review).await.unwrap();
                match asked.status {
                    Some(status) if status.allowed => Ok(()),
                    status => Err(format!("{status:?}")),
                }
            })
            .await;
        }
    }

    /// Deletes it and creates another one of its name, with the same rights.
    pub(crate) async fn replace_account(&self, name: &str) {
        self.delete_account(name).await;
        let account: ServiceAccount = object(json!({"metadata": {"name": name}}));
        self.api().create(&PostParams::default(), &account).await.unwrap();
    }

    /// Deletes a ServiceAccount, and waits until the API server, which learns of it by a watch, takes its tokens no
    /// longer.
    pub(crate) async fn delete_account(&self, name: &str) {
        let token = self.token(name, "").await;
        self.api::<ServiceAccount>().delete(name, &DeleteParams::default()).await.unwrap();
        let spec = TokenReviewSpec { token, ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        eventually("the API server knows that the account is gone", PATIENCE, async || {
            let asked = Api::all(self.client.clone()).create(&PostParams::default(), &review).await.unwrap();
            match asked.status {
                Some(status) if status.authenticated == Some(true) => Err(format!("{status:?}")),
                _ => Ok(()),
            }
        })
        .await;
    }

    /// A token of a ServiceAccount; an empty audience is the API server's.
    pub(crate) async fn token(&self, account: &str, audience: &str) -> String {
        let audiences = if audience.is_empty() { vec![] } else { vec![audience.to_owned()] };
        let spec = TokenRequestSpec { audiences: Some(audiences), ..TokenRequestSpec::default() };
        let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
        let api = self.api::<ServiceAccount>();
        api.create_token_request(account, &PostParams::default(), &request)
            .await
            .unwrap()
            .status
            .unwrap()
            .token
            .unwrap()
    }

    /// Starts the component, and waits until it knows the pods.
    pub(crate) async fn start(&self) -> Viz {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weft-viz"));
        command.args(["--addr", "127.0.0.1:0", "--admin-addr", "127.0.0.1:0", "--log-format", "json"]);
        let process = process::Process::start(&mut command, PATIENCE);
        process.says("\"started\"").await;
        let line: Value = serde_json::from_str(&process.lines("\"started\"")[0]).unwrap();
        let field = |name: &str| {
            line.get(name).or_else(|| line["fields"].get(name)).unwrap().as_str().unwrap().parse().unwrap()
        };
        let (api, admin): (SocketAddr, SocketAddr) = (field("api"), field("admin"));
        let channel = Channel::from_shared(format!("http://{api}")).unwrap().connect().await.unwrap();
        let viz = Viz { process, admin, client: VizClient::new(channel.clone()), channel };
        eventually("ready", PATIENCE, async || match viz.get("/ready").await {
            answer if answer.starts_with("HTTP/1.1 200 ") => Ok(()),
            answer => Err(answer),
        })
        .await;
        viz
    }

    /// Removes the test's objects.
    pub(crate) async fn done(self) {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces.delete(&self.namespace, &DeleteParams::background()).await.unwrap();
    }
}

/// An object of Kubernetes from JSON.
pub(crate) fn object<K: serde::de::DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

impl Viz {
    async fn get(&self, path: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(self.admin).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// Its own metrics.
    pub(crate) async fn metrics(&self) -> String {
        self.get("/metrics").await
    }

    /// Waits until its metrics contain this: an answer is there before it is counted.
    pub(crate) async fn counts(&self, part: &str) {
        eventually(part, PATIENCE, async || {
            let metrics = self.metrics().await;
            if metrics.contains(part) { Ok(()) } else { Err(metrics) }
        })
        .await;
    }

    /// Golden metrics of a namespace's deployments.
    pub(crate) async fn stat(&self, token: Option<&str>, namespace: &str) -> Result<StatResponse, Status> {
        let request = StatRequest { resource: resource("deployment", namespace, ""), ..StatRequest::default() };
        self.client.clone().stat(authorized(token, request)).await.map(tonic::Response::into_inner)
    }

    /// The JSON interface of the dashboard, which relays to the component: the HTTP status and the answer.
    pub(crate) async fn ask_as_page(&self, token: &str, question: &str, request: &Value) -> (u16, Value) {
        let relay = Relay::new(self.channel.clone(), format!("Bearer {token}").parse().unwrap(), NoOther);
        let answer = page::question(&relay, question, request.to_string().as_bytes()).await.unwrap();
        let status = answer.status().as_u16();
        let content = answer.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&content).unwrap())
    }

    pub(crate) async fn tap(&self, token: Option<&str>, request: TapRequest) -> Result<Streaming<TapEvent>, Status> {
        self.client.clone().tap(authorized(token, request)).await.map(tonic::Response::into_inner)
    }
}

/// A caller with one token.
struct NoOther;

impl Credentials for NoOther {
    async fn renew(&self) -> Result<AsciiMetadataValue, String> {
        Err("there is one alone".to_owned())
    }
}

fn authorized<Q>(token: Option<&str>, request: Q) -> Request<Q> {
    let mut request = Request::new(request);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    request
}
