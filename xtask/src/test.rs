//! `test`: unit tests of every package, then tests against the real kernel, then tests against a real Kubernetes.
//!
//! The level is in the name: integration tests called `apiserver_*` get a Kubernetes API server, those called
//! `cluster_*` a whole cluster (`cluster`); the other ones of the packages in [`PRIVILEGED`] need root and BPF
//! (`netns`); all others run anywhere (`unit`). A test never skips itself for want of privileges; without root, ask for
//! `unit`.
//!
//! Levels that wait more than they compute run beside others: the tests with a cluster beside those against the kernel
//! and, after these, with an API server; and the agent's tests as on an old kernel beside the others against the
//! kernel. What runs beside others is printed at its end.

use std::{
    fs,
    io::{IsTerminal as _, stdin},
    num::NonZeroUsize,
    panic::resume_unwind,
    path::{Path, PathBuf},
    process::{self, Command},
    thread::{self, ScopedJoinHandle},
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::ValueEnum;
use serde_json::Value;

use crate::{
    build::{self, Snapshot},
    command::{self, step},
    ebpf,
    lab::Lab,
    previous::Previous,
    setup::{self, Scope, packages},
    workspace::{Workspace, text},
};

/// Packages whose integration tests load programs, create namespaces and start the real binaries.
const PRIVILEGED: [&str; 3] = ["weft-agent", "weft-sandbox", "weft-tests"];

/// The oldest kernel on which the agent works, in another way than on newer ones.
const DEGRADED: &str = "5.10";
/// Its tests that are run in that way, too.
const BOTH_WAYS: [&str; 3] = ["datapath", "truth_table", "failures"];
/// Tests that wait for something most of the time, so that more of them run at a time than there are processors.
const WAITING: &str = "apiserver_control_plane";
/// Says how many tests of a program run at a time.
const THREADS: &str = "RUST_TEST_THREADS";
/// The number of those.
const WAITING_THREADS: usize = 16;
/// Unit tests at a time for each processor: they wait for sockets for more than half of their time.
const UNIT_THREADS: usize = 3;
/// Programs of other projects that tests against the kernel run in pods and beside them.
const FOREIGN: [&str; 5] = ["h2spec", "grpc-interop", "go-http", "otelcol", "promtool"];
/// Tests with a browser, which not every distribution has as a package.
const WITH_BROWSER: &str = "netns_dashboard";
/// What tests in a cluster are given, beside what every test has.
const CLUSTER_VARIABLES: [&str; 3] = ["KUBECONFIG", "PATH", "WEFT_KUBE_AUDIT_LOG"];
/// How long one test program may take, several times what the longest one does. One that hangs is ended long before CI
/// gives up, so that the levels after it are still run and its name is said.
const LONGEST: &str = "25m";
/// Has a check fail if the cluster does not meet its requirement; without it, the check is ignored. For a cluster that
/// is made here, which meets all of them.
const REQUIRE_ALL: (&str, &str) = ("WEFT_TEST_REQUIRE_ALL", "1");
/// Says for errors what `RUST_BACKTRACE` says for panics, where it is set ([`std::backtrace`]).
const ERROR_BACKTRACE: &str = "RUST_LIB_BACKTRACE";

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask test                        everything; needs root
  cargo xtask test unit                   without root
  cargo xtask test netns -- websocket     tests against the kernel whose name contains \"websocket\"
  cargo xtask test netns -- --list        their names
  cargo xtask test cluster                tests against Kubernetes: brings clusters up and down by itself
  cargo xtask test cluster --previous ~/.cache/weft/upgrade/dist -- \"an earlier version\"
                                          an upgrade, with what the last `cargo xtask upgrade` built
  KUBECONFIG=~/.kube/config cargo xtask test cluster
                                          the same tests in a cluster of yours that may be installed into and has
                                          the images, or gets them by `kind load`")]
pub(crate) struct Args {
    /// Which tests
    #[arg(value_enum, default_value_t = Level::All)]
    level: Level,
    /// Leave the clusters running, to look at what a test left in them
    #[arg(long)]
    keep: bool,
    /// Images and charts of an earlier version, for the check that upgrades from it in a cluster
    #[arg(long, value_name = "DIRECTORY", value_parser = Previous::parse)]
    previous: Option<Previous>,
    /// Arguments for the test programs: a part of a name, --exact, --nocapture, --list
    #[arg(last = true, value_name = "FILTER")]
    filter: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Level {
    /// Tests that need no privilege
    Unit,
    /// Tests with network namespaces, cgroups and the kernel's BPF; root
    Netns,
    /// Tests with a Kubernetes API server and with a whole cluster; root, or a cluster of yours
    Cluster,
    /// All of them
    All,
}

/// What an integration test runs against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ground {
    Nothing,
    Kernel,
    ApiServer,
    Cluster,
}

/// Builds and runs the tests of a level.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let mut levels = Levels::default();
    if args.level == Level::Unit {
        ebpf::build(&workspace, &setup::ensure(Scope::Build)?)?;
        levels.unit(&workspace, args);
        return levels.result();
    }
    setup::can_run()?;
    thread::scope(|scope| {
        // Building Kubernetes takes minutes, once. Installers, compilers of Rust and tests leave a core idle now and
        // then.
        let needs_cluster = matches!(args.level, Level::Cluster | Level::All);
        let tools = if needs_cluster {
            let lab = Lab::build(&workspace)?;
            Some(scope.spawn(move || command::run(&mut lab.command(&["kube", "tools"]))))
        } else {
            None
        };
        let build = || {
            ebpf::build(&workspace, &setup::ensure(Scope::Run)?)?;
            Snapshot::take(&workspace, &build::tests(&workspace)?)
        };
        // Now: this program ends when the tools are there, too.
        let snapshot = build().inspect_err(|error| eprintln!("error: {error:#}"))?;
        let environment = [("WEFT_BIN_DIR", snapshot.directory().display().to_string())];
        if args.level == Level::All {
            levels.unit(&workspace, args);
        }
        let lab = Lab::at(snapshot.directory());
        let (of_cluster, of_api_server) = match args.level {
            Level::Cluster => (Output::AtOnce, Output::AtItsEnd),
            _ => (Output::AtItsEnd, Output::AtOnce),
        };
        thread::scope(|beside| {
            let (workspace, lab, environment) = (&workspace, &lab, &environment[..]);
            let cluster = tools.map(|tools| {
                beside
                    .spawn(move || join(tools).and_then(|()| on_cluster(workspace, lab, args, environment, of_cluster)))
            });
            if matches!(args.level, Level::Netns | Level::All) {
                levels.note("programs of other projects", add_foreign(lab, snapshot.directory()));
                levels.netns(workspace, args, environment);
            }
            if let Some(cluster) = cluster {
                levels.note("API server", on_api_server(workspace, lab, args, environment, of_api_server));
                levels.note("cluster", join(cluster));
            }
        });
        levels.result()
    })
}

