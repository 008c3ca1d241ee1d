//! `weft profile`: a ServiceProfile from a template, an OpenAPI document or a protobuf file.
//!
//! ```text
//! --template            ──> text with comments, to be edited
//! --open-api, --proto   ──> routes ──> ServiceProfile, checked as its webhook would
//! ```

mod openapi;
mod proto;

use std::{fs, process::ExitCode};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use weft_k8s_api::{
    names,
    profile::{Route, ServiceProfile, ServiceProfileSpec, validate},
    values::Values,
};

use crate::{
    cluster::{ANSWER, ClusterArgs, within},
    manifest::{self, ManifestFormat, document},
    output::{
        self,
        progress::{self, API_SERVER},
    },
};

/// With the service's name, namespace and domain.
const TEMPLATE: &str = include_str!("profile/template.yaml");
/// Domain of a cluster that is not asked for it.
const CLUSTER_DOMAIN: &str = "cluster.local";

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft profile --template -n shop web > web.yaml                 to be edited; every field has a comment
  weft profile --open-api web.json -n shop web | kubectl apply -f -
  weft profile --proto voting.proto -n emojivoto voting-svc | kubectl apply -f -
  weft profile --ignore-cluster --template -n shop web           without a cluster: its domain is cluster.local")]
pub(crate) struct ProfileArgs {
    /// Name of the Service
    service: String,
    #[command(flatten)]
    from: From,
    /// Namespace of the Service [default: that of the kubeconfig's context]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Do not query the cluster for its domain, or the kubeconfig for a namespace
    #[arg(long)]
    ignore_cluster: bool,
    /// Format of the profile
    #[arg(short, long, value_enum, default_value_t)]
    output: ManifestFormat,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct From {
    /// A template with every field
    #[arg(long)]
    template: bool,
    /// Routes of an OpenAPI document, version 2 or 3, YAML or JSON; - for standard input
    #[arg(long, value_name = "FILE")]
    open_api: Option<String>,
    /// Routes of the gRPC services in a protobuf file; - for standard input
    #[arg(long, value_name = "FILE")]
    proto: Option<String>,
}

/// Where the profile's Service is.
struct Service<'a> {
    name: &'a str,
    namespace: String,
    cluster_domain: String,
}

pub(crate) async fn execute(args: ProfileArgs) -> Result<ExitCode> {
    check_label("service", &args.service)?;
    // First what is given, then what may take time.
    let routes = routes(&args.from)?;
    let service = progress::during(API_SERVER, service(&args)).await?;
    check_label("namespace", &service.namespace)?;
    let text = match routes {
        None => template(&service, args.output)?,
        Some(routes) => profile(&service, routes, args.output)?,
    };
    output::raw(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Routes of a file; none for the template.
fn routes(from: &From) -> Result<Option<Vec<Route>>> {
    let Some(file) = from.open_api.as_ref().or(from.proto.as_ref()) else { return Ok(None) };
    let text = if file == "-" {
        std::io::read_to_string(std::io::stdin()).context("standard input")?
    } else {
        fs::read_to_string(file).with_context(|| file.clone())?
    };
    let name = if file == "-" { "standard input" } else { file };
    let routes = if from.open_api.is_some() { openapi::routes(name, &text) } else { proto::routes(name, &text) };
    routes.map(Some)
}

/// A DNS label, as names of Services and namespaces are (RFC 1123).
fn check_label(what: &str, name: &str) -> Result<()> {
    if !names::is_label(name) {
        bail!("{what} {name:?}: expected lower case letters, digits and -, such as web");
    }
    Ok(())
}

async fn service(args: &ProfileArgs) -> Result<Service<'_>> {
    let name = &args.service;
    if args.ignore_cluster {
        let namespace = args.namespace.clone().unwrap_or_else(|| "default".to_owned());
        return Ok(Service { name, namespace, cluster_domain: CLUSTER_DOMAIN.to_owned() });
    }
    let cluster = args.cluster.cluster().await?;
    let control = &cluster.namespace;
    let api: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), control);
    let instead = "--ignore-cluster takes cluster.local for the cluster's domain";
    let found = within(ANSWER, api.get_opt("linkerd-config")).await;
    let found = found
        .map_err(|problem| anyhow!("ConfigMap {control}/linkerd-config of {}: {problem}; {instead}", cluster.server))?;
    let found = found.with_context(|| {
        format!("ConfigMap {control}/linkerd-config does not exist: no mesh is installed there (-L); {instead}")
    })?;
    let values = found.data.and_then(|mut data| data.remove("values")).unwrap_or_default();
    let values = Values::parse(&values)
        .map_err(|invalid| anyhow!("ConfigMap {control}/linkerd-config, data[\"values\"]: {invalid}"))?;
    let namespace = args.namespace.clone().unwrap_or(cluster.default_namespace);
    Ok(Service { name, namespace, cluster_domain: values.cluster_domain().to_owned() })
}

