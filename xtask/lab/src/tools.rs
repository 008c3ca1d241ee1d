//! Programs of a cluster that no distribution has in the right version: built once, kept by version in the cache.
//!
//! Each tool is a directory such as `kube/kubernetes-v1.36.3`. It is built under another name and renamed when it is
//! complete; a lock keeps two runs from building the same tool.

mod go;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result};
use weft_xtask::{
    command::{self, step},
    setup::packages,
    workspace,
};

use go::Go;

const KUBERNETES: &str = "v1.36.3";
const COREDNS: &str = "v1.15.0";
const HELM: &str = "v3.21.4";
const STEP: &str = "v0.21.0";
/// The newest one that is a module; programs of others have to be built as everything else.
const H2SPEC: &str = "v2.2.1";
const GRPC_GO: &str = "v1.84.0";
const CRANE: &str = "v0.22.1";
/// Of the source below.
const GO_HTTP: &str = "1";
/// Of the collector's modules; `contrib` has the exporter to files.
const OTELCOL: &str = "v0.165.0";
/// The same release of its stable modules.
const OTELCOL_STABLE: &str = "v1.71.0";
/// Issues certificates, and what distributes trust anchors.
const CERT_MANAGER: &str = "v1.21.2";
const TRUST_MANAGER: &str = "v0.25.0";
/// Enforces NetworkPolicies in a test of the cluster.
const KUBE_ROUTER: &str = "v2.1.0";
const ETCD: &str = "3.6.15";
/// The distribution's version; the number counts what we take of it.
const PROMTOOL: &str = "deb-2";
/// Version of our own source below.
const PAUSE: &str = "1";

/// Modules of the Kubernetes repository that `k8s.io/kubernetes` takes from its own tree; outside of it, their
/// published versions have to be named.
const STAGING: [&str; 33] = [
    "api",
    "apiextensions-apiserver",
    "apimachinery",
    "apiserver",
    "cli-runtime",
    "client-go",
    "cloud-provider",
    "cluster-bootstrap",
    "code-generator",
    "component-base",
    "component-helpers",
    "controller-manager",
    "cri-api",
    "cri-client",
    "cri-streaming",
    "csi-translation-lib",
    "dynamic-resource-allocation",
    "endpointslice",
    "externaljwt",
    "kms",
    "kube-aggregator",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "metrics",
    "mount-utils",
    "pod-security-admission",
    "sample-apiserver",
    "sample-cli-plugin",
    "sample-controller",
    "streaming",
];
const PROGRAMS: [&str; 6] =
    ["kube-apiserver", "kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubectl"];

/// Nobody debugs these programs: without what a debugger needs, compiling takes a ninth less of the processors.
const WITHOUT_DWARF: &str = "-gcflags=all=-dwarf=false";

/// What `kube/coredns.yaml` configures.
const COREDNS_PLUGINS: [&str; 5] = ["errors", "health", "kubernetes", "ready", "template"];

/// Holds a pod's namespaces open and reaps orphans of its containers.
const PAUSE_SOURCE: &str = "\
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int signal) { _exit(0); }
static void reap(int signal) { while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) { signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, reap); for (;;) pause(); }
";

/// A collector with one receiver and one exporter, and its configuration in an argument.
const OTELCOL_SOURCE: &str = r#"package main

import (
	"log"

	"github.com/open-telemetry/opentelemetry-collector-contrib/exporter/fileexporter"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/yamlprovider"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry/otelconftelemetry"
)

func factories() (otelcol.Factories, error) {
	otlp, file := otlpreceiver.NewFactory(), fileexporter.NewFactory()
	return otelcol.Factories{
		Receivers: map[component.Type]receiver.Factory{otlp.Type(): otlp},
		Exporters: map[component.Type]exporter.Factory{file.Type(): file},
		Telemetry: otelconftelemetry.NewFactory(),
	}, nil
}

func main() {
	command := otelcol.NewCommand(otelcol.CollectorSettings{
		BuildInfo: component.BuildInfo{Command: "otelcol"},
		Factories: factories,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{ResolverSettings: confmap.ResolverSettings{
			DefaultScheme:     "yaml",
			ProviderFactories: []confmap.ProviderFactory{yamlprovider.NewFactory()},
		}},
	})
	if err := command.Execute(); err != nil {
		log.Fatal(err)
	}
}
"#;

