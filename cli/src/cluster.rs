//! A Kubernetes cluster of the user's kubeconfig.
//!
//! ```text
//! ClusterArgs ──connect──> Cluster ──client──> API server
//!                             ├────forward────> a pod's port, through the API server
//!                             └────exec───────> a program in a pod, through the API server
//! ```
//!
//! Owns access: which cluster, as which user, with which deadlines. Refuses to know what the mesh is.

mod exec;
mod forward;
mod proxy;

use std::{env, error::Error, ffi::OsString, io, path::PathBuf, time::Duration};

use anyhow::{Result, anyhow, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Service;
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tracing_subscriber::{EnvFilter, fmt::format::FmtSpan};
use weft_k8s_api::kubeconfig;

/// Deadline for connecting to the API server: long enough for a distant one, short enough to wait for.
const CONNECT: Duration = Duration::from_secs(10);
/// With `--verbose`: the requests to the API server, with status and duration.
const VERBOSE: &str = "warn,kube_client=debug";
/// Deadline for the API server's answer to one request; of a list, for one page.
pub(crate) const ANSWER: Duration = Duration::from_secs(20);
/// Default namespace of the control plane; Linkerd's name, like that of all objects that are found by name.
pub(crate) const CONTROL_NAMESPACE: &str = "linkerd";
/// How an error begins that another right, or another user, would solve.
const NOT_PERMITTED: &str = "not permitted: ";
/// Annotation of objects that helm installed: the release.
pub(crate) const HELM_RELEASE: &str = "meta.helm.sh/release-name";

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct ClusterArgs {
    /// Kubeconfig file [default: $KUBECONFIG, else ~/.kube/config, else the cluster that this runs in]
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// Namespace of the control plane
    #[arg(short = 'L', long, value_name = "NAMESPACE", env = "LINKERD_NAMESPACE", default_value = CONTROL_NAMESPACE)]
    pub(crate) linkerd_namespace: String,
    /// User to impersonate
    #[arg(long = "as", value_name = "USER")]
    pub(crate) impersonate: Option<String>,
    /// Group to impersonate; may be repeated
    #[arg(long = "as-group", value_name = "GROUP", requires = "impersonate")]
    pub(crate) impersonate_groups: Vec<String>,
    /// Print every request to the API server on standard error
    #[arg(long)]
    pub(crate) verbose: bool,
}

/// Access to a cluster, which may or may not answer.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
    /// Namespace of the control plane.
    pub(crate) namespace: String,
    /// Namespace of the context, for objects that are named without one.
    pub(crate) default_namespace: String,
    /// The API server's address, for messages.
    pub(crate) server: String,
}

impl Cluster {
    /// The address of the API server's own Service, which is of the cluster's first address family.
    pub(crate) async fn service_address(&self) -> Result<String, String> {
        let api = Api::<Service>::namespaced(self.client.clone(), "default");
        let found = within(ANSWER, api.get_opt("kubernetes")).await?;
        Ok(found.and_then(|service| service.spec?.cluster_ip).unwrap_or_default())
    }
}

/// Whether the address of a Service is of IPv6.
pub(crate) fn is_ipv6(address: &str) -> bool {
    address.contains(':')
}

impl ClusterArgs {
    /// Whether a cluster was selected. `-L` and impersonation do not select one.
    pub(crate) fn is_chosen(&self) -> bool {
        self.kubeconfig.is_some() || self.context.is_some()
    }

    /// Reads the configuration. Only the first request shows whether the cluster answers.
    pub(crate) async fn cluster(&self) -> Result<Cluster> {
        let mut config = self.config().await?;
        config.connect_timeout = Some(CONNECT);
        config.auth_info.impersonate = self.impersonate.clone().or(config.auth_info.impersonate);
        if !self.impersonate_groups.is_empty() {
            config.auth_info.impersonate_groups = Some(self.impersonate_groups.clone());
        }
        let (server, default_namespace) = (config.cluster_url.to_string(), config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| anyhow!("{}", explain(&error)))?;
        Ok(Cluster { client, namespace: self.linkerd_namespace.clone(), default_namespace, server })
    }

    pub(crate) async fn config(&self) -> Result<Config> {
        if self.verbose {
            log_requests();
        }
        match (self.read_config().await, &self.kubeconfig) {
            (Ok(config), _) => Ok(config),
            // The library's messages contain their causes already.
            (Err(error), Some(file)) => bail!("kubeconfig {}: {error}", file.display()),
            (Err(error), None) if self.context.is_none() && is_missing(&error) => {
                Config::incluster().map_err(|_| match files_of_environment() {
                    Some(files) => anyhow!(
                        "no cluster is configured: KUBECONFIG ({}) names no file with a current context",
                        files.display()
                    ),
                    None => anyhow!("no cluster is configured: set KUBECONFIG or use --kubeconfig"),
                })
            }
            (Err(error), None) => bail!("kubeconfig: {error}"),
        }
    }