fn template(service: &Service, format: ManifestFormat) -> Result<String> {
    let text = TEMPLATE
        .replace("SERVICE", service.name)
        .replace("NAMESPACE", &service.namespace)
        .replace("DOMAIN", &service.cluster_domain);
    match format {
        ManifestFormat::Yaml => Ok(text),
        ManifestFormat::Json => manifest::text(&document::parse_yaml(&text)?, format),
    }
}

fn profile(service: &Service, routes: Vec<Route>, format: ManifestFormat) -> Result<String> {
    let Service { name, namespace, cluster_domain } = service;
    let spec = ServiceProfileSpec { routes: Some(routes), ..ServiceProfileSpec::default() };
    let mut profile = ServiceProfile::new(&format!("{name}.{namespace}.svc.{cluster_domain}"), spec);
    profile.metadata.namespace = Some(namespace.clone());
    if let Some(invalid) = validate(&profile).into_iter().next() {
        bail!("the webhook would refuse this profile: {invalid}");
    }
    manifest::text(&serde_yaml_ng::to_value(&profile)?, format)
}

/// A regular expression for a path itself, with Linkerd's spelling (Go's `regexp.QuoteMeta`), so that profiles can be
/// compared.
fn quoted(path: &str) -> String {
    let mut quoted = String::with_capacity(path.len());
    for c in path.chars() {
        if r"\.+*?()|[]{}^$".contains(c) {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted
}

#[cfg(test)]
mod tests {
    use weft_k8s_api::profile;

    use super::*;

    fn shop() -> Service<'static> {
        Service { name: "web", namespace: "shop".to_owned(), cluster_domain: "cluster.local".to_owned() }
    }

    /// As its webhook reads it.
    fn accepted(text: &str) -> ServiceProfile {
        let value = serde_json::to_value(document::parse_yaml(text).unwrap()).unwrap();
        let read = profile::read(&value).unwrap();
        assert_eq!(validate(&read), []);
        read
    }

    #[test]
    fn the_template_is_a_profile() {
        let text = template(&shop(), ManifestFormat::Yaml).unwrap();
        let read = accepted(&text);
        assert_eq!(read.metadata.name.as_deref(), Some("web.shop.svc.cluster.local"));
        assert_eq!(read.metadata.namespace.as_deref(), Some("shop"));
        assert!(!text.contains("SERVICE") && !text.contains("DOMAIN"), "{text}");
        let json = template(&shop(), ManifestFormat::Json).unwrap();
        assert_eq!(accepted(&json), read);
    }

    /// Every example in the template's comments is a field that exists.
    #[test]
    fn what_the_template_comments_out_is_valid_too() {
        let text = template(&shop(), ManifestFormat::Yaml).unwrap();
        let uncommented: String = text.lines().map(|line| line.replacen("#! ", "", 1) + "\n").collect();
        let read = accepted(&uncommented);
        let route = &read.spec.routes.as_ref().unwrap()[0];
        assert_eq!((route.is_retryable, route.timeout.as_deref()), (Some(true), Some("300ms")));
        assert!(read.spec.retry_budget.is_some());
    }

    #[test]
    fn routes_become_a_profile_that_the_webhook_stores() {
        let routes =
            openapi::routes("web.yaml", "swagger: '2.0'\npaths:\n  /a/{id}:\n    get: {responses: {200: {}}}\n");
        let text = profile(&shop(), routes.unwrap(), ManifestFormat::Yaml).unwrap();
        assert_eq!(
            text,
            "apiVersion: linkerd.io/v1alpha2\nkind: ServiceProfile\nmetadata:\n  name: web.shop.svc.cluster.local\n  \
             namespace: shop\nspec:\n  routes:\n  - name: GET /a/{id}\n    condition:\n      pathRegex: /a/[^/]*\n      \
             method: GET\n    responseClasses:\n    - condition:\n        status:\n          min: 200\n          max: 200\n"
        );
        accepted(&text);
    }

    #[test]
    fn a_route_that_the_webhook_would_refuse_is_refused() {
        let text = "openapi: 3.0.0\npaths:\n  /a:\n    get: {x-linkerd-timeout: soon, responses: {}}\n";
        let error = profile(&shop(), openapi::routes("web.yaml", text).unwrap(), ManifestFormat::Yaml).unwrap_err();
        assert!(error.to_string().contains("spec.routes[0].timeout"), "{error}");
    }

    #[test]
    fn names_are_labels() {
        for bad in ["", "Web", "web.shop", "-web", "web-", &"w".repeat(64)] {
            assert!(check_label("service", bad).unwrap_err().to_string().contains(&format!("{bad:?}")));
        }
        assert!(check_label("service", "web-2").is_ok());
    }

    #[test]
    fn paths_are_quoted_as_in_go() {
        assert_eq!(quoted("/a.b-c/d+e#f"), r"/a\.b-c/d\+e#f");
    }
}
