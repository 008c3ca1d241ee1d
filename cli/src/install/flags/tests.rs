//! Every flag of the table, rendered.

use clap::Parser;
use futures::FutureExt as _;

use super::{super::values::ValueArgs, *};
use crate::chart::{
    Chart,
    effects::{apart, certificates},
};

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    values: ValueArgs,
}

fn parsed(arguments: &[&str]) -> Result<ValueArgs, clap::Error> {
    let arguments = std::iter::once("install").chain(arguments.iter().copied());
    CommandLine::try_parse_from(arguments).map(|line| line.values)
}

struct Rendered {
    values: Value,
    /// The ConfigMap from which the injector and the agent read.
    config: String,
    others: Vec<String>,
    notes: Vec<String>,
}

fn rendered(arguments: &[&str]) -> Result<Rendered> {
    let chart = Chart::control_plane()?;
    // Nothing is downloaded, so it is ready at once.
    let settings = parsed(arguments)?.settings(Some(certificates())).now_or_never().unwrap()?;
    let values = chart.values(&settings)?;
    let (config, others) = apart(chart.manifests("mesh", &values)?);
    Ok(Rendered { others, config, notes: chart.meaningless("mesh", &values)?, values })
}

/// Each flag with what is not the chart's default.
fn examples(folder: &std::path::Path) -> Vec<(&'static str, String)> {
    let file = folder.join("certificate, or key.pem");
    fs::write(&file, "-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n").unwrap();
    fs::write(folder.join("issuer.pem"), "-----BEGIN CERTIFICATE-----\nissuer\n").unwrap();
    let path = |name: &str| format!("={}", folder.join(name).display());
    let rows = [
        ("cluster-domain", "=mesh.example"),
        ("controller-gid", "=7"),
        ("controller-log-level", "=debug"),
        ("controller-replicas", "=5"),
        ("controller-uid", "=77"),
        ("disable-h2-upgrade", ""),
        ("enable-endpoint-slices", "=false"),
        ("control-plane-tracing", ""),
        ("control-plane-tracing-namespace", "=traces"),
        ("disable-heartbeat", ""),
        ("linkerd-cni-enabled", ""),
        ("identity-trust-domain", "=trust.example"),
        ("identity-external-issuer", ""),
        ("identity-external-ca", "=true"),
        ("identity-issuance-lifetime", "=1h"),
        ("identity-clock-skew-allowance", "=3s"),
        ("control-plane-version", "=edge"),
        ("image-pull-policy", "=Always"),
        ("proxy-image", "=example.org/proxy"),
        ("proxy-version", "=edge"),
        ("registry", "=registry.example:5000/mesh/"),
        ("init-image", "=example.org/init"),
        ("init-image-version", "=v2"),
        ("admin-port", "=5191"),
        ("control-port", "=5190"),
        ("inbound-port", "=5143"),
        ("outbound-port", "=5140"),
        ("default-inbound-policy", "=deny"),
        ("enable-external-profiles", ""),
        ("opaque-ports", "=25,3306"),
        ("skip-inbound-ports", "=22"),
        ("skip-outbound-ports", "=25,587-588"),
        ("proxy-cpu-limit", "=1"),
        ("proxy-cpu-request", "=100m"),
        ("proxy-memory-limit", "=99Mi"),
        ("proxy-memory-request", "=20Mi"),
        ("proxy-log-level", "=warn,linkerd=debug"),
        ("proxy-gid", "=9"),
        ("proxy-uid", "=2222"),
        ("native-sidecar", "=false"),
    ];
    let files = [
        ("identity-trust-anchors-file", path("issuer.pem")),
        ("identity-issuer-certificate-file", path("issuer.pem")),
        ("identity-issuer-key-file", path("certificate, or key.pem")),
    ];
    rows.map(|(name, given)| (name, given.to_owned())).into_iter().chain(files).collect()
}