/// Runs the checks in a cluster whose names contain `filter`, with an earlier version to upgrade from.
pub(crate) fn upgrade_from(previous: Previous, filter: &str, keep: bool) -> Result<()> {
    run(&Args { level: Level::Cluster, keep, previous: Some(previous), filter: vec![filter.to_owned()] })
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// How the output of a level is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    /// While it runs.
    AtOnce,
    /// When it ends: another level runs beside it.
    AtItsEnd,
}

/// Runs levels one after the other, and the next one whatever came of the last: what it says is worth knowing, too.
#[derive(Debug, Default)]
struct Levels {
    failed: Vec<String>,
    /// What was not run, and why.
    left_out: Vec<String>,
}

impl Levels {
    fn note(&mut self, level: &str, result: Result<()>) {
        if let Err(error) = result {
            eprintln!("error: {error:#}");
            self.failed.push(format!("{level}: {error:#}"));
        }
    }

    fn unit(&mut self, workspace: &Workspace, args: &Args) {
        step("unit tests");
        let mut selection = vec!["--lib".to_owned(), "--bins".to_owned()];
        selection.extend(tests_on(workspace, Ground::Nothing));
        let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let threads = (UNIT_THREADS * processors).to_string();
        self.note("unit", cargo_test(workspace, &selection, args, &[(THREADS, threads)], Output::AtOnce));
    }

