//! Completion in shells: `weft` itself answers what may stand at the cursor, with the names that the cluster has.
//!
//! The script that `weft completion` prints calls `weft` with `WEFT_COMPLETE=SHELL` and the line so far. Arguments are
//! completed by their names, in every subcommand: `--namespace` is one everywhere. A cluster that does not answer in
//! time, or refuses, completes to nothing.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::PathBuf,
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::{Arg, Command, Subcommand as _};
use clap_complete::{
    CompleteEnv, Shell,
    engine::{ArgValueCandidates, ArgValueCompleter, CompletionCandidate},
    env::Shells,
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
};
use weft_k8s_api::policy::EgressNetwork;

use crate::{cluster::ClusterArgs, kind::Kind, viz::Verb};

/// The variable by which a script asks for candidates.
const VARIABLE: &str = "WEFT_COMPLETE";
/// How long a person waits for candidates.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most names that are asked for: longer lists are of no use in a shell.
const MOST: u32 = 500;
/// The end of zsh's script. In a folder of `fpath`, the whole script is the function `_weft`, which zsh calls for the
/// first completion of a session: without this line, the call would define the completer and complete nothing.
const ZSH_AUTOLOADED: &str = "if [[ $funcstack[1] == _weft ]]; then _clap_dynamic_completer_weft \"$@\"; fi\n";

/// Answers a script and ends the process, if one asks.
pub(crate) fn answer(command: fn() -> Command) {
    CompleteEnv::with_factory(|| with_names(command())).var(VARIABLE).complete();
}

/// The script for a shell.
pub(crate) fn script(shell: Shell, to: &mut Vec<u8>) -> Result<()> {
    let name = shell.to_string();
    let shells = Shells::builtins();
    let completer = shells.completer(&name).with_context(|| format!("{name}: no completion for this shell"))?;
    completer.write_registration(VARIABLE, "weft", "weft", "weft", to)?;
    if shell == Shell::Zsh {
        to.extend_from_slice(ZSH_AUTOLOADED.as_bytes());
    }
    Ok(())
}

/// Adds what completes names to a command and those below it. What is in a sandbox, no cluster knows.
fn with_names(command: Command) -> Command {
    let below = |command: Command| if command.get_name() == "sandbox" { command } else { with_names(command) };
    // Policy and the commands about metrics do not take a name without its kind.
    let with_name: fn(Arg) -> Arg = match command.get_name() {
        "policy" => with_policy_target,
        name if Verb::has_subcommand(name) => with_kind_and_name,
        _ => with_name,
    };
    command.mut_args(with_name).mut_subcommands(below)
}

fn with_policy_target(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "resource" => arg.add(ArgValueCompleter::new(|current: &OsStr| {
            current.to_str().map(|current| candidates(policy_targets(Line::read(), current))).unwrap_or_default()
        })),
        _ => with_name(arg),
    }
}

fn with_kind_and_name(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "resource" | "to" | "from" => arg.add(ArgValueCompleter::new(|current: &OsStr| {
            current.to_str().map(|current| candidates(kinds_and_names(Line::read(), current))).unwrap_or_default()
        })),
        "to_namespace" | "from_namespace" => {
            arg.add(ArgValueCandidates::new(|| candidates(names(Line::read(), Kind::Namespace, PATIENCE))))
        }
        _ => with_name(arg),
    }
}

fn with_name(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "namespace" | "linkerd_namespace" => {
            arg.add(ArgValueCandidates::new(|| candidates(names(Line::read(), Kind::Namespace, PATIENCE))))
        }
        "service" => arg.add(ArgValueCandidates::new(|| candidates(names(Line::read(), Kind::Service, PATIENCE)))),
        "context" => arg.add(ArgValueCandidates::new(|| candidates(contexts(&Line::read())))),
        "resource" | "pod" | "pods" => arg.add(ArgValueCompleter::new(|current: &OsStr| {
            current.to_str().map(|current| candidates(resources(Line::read(), current))).unwrap_or_default()
        })),
        _ => arg,
    }
}

fn candidates(names: Vec<String>) -> Vec<CompletionCandidate> {
    names.into_iter().map(CompletionCandidate::new).collect()
}