/// The controllers of cert-manager and of trust-manager that work without an outside world, in one program:
/// cert-manager's own programs are modules that no proxy of modules has, because their directories have other names
/// than they do.
const CERT_MANAGER_SOURCE: &str = include_str!("tools/cert_manager.go");

/// A server and a client of Go's own HTTP.
const GO_HTTP_SOURCE: &str = include_str!("tools/go_http.go");

/// A tool to build: its directory's name, a hint about the duration, and how to fill the directory.
struct Tool {
    name: &'static str,
    version: &'static str,
    minutes: &'static str,
    build: fn(&Path) -> Result<()>,
}

const TOOLS: [Tool; 14] = [
    Tool { name: "pause", version: PAUSE, minutes: "seconds", build: pause },
    Tool { name: "etcd", version: ETCD, minutes: "seconds", build: etcd },
    Tool { name: "kubernetes", version: KUBERNETES, minutes: "10 minutes on two cores", build: kubernetes },
    Tool { name: "helm", version: HELM, minutes: "2 minutes", build: helm },
    Tool { name: "step", version: STEP, minutes: "2 minutes", build: smallstep },
    Tool { name: "promtool", version: PROMTOOL, minutes: "seconds", build: promtool },
    Tool { name: "crane", version: CRANE, minutes: "a minute", build: crane },
    Tool { name: "coredns", version: COREDNS, minutes: "a minute", build: coredns },
    Tool { name: "cert-manager", version: CERT_MANAGER, minutes: "3 minutes", build: cert_manager },
    Tool { name: "kube-router", version: KUBE_ROUTER, minutes: "2 minutes", build: kube_router },
    Tool { name: "h2spec", version: H2SPEC, minutes: "a minute", build: h2spec },
    Tool { name: "grpc-interop", version: GRPC_GO, minutes: "2 minutes", build: grpc_interop },
    Tool { name: "go-http", version: GO_HTTP, minutes: "half a minute", build: go_http },
    Tool { name: "otelcol", version: OTELCOL, minutes: "2 minutes", build: otelcol },
];

/// The directories of the tools.
#[derive(Debug)]
pub(crate) struct Tools {
    root: PathBuf,
}

impl Tools {
    /// All tools of a cluster and its tests.
    pub(crate) const ALL: &[&str] =
        &["pause", "etcd", "kubernetes", "helm", "step", "promtool", "crane", "coredns", "cert-manager", "kube-router"];
    /// All names of tools: also programs of other projects that tests send through the mesh.
    pub(crate) const NAMES: [&str; TOOLS.len()] = {
        let mut names = [""; TOOLS.len()];
        let mut at = 0;
        while at < names.len() {
            names[at] = TOOLS[at].name;
            at += 1;
        }
        names
    };

    /// Builds those of these tools that are missing, with progress on standard error.
    ///
    /// # Errors
    /// When a build fails or a compiler is missing.
    pub(crate) fn ensure(names: &[&str]) -> Result<Self> {
        let tools = Self { root: workspace::cache_directory()?.join("kube") };
        if tools.missing(names).next().is_none() {
            return Ok(tools);
        }
        fs::create_dir_all(&tools.root).with_context(|| format!("create {}", tools.root.display()))?;
        let missing: Vec<_> = tools.missing(names).collect();
        for (index, tool) in missing.iter().enumerate() {
            // One for each tool: who needs a small one does not wait for all of Kubernetes.
            let lock = tools.root.join(format!("{}.lock", tool.name));
            let lock = File::create(&lock).with_context(|| format!("create {}", lock.display()))?;
            if lock.try_lock().is_err() {
                step(&format!("another run builds {}: wait for it", tool.name));
                lock.lock().with_context(|| format!("lock {}", tool.name))?;
            }
            if tools.directory(tool).exists() {
                continue;
            }
            let (count, started) = (missing.len(), Instant::now());
            step(&format!(
                "build {} {} ({} of {count}; once, it is cached; about {})",
                tool.name,
                tool.version,
                index + 1,
                tool.minutes
            ));
            tools.build(tool).with_context(|| format!("build {} {}", tool.name, tool.version))?;
            step(&format!("built {} in {} s", tool.name, started.elapsed().as_secs()));
        }
        Ok(tools)
    }

