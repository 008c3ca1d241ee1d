//! `weft install`, `upgrade`, `uninstall` and `prune`: manifests for `kubectl apply -f -` and `kubectl delete -f -`.
//!
//! ```text
//! charts in the program ──render──────────> manifests       install; upgrade, with the stored configuration
//! objects of the cluster by label ──────> names to delete   uninstall; prune: those that the charts no longer have
//! ```
//!
//! Reads from the cluster and changes nothing in it. Meshes that helm installed are left to helm.

mod certificates;
mod cluster;
mod flags;
mod offer;
mod render;
mod stored;
mod values;
pub(crate) mod viz;

use std::{collections::BTreeMap, process::ExitCode};

use anyhow::{Result, anyhow, bail};
use clap::Args;
use weft_k8s_api::policy::route::GATEWAY_GROUP;

use crate::{
    chart::{Chart, values::Settings},
    cluster::{CONTROL_NAMESPACE, Cluster, ClusterArgs},
    docs,
    manifest::{self, ManifestFormat, document, source},
    mesh::installed::Installed,
    output::{
        self,
        progress::{self, API_SERVER},
    },
};
use cluster::{Definition, Object};
use offer::Offer;
use render::{Certificates, Rendered};
use stored::Stored;
use values::ValueArgs;

/// Objects of certificates. The chart lacks one only where a value leaves it to another tool, which writes into the
/// chart's own; `weft prune` would delete what that tool has written.
const CERTIFICATES: [(&str, &str); 5] = [
    ("Secret", "linkerd-identity-issuer"),
    ("ConfigMap", "linkerd-identity-trust-roots"),
    ("Secret", "linkerd-proxy-injector-k8s-tls"),
    ("Secret", "linkerd-sp-validator-k8s-tls"),
    ("Secret", "linkerd-policy-validator-k8s-tls"),
];
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
    /// Do not query the cluster for an existing installation
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
  weft upgrade --from-manifests linkerd.yaml > new.yaml    what `weft install` printed, without the cluster
  weft prune | kubectl delete -f -                   what the new version no longer has")]