fn contexts(line: &Line) -> Vec<String> {
    line.cluster.kubeconfig().into_iter().flat_map(|config| config.contexts).map(|context| context.name).collect()
}

/// Pods by their names; others by kind and name.
fn resources(line: Line, current: &str) -> Vec<String> {
    let workloads = || Kind::with_pods().filter(|kind| *kind != Kind::Pod);
    let (prefix, kind) = match current.split_once('/') {
        None => (String::new(), Kind::Pod),
        Some((short, _)) => match workloads().find(|kind| kind.short() == short) {
            Some(kind) => (format!("{short}/"), kind),
            None => return Vec::new(),
        },
    };
    let mut found: Vec<_> = names(line, kind, PATIENCE).iter().map(|name| format!("{prefix}{name}")).collect();
    if prefix.is_empty() {
        found.extend(workloads().map(|kind| format!("{}/", kind.short())));
    }
    found.retain(|name| name.starts_with(current));
    found
}

/// Kinds, and names after a kind and a slash.
fn kinds_and_names(line: Line, current: &str) -> Vec<String> {
    let mut kinds = Kind::all().filter(|kind| kind.group().is_some());
    let mut found: Vec<String> = match current.split_once('/') {
        None => kinds.flat_map(|kind| [kind.short().to_owned(), format!("{}/", kind.short())]).collect(),
        Some((short, _)) => match kinds.find(|kind| kind.short() == short) {
            Some(kind) => names(line, kind, PATIENCE).iter().map(|name| format!("{short}/{name}")).collect(),
            None => return Vec::new(),
        },
    };
    found.retain(|name| name.starts_with(current));
    found
}

/// What `weft diagnostics policy` takes: kinds with a slash, and the names after it.
fn policy_targets(line: Line, current: &str) -> Vec<String> {
    let kinds = Kind::with_pods().chain([Kind::Service]).map(|kind| (kind.short(), resource(kind)));
    let mut kinds = kinds.chain([("egressnetwork", ApiResource::erase::<EgressNetwork>(&()))]);
    let mut found: Vec<String> = match current.split_once('/') {
        None => kinds.map(|(kind, _)| format!("{kind}/")).collect(),
        Some((wanted, _)) => match kinds.find(|(kind, _)| *kind == wanted) {
            Some((kind, resource)) => {
                names_of(line, resource, PATIENCE).iter().map(|name| format!("{kind}/{name}")).collect()
            }
            None => return Vec::new(),
        },
    };
    found.retain(|name| name.starts_with(current));
    found
}

fn resource(kind: Kind) -> ApiResource {
    let gvk = GroupVersionKind::gvk(kind.group().unwrap_or_default(), "v1", &format!("{kind:?}"));
    ApiResource::from_gvk_with_plural(&gvk, kind.plural())
}

async fn list(api: Api<DynamicObject>) -> Result<Vec<String>> {
    let found = api.list_metadata(&ListParams::default().limit(MOST)).await?;
    Ok(found.items.into_iter().filter_map(|object| object.metadata.name).collect())
}

fn names(line: Line, kind: Kind, patience: Duration) -> Vec<String> {
    names_of(line, resource(kind), patience)
}

/// Names of objects in the cluster that the line so far is about; none if it does not give them in time. In a thread of
/// its own: a program that a kubeconfig names for credentials cannot be interrupted.
fn names_of(line: Line, resource: ApiResource, patience: Duration) -> Vec<String> {
    if line.is_local {
        return Vec::new();
    }
    let (found_tx, found_rx) = mpsc::channel();
    thread::spawn(move || {
        let asked = async {
            let cluster = line.cluster.cluster().await?;
            let api: Api<DynamicObject> = if resource.plural == Kind::Namespace.plural() {
                Api::all_with(cluster.client, &resource)
            } else {
                Api::namespaced_with(cluster.client, &line.namespace.unwrap_or(cluster.default_namespace), &resource)
            };
            list(api).await
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        // One that waits no longer is not there.
        let _ = found_tx.send(runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(asked)));
    });
    found_rx.recv_timeout(patience).ok().and_then(Result::ok).unwrap_or_default()
}

/// What the line so far says about the cluster and the namespace.
#[derive(Default)]
struct Line {
    cluster: ClusterArgs,
    namespace: Option<String>,
    /// It is about a sandbox or an agent of this host.
    is_local: bool,
}