    /// A program of the cluster.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        let tool = if PROGRAMS.contains(&name) { "kubernetes" } else { name };
        TOOLS
            .iter()
            .find(|known| known.name == tool)
            .map_or_else(|| name.into(), |tool| self.directory(tool).join(name))
    }

    /// The directories for PATH: the tools that a reader of the tutorial has installed, the checker of metrics, a
    /// registry, what issues certificates, and a network plugin.
    pub(crate) fn path_directories(&self) -> Vec<PathBuf> {
        self.directories(&["kubernetes", "helm", "step", "promtool", "crane", "cert-manager", "kube-router"])
    }

    /// The directories of these tools.
    pub(crate) fn directories(&self, names: &[&str]) -> Vec<PathBuf> {
        TOOLS.iter().filter(|tool| names.contains(&tool.name)).map(|tool| self.directory(tool)).collect()
    }

    /// The tag of CoreDNS' image.
    pub(crate) fn coredns_version() -> &'static str {
        COREDNS.trim_start_matches('v')
    }

    fn missing(&self, names: &[&str]) -> impl Iterator<Item = &'static Tool> {
        TOOLS.iter().filter(|tool| names.contains(&tool.name) && !self.directory(tool).exists())
    }

    fn directory(&self, tool: &Tool) -> PathBuf {
        self.root.join(format!("{}-{}", tool.name, tool.version))
    }

    fn build(&self, tool: &Tool) -> Result<()> {
        let (partial, complete) = (self.root.join(format!("{}.partial", tool.name)), self.directory(tool));
        // Left over from an interrupted run.
        let _ = fs::remove_dir_all(&partial);
        fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
        (tool.build)(&partial)?;
        fs::rename(&partial, &complete).with_context(|| format!("rename to {}", complete.display()))
    }
}

fn kubernetes(into: &Path) -> Result<()> {
    let base = "k8s.io/component-base/version";
    let flags = format!(
        "-s -w -X {base}.gitVersion={KUBERNETES} -X {base}.gitMajor=1 -X {base}.gitMinor=36 -X {base}.gitTreeState=clean \
         -X {base}.gitCommit=0000000 -X {base}.buildDate=1970-01-01T00:00:00Z \
         -X k8s.io/client-go/pkg/version.gitVersion={KUBERNETES}"
    );
    let packages = PROGRAMS.map(|program| format!("k8s.io/kubernetes/cmd/{program}"));
    build_module(into, &[("go.mod", go_mod(KUBERNETES))], &flags, "..", &packages)
}

/// Builds packages of a module that consists of these files.
fn build_module(into: &Path, files: &[(&str, String)], flags: &str, output: &str, packages: &[String]) -> Result<()> {
    let module = into.join("module");
    fs::create_dir(&module).context("create the module")?;
    for (name, text) in files {
        fs::write(module.join(name), text).with_context(|| format!("write {name}"))?;
    }
    let mut build = go::find_or_install()?.command();
    build.current_dir(&module).env("GOFLAGS", "-mod=mod");
    build.args(["build", "-trimpath", WITHOUT_DWARF, "-ldflags", flags, "-o", output]);
    command::run(build.args(packages))?;
    fs::remove_dir_all(&module).context("remove the module")
}

/// A module that only contains Kubernetes, with its own parts at the versions of its release.
fn go_mod(version: &str) -> String {
    let staging = version.replacen("v1.", "v0.", 1);
    let replaced: String = STAGING.iter().map(|name| format!("\tk8s.io/{name} => k8s.io/{name} {staging}\n")).collect();
    format!(
        "module weft.example/kubernetes\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes {version}\n\nreplace (\n{replaced})\n"
    )
}

fn helm(into: &Path) -> Result<()> {
    install(&go::find_or_install()?, into, &format!("helm.sh/helm/v3/cmd/helm@{HELM}"))
}

fn smallstep(into: &Path) -> Result<()> {
    install(&go::find_or_install()?, into, &format!("github.com/smallstep/cli/cmd/step@{STEP}"))
}

/// A registry for tests, and what pushes to it.
fn crane(into: &Path) -> Result<()> {
    install(&go::find_or_install()?, into, &format!("github.com/google/go-containerregistry/cmd/crane@{CRANE}"))
}