#[test]
fn every_flag_changes_what_is_rendered_or_is_said_to_mean_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let examples = examples(folder.path());
    let plain = rendered(&[]).unwrap();
    let defaults = Chart::control_plane().unwrap().defaults().unwrap();
    for flag in all() {
        let (_, given) =
            examples.iter().find(|(name, _)| *name == flag.name).unwrap_or_else(|| panic!("--{}", flag.name));
        let argument = format!("--{}{given}", flag.name);
        let after = match rendered(&[&argument]) {
            Ok(after) => after,
            Err(refused) => {
                let refused = refused.to_string();
                assert!(
                    flag.help.is_empty() && flag.paths.iter().all(|path| refused.contains(path)),
                    "{argument}: {refused}"
                );
                continue;
            }
        };
        for path in flag.paths {
            let pointer = format!("/{}", path.replace('.', "/"));
            let now = after.values.pointer(&pointer);
            assert!(now.is_some() && now != defaults.pointer(&pointer), "{argument}: {path} is {now:?}");
        }
        if flag.help.is_empty() {
            let said = |path: &str| after.notes.iter().any(|note| path.starts_with(note.split(": ").next().unwrap()));
            assert!(flag.paths.iter().all(|path| said(path)), "{argument}: {:?}", after.notes);
            assert_eq!(after.others, plain.others, "{argument}");
            continue;
        }
        assert_eq!(after.notes, Vec::<String>::new(), "{argument}");
        // The agent and the injector read them there, and the control plane's own pods do not need them.
        let is_of_others =
            ["skip-inbound-ports", "skip-outbound-ports", "enable-external-profiles"].contains(&flag.name);
        let is_secret = flag.name == "identity-issuer-key-file";
        assert_eq!(after.config == plain.config, is_secret, "{argument}");
        assert_eq!(after.others == plain.others, is_of_others, "{argument}");
    }
    assert_eq!(all().count(), examples.len(), "an example of no flag");
}

#[test]
fn flags_are_linkerds() {
    let value = |arguments: &[&str], path: &str| rendered(arguments).unwrap().values.pointer(path).cloned().unwrap();
    // Several ports, as a list or one by one.
    let ports = ["--skip-inbound-ports", "22,80-81", "--skip-inbound-ports", "99"];
    assert_eq!(value(&ports, "/proxyInit/ignoreInboundPorts"), "22,80-81,99");
    assert_eq!(value(&["--opaque-ports", "25"], "/proxy/opaquePorts"), "25");
    assert_eq!(value(&["--disable-h2-upgrade=false"], "/enableH2Upgrade"), true);
    assert_eq!(value(&["--disable-h2-upgrade=F"], "/enableH2Upgrade"), true);
    assert_eq!(value(&["--identity-external-issuer=false"], "/identity/issuer/scheme"), "linkerd.io/tls");
    assert_eq!(value(&["-v", "edge"], "/proxy/image/version"), "edge");
    assert_eq!(value(&["--proxy-gid", "-1"], "/proxy/gid"), -1);
    assert_eq!(value(&["--proxy-cpu", "1m"], "/proxy/resources/cpu/request"), "1m");
    let registry = ["--registry", "example.org/a", "--proxy-image", "other/proxy@sha256:1"];
    let refused = rendered(&registry).err().unwrap().to_string();
    assert!(refused.contains("proxy.image.name"), "{refused}");
    let registry = ["--registry", "example.org/a", "--proxy-image", "other:5000/b/my-proxy"];
    assert_eq!(value(&registry, "/proxy/image/name"), "example.org/a/my-proxy");
    assert_eq!(value(&registry, "/agent/image/name"), "example.org/a/weft-agent");
    let linkerds =
        ["--registry", "example.org/a", "--set", "controllerReplicas=2", "--proxy-image", "cr.l5d.io/linkerd/proxy"];
    assert_eq!(value(&linkerds, "/proxy/image/name"), "cr.l5d.io/linkerd/proxy");
}

#[test]
fn what_is_set_takes_precedence_over_flags() {
    let both = ["--controller-replicas", "2", "--set", "controllerReplicas=3"];
    assert_eq!(rendered(&both).unwrap().values["controllerReplicas"], 3);
    assert_eq!(rendered(&["--ha", "--controller-replicas", "2"]).unwrap().values["controllerReplicas"], 2);
}

#[test]
fn mistakes_name_the_flag() {
    for (arguments, words) in [
        (["--controller-replicas", "many"], "--controller-replicas"),
        (["--disable-heartbeat=perhaps", "--ha"], "--disable-heartbeat"),
    ] {
        let error = parsed(&arguments).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
    let missing = format!("{:#}", rendered(&["--identity-trust-anchors-file", "nowhere.pem"]).err().unwrap());
    assert!(missing.contains("--identity-trust-anchors-file nowhere.pem"), "{missing}");
    // The chart knows what a value may be.
    let refused = rendered(&["--default-inbound-policy", "open"]).err().unwrap().to_string();
    assert!(refused.contains("proxy.defaultInboundPolicy"), "{refused}");
}

#[test]
fn the_help_has_groups_and_hides_what_means_nothing() {
    use clap::CommandFactory as _;
    let help = CommandLine::command().render_long_help().to_string();
    for heading in ["\nControl plane:\n", "\nIdentity:\n", "\nImages:\n", "\nProxy:\n", "\nValues:\n"] {
        assert_eq!(help.matches(heading).count(), 1, "{heading}: {help}");
    }
    for flag in all() {
        assert_eq!(
            help.contains(&format!("--{} ", flag.name)) || help.contains(&format!("--{}[", flag.name)),
            !flag.help.is_empty(),
            "--{}",
            flag.name
        );
    }
}