impl Line {
    fn read() -> Self {
        // The script's own arguments end with `--`.
        let words: Vec<_> = env::args_os().skip_while(|word| word != "--").collect();
        Self::of(&words)
    }

    fn of(words: &[OsString]) -> Self {
        let words: Vec<_> = words.iter().filter_map(|word| word.to_str()).collect();
        let value = |names: &[&str]| {
            let found = words.iter().enumerate().find_map(|(index, word)| {
                names.iter().find_map(|name| match word.strip_prefix(name)? {
                    "" => words.get(index + 1).copied(),
                    rest if name.starts_with("--") => rest.strip_prefix('='),
                    rest => Some(rest.strip_prefix('=').unwrap_or(rest)),
                })
            });
            found.map(str::to_owned)
        };
        let cluster = ClusterArgs {
            kubeconfig: value(&["--kubeconfig"]).map(PathBuf::from),
            context: value(&["--context"]),
            impersonate: value(&["--as"]),
            ..ClusterArgs::default()
        };
        let is_local = value(&["--sandbox"]).or_else(|| value(&["--agent-socket"])).is_some();
        Self { cluster, namespace: value(&["--namespace", "-n"]), is_local }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Read as _, Write as _},
        net::TcpListener,
    };

    use clap::CommandFactory as _;

    use super::*;

    fn complete(words: &[&str]) -> Vec<String> {
        let mut command = with_names(crate::Cli::command());
        let words: Vec<_> = words.iter().map(OsString::from).collect();
        let last = words.len() - 1;
        let found = clap_complete::engine::complete(&mut command, words, last, None).unwrap();
        found.iter().map(|candidate| candidate.get_value().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn commands_and_options_are_completed() {
        let found = complete(&["weft", ""]);
        for command in ["check", "status", "inject", "profile", "completion"] {
            assert!(found.iter().any(|name| name == command), "{command}: {found:?}");
        }
        assert_eq!(complete(&["weft", "check", "--prox"]), ["--proxy"]);
        assert!(!found.iter().any(|name| name == "sandbox-init"), "{found:?}");
    }

    /// A kubeconfig whose cluster is at this address.
    fn kubeconfig(address: &str) -> (tempfile::TempDir, Line) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config");
        let text = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "staging",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "contexts": [
                {"name": "staging", "context": {"cluster": "c", "user": "u"}},
                {"name": "production", "context": {"cluster": "c", "user": "u"}},
            ],
            "users": [{"name": "u", "user": {}}],
        });
        std::fs::write(&file, text.to_string()).unwrap();
        let cluster = ClusterArgs { kubeconfig: Some(file), ..ClusterArgs::default() };
        (directory, Line { cluster, ..Line::default() })
    }

    #[test]
    fn contexts_are_those_of_the_kubeconfig_on_the_line() {
        let (_directory, line) = kubeconfig("127.0.0.1:1");
        assert_eq!(contexts(&line), ["staging", "production"]);
    }

    #[test]
    fn a_cluster_that_does_not_answer_has_no_names() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let (_directory, line) = kubeconfig(&silent.local_addr().unwrap().to_string());
        assert!(names(line, Kind::Pod, Duration::from_millis(200)).is_empty());
        let (_directory, line) = kubeconfig("127.0.0.1:1");
        assert!(names(line, Kind::Pod, PATIENCE).is_empty());
    }

    #[test]
    fn kinds_are_offered_even_so() {
        let (_directory, line) = kubeconfig("127.0.0.1:1");
        assert_eq!(resources(line, "d"), ["deploy/", "ds/"]);
        let (_directory, line) = kubeconfig("127.0.0.1:1");
        assert!(resources(line, "unknown/x").is_empty());
    }

    #[test]
    fn commands_about_metrics_want_a_kind() {
        let (_directory, line) = kubeconfig("127.0.0.1:1");
        assert_eq!(kinds_and_names(line, "d"), ["deploy", "deploy/", "ds", "ds/"]);
        assert_eq!(complete(&["weft", "tap", "sv"]), ["svc", "svc/"]);
        assert_eq!(complete(&["weft", "stat", "deploy", "--from", "rs"]), ["rs", "rs/"]);
    }

    /// An API server that knows one object of every kind, and the first line of each request.
    fn api_server(name: &'static str) -> (String, mpsc::Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (asked_tx, asked) = mpsc::channel();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.unwrap());
                let mut lines = stream.by_ref().lines().map_while(Result::ok);
                let _ = asked_tx.send(lines.next().unwrap_or_default());
                let _ = lines.find(String::is_empty);
                let version = "meta.k8s.io/v1";
                let list = serde_json::json!({
                    "apiVersion": version, "kind": "PartialObjectMetadataList", "metadata": {},
                    "items": [{"apiVersion": version, "kind": "PartialObjectMetadata", "metadata": {"name": name}}],
                });
                let (head, body) = ("HTTP/1.1 200 OK\r\ncontent-type: application/json", list.to_string());
                let length = body.len();
                let answer = format!("{head}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
            }
        });
        (address, asked)
    }

    #[test]
    fn policy_is_of_a_kind_with_a_name() {
        let (_directory, line) = kubeconfig("127.0.0.1:1");
        assert_eq!(policy_targets(line, "s"), ["sts/", "svc/"]);
        let (_directory, line) = kubeconfig("127.0.0.1:1");
        assert!(policy_targets(line, "ns/x").is_empty());
        assert_eq!(complete(&["weft", "diagnostics", "policy", "eg"]), ["egressnetwork/"]);
        let (address, asked) = api_server("internet");
        for (current, path) in [
            ("svc/int", "/api/v1/namespaces/default/services?"),
            ("egressnetwork/", "/apis/policy.linkerd.io/v1alpha1/namespaces/default/egressnetworks?"),
        ] {
            let (_directory, line) = kubeconfig(&address);
            let (kind, _) = current.split_once('/').unwrap();
            assert_eq!(policy_targets(line, current), [format!("{kind}/internet")]);
            let request = asked.recv().unwrap();
            assert!(request.starts_with(&format!("GET {path}")), "{request}");
        }
    }

    #[test]
    fn pods_of_identity_and_verdicts_of_a_trace_are_completed() {
        let found = complete(&["weft", "identity", "deploy"]);
        assert!(found.iter().any(|name| name == "deploy/"), "{found:?}");
        assert_eq!(complete(&["weft", "trace", "--verdict", "deny_no_"]), ["deny_no_listener", "deny_no_memory"]);
    }

    #[test]
    fn the_line_so_far_says_which_cluster() {
        let of = |words: &[&str]| Line::of(&words.iter().map(OsString::from).collect::<Vec<_>>());
        let line = of(&["--", "weft", "trace", "--context=staging", "-n", "shop", "--kubeconfig", "/k", ""]);
        assert_eq!(line.cluster.context.as_deref(), Some("staging"));
        assert_eq!(line.cluster.kubeconfig, Some(PathBuf::from("/k")));
        assert_eq!((line.namespace.as_deref(), line.is_local), (Some("shop"), false));
        for short in ["-nshop", "-n=shop", "--namespace=shop"] {
            assert_eq!(of(&["--", "weft", "trace", short]).namespace.as_deref(), Some("shop"), "{short}");
        }
        assert_eq!(of(&["--", "weft", "trace", "-n"]).namespace, None);
        assert!(of(&["--", "weft", "trace", "--sandbox", "default", ""]).is_local);
    }

    fn script_of(shell: Shell) -> String {
        let mut text = Vec::new();
        script(shell, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn every_shell_gets_a_script_that_asks_weft() {
        use clap::ValueEnum as _;
        for shell in Shell::value_variants() {
            let text = script_of(*shell);
            assert!(text.contains(VARIABLE), "{shell}: {text}");
        }
    }

    /// The name of the function is clap's.
    #[test]
    fn zsh_calls_the_completer_when_it_loads_the_script_to_complete() {
        let text = script_of(Shell::Zsh);
        assert!(text.starts_with("#compdef weft\nfunction _clap_dynamic_completer_weft() {\n"), "{text}");
        assert!(text.ends_with(&format!("\ncompdef _clap_dynamic_completer_weft weft\n{ZSH_AUTOLOADED}")), "{text}");
    }
}