    fn netns(&mut self, workspace: &Workspace, args: &Args, environment: &[(&str, String)]) {
        step("tests against the kernel");
        let mut selection = tests_on(workspace, Ground::Kernel);
        self.note("clients and servers", packages::ensure(&packages::CLIENTS));
        match packages::ensure_browser() {
            Ok(true) => {}
            Ok(false) => {
                selection = selection.chunks(2).filter(|option| option[1] != WITH_BROWSER).flatten().cloned().collect();
                self.left_out
                    .push(format!("{WITH_BROWSER}: there is no chromium, and the distribution has no package of it"));
            }
            Err(error) => self.note("browser", Err(error)),
        }
        let both_ways = BOTH_WAYS.iter().flat_map(|test| ["--test", test]).map(str::to_owned).collect::<Vec<_>>();
        let as_on_linux = [("WEFT_TEST_AS_ON_LINUX", DEGRADED.to_owned())];
        thread::scope(|scope| {
            let degraded = scope.spawn(|| {
                step(&format!("the agent's tests as on Linux {DEGRADED}"));
                cargo_test(workspace, &both_ways, args, &as_on_linux, Output::AtItsEnd)
            });
            self.note("netns", cargo_test(workspace, &selection, args, environment, Output::AtOnce));
            self.note("netns, degraded", join(degraded));
        });
    }

    /// The errors once more at the end: the first level's words are thousands of lines above.
    fn result(self) -> Result<()> {
        for left_out in &self.left_out {
            step(&format!("NOT RUN: {left_out}"));
        }
        if !self.failed.is_empty() {
            bail!("tests failed\n{}", self.failed.join("\n"));
        }
        Ok(())
    }
}

/// Puts programs of other projects beside ours, which is where pods find them.
fn add_foreign(lab: &Lab, programs: &Path) -> Result<()> {
    let directories = command::output(&mut lab.command(&[&["kube", "tools"][..], &FOREIGN].concat()))?;
    for directory in directories.lines() {
        for program in fs::read_dir(directory).with_context(|| format!("list {directory}"))? {
            let program = program.with_context(|| format!("list {directory}"))?;
            let copy = programs.join(program.file_name());
            fs::copy(program.path(), &copy).with_context(|| format!("copy to {}", copy.display()))?;
        }
    }
    Ok(())
}

/// Tests that need objects and no pods get an API server of their own, whatever cluster there is: it is up in seconds,
/// and they may break what they want in it.
fn on_api_server(
    workspace: &Workspace,
    lab: &Lab,
    args: &Args,
    environment: &[(&str, String)],
    output: Output,
) -> Result<()> {
    step("tests against a Kubernetes API server");
    let tests = tests_on(workspace, Ground::ApiServer);
    let (waiting, others): (Vec<_>, Vec<_>) = tests.chunks(2).partition(|option| option[1] == WAITING);
    in_cluster(lab, "test-api", &["--control-plane-only"], args, |of_cluster| {
        let environment = [environment, of_cluster].concat();
        let more = [&environment[..], &[(THREADS, WAITING_THREADS.to_string())]].concat();
        let waiting = cargo_test(workspace, &waiting.concat(), args, &more, output);
        waiting.and(cargo_test(workspace, &others.concat(), args, &environment, output))
    })
}