    /// The kubeconfig, where kubectl looks for it.
    pub(crate) fn kubeconfig(&self) -> Result<Kubeconfig, KubeconfigError> {
        let read = match (&self.kubeconfig, files_of_environment()) {
            (Some(file), _) => Kubeconfig::read_from(file),
            (None, Some(files)) => kubeconfig::read(&files).map_err(|error| error.source),
            (None, None) => Kubeconfig::read(),
        };
        read.map(kubeconfig::without_empty_context)
    }

    async fn read_config(&self) -> Result<Config, KubeconfigError> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let kubeconfig = self.kubeconfig()?;
        let given = proxy::given(&kubeconfig, self.context.as_deref());
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
        let proxy = given.or_else(|| proxy::from_environment(&config.cluster_url));
        config.proxy_url = proxy.map(|url| url.parse()).transpose().map_err(KubeconfigError::ParseProxyUrl)?;
        Ok(config)
    }
}

fn files_of_environment() -> Option<OsString> {
    env::var_os("KUBECONFIG").filter(|files| !files.is_empty())
}

/// Prints the client library's log on standard error.
fn log_requests() {
    let log = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(VERBOSE)).with_span_events(FmtSpan::CLOSE);
    // Not an error: the log of an earlier connection of this process goes on.
    let _ = log.with_ansi(false).with_writer(io::stderr).try_init();
}

/// Whether there is no kubeconfig at all, in contrast to a broken one.
fn is_missing(error: &KubeconfigError) -> bool {
    match error {
        KubeconfigError::FindPath | KubeconfigError::CurrentContextNotSet => true,
        KubeconfigError::ReadConfig(source, _) => source.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

/// The error, without the layers of the client library.
pub(crate) fn explain(error: &kube::Error) -> String {
    let kube::Error::Api(status) = error else { return root_cause(error) };
    let message = match status.message.as_str() {
        "" => format!("the API server answered {}", status.code),
        message => message.to_owned(),
    };
    if matches!(status.code, 401 | 403) { format!("{NOT_PERMITTED}{message}") } else { message }
}

/// What helps against an error of [`within`] about objects to read.
pub(crate) fn remedy_for(error: &str) -> &'static str {
    if error.starts_with(NOT_PERMITTED) {
        "let this user get and list them, or use one who may (--context, --as)"
    } else {
        "try again; --verbose prints each request to the API server and how long it took"
    }
}

/// The innermost cause of an error: the layers above it only name themselves.
pub(crate) fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// An answer of the API server, or the error, in one line.
pub(crate) async fn within<T>(
    deadline: Duration,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, String> {
    match tokio::time::timeout(deadline, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(explain(&error)),
        Err(_) => Err(format!("no answer within {}s", deadline.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_missing_kubeconfig_is_distinguished_from_a_broken_one() {
        let read = |kind| KubeconfigError::ReadConfig(io::Error::from(kind), "config".into());
        assert!(is_missing(&read(io::ErrorKind::NotFound)));
        assert!(!is_missing(&read(io::ErrorKind::PermissionDenied)));
        assert!(!is_missing(&KubeconfigError::LoadContext("other".to_owned())));
    }

    #[test]
    fn a_kubeconfig_without_a_current_context_is_like_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        std::fs::write(file("unset"), "current-context: ''\n").unwrap();
        let unset = ClusterArgs { kubeconfig: Some(file("unset")), ..ClusterArgs::default() };
        assert_eq!(unset.kubeconfig().unwrap().current_context, None);
        // The only file of KUBECONFIG.
        assert!(is_missing(&kubeconfig::read(file("none").as_os_str()).unwrap_err().source));
    }

    #[tokio::test]
    async fn a_context_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config");
        std::fs::write(&file, "apiVersion: v1\nkind: Config\n").unwrap();
        let args =
            ClusterArgs { kubeconfig: Some(file), context: Some("staging".to_owned()), ..ClusterArgs::default() };
        let Err(error) = args.cluster().await else { panic!("found") };
        assert!(format!("{error:#}").contains("staging"), "{error:#}");
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_ends_with_its_reason() {
        let error =
            within(Duration::from_millis(1), std::future::pending::<Result<(), kube::Error>>()).await.unwrap_err();
        assert!(error.contains("no answer"), "{error}");
    }

    /// More rights do not make a server faster.
    #[tokio::test]
    async fn a_right_is_the_remedy_of_nothing_but_a_refusal() {
        let names_a_right = |error: &str| remedy_for(error).contains("let this user");
        for (code, expected) in [(401, true), (403, true), (503, false)] {
            let refused = kube::Error::Api(Status::failure("no", "reason").with_code(code).boxed());
            let error = within(ANSWER, async { Err::<(), _>(refused) }).await.unwrap_err();
            assert_eq!(names_a_right(&error), expected, "{error}");
        }
        let slow = within(Duration::from_millis(1), std::future::pending::<Result<(), kube::Error>>()).await;
        assert!(!names_a_right(&slow.unwrap_err()));
    }
}