/// With the plugins of our Corefile alone: all of them bring the clients of three clouds, and take minutes
/// (coredns.io/2017/07/25/compile-time-enabling-or-disabling-plugins).
fn coredns(into: &Path) -> Result<()> {
    let module = format!("module weft.example/coredns\n\ngo 1.26.0\n\nrequire github.com/coredns/coredns {COREDNS}\n");
    let files = [("go.mod", module), ("main.go", coredns_main())];
    build_module(into, &files, "-s -w", "../coredns", &[".".to_owned()])
}

fn coredns_main() -> String {
    let plugins: String =
        COREDNS_PLUGINS.iter().map(|name| format!("\t_ \"github.com/coredns/coredns/plugin/{name}\"\n")).collect();
    format!(
        "package main\n\nimport (\n{plugins}\t\"github.com/coredns/coredns/coremain\"\n)\n\nfunc main() {{\n\tcoremain.Run()\n}}\n"
    )
}

/// A conformance test of HTTP/2 servers.
fn h2spec(into: &Path) -> Result<()> {
    install(&go::find_or_install()?, into, &format!("github.com/summerwind/h2spec/cmd/h2spec@{H2SPEC}+incompatible"))
}

/// The client and the server of gRPC's interoperability tests.
fn grpc_interop(into: &Path) -> Result<()> {
    let go = go::find_or_install()?;
    for role in ["client", "server"] {
        install(&go, into, &format!("google.golang.org/grpc/interop/{role}@{GRPC_GO}"))?;
        fs::rename(into.join(role), into.join(format!("grpc-interop-{role}"))).context("name the program")?;
    }
    Ok(())
}

/// Go's own HTTP.
fn go_http(into: &Path) -> Result<()> {
    let module = "module weft.example/go-http\n\ngo 1.26.0\n";
    let files = [("go.mod", module.to_owned()), ("main.go", GO_HTTP_SOURCE.to_owned())];
    build_module(into, &files, "-s -w", "../go-http", &[".".to_owned()])
}

/// An OpenTelemetry collector that receives OTLP and writes files.
fn otelcol(into: &Path) -> Result<()> {
    let (core, contrib) =
        ("go.opentelemetry.io/collector", "github.com/open-telemetry/opentelemetry-collector-contrib");
    let required: String = [
        format!("{core}/otelcol"),
        format!("{core}/receiver/otlpreceiver"),
        format!("{core}/service"),
        format!("{contrib}/exporter/fileexporter"),
    ]
    .map(|module| format!("\t{module} {OTELCOL}\n"))
    .concat();
    let stable = format!("{core}/confmap/provider/yamlprovider {OTELCOL_STABLE}");
    let module = format!("module weft.example/otelcol\n\ngo 1.26.0\n\nrequire (\n{required}\t{stable}\n)\n");
    let files = [("go.mod", module), ("main.go", OTELCOL_SOURCE.to_owned())];
    build_module(into, &files, "-s -w", "../otelcol", &[".".to_owned()])
}

/// The program, and in `definitions.yaml` the definitions of the kinds that it needs.
fn cert_manager(into: &Path) -> Result<()> {
    let (certificates, trust) = ("github.com/cert-manager/cert-manager", "github.com/cert-manager/trust-manager");
    let module = format!(
        "module weft.example/cert-manager\n\ngo 1.26.0\n\n\
         require (\n\t{certificates} {CERT_MANAGER}\n\t{trust} {TRUST_MANAGER}\n)\n"
    );
    let files = [("go.mod", module), ("main.go", CERT_MANAGER_SOURCE.to_owned())];
    build_module(into, &files, "-s -w", "../cert-manager", &[".".to_owned()])?;
    let go = go::find_or_install()?;
    let mut definitions = String::new();
    for (module, kinds) in [
        (
            format!("{certificates}@{CERT_MANAGER}"),
            &[
                "cert-manager.io_certificaterequests",
                "cert-manager.io_certificates",
                "cert-manager.io_clusterissuers",
                "cert-manager.io_issuers",
            ][..],
        ),
        (format!("{trust}@{TRUST_MANAGER}"), &["trust.cert-manager.io_bundles"]),
    ] {
        let directory = source_of(&go, &module)?.join("deploy/crds");
        for kind in kinds {
            let file = directory.join(format!("{kind}.yaml"));
            // Each begins with a line that separates it from the one before.
            definitions += &fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        }
    }
    fs::write(into.join("definitions.yaml"), definitions).context("write definitions.yaml")
}

