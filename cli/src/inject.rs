//! `weft inject` and `weft uninject`: the proxy in manifests, and manifests without it.
//!
//! ```text
//! manifests ──transform──> annotated for the injector          (inject)
//!                     └──> with the whole proxy, by the injector's own function (inject --manual)
//!                     └──> without both                         (uninject)
//! ```
//!
//! Nothing is printed unless all of it was understood. Refuses to decide what a proxy is: `weft_k8s_api::inject` does.

mod manual;
mod options;
mod report;
mod transform;
mod workload;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Args;
use serde_yaml_ng::Value;
use weft_k8s_api::field::FieldPath;

use crate::{
    cluster::ClusterArgs,
    manifest::{
        self, ManifestFormat,
        document::{self, Document, Unusable},
    },
    output::{
        self,
        progress::{self, API_SERVER},
    },
};
use manual::Manual;
use options::ProxyArgs;
use report::{Entry, Outcome};
use transform::{Injection, Place};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kubectl get deploy -o yaml | weft inject - | kubectl apply -f -         mesh what runs in a namespace
  weft inject https://example.com/app.yaml | kubectl apply -f -           a manifest from a URL, through HTTPS_PROXY
  weft inject deploy/ | kubectl apply -f -                                a folder and its sub-folders
  weft inject --skip-outbound-ports 3306 web.yaml                         with settings, as annotations
  weft inject --manual web.yaml                                           with the whole proxy, for clusters without injector")]
pub(crate) struct InjectArgs {
    /// Files, folders, URLs, or - for standard input
    #[arg(required = true, value_name = "MANIFESTS")]
    manifests: Vec<String>,
    /// Print whole proxies instead of annotations that ask the injector for them
    #[arg(long)]
    manual: bool,
    /// Do not query the cluster for its settings: --manual then uses the chart's. Without --manual the cluster is never
    /// queried
    #[arg(long)]
    ignore_cluster: bool,
    /// Trust anchors of the mesh, PEM, for --manual --ignore-cluster
    #[arg(long, value_name = "FILE", requires = "ignore_cluster")]
    identity_trust_anchors_file: Option<PathBuf>,
    /// Format of the manifests
    #[arg(short, long, value_enum, default_value_t)]
    output: ManifestFormat,
    #[command(flatten)]
    proxy: ProxyArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kubectl get deploy -o yaml | weft uninject - | kubectl apply -f -
  weft uninject injected.yaml > web.yaml")]
pub(crate) struct UninjectArgs {
    /// Files, folders, URLs, or - for standard input
    #[arg(required = true, value_name = "MANIFESTS")]
    manifests: Vec<String>,
    /// Format of the manifests
    #[arg(short, long, value_enum, default_value_t)]
    output: ManifestFormat,
}

/// `weft inject`.
pub(crate) async fn inject(args: InjectArgs) -> Result<ExitCode> {
    let overrides = args.proxy.overrides()?;
    for note in args.proxy.notes() {
        output::note(&note);
    }
    let documents = manifest::read(&args.manifests).await?;
    let manual = if args.manual { Some(settings(&args, &documents).await?) } else { None };
    let injection = Injection { overrides: &overrides, manual: manual.as_ref() };
    let transformed = transform(&documents, args.output, |object, place| transform::inject(object, place, &injection))?;
    transformed.print(true)
}

/// `weft uninject`.
pub(crate) async fn uninject(args: UninjectArgs) -> Result<ExitCode> {
    let documents = manifest::read(&args.manifests).await?;
    transform(&documents, args.output, transform::uninject)?.print(false)
}

async fn settings(args: &InjectArgs, documents: &[Document]) -> Result<Manual> {
    let objects: Vec<_> = documents.iter().flat_map(|document| document::objects(&document.value)).collect();
    if !args.ignore_cluster {
        let asked = async { Manual::of_cluster(&args.cluster.cluster().await?, &objects).await };
        return progress::during(API_SERVER, asked).await;
    }
    let anchors = args.identity_trust_anchors_file.as_ref().context(
        "--manual --ignore-cluster needs --identity-trust-anchors-file: a proxy without the mesh's trust anchors does not \
         start",
    )?;
    Manual::of_chart(&args.cluster.linkerd_namespace, anchors, &objects)
}

/// What is printed, if all of it could be made.
#[derive(Debug)]
struct Transformed {
    manifests: String,
    entries: Vec<Entry>,
}

impl Transformed {
    fn print(&self, injecting: bool) -> Result<ExitCode> {
        output::raw(&self.manifests)?;
        report::print(&report::text(&self.entries, injecting));
        Ok(ExitCode::SUCCESS)
    }
}

fn transform(
    documents: &[Document],
    format: ManifestFormat,
    mut one: impl FnMut(&mut Value, &Place) -> Result<Entry, Unusable>,
) -> Result<Transformed> {
    let mut transformed = Transformed { manifests: String::new(), entries: Vec::new() };
    let mut errors = Vec::new();
    for document in documents {
        let mut value = document.value.clone();
        let mut apply = |object: &mut Value, outer: FieldPath| {
            if workload::text(object, &["kind"]).is_none() {
                let (kind, name) = (String::new(), String::new());
                return transformed.entries.push(Entry {
                    kind,
                    name,
                    outcome: Outcome::Skipped(None),
                    warnings: Vec::new(),
                });
            }
            match one(object, &Place { document, outer }) {
                Ok(entry) => transformed.entries.push(entry),
                Err(error) => errors.push(error),
            }
        };
        if document::is_list(&value) {
            let list = value.get_mut("items").and_then(Value::as_sequence_mut);
            for (index, object) in list.into_iter().flatten().enumerate() {
                apply(object, FieldPath::of("items").index(index));
            }
        } else {
            apply(&mut value, FieldPath::default());
        }
        let unchanged = value == document.value && format == ManifestFormat::Yaml;
        let text = if unchanged { document.text.clone() } else { manifest::text(&value, format)? };
        manifest::push(&mut transformed.manifests, &text, format);
    }
    if errors.is_empty() { Ok(transformed) } else { Err(manifest::refused(&errors)) }
}

#[cfg(test)]
mod tests;
