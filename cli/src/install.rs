//! `weft install`, `upgrade`, `uninstall` and `prune`: manifests for `kubectl apply -f -` and `kubectl delete -f -`.
//!
//! ```text
//! charts in the program ──render──────────> manifests       install, upgrade
//! objects of the cluster by label ──────> names to delete   uninstall; prune: those that the charts no longer have
//! ```
//!
//! Reads from the cluster and changes nothing in it. Meshes that helm installed are left to helm.

mod certificates;
mod cluster;
mod render;
pub(crate) mod viz;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::{
    chart::{
        self, Chart,
        values::{self, Settings},
    },
    check,
    cluster::{Cluster, ClusterArgs},
    manifest::{self, ManifestFormat, document},
    output,
};
use cluster::{Installed, Object};
use render::{Certificates, Rendered};

/// Most pods that a message names.
const NAMED: usize = 5;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft install --crds | kubectl apply --server-side -f -   custom resource definitions first
  weft install | kubectl apply -f -                  with certificates that are generated
  weft install --ha --set proxy.logLevel=info | kubectl apply -f -
  weft install --identity-trust-anchors-file ca.crt --identity-issuer-certificate-file issuer.crt \\
    --identity-issuer-key-file issuer.key | kubectl apply -f -
  weft check")]
pub(crate) struct InstallArgs {
    /// Print the custom resource definitions instead, which come first
    #[arg(long)]
    crds: bool,
    /// Ask no cluster whether the mesh is installed already
    #[arg(long)]
    ignore_cluster: bool,
    #[command(flatten)]
    values: ValueArgs,
    /// Format of the manifests
    #[arg(short, long, value_enum, default_value_t)]
    output: ManifestFormat,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft upgrade --crds | kubectl apply --server-side -f -   custom resource definitions first
  weft upgrade | kubectl apply -f -                  with the values of the installation
  weft upgrade --set controllerReplicas=3 | kubectl apply -f -
  weft prune | kubectl delete -f -                   what the new version no longer has")]
pub(crate) struct UpgradeArgs {
    /// Print the custom resource definitions instead, which come first
    #[arg(long)]
    crds: bool,
    /// Also with certificates that proxies would not trust
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    values: ValueArgs,
    /// Format of the manifests
    #[arg(short, long, value_enum, default_value_t)]
    output: ManifestFormat,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft uninstall | kubectl delete -f -
  weft uninstall --keep-crds | kubectl delete -f -   policies stay

Refuses while pods have a proxy: without agents they would be reached around it.")]
pub(crate) struct UninstallArgs {
    /// Also while pods have a proxy
    #[arg(short, long)]
    force: bool,
    /// Leave the custom resource definitions, and with them all policies
    #[arg(long)]
    keep_crds: bool,
    /// Format of the manifests
    #[arg(short, long, value_enum, default_value_t)]
    output: ManifestFormat,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft upgrade | kubectl apply -f - && weft prune | kubectl delete -f -")]
pub(crate) struct PruneArgs {
    /// Format of the manifests
    #[arg(short, long, value_enum, default_value_t)]
    output: ManifestFormat,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Values of a chart, by helm's options.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Values")]
struct HelmArgs {
    /// A file of values; may be repeated
    #[arg(short = 'f', long, value_name = "FILE")]
    values: Vec<String>,
    /// A value, by its path in values.yaml; may be repeated
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
    /// A value that is text, whatever it looks like
    #[arg(long, value_name = "PATH=VALUE")]
    set_string: Vec<String>,
    /// A value from a file
    #[arg(long, value_name = "PATH=FILE")]
    set_file: Vec<String>,
}

impl HelmArgs {
    /// What is set on top of `base`.
    fn settings(&self, base: Option<Value>) -> Settings {
        Settings {
            base,
            files: self.values.clone(),
            set: self.set.clone(),
            set_string: self.set_string.clone(),
            set_file: self.set_file.clone(),
        }
    }
}

/// Values of the chart: helm's options, and Linkerd's for the most common ones.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Values")]
struct ValueArgs {
    /// Three replicas of everything, requests of resources, webhooks that fail closed
    #[arg(long)]
    ha: bool,
    #[command(flatten)]
    helm: HelmArgs,
    /// Trust anchors of the mesh, PEM
    #[arg(long, value_name = "FILE")]
    identity_trust_anchors_file: Option<PathBuf>,
    /// Certificate that signs those of proxies, PEM
    #[arg(long, value_name = "FILE")]
    identity_issuer_certificate_file: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE")]
    identity_issuer_key_file: Option<PathBuf>,
    /// Trust domain of identities
    #[arg(long, value_name = "DOMAIN")]
    identity_trust_domain: Option<String>,
    /// Domain of the cluster's DNS names
    #[arg(long, value_name = "DOMAIN")]
    cluster_domain: Option<String>,
    /// Log level of the control plane
    #[arg(long, value_name = "LEVEL")]
    controller_log_level: Option<String>,
    /// Replicas of each Deployment
    #[arg(long, value_name = "NUMBER")]
    controller_replicas: Option<u16>,
}

impl ValueArgs {
    /// What is set on top of `base`.
    fn settings(&self, base: Option<Value>) -> Result<Settings> {
        let mut settings = self.helm.settings(base);
        if self.ha {
            let ha = Chart::control_plane()?.high_availability()?;
            values::merge(settings.base.get_or_insert_with(|| json!({})), ha);
        }
        for (path, file) in [
            ("identityTrustAnchorsPEM", &self.identity_trust_anchors_file),
            ("identity.issuer.tls.crtPEM", &self.identity_issuer_certificate_file),
            ("identity.issuer.tls.keyPEM", &self.identity_issuer_key_file),
        ] {
            settings
                .set_file
                .extend(file.iter().map(|file| format!("{path}={}", escaped(&file.display().to_string()))));
        }
        for (path, value) in [
            ("identityTrustDomain", &self.identity_trust_domain),
            ("clusterDomain", &self.cluster_domain),
            ("controllerLogLevel", &self.controller_log_level),
        ] {
            settings.set_string.extend(value.iter().map(|value| format!("{path}={}", escaped(value))));
        }
        settings.set.extend(self.controller_replicas.map(|replicas| format!("controllerReplicas={replicas}")));
        Ok(settings)
    }

