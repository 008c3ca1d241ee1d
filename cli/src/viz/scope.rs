//! What a request is about, as people write it: kubectl's kinds and names, a namespace or all, a window.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use clap::Args;
use weft_proto::viz::Resource;

use super::source::{Pace, Source, SourceArgs};
use crate::{
    kind::{Kind, names},
    output,
    pod_network::PodNetwork,
};

/// What `all` is: Linkerd's, without the kinds that stand above others.
const ALL: [Kind; 7] = [
    Kind::Deployment,
    Kind::DaemonSet,
    Kind::StatefulSet,
    Kind::Job,
    Kind::ReplicationController,
    Kind::Pod,
    Kind::Service,
];
/// The time between the two scrapes of an answer, where no earlier scrape exists.
const FIRST: Duration = Duration::from_secs(1);
/// How often a screen is drawn again.
pub(super) const EVERY: Duration = Duration::from_secs(2);

/// Where to look, and how far back.
#[derive(Clone, Debug, Args)]
pub(crate) struct ScopeArgs {
    /// Namespace of the resource [default: the context's; in a sandbox `default`]
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// Resources of all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

/// How long to count.
#[derive(Clone, Debug, Args)]
pub(crate) struct WindowArgs {
    /// How long to count: up to 15m. Without the component weft-viz counting starts with the command, which takes this
    /// long [default: 1m with the component, else 1s]
    #[arg(short, long, value_name = "TIME", value_parser = window)]
    pub(crate) time_window: Option<Duration>,
}

impl WindowArgs {
    /// Seconds for a request.
    pub(crate) fn seconds(&self) -> u32 {
        self.time_window.map_or(0, |window| u32::try_from(window.as_secs()).unwrap_or(u32::MAX))
    }

    fn pace(&self) -> Pace {
        Pace { first: self.time_window.unwrap_or(FIRST), every: Duration::from_secs(10) }
    }
}

/// Only traffic to one destination.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ToArgs {
    /// Only traffic to this resource, KIND or KIND/NAME, such as svc/web. stat-outbound and routes accept only svc and
    /// au/HOST:PORT
    #[arg(long, value_name = "RESOURCE")]
    pub(super) to: Option<String>,
    /// Namespace of --to [default: that of the resource]
    #[arg(long, value_name = "NAMESPACE", requires = "to")]
    to_namespace: Option<String>,
}

impl ToArgs {
    /// The resource, beside one in `namespace`.
    pub(super) fn resource(&self, namespace: &str) -> Result<Option<Resource>> {
        other(self.to.as_deref(), self.to_namespace.as_deref(), namespace)
    }
}

/// The other end of traffic: in its own namespace, or in that of the resource.
pub(super) fn other(text: Option<&str>, own: Option<&str>, namespace: &str) -> Result<Option<Resource>> {
    text.map(|text| resource(text, own.unwrap_or(namespace))).transpose()
}

fn window(text: &str) -> Result<Duration, String> {
    let window = output::duration(text)?;
    if !(1..=900).contains(&window.as_secs()) {
        return Err("expected 1s to 15m".to_owned());
    }
    Ok(window)
}

/// A scope with a source of answers.
pub(crate) struct Scope {
    pub(crate) source: Source,
    /// Empty: all.
    pub(crate) namespace: String,
    pub(crate) network: PodNetwork,
}

impl ScopeArgs {
    /// A source for one answer.
    pub(crate) async fn once(&self, window: &WindowArgs) -> Result<Scope> {
        self.open(window.pace()).await
    }

    /// A source for answers that repeat.
    pub(crate) async fn repeated(&self) -> Result<Scope> {
        let scope = self.open(Pace { first: FIRST, every: EVERY }).await?;
        scope.source.keep_current();
        Ok(scope)
    }