/// Tests that need pods run where KUBECONFIG says, and else in a cluster that is made for them.
fn on_cluster(
    workspace: &Workspace,
    lab: &Lab,
    args: &Args,
    environment: &[(&str, String)],
    output: Output,
) -> Result<()> {
    let selection = tests_on(workspace, Ground::Cluster);
    let of_previous: Vec<_> = args.previous.iter().map(Previous::variable).collect();
    if let Some(kubeconfig) = std::env::var_os("KUBECONFIG") {
        step(&format!("tests in the cluster of {}", kubeconfig.display()));
        load_images(lab, args.previous.as_ref())?;
        // kubectl is its owner's; what else the documents use may be missing.
        let directories = command::output(&mut lab.command(&["kube", "tools", "helm", "step", "promtool"]))?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::env::split_paths(&path).chain(directories.lines().map(PathBuf::from)))?;
        let path = ("PATH", path.to_string_lossy().into_owned());
        return cargo_test(workspace, &selection, args, &[environment, &of_previous[..], &[path]].concat(), output);
    }
    step("tests in a Kubernetes cluster");
    // As many nodes as production has replicas; what passes between nodes is tested, too.
    let mut kind = vec!["--no-build", "--nodes", "3"];
    kind.extend(args.previous.iter().flat_map(Previous::images).flat_map(|archive| ["--load", archive.as_str()]));
    in_cluster(lab, "test", &kind, args, |of_cluster| {
        let require_all = (REQUIRE_ALL.0, REQUIRE_ALL.1.to_owned());
        let environment = [environment, of_cluster, &of_previous[..], &[require_all]].concat();
        cargo_test(workspace, &selection, args, &environment, output)
    })
}

/// Gives a cluster of kind our images; another one has them already, or a registry from which it gets them.
fn load_images(lab: &Lab, previous: Option<&Previous>) -> Result<()> {
    let context = command::output(Command::new("kubectl").args(["config", "current-context"]))?;
    let context = context.trim();
    let Some(name) = context.strip_prefix("kind-") else {
        step(&format!("the context {context} is not kind's: its nodes must have the images of `cargo xtask dist`"));
        if let Some(previous) = previous {
            step(&format!("and these: {}", previous.images().join(" ")));
        }
        return Ok(());
    };
    // It also names the checksums.
    let written = command::output(&mut lab.command(&["dist", "--only", "images", "--no-build", "--profile", "dev"]))?;
    let archives = written.lines().filter(|path| path.ends_with(".tar"));
    for archive in archives.chain(previous.into_iter().flat_map(Previous::images).map(String::as_str)) {
        command::run(Command::new("kind").args(["load", "image-archive", "--name", name, archive]))?;
    }
    Ok(())
}

/// Brings a cluster up, runs `tests` with its environment, and takes it down whatever came of them.
fn in_cluster(
    lab: &Lab,
    prefix: &str,
    kind: &[&str],
    args: &Args,
    tests: impl FnOnce(&[(&str, String)]) -> Result<()>,
) -> Result<()> {
    let name = format!("{prefix}-{}", process::id());
    let up = [&["kube", "up", "--name", &name], kind].concat();
    let brought_up = command::run(&mut lab.command(&up)).and_then(|()| tests(&environment_of(lab, &name)?));
    if args.keep {
        step(&format!("the cluster {name} stays: `cargo xtask kube env --name {name}`, and `down` in the end"));
        return brought_up;
    }
    let taken_down = command::run(&mut lab.command(&["kube", "down", "--name", &name]))
        .with_context(|| format!("take down the cluster {name}"));
    brought_up.and(taken_down)
}

/// The variables of a cluster.
fn environment_of(lab: &Lab, name: &str) -> Result<Vec<(&'static str, String)>> {
    let printed = command::output(&mut lab.command(&["kube", "env", "--name", name, "--output", "json"]))?;
    let values: Value = serde_json::from_str(&printed).context("read the variables of the cluster")?;
    Ok(CLUSTER_VARIABLES.map(|variable| (variable, text(&values[variable]))).to_vec())
}

