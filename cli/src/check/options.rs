//! Arguments of `weft check` and `weft viz check`: Linkerd's flags, and what each selects.

use std::time::Duration;

use clap::{Args, ValueEnum, builder::NonEmptyStringValueParser};

use super::facts::Mode;
use crate::{cluster::ClusterArgs, output};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft check --pre                    before installing: what the cluster lacks
  weft check --crds                   after `weft install --crds`: whether the custom resources are there
  weft check                          after installing: waits until everything is up, or says what is wrong
  weft check --proxy -n shop          the proxies of one namespace as well
  weft check -o short                 what failed, and nothing else
  weft check -o json --wait 0s | jq -r '.categories[].checks[] | select(.result == \"error\") | .error'

Ends with 1 when a check fails. Warnings are no failure. --wait is for what time may heal, such as a pod that starts; a
wrong certificate ends the wait at once.")]
pub(crate) struct CheckArgs {
    /// Only the requirements for an installation of the control plane
    #[arg(long, conflicts_with_all = ["proxy", "crds"])]
    pre: bool,
    /// Only the custom resource definitions
    #[arg(long, conflicts_with = "proxy")]
    crds: bool,
    /// Also the pods with a proxy
    #[arg(long)]
    proxy: bool,
    #[command(flatten)]
    narrow: NarrowArgs,
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    pointless: PointlessArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft viz check
  weft viz check --proxy -n shop      whether the proxies of one namespace serve tap as well
  weft viz check -o short --wait 0s

Ends with 1 when a check fails. `weft check` does the same where the component is installed.")]
pub(crate) struct VizCheckArgs {
    /// Also the pods with a proxy
    #[arg(long)]
    proxy: bool,
    #[command(flatten)]
    narrow: NarrowArgs,
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Args)]
struct NarrowArgs {
    /// With --proxy: only this namespace [default: all]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Warn where this program, the control plane, weft-viz or proxies have another version
    #[arg(long, value_name = "VERSION", value_parser = NonEmptyStringValueParser::new())]
    expected_version: Option<String>,
}

#[derive(Debug, Args)]
struct CommonArgs {
    /// How long to wait for conditions that may still become true
    #[arg(long, value_name = "TIME", default_value = "300s", value_parser = output::duration)]
    wait: Duration,
    /// Output format: json and yaml are Linkerd's, {success, categories}
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
}

/// Linkerd's flags about what Weft does in another way.
#[derive(Debug, Args)]
#[command(next_help_heading = "Without effect, for scripts of Linkerd's")]
struct PointlessArgs {
    /// Accepted with a warning: there is no CNI plugin, the node agent redirects in its place
    #[arg(long)]
    linkerd_cni_enabled: bool,
    /// Accepted with a warning: the node agent is in the control plane's namespace
    #[arg(long, value_name = "NAMESPACE")]
    cni_namespace: Option<String>,
    /// Accepted with a warning: everything is asked through the API server
    #[arg(long, value_name = "HOST:PORT")]
    api_addr: Option<String>,
    /// Accepted with a warning: a check compares the versions that there are
    #[arg(long, value_name = "VERSION")]
    cli_version_override: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// Every check
    Table,
    /// Only checks that did not pass
    Short,
    /// For programs
    Json,
    /// For programs, and people who read all of it
    Yaml,
}

/// What to check, for how long, and how to print it.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) scope: Scope,
    pub(super) wait: Duration,
    pub(super) output: Format,
}

/// What to check.
#[derive(Clone, Debug)]
pub(super) struct Scope {
    pub(super) mode: Mode,
    pub(super) cluster: ClusterArgs,
    /// Of pods with a proxy: the only namespace; `None` means all.
    pub(super) namespace: Option<String>,
    pub(super) expected_version: Option<String>,
}

impl CheckArgs {
    /// Why flags that were given have no effect.
    pub(super) fn warnings(&self) -> Vec<String> {
        let PointlessArgs { linkerd_cni_enabled, cni_namespace, api_addr, cli_version_override } = &self.pointless;
        let agent = "Weft has no CNI plugin; its node agent redirects, which the category weft-agent checks";
        let api =
            "weft check asks through the API server; `weft diagnostics --api-addr` asks the control plane directly";
        let version = "versions are compared as they are; `--expected-version` says which one they should have";
        let rows = [
            ("--linkerd-cni-enabled", *linkerd_cni_enabled, agent),
            ("--cni-namespace", cni_namespace.is_some(), agent),
            ("--api-addr", api_addr.is_some(), api),
            ("--cli-version-override", cli_version_override.is_some(), version),
        ];
        let given = rows.into_iter().filter(|(_, given, _)| *given);
        given.map(|(flag, _, why)| format!("{flag} has no effect: {why}")).collect()
    }
}