    async fn open(&self, pace: Pace) -> Result<Scope> {
        let network = self.source.mesh.network().await?;
        let namespace = match (self.all_namespaces, &self.namespace, &network) {
            (true, ..) => String::new(),
            (_, Some(namespace), _) => namespace.clone(),
            (_, None, PodNetwork::Cluster(cluster)) => cluster.default_namespace.clone(),
            (_, None, PodNetwork::Sandbox(_)) => "default".to_owned(),
        };
        let source = self.source.open(network.clone(), pace).await?;
        Ok(Scope { source, namespace, network })
    }
}

/// The resources of a command line: `deploy`, `deploy web api`, `deploy/web po/web-0`, `all`.
pub(super) fn resources(words: &[String], namespace: &str) -> Result<Vec<Resource>> {
    let unknown = |text: &str| {
        anyhow!(
            "{text:?} is no kind of resources: expected KIND, KIND NAME... or KIND/NAME with a KIND of {}, all",
            names(Kind::all())
        )
    };
    let make = |kind: Kind, name: &str| {
        let namespace = if kind == Kind::Namespace { "" } else { namespace };
        Resource { namespace: namespace.to_owned(), kind: kind.long().to_owned(), name: name.to_owned() }
    };
    let Some((first, rest)) = words.split_first() else { bail!("name a resource, such as deploy or deploy/web") };
    if first == "all" && rest.is_empty() {
        return Ok(ALL.iter().map(|kind| make(*kind, "")).collect());
    }
    if words.iter().any(|word| word.contains('/')) {
        let one = |word: &String| {
            let (text, name) = word
                .split_once('/')
                .ok_or_else(|| anyhow!("{word:?}: either all are KIND/NAME, or the first is the KIND"))?;
            if name.is_empty() || name.contains('/') {
                bail!("{word:?} is not KIND/NAME");
            }
            Ok(make(Kind::parse(text).ok_or_else(|| unknown(text))?, name))
        };
        return words.iter().map(one).collect();
    }
    let kind = Kind::parse(first).ok_or_else(|| unknown(first))?;
    if rest.is_empty() {
        return Ok(vec![make(kind, "")]);
    }
    Ok(rest.iter().map(|name| make(kind, name)).collect())
}

/// One resource: `deploy/web`, or a kind.
pub(super) fn resource(text: &str, namespace: &str) -> Result<Resource> {
    let mut found = resources(std::slice::from_ref(&text.to_owned()), namespace)?;
    match (found.pop(), found.is_empty()) {
        (Some(resource), true) => Ok(resource),
        _ => bail!("{text:?} is more than one kind"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<Vec<(String, String)>> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        Ok(resources(&words, "shop")?.into_iter().map(|resource| (resource.kind, resource.name)).collect())
    }

    fn pair(kind: &str, name: &str) -> (String, String) {
        (kind.to_owned(), name.to_owned())
    }

    #[test]
    fn kinds_and_names_are_kubectls() {
        assert_eq!(read(&["deploy"]).unwrap(), [pair("deployment", "")]);
        assert_eq!(
            read(&["deployments", "web", "api"]).unwrap(),
            [pair("deployment", "web"), pair("deployment", "api")]
        );
        assert_eq!(read(&["deploy/web", "po/x-0"]).unwrap(), [pair("deployment", "web"), pair("pod", "x-0")]);
        assert_eq!(read(&["au"]).unwrap(), [pair("authority", "")]);
        assert_eq!(read(&["all"]).unwrap().len(), ALL.len());
        assert_eq!(resources(&["ns".to_owned()], "shop").unwrap()[0].namespace, "");
    }

    #[test]
    fn what_is_no_resource_is_refused_with_the_kinds() {
        for words in [&["web"][..], &["web/"], &["deploy/"], &["deploy/a/b"], &["x/y"], &["deploy/web", "api"]] {
            assert!(read(words).is_err(), "{words:?}");
        }
        assert!(read(&["web"]).unwrap_err().to_string().contains("sts"));
    }

    #[test]
    fn windows_are_bounded() {
        assert!(window("1s").is_ok() && window("15m").is_ok());
        assert!(window("16m").is_err() && window("10ms").is_err());
    }
}