/// Selects the integration tests that run against this.
fn tests_on(workspace: &Workspace, wanted: Ground) -> Vec<String> {
    let tests = workspace.integration_tests().into_iter();
    let chosen = tests.filter(|(package, test)| ground(package, test) == wanted);
    chosen.flat_map(|(_, test)| ["--test".to_owned(), test]).collect()
}

fn ground(package: &str, test: &str) -> Ground {
    if test.starts_with("apiserver_") {
        Ground::ApiServer
    } else if test.starts_with("cluster_") {
        Ground::Cluster
    } else if PRIVILEGED.contains(&package) {
        Ground::Kernel
    } else {
        Ground::Nothing
    }
}

fn cargo_test(
    workspace: &Workspace,
    selection: &[String],
    args: &Args,
    environment: &[(&str, String)],
    output: Output,
) -> Result<()> {
    if selection.is_empty() {
        bail!("no tests found");
    }
    let mut cargo = command::cargo();
    cargo
        .current_dir(&workspace.root)
        .args(["test", "--workspace", "--no-fail-fast", "--config", &bounded()])
        .args(selection)
        .arg("--")
        .args(&args.filter)
        .envs(environment.iter().map(|(name, value)| (*name, value)));
    // With RUST_BACKTRACE=1, each error would also print where it was made, in a hundred lines that bury its message.
    // Panics still print theirs.
    if std::env::var_os(ERROR_BACKTRACE).is_none() {
        cargo.env(ERROR_BACKTRACE, "0");
    }
    let mut failures = Failures::default();
    let run = match output {
        Output::AtOnce => command::run_reading(&mut cargo, |line| failures.read(line)),
        Output::AtItsEnd => command::run_keeping(&mut cargo, |line| failures.read(line)),
    };
    let with_words =
        |error| if failures.said.is_empty() { error } else { anyhow!("{error}:\n{}", failures.said.trim_end()) };
    run.map_err(with_words)
}

/// Cargo's setting that ends a test program after [`LONGEST`], with everything that it started. At a terminal it stays
/// in the foreground, or Ctrl-C would not reach it.
fn bounded() -> String {
    let foreground = if stdin().is_terminal() { "\"--foreground\", " } else { "" };
    format!(
        "target.'cfg(target_os = \"linux\")'.runner = [\"timeout\", \"--verbose\", {foreground}\"--kill-after=30s\", \"{LONGEST}\"]"
    )
}

/// What the tests that failed had to say: of the output of libtest, which all of our test programs share, the lines
/// from `failures:` to the result.
#[derive(Debug, Default)]
struct Failures {
    said: String,
    is_within: bool,
}

impl Failures {
    fn read(&mut self, line: &str) {
        self.is_within |= line == "failures:";
        if self.is_within {
            self.said += line;
            self.said.push('\n');
        }
        if line.starts_with("test result: ") {
            self.is_within = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tests_name_says_what_it_runs_against() {
        assert_eq!(ground("weft-control-plane", "apiserver_lease"), Ground::ApiServer);
        assert_eq!(ground("weft-tests", "cluster_tutorial"), Ground::Cluster);
        assert_eq!(ground("weft-tests", "netns_mesh"), Ground::Kernel);
        assert_eq!(ground("weft-agent", "datapath"), Ground::Kernel);
        assert_eq!(ground("weft-k8s-api", "anything"), Ground::Nothing);
    }

    #[test]
    fn what_failed_tests_said_is_gathered() {
        let failed = "failures:\n\n---- b ----\nwhy\n\n\nfailures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed\n";
        let output = format!(
            "\nrunning 2 tests\ntest a ... ok\ntest b ... FAILED\n\n{failed}\nrunning 1 test\ntest c ... ok\n\n\
             test result: ok. 1 passed; 0 failed\n\nrunning 1 test\n  | talk\n"
        );
        let mut failures = Failures::default();
        output.lines().for_each(|line| failures.read(line));
        assert_eq!(failures.said, failed);
    }
}
