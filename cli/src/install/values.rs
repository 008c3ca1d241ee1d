//! Values on the command line: by helm's options, and by Linkerd's flags.

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use super::flags::LinkerdArgs;
use crate::{
    chart::{
        Chart,
        values::{Settings, merge},
    },
    cluster::CONTROL_NAMESPACE,
};

/// Values of a chart, by helm's options.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Values")]
pub(super) struct HelmArgs {
    /// A file of values; may be repeated
    #[arg(short = 'f', long, value_name = "FILE")]
    pub(super) values: Vec<String>,
    /// A value, by its path in values.yaml; may be repeated
    #[arg(long, value_name = "PATH=VALUE")]
    pub(super) set: Vec<String>,
    /// A value that is text, whatever it looks like
    #[arg(long, value_name = "PATH=VALUE")]
    pub(super) set_string: Vec<String>,
    /// A value from a file
    #[arg(long, value_name = "PATH=FILE")]
    pub(super) set_file: Vec<String>,
}

impl HelmArgs {
    /// What is set on top of `base`.
    pub(super) fn settings(&self, base: Option<Value>) -> Settings {
        Settings {
            base,
            files: self.values.clone(),
            set: self.set.clone(),
            set_string: self.set_string.clone(),
            set_file: self.set_file.clone(),
        }
    }
}

/// Values of the chart: helm's options, and Linkerd's flags.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Values")]
pub(super) struct ValueArgs {
    /// Three replicas of everything, requests of resources, webhooks that fail closed
    #[arg(long)]
    pub(super) ha: bool,
    #[command(flatten)]
    pub(super) helm: HelmArgs,
    #[command(flatten)]
    pub(super) linkerd: LinkerdArgs,
}

impl ValueArgs {
    /// What is set on top of `base`, in Linkerd's order: high availability, flags, files, `--set`.
    ///
    /// # Errors
    /// When a file that a flag names cannot be read.
    pub(super) fn settings(&self, base: Option<Value>) -> Result<Settings> {
        let chart = Chart::control_plane()?;
        let mut base = base.unwrap_or_else(|| json!({}));
        if self.ha {
            merge(&mut base, chart.high_availability()?);
        }
        self.linkerd.onto(&mut base, &chart.defaults()?)?;
        Ok(self.helm.settings(Some(base)))
    }

    /// The custom resource definitions, by the values of their chart.
    ///
    /// # Errors
    /// When a flag has no meaning for them, or a value is none of that chart's.
    pub(super) fn definitions(&self) -> Result<Vec<String>> {
        const CHART: &str = "--crds has the values of the chart weft-crds";
        if let Some(flag) = self.ha.then_some("ha").or_else(|| self.linkerd.first()) {
            bail!("{CHART}, by --set or --values, such as installGatewayAPI=true: --{flag} is none of them");
        }
        let chart = Chart::definitions()?;
        let values = chart.values(&self.helm.settings(None)).context(CHART)?;
        chart.manifests(CONTROL_NAMESPACE, &values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(values: &[&str]) -> ValueArgs {
        let set = values.iter().map(|value| (*value).to_owned()).collect();
        ValueArgs { helm: HelmArgs { set, ..HelmArgs::default() }, ..ValueArgs::default() }
    }

    #[test]
    fn high_availability_comes_before_what_is_set() {
        let args = ValueArgs { ha: true, ..set(&["proxy.logLevel=debug,controllerReplicas=5"]) };
        let settings = args.settings(Some(json!({"clusterDomain": "mesh.example"}))).unwrap();
        let values = Chart::control_plane().unwrap().values(&settings).unwrap();
        assert_eq!(values["controllerReplicas"], 5);
        assert_eq!(values["enablePodDisruptionBudget"], true);
        assert_eq!(values["clusterDomain"], "mesh.example");
        assert_eq!(values["proxy"]["logLevel"], "debug");
    }

    #[test]
    fn the_definitions_have_values_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("values.yaml");
        std::fs::write(&file, "enableTlsRoutes: true\n").unwrap();
        let mut args = set(&["enableTcpRoutes=true"]);
        args.helm.values.push(file.display().to_string());
        let count = |args: &ValueArgs| {
            let texts = args.definitions().unwrap();
            texts.iter().filter(|text| text.contains(".gateway.networking.k8s.io\n")).count()
        };
        assert_eq!((count(&args), count(&set(&[]))), (2, 0));
        let refused = |args: &ValueArgs| format!("{:#}", args.definitions().unwrap_err());
        assert!(
            refused(&set(&["proxy.logLevel=info"])).contains("proxy"),
            "{}",
            refused(&set(&["proxy.logLevel=info"]))
        );
        let ha = ValueArgs { ha: true, ..ValueArgs::default() };
        assert!(refused(&ha).contains("--ha"), "{}", refused(&ha));
    }
}
