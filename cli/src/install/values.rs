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
    manifest::source,
};

/// Values of a chart, by helm's options.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Values")]
pub(super) struct HelmArgs {
    /// Values: a file, a URL, or - for standard input; may be repeated
    #[arg(short = 'f', long, value_name = "FILE")]
    pub(super) values: Vec<String>,
    /// A value, by its path in values.yaml; may be repeated
    #[arg(long, value_name = "PATH=VALUE")]
    pub(super) set: Vec<String>,
    /// A value to set as a string
    #[arg(long, value_name = "PATH=VALUE")]
    pub(super) set_string: Vec<String>,
    /// A value from a file
    #[arg(long, value_name = "PATH=FILE")]
    pub(super) set_file: Vec<String>,
}

impl HelmArgs {
    /// What is set on top of `base`.
    ///
    /// # Errors
    /// When a file of values cannot be read.
    pub(super) async fn settings(&self, base: Option<Value>) -> Result<Settings> {
        source::check_stdin(&self.values)?;
        let mut files = Vec::new();
        for from in &self.values {
            files.push(source::read_one(from).await?);
        }
        let (set, set_string, set_file) = (self.set.clone(), self.set_string.clone(), self.set_file.clone());
        Ok(Settings { base, files, set, set_string, set_file })
    }
}

/// Values of the chart: helm's options, and Linkerd's flags.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Values")]
pub(super) struct ValueArgs {
    /// High availability: three replicas, resource requests, webhooks that fail closed
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
    pub(super) async fn settings(&self, base: Option<Value>) -> Result<Settings> {
        let chart = Chart::control_plane()?;
        let mut base = base.unwrap_or_else(|| json!({}));
        if self.ha {
            merge(&mut base, chart.high_availability()?);
        }
        self.linkerd.onto(&mut base, &chart.defaults()?)?;
        self.helm.settings(Some(base)).await
    }

    /// The custom resource definitions, by the values of their chart.
    ///
    /// # Errors
    /// When a flag has no meaning for them, or a value is none of that chart's.
    pub(super) async fn definitions(&self) -> Result<Vec<String>> {
        if let Some(flag) = self.ha.then_some("ha").or_else(|| self.linkerd.first()) {
            bail!(
                "--{flag} does not apply to --crds: set values of the chart weft-crds by --set or --values, such as \
                 installGatewayAPI=true"
            );
        }
        let chart = Chart::definitions()?;
        let values =
            chart.values(&self.helm.settings(None).await?).context("--crds has the values of the chart weft-crds")?;
        chart.manifests(CONTROL_NAMESPACE, &values)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

    use super::*;

    fn set(values: &[&str]) -> ValueArgs {
        let set = values.iter().map(|value| (*value).to_owned()).collect();
        ValueArgs { helm: HelmArgs { set, ..HelmArgs::default() }, ..ValueArgs::default() }
    }

    #[tokio::test]
    async fn high_availability_comes_before_what_is_set() {
        let args = ValueArgs { ha: true, ..set(&["proxy.logLevel=debug,controllerReplicas=5"]) };
        let settings = args.settings(Some(json!({"clusterDomain": "mesh.example"}))).await.unwrap();
        let values = Chart::control_plane().unwrap().values(&settings).unwrap();
        assert_eq!(values["controllerReplicas"], 5);
        assert_eq!(values["enablePodDisruptionBudget"], true);
        assert_eq!(values["clusterDomain"], "mesh.example");
        assert_eq!(values["proxy"]["logLevel"], "debug");
    }

    #[tokio::test]
    async fn the_definitions_have_values_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("values.yaml");
        std::fs::write(&file, "enableTlsRoutes: true\n").unwrap();
        let mut args = set(&["enableTcpRoutes=true"]);
        args.helm.values.push(file.display().to_string());
        for (args, count) in [(args, 2), (set(&[]), 0)] {
            let texts = args.definitions().await.unwrap();
            assert_eq!(texts.iter().filter(|text| text.contains(".gateway.networking.k8s.io\n")).count(), count);
        }
        let ha = ValueArgs { ha: true, ..ValueArgs::default() };
        for (args, word) in [(set(&["proxy.logLevel=info"]), "proxy"), (ha, "--ha")] {
            let refused = format!("{:#}", args.definitions().await.unwrap_err());
            assert!(refused.contains(word), "{refused}");
        }
    }

    #[tokio::test]
    async fn values_come_from_a_url_too_and_from_standard_input_once() {
        let of = |files: &[&str]| {
            let values = files.iter().map(|file| (*file).to_owned()).collect();
            HelmArgs { values, ..HelmArgs::default() }
        };
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/values.yaml", server.local_addr().unwrap());
        let serve = async {
            let (stream, _) = server.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            while stream.read_line(&mut line).await.unwrap() > 0 && line != "\r\n" {
                line.clear();
            }
            let answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\na: 1\n";
            stream.write_all(answer).await.unwrap();
        };
        let args = of(&[&url]);
        let (settings, ()) = tokio::join!(args.settings(None), serve);
        assert_eq!(settings.unwrap().onto(&json!({"a": 0})).unwrap(), json!({"a": 1}));
        let refused = of(&["-", "-"]).settings(None).await.unwrap_err();
        assert!(refused.to_string().contains("standard input"), "{refused}");
        assert!(format!("{:#}", of(&["nowhere.yaml"]).settings(None).await.unwrap_err()).contains("nowhere.yaml"));
    }
}