    /// Whether the definitions of the Gateway API are wanted: the one value of that chart.
    fn gateway_api(&self) -> Result<bool> {
        let only = "--crds takes one value, --set installGatewayAPI=true";
        let mut wanted = false;
        for value in self.helm.set.iter().flat_map(|set| set.split(',')) {
            wanted = match value {
                "installGatewayAPI=true" => true,
                "installGatewayAPI=false" => false,
                _ => bail!("{value}: {only}"),
            };
        }
        let others = Self { helm: HelmArgs { set: Vec::new(), ..self.helm.clone() }, ha: false, ..self.clone() }
            .settings(None)?;
        if self.ha
            || !(others.files.is_empty() && others.set.is_empty())
            || !(others.set_string.is_empty() && others.set_file.is_empty())
        {
            bail!("{only}");
        }
        Ok(wanted)
    }
}

/// For `--set`, which splits values at commas.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace(',', "\\,")
}

/// `weft install`.
pub(crate) async fn install(args: InstallArgs) -> Result<ExitCode> {
    if args.crds {
        return definitions(args.values.gateway_api()?, args.output);
    }
    let settings = args.values.settings(None)?;
    if !args.ignore_cluster {
        let cluster = args.cluster.cluster().await?;
        ready_for(&cluster).await?;
    }
    let rendered = Rendered::new(&args.cluster.linkerd_namespace, &settings, Certificates::New)?;
    output::raw(&rendered.text(args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether a cluster can take a new mesh.
async fn ready_for(cluster: &Cluster) -> Result<()> {
    let namespace = &cluster.namespace;
    let anyway = "--ignore-cluster prints manifests anyway";
    match cluster::installed(cluster).await? {
        Installed::No => {}
        Installed::ByUs => bail!("Weft is installed in namespace {namespace}: use `weft upgrade`; {anyway}"),
        Installed::ByHelm(release) => {
            bail!("helm installed release {release} in namespace {namespace}: use `helm upgrade`; {anyway}")
        }
        Installed::ByOthers => bail!(
            "another mesh is installed in namespace {namespace}, such as Linkerd: a cluster has one of them. Uninstall it \
             first; {anyway}"
        ),
    }
    let missing = missing_definitions(cluster).await?;
    if let Some(first) = missing.first() {
        bail!(
            "custom resource definitions are missing, such as {first}: first `weft install --crds | kubectl apply --server-side -f -`; \
             {anyway}"
        );
    }
    // What the charts themselves ask a cluster when helm installs them.
    let version = cluster::version(cluster).await?;
    if check::is_too_old(&version) {
        bail!("this cluster runs Kubernetes {version}; Weft needs 1.31 or newer, for native sidecars; {anyway}");
    }
    if let Some(first) = outdated(&check::our_crds(), &cluster::served(cluster).await?).first() {
        bail!(
            "custom resource definitions are too old: {first}: first `weft install --crds | kubectl apply --server-side -f -`; {anyway}"
        );
    }
    Ok(())
}

/// Definitions that do not serve what this version reads. Those that are missing are not among them.
fn outdated(ours: &BTreeMap<String, BTreeSet<String>>, there: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let lacking = ours.iter().filter_map(|(name, versions)| {
        let missing: Vec<_> = versions.difference(there.get(name)?).map(String::as_str).collect();
        (!missing.is_empty()).then(|| format!("{name} does not serve {}", missing.join(", ")))
    });
    lacking.collect()
}

async fn missing_definitions(cluster: &Cluster) -> Result<Vec<String>> {
    let known = cluster::definitions(cluster).await?;
    let wanted = defined()?.into_iter();
    Ok(wanted.map(|object| object.name).filter(|name| !known.contains_key(name)).collect())
}

/// `weft upgrade`.
pub(crate) async fn upgrade(args: UpgradeArgs) -> Result<ExitCode> {
    if args.crds {
        return definitions(args.values.gateway_api()?, args.output);
    }
    let cluster = args.cluster.cluster().await?;
    cluster::ours(&cluster::installed(&cluster).await?, &cluster, "helm upgrade")?;
    let missing = missing_definitions(&cluster).await?;
    if let Some(first) = missing.first() {
        bail!(
            "this version has custom resource definitions that the cluster has not, such as {first}: first \
             `weft upgrade --crds | kubectl apply --server-side -f -`"
        );
    }
    let certificates = if args.force { Certificates::Forced } else { Certificates::Kept };
    let rendered = current(&cluster, &args.values, certificates).await?;
    output::raw(&rendered.text(args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// The mesh of a cluster, rendered with this version's charts.
async fn current(cluster: &Cluster, values: &ValueArgs, certificates: Certificates) -> Result<Rendered> {
    let mut base = cluster::overrides(cluster).await?;
    let scheme = base["identity"]["issuer"]["scheme"].as_str().unwrap_or("linkerd.io/tls");
    if scheme == "linkerd.io/tls" {
        let (certificate, key) = cluster::issuer(cluster).await?;
        values::merge(&mut base, certificates::issuer_values(&certificate, &key));
    }
    Rendered::new(&cluster.namespace, &values.settings(Some(base))?, certificates)
}

/// `weft uninstall`.
pub(crate) async fn uninstall(args: UninstallArgs) -> Result<ExitCode> {
    let cluster = args.cluster.cluster().await?;
    cluster::ours(&cluster::installed(&cluster).await?, &cluster, "helm uninstall")?;
    let meshed = cluster::meshed(&cluster).await?;
    if !meshed.is_empty() && !args.force {
        let some = meshed.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = if meshed.len() > NAMED { ", ..." } else { "" };
        bail!(
            "{} pods have a proxy ({some}{more}): connections would reach them around it. Remove it first (annotation \
             linkerd.io/inject, then restart the workloads); --force prints manifests anyway",
            meshed.len()
        );
    }
    let mut gone = to_delete(cluster::objects(&cluster).await?, &cluster.namespace);
    if !args.keep_crds {
        let known = cluster::definitions(&cluster).await?;
        let ours = defined()?.into_iter();
        // After the webhooks and before the namespace.
        let place = gone.iter().position(|object| object.kind == "Namespace").unwrap_or(gone.len());
        gone.splice(place..place, ours.filter(|object| known.get(&object.name) == Some(&None)));
    }
    let code = print(&gone, args.output)?;
    output::note(
        "each agent unloads the kernel programs of its node when its DaemonSet is deleted. A node whose agent is killed \
         before that keeps them until `weft-agent unload` there",
    );
    Ok(code)
}

/// What has to be deleted by name: what is in the namespace goes with it. The agents go first, to see that they go.
fn to_delete(objects: Vec<Object>, namespace: &str) -> Vec<Object> {
    let whole = objects.iter().any(|object| object.kind == "Namespace" && object.name == namespace);
    let goes_along = |object: &Object| object.namespace.as_deref() == Some(namespace) && object.kind != "DaemonSet";
    objects.into_iter().filter(|object| !whole || !goes_along(object)).collect()
}

/// `weft prune`.
pub(crate) async fn prune(args: PruneArgs) -> Result<ExitCode> {
    let cluster = args.cluster.cluster().await?;
    cluster::ours(&cluster::installed(&cluster).await?, &cluster, "helm upgrade")?;
    let rendered = current(&cluster, &ValueArgs::default(), Certificates::Forced).await?;
    let same = |a: &Object, b: &Object| a.kind == b.kind && a.name == b.name && a.namespace == b.namespace;
    let mut stale = cluster::objects(&cluster).await?;
    stale.retain(|object| !rendered.objects().any(|known| same(known, object)));
    print(&stale, args.output)
}

fn print(objects: &[Object], format: ManifestFormat) -> Result<ExitCode> {
    let mut text = String::new();
    for object in objects {
        manifest::push(&mut text, &manifest::text(&object.manifest(), format)?, format);
    }
    output::raw(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The custom resource definitions that this version reads.
fn defined() -> Result<Vec<Object>> {
    let texts = chart::definitions(false)?;
    let objects = texts.iter().map(|text| Ok(Object::of(&document::parse_yaml(text)?)));
    objects.filter_map(Result::transpose).collect()
}

fn definitions(gateway_api: bool, format: ManifestFormat) -> Result<ExitCode> {
    let mut stream = String::new();
    for text in chart::definitions(gateway_api)? {
        match format {
            ManifestFormat::Yaml => manifest::push(&mut stream, &text, format),
            ManifestFormat::Json => {
                manifest::push(&mut stream, &manifest::text(&document::parse_yaml(&text)?, format)?, format);
            }
        }
    }
    output::raw(&stream)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_that_lack_a_version_are_named() {
        let of = |versions: &[&str]| versions.iter().map(|version| (*version).to_owned()).collect::<BTreeSet<_>>();
        let map = |versions: &[&str]| BTreeMap::from([("a".to_owned(), of(versions))]);
        assert_eq!(outdated(&map(&["v1", "v2"]), &map(&["v1"])), ["a does not serve v2"]);
        assert!(outdated(&map(&["v1"]), &map(&["v1", "v2"])).is_empty());
        assert!(outdated(&map(&["v1"]), &BTreeMap::new()).is_empty());
    }

    fn object(kind: &str, namespace: Option<&str>, name: &str) -> Object {
        Object {
            api_version: "v1".to_owned(),
            kind: kind.to_owned(),
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        }
    }

    #[test]
    fn what_is_in_the_namespace_goes_with_it_but_the_agents_go_first() {
        let objects = || {
            vec![
                object("DaemonSet", Some("linkerd"), "weft-agent"),
                object("Service", Some("linkerd"), "linkerd-dst"),
                object("RoleBinding", Some("kube-system"), "reader"),
                object("ClusterRole", None, "weft-agent"),
            ]
        };
        assert_eq!(to_delete(objects(), "linkerd").len(), 4);
        let mut all = objects();
        all.push(object("Namespace", None, "linkerd"));
        let kinds: Vec<_> = to_delete(all, "linkerd").into_iter().map(|object| object.kind).collect();
        assert_eq!(kinds, ["DaemonSet", "RoleBinding", "ClusterRole", "Namespace"]);
    }

    #[test]
    fn options_become_values() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca,1.crt");
        std::fs::write(&file, "PEM").unwrap();
        let args = ValueArgs {
            ha: true,
            helm: HelmArgs { set: vec!["proxy.logLevel=debug".to_owned()], ..HelmArgs::default() },
            identity_trust_anchors_file: Some(file),
            controller_replicas: Some(5),
            ..ValueArgs::default()
        };
        let settings = args.settings(Some(json!({"clusterDomain": "mesh.example"}))).unwrap();
        let values = Chart::control_plane().unwrap().values(&settings).unwrap();
        assert_eq!(values["identityTrustAnchorsPEM"], "PEM");
        assert_eq!(values["controllerReplicas"], 5);
        assert_eq!(values["enablePodDisruptionBudget"], true);
        assert_eq!(values["clusterDomain"], "mesh.example");
        assert_eq!(values["proxy"]["logLevel"], "debug");
    }

    #[test]
    fn the_definitions_take_one_value() {
        let set = |values: &[&str]| ValueArgs {
            helm: HelmArgs { set: values.iter().map(|value| (*value).to_owned()).collect(), ..HelmArgs::default() },
            ..ValueArgs::default()
        };
        assert!(set(&["installGatewayAPI=true"]).gateway_api().unwrap());
        assert!(!set(&[]).gateway_api().unwrap());
        assert!(set(&["proxy.logLevel=info"]).gateway_api().unwrap_err().to_string().contains("installGatewayAPI"));
        assert!(ValueArgs { ha: true, ..ValueArgs::default() }.gateway_api().is_err());
    }
}