impl From<CheckArgs> for Request {
    fn from(args: CheckArgs) -> Self {
        let mode = match &args {
            CheckArgs { pre: true, .. } => Mode::Pre,
            CheckArgs { crds: true, .. } => Mode::Definitions,
            CheckArgs { proxy: true, .. } => Mode::Proxy,
            _ => Mode::Installed,
        };
        args.common.request(args.narrow.scope(mode, args.cluster))
    }
}

impl From<VizCheckArgs> for Request {
    fn from(args: VizCheckArgs) -> Self {
        let mode = if args.proxy { Mode::VizProxy } else { Mode::Viz };
        args.common.request(args.narrow.scope(mode, args.cluster))
    }
}

impl NarrowArgs {
    fn scope(self, mode: Mode, cluster: ClusterArgs) -> Scope {
        Scope { mode, cluster, namespace: self.namespace, expected_version: self.expected_version }
    }
}

impl CommonArgs {
    fn request(self, scope: Scope) -> Request {
        Request { scope, wait: self.wait, output: self.output }
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, FromArgMatches as _, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        args: CheckArgs,
    }

    fn parse(arguments: &[&str]) -> Result<CheckArgs, clap::Error> {
        let matches = Command::command().try_get_matches_from([&["check"], arguments].concat())?;
        Command::from_arg_matches(&matches).map(|command| command.args)
    }

    #[test]
    fn each_scope_has_its_flag_and_there_is_one() {
        let mode = |arguments: &[&str]| Request::from(parse(arguments).unwrap()).scope.mode;
        assert_eq!(mode(&[]), Mode::Installed);
        assert_eq!(mode(&["--pre"]), Mode::Pre);
        assert_eq!(mode(&["--crds"]), Mode::Definitions);
        assert_eq!(mode(&["--proxy", "-n", "shop"]), Mode::Proxy);
        for two in [["--pre", "--crds"], ["--pre", "--proxy"], ["--crds", "--proxy"]] {
            assert!(parse(&two).is_err(), "{two:?}");
        }
    }

    #[test]
    fn the_component_has_the_same_flags() {
        #[derive(Debug, Parser)]
        struct Command {
            #[command(flatten)]
            args: VizCheckArgs,
        }
        let request =
            |arguments: &[&str]| Request::from(Command::parse_from([&["check"], arguments].concat()).args).scope;
        assert_eq!(request(&[]).mode, Mode::Viz);
        let scope = request(&["--proxy", "-n", "shop", "--expected-version", "0.2.0"]);
        assert_eq!((scope.mode, scope.namespace.as_deref()), (Mode::VizProxy, Some("shop")));
        assert_eq!(scope.expected_version.as_deref(), Some("0.2.0"));
    }

    #[test]
    fn flags_without_effect_say_what_takes_their_place() {
        assert_eq!(parse(&["--expected-version", "0.1.0", "--verbose"]).unwrap().warnings(), Vec::<String>::new());
        let flags = ["--linkerd-cni-enabled", "--cni-namespace=cni", "--api-addr=a:1", "--cli-version-override=1"];
        let [enabled, namespace, address, version] = parse(&flags).unwrap().warnings().try_into().unwrap();
        assert!(enabled.starts_with("--linkerd-cni-enabled has no effect") && enabled.contains("node agent"));
        assert!(namespace.starts_with("--cni-namespace has no effect") && namespace.contains("weft-agent"));
        assert!(address.starts_with("--api-addr has no effect") && address.contains("weft diagnostics"));
        assert!(version.starts_with("--cli-version-override has no effect") && version.contains("--expected-version"));
    }

    #[test]
    fn an_expected_version_is_kept_and_has_a_text() {
        let request = Request::from(parse(&["--expected-version", "0.2.0"]).unwrap());
        assert_eq!(request.scope.expected_version.as_deref(), Some("0.2.0"));
        assert!(parse(&["--expected-version", ""]).is_err());
    }
}
