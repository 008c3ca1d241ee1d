//! `weft viz install` and `uninstall`: manifests of the component `weft-viz` for `kubectl apply -f -` and
//! `kubectl delete -f -`, as `weft install` prints those of the mesh.

use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::Args;
use serde_json::json;

use super::{
    cluster::{self, InstalledViz},
    print,
    render::{Rendered, yaml},
    values::HelmArgs,
};
use crate::{
    chart::{Chart, values::Settings},
    cluster::ClusterArgs,
    component::{NAMESPACE, SELECTOR},
    manifest::ManifestFormat,
    mesh::installed::Installed,
    output::{
        self,
        progress::{self, API_SERVER},
    },
};

/// Kinds of the chart that the mesh's chart does not have.
const KINDS: [(&str, &str, &str, bool); 3] = [
    ("policy.linkerd.io/v1alpha1", "AuthorizationPolicy", "authorizationpolicies", true),
    ("policy.linkerd.io/v1alpha1", "MeshTLSAuthentication", "meshtlsauthentications", true),
    ("policy.linkerd.io/v1beta3", "Server", "servers", true),
];

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft viz install | kubectl apply -f -
  weft viz install --set scrapeInterval=5s --set 'clients[0].name=grafana,clients[0].namespace=monitoring' | kubectl apply -f -

The same again is an upgrade: give the values of the installation.")]
pub(crate) struct InstallArgs {
    /// Do not query the cluster for a mesh or a Helm release
    #[arg(long, alias = "skip-checks")]
    ignore_cluster: bool,
    /// Namespace of the component, which the mesh has to name (proxy.tap.namespace)
    #[arg(long, value_name = "NAMESPACE", default_value = NAMESPACE)]
    viz_namespace: String,
    #[command(flatten)]
    helm: HelmArgs,
    /// Format of the manifests
    #[arg(short, long, value_enum, default_value_t)]
    output: ManifestFormat,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft viz uninstall | kubectl delete -f -

The namespace stays: Linkerd's extension has the same one.")]
pub(crate) struct UninstallArgs {
    /// Format of the manifests
    #[arg(short, long, value_enum, default_value_t)]
    output: ManifestFormat,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// `weft viz install`.
pub(crate) async fn install(args: InstallArgs) -> Result<ExitCode> {
    let settings = args.helm.settings(None).await?;
    let is_new = match args.ignore_cluster {
        true => true,
        false => progress::during(API_SERVER, lacks_namespace(&args)).await?,
    };
    output::raw(&rendered(&args.viz_namespace, &settings, is_new)?.text(args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether the namespace has to be made in a cluster that can take the component.
async fn lacks_namespace(args: &InstallArgs) -> Result<bool> {
    const ANYWAY: &str = "--ignore-cluster prints manifests anyway";
    let cluster = args.cluster.cluster().await?;
    let installed = cluster::installed(&cluster).await.map_err(|error| anyhow!("{error}; {ANYWAY}"))?;
    if installed == Installed::No {
        bail!(
            "no mesh is installed in namespace {}: the component needs one (`weft install`, or another namespace with -L); \
             {ANYWAY}",
            cluster.namespace
        );
    }
    if let Some(component) = InstalledViz::find(&cluster).await? {
        component.by_kubectl("helm upgrade").map_err(|refused| anyhow!("{refused}; {ANYWAY}"))?;
    }
    Ok(!cluster::has_namespace(&cluster, &args.viz_namespace).await?)
}

/// A namespace that exists is left out, as by `uninstall`: Linkerd's extension has the same one, with labels of its
/// own, and `kubectl apply` would take those away that are not in the manifest.
fn rendered(namespace: &str, settings: &Settings, is_new: bool) -> Result<Rendered> {
    let chart = Chart::viz()?;
    let mut texts = chart.manifests(namespace, &chart.values(settings)?)?;
    if is_new {
        texts.push(yaml(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}))?);
    }
    Rendered::of(texts)
}

/// `weft viz uninstall`.
pub(crate) async fn uninstall(args: UninstallArgs) -> Result<ExitCode> {
    let listed = async {
        let cluster = args.cluster.cluster().await?;
        if let Some(component) = InstalledViz::find(&cluster).await? {
            component.by_kubectl("helm uninstall")?;
        }
        cluster::objects_with(&cluster, SELECTOR, &KINDS).await
    };
    let mut objects = progress::during(API_SERVER, listed).await?;
    objects.retain(|object| object.kind != "Namespace");
    if objects.is_empty() {
        output::note("the component weft-viz is not installed");
    }
    print(&objects, args.output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::document;

    #[test]
    fn every_object_is_found_again_but_the_namespace() {
        let everything =
            "podMonitor.enabled=true,podDisruptionBudget.enabled=true,clients[0].name=a,clients[0].namespace=b";
        let settings = Settings { set: vec![everything.to_owned()], ..Settings::default() };
        let documents = rendered("viz", &settings, true).unwrap().documents;
        assert_eq!(documents[0].1.kind, "Namespace");
        for (text, object) in &documents[1..] {
            let value = document::parse_yaml(text).unwrap();
            let (key, wanted) = SELECTOR.split_once('=').unwrap();
            assert_eq!(value["metadata"]["labels"][key].as_str(), Some(wanted), "{object:?}");
            let listed = KINDS.iter().any(|(version, kind, ..)| *version == object.api_version && *kind == object.kind);
            assert!(listed || cluster::is_listed(object), "{object:?}");
        }
        let again = rendered("viz", &settings, false).unwrap();
        assert!(again.objects().eq(documents[1..].iter().map(|(_, object)| object)));
        for kind in ["Deployment", "Server", "AuthorizationPolicy", "PodMonitor", "PodDisruptionBudget"] {
            assert!(documents.iter().any(|(_, object)| object.kind == kind), "{kind}");
        }
    }

    #[test]
    fn without_clients_nobody_may_connect_through_the_mesh() {
        let documents = rendered("viz", &Settings::default(), true).unwrap().documents;
        let kinds: Vec<&str> = documents.iter().map(|(_, object)| object.kind.as_str()).collect();
        assert!(kinds.contains(&"Server") && !kinds.contains(&"AuthorizationPolicy"), "{kinds:?}");
    }

    #[test]
    fn a_value_that_the_schema_refuses_is_named() {
        let settings = Settings { set: vec!["scrapeIntervall=5s".to_owned()], ..Settings::default() };
        let error = rendered("viz", &settings, true).unwrap_err().to_string();
        assert!(error.contains("scrapeIntervall"), "{error}");
    }
}