pub(crate) struct UpgradeArgs {
    /// Print the custom resource definitions instead, which come first
    #[arg(long)]
    crds: bool,
    /// Read the installation from manifests that `weft install` printed, and ask no cluster: a file, a folder, a URL,
    /// or - for standard input
    #[arg(long, value_name = "MANIFESTS", conflicts_with = "crds")]
    from_manifests: Option<String>,
    /// Upgrade even if proxies would not trust the certificates
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

Refuses while pods have a proxy: without agents they would be reached around it; and while weft-viz is installed.")]
pub(crate) struct UninstallArgs {
    /// Also while pods have a proxy, or weft-viz is installed
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

/// `weft install`.
pub(crate) async fn install(args: InstallArgs) -> Result<ExitCode> {
    if args.crds {
        return definitions(&args.values.definitions().await?, args.output);
    }
    let settings = args.values.settings(None).await?;
    if !args.ignore_cluster {
        let asked = async { ready_for(&args.cluster.cluster().await?, &settings).await };
        progress::during(API_SERVER, asked).await?;
    }
    let rendered = Rendered::new(&args.cluster.linkerd_namespace, &settings, Certificates::New)?;
    output::raw(&rendered.text(args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether a cluster can take a new mesh.
async fn ready_for(cluster: &Cluster, settings: &Settings) -> Result<()> {
    let namespace = &cluster.namespace;
    let anyway = "--ignore-cluster prints manifests anyway";
    match cluster::installed(cluster).await.map_err(|error| anyhow!("{error}; {anyway}"))? {
        Installed::No => {}
        Installed::ByUs => bail!("Weft is installed in namespace {namespace}: use `weft upgrade`; {anyway}"),
        Installed::ByHelm(release) => {
            bail!("helm installed release {release} in namespace {namespace}: use `helm upgrade`; {anyway}")
        }
        Installed::ByTemplate => bail!(
            "a tool that renders the chart, such as Argo CD, installed Weft in namespace {namespace}: use that tool; \
             {anyway}"
        ),
        Installed::ByOthers => bail!(
            "another mesh is installed in namespace {namespace}, such as Linkerd: a cluster has one of them. How Weft replaces it: \
             {}; {anyway}",
            docs::page("migration.md")
        ),
    }
    let offer = Offer::of(cluster).await?;
    if let Some(lack) = offer.lack(&Chart::control_plane()?.values(settings)?, "install") {
        bail!("{lack}; {anyway}");
    }
    offer.note_unknown();
    Ok(())
}

/// `weft upgrade`.
pub(crate) async fn upgrade(args: UpgradeArgs) -> Result<ExitCode> {
    if args.crds {
        return definitions(&args.values.definitions().await?, args.output);
    }
    let rendered = upgraded(&args).await?;
    output::raw(&rendered.text(args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

async fn upgraded(args: &UpgradeArgs) -> Result<Rendered> {
    let namespace = &args.cluster.linkerd_namespace;
    let settings = match &args.from_manifests {
        Some(from) => {
            source::check_stdin(args.values.helm.values.iter().chain([from]))?;
            let place = if from == "-" { "standard input" } else { from };
            let documents = manifest::read(std::slice::from_ref(from)).await?;
            settings(&Stored::in_manifests(&documents, place, namespace)?, &args.values).await?
        }
        None => {
            let cluster = args.cluster.cluster().await?;
            let stored = progress::during(API_SERVER, Stored::in_cluster(&cluster)).await?;
            let settings = settings(&stored, &args.values).await?;
            let offer = progress::during(API_SERVER, Offer::of(&cluster)).await?;
            if let Some(lack) = offer.lack(&Chart::control_plane()?.values(&settings)?, "upgrade") {
                bail!("{lack}");
            }
            offer.note_unknown();
            settings
        }
    };
    Rendered::new(namespace, &settings, if args.force { Certificates::Forced } else { Certificates::Kept })
}

/// The settings of an installation, and `values` on top of them.
async fn settings(stored: &Stored, values: &ValueArgs) -> Result<Settings> {
    stored.check_ours("helm upgrade")?;
    values.settings(Some(stored.values()?)).await
}

/// `weft uninstall`.
pub(crate) async fn uninstall(args: UninstallArgs) -> Result<ExitCode> {
    let (gone, left) = progress::during(API_SERVER, removed(&args)).await?;
    let code = print(&gone, args.output)?;
    if let Some(note) = left {
        output::note(&note);
    }
    output::note(
        "each agent unloads the kernel programs of its node when its DaemonSet is deleted. A node whose agent is killed \
         before that keeps them until `weft-agent unload` there",
    );
    Ok(code)
}

/// What an uninstallation deletes, and a note about what it leaves.
async fn removed(args: &UninstallArgs) -> Result<(Vec<Object>, Option<String>)> {
    let cluster = args.cluster.cluster().await?;
    cluster::ours(&cluster::installed(&cluster).await?, &cluster.namespace, &cluster.server, "helm uninstall")?;
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
    if !args.force
        && let Some(component) = cluster::InstalledViz::find(&cluster).await?
    {
        let why = if args.keep_crds { "needs the mesh" } else { "has policies, whose kinds go with the mesh" };
        bail!(
            "the component weft-viz is installed and {why}: first {}; --force prints manifests anyway",
            component.removal()
        );
    }
    let mut gone = to_delete(cluster::objects(&cluster).await?, &cluster.namespace);
    let mut left = None;
    if !args.keep_crds {
        let known = cluster::definitions(&cluster).await?;
        let ours = defined()?.into_iter();
        // After the webhooks and before the namespace.
        let place = gone.iter().position(|object| object.kind == "Namespace").unwrap_or(gone.len());
        let by_helm = |object: &Object| known.get(&object.name).is_none_or(|known| known.by_helm);
        gone.splice(place..place, ours.filter(|object| !by_helm(object)));
        left = gateway_api(&known);
    }
    Ok((gone, left))
}

/// What has to be deleted by name: what is in the namespace goes with it. The agents go first, to see that they go.
fn to_delete(objects: Vec<Object>, namespace: &str) -> Vec<Object> {
    let whole = objects.iter().any(|object| object.kind == "Namespace" && object.name == namespace);
    let goes_along = |object: &Object| object.namespace.as_deref() == Some(namespace) && object.kind != "DaemonSet";
    objects.into_iter().filter(|object| !whole || !goes_along(object)).collect()
}

/// `weft prune`.
pub(crate) async fn prune(args: PruneArgs) -> Result<ExitCode> {
    let objects = progress::during(API_SERVER, stale(&args)).await?;
    if objects.is_empty() {
        output::note("nothing to delete: every object of the mesh is one of this version");
    }
    print(&objects, args.output)
}

/// Objects of the mesh that this version's charts do not have.
async fn stale(args: &PruneArgs) -> Result<Vec<Object>> {
    let cluster = args.cluster.cluster().await?;
    let settings = settings(&Stored::in_cluster(&cluster).await?, &ValueArgs::default()).await?;
    let rendered = Rendered::new(&cluster.namespace, &settings, Certificates::Forced)?;
    let mut objects = cluster::objects(&cluster).await?;
    objects.retain(|object| is_stale(object, &rendered));
    Ok(objects)
}

/// Whether an object of the mesh is to be deleted, because it is not among the rendered ones.
fn is_stale(object: &Object, rendered: &Rendered) -> bool {
    let same = |a: &Object, b: &Object| a.kind == b.kind && a.name == b.name && a.namespace == b.namespace;
    let is_certificate = CERTIFICATES.contains(&(object.kind.as_str(), object.name.as_str()));
    !is_certificate && !rendered.objects().any(|known| same(known, object))
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
    let chart = Chart::definitions()?;
    let texts = chart.manifests(CONTROL_NAMESPACE, &chart.values(&Settings::default())?)?;
    let objects = texts.iter().map(|text| Ok(Object::of(&document::parse_yaml(text)?)));
    objects.filter_map(Result::transpose).collect()
}

fn definitions(texts: &[String], format: ManifestFormat) -> Result<ExitCode> {
    let mut stream = String::new();
    for text in texts {
        match format {
            ManifestFormat::Yaml => manifest::push(&mut stream, text, format),
            ManifestFormat::Json => {
                manifest::push(&mut stream, &manifest::text(&document::parse_yaml(text)?, format)?, format);
            }
        }
    }
    output::raw(&stream)?;
    Ok(ExitCode::SUCCESS)
}

/// What is said about definitions of the Gateway API that `weft install --crds` made: other tools may use them by now.
fn gateway_api(known: &BTreeMap<String, Definition>) -> Option<String> {
    let ours = known.iter().filter(|(name, definition)| {
        name.ends_with(&format!(".{GATEWAY_GROUP}")) && definition.is_ours && !definition.by_helm
    });
    let names: Vec<_> = ours.map(|(name, _)| name.as_str()).collect();
    if names.is_empty() {
        return None;
    }
    Some(format!(
        "these definitions of the Gateway API stay, because others than Weft may use them by now. Where nothing else does, this removes \
         them, and every object of theirs: kubectl delete crd {}",
        names.join(" ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn certificates_that_are_left_to_another_tool_are_not_stale() {
        let rendered = |set: &str| {
            let set = set.split(',').map(str::to_owned).collect();
            Rendered::new("linkerd", &Settings { set, ..Settings::default() }, Certificates::New).unwrap()
        };
        let all = rendered("controllerReplicas=1");
        let external = rendered(
            "identity.externalCA=true,identity.issuer.scheme=kubernetes.io/tls,proxyInjector.externalSecret=true,\
             proxyInjector.caBundle=PEM,profileValidator.externalSecret=true,profileValidator.caBundle=PEM,\
             policyValidator.externalSecret=true,policyValidator.caBundle=PEM",
        );
        for (kind, name) in CERTIFICATES {
            let certificate = object(kind, Some("linkerd"), name);
            assert!(all.objects().any(|known| *known == certificate), "{certificate:?}");
            assert!(!external.objects().any(|known| *known == certificate), "{certificate:?}");
            assert!(!is_stale(&certificate, &external), "{certificate:?}");
        }
        assert!(is_stale(&object("ConfigMap", Some("linkerd"), "older"), &external));
    }

    #[test]
    fn what_is_left_of_the_gateway_api_is_named_with_the_command_that_removes_it() {
        let known = |entries: &[(&str, bool, bool)]| {
            let all = entries.iter().map(|(name, by_helm, is_ours)| {
                ((*name).to_owned(), Definition { by_helm: *by_helm, is_ours: *is_ours })
            });
            all.collect::<BTreeMap<_, _>>()
        };
        let of = |kind: &str| format!("{kind}.gateway.networking.k8s.io");
        let (http, tcp, tls, gateways) = (of("httproutes"), of("tcproutes"), of("tlsroutes"), of("gateways"));
        let note = gateway_api(&known(&[
            (&http, false, true),
            (&tcp, false, false),
            (&tls, true, true),
            (&gateways, false, true),
            ("servers.policy.linkerd.io", false, true),
        ]));
        let note = note.unwrap();
        assert!(note.ends_with(&format!("kubectl delete crd {gateways} {http}")), "{note}");
        assert_eq!(gateway_api(&known(&[(&tcp, false, false), (&tls, true, true)])), None);
    }
}