/// The network plugin, of which the tests use what enforces NetworkPolicies.
fn kube_router(into: &Path) -> Result<()> {
    let package = "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router";
    install(&go::find_or_install()?, into, &format!("{package}@{KUBE_ROUTER}"))
}

/// Where Go keeps the source of `MODULE@VERSION`.
fn source_of(go: &Go, module: &str) -> Result<PathBuf> {
    let printed = command::output(go.command().args(["mod", "download", "-json", module]))?;
    let found: serde_json::Value = serde_json::from_str(&printed).context("read what go printed")?;
    found["Dir"].as_str().map(PathBuf::from).with_context(|| format!("go named no directory of {module}"))
}

fn install(go: &Go, into: &Path, package: &str) -> Result<()> {
    command::run(go.command().env("GOBIN", into).args([
        "install",
        "-trimpath",
        WITHOUT_DWARF,
        "-ldflags=-s -w",
        package,
    ]))
}

/// Prometheus and its linter, from a package whose service must not be installed.
fn promtool(into: &Path) -> Result<()> {
    let unpacked = into.join("package");
    fs::create_dir(&unpacked).context("create the package's directory")?;
    packages::unpack("prometheus", &unpacked)?;
    for program in ["promtool", "prometheus"] {
        let found = unpacked.join("usr/bin").join(program);
        fs::copy(found, into.join(program)).with_context(|| format!("take {program}"))?;
    }
    fs::remove_dir_all(&unpacked).context("remove the package")
}

fn pause(into: &Path) -> Result<()> {
    let source = into.join("pause.c");
    fs::write(&source, PAUSE_SOURCE).context("write pause.c")?;
    command::run(Command::new("cc").args(["-static", "-Os", "-s", "-o"]).arg(into.join("pause")).arg(&source))
}

/// etcd comes as a crate that contains the program; building a program that names its path makes cargo fetch it.
fn etcd(into: &Path) -> Result<()> {
    let project = into.join("project");
    fs::create_dir_all(project.join("src")).context("create the project")?;
    let manifest = format!(
        "[package]\nname = \"etcd-path\"\nedition = \"2024\"\n\n[dependencies]\netcd-bin-vendored = \"={ETCD}\"\n\n[workspace]\n"
    );
    fs::write(project.join("Cargo.toml"), manifest).context("write Cargo.toml")?;
    let main =
        "fn main() { println!(\"{}\", etcd_bin_vendored::etcd_bin_path().expect(\"this platform\").display()) }\n";
    fs::write(project.join("src/main.rs"), main).context("write main.rs")?;
    let mut run = command::cargo();
    run.args(["run", "--quiet"]).current_dir(&project).env("CARGO_TARGET_DIR", project.join("target"));
    let path = command::output(&mut run)?;
    fs::copy(path.trim(), into.join("etcd")).with_context(|| format!("copy {}", path.trim()))?;
    fs::remove_dir_all(&project).context("remove the project")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn parts_of_kubernetes_have_the_version_of_their_release() {
        let text = go_mod("v1.36.3");
        assert!(text.contains("require k8s.io/kubernetes v1.36.3\n"), "{text}");
        assert!(text.contains("\tk8s.io/client-go => k8s.io/client-go v0.36.3\n"), "{text}");
    }

    #[test]
    fn coredns_has_the_plugins_of_its_configuration() {
        let text = include_str!("kube/coredns.yaml");
        let (_, corefile) = text.split_once("Corefile: |").expect("a Corefile");
        let (corefile, _) = corefile.split_once("---").expect("an end");
        let directives = corefile.lines().filter_map(|line| line.strip_prefix("        "));
        let directives = directives.filter(|line| !line.starts_with(' ') && *line != "}");
        let names: BTreeSet<_> = directives.filter_map(|line| line.split_whitespace().next()).collect();
        assert!(names.iter().eq(&COREDNS_PLUGINS), "{names:?}");
    }

    #[test]
    fn programs_are_found_in_the_directory_of_their_release() {
        let tools = Tools { root: "/cache/kube".into() };
        assert_eq!(tools.program("kubectl"), Path::new("/cache/kube/kubernetes-v1.36.3/kubectl"));
        assert_eq!(tools.program("etcd"), Path::new("/cache/kube").join(format!("etcd-{ETCD}/etcd")));
    }
}
