//! What a release consists of, as somebody who has nothing else gets it: charts from a registry, the command line by
//! the script.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
};

use tempfile::TempDir;
use weft_examples::client::Report;
use weft_test_kit::{binaries, mesh::unique_name};
use weft_tests::{cluster::Cluster, output::succeeded, report::assert_vouched_for};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Artefacts of the binaries under test, with some parts only.
fn dist(into: &Path, arguments: &[&str]) {
    let mut lab = Command::new(binaries::directory().unwrap().join("weft-lab"));
    lab.args(["dist", "--profile", "dev", "--no-build", "--output"]).arg(into).args(arguments);
    succeeded(&lab.output().unwrap());
}

/// A registry on a port of its own that ends with the test.
struct Registry {
    child: Child,
    address: String,
}

impl Registry {
    fn start(cluster: &Cluster) -> Self {
        let mut serve = cluster.command("crane");
        serve.args(["registry", "serve", "--address", "127.0.0.1:0"]);
        let mut child = serve.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let port = loop {
            line.clear();
            assert_ne!(said.read_line(&mut line).unwrap(), 0, "the registry ended");
            if let Some((_, port)) = line.trim().rsplit_once("port ") {
                break port.to_owned();
            }
        };
        // It logs every request.
        thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        Self { child, address: format!("127.0.0.1:{port}") }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn charts_of_a_release_are_pulled_from_a_registry() {
    let cluster = Cluster::from_env().unwrap();
    let (once, again, pulled) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    for into in [&once, &again] {
        dist(into.path(), &["--only", "charts", "--registry", "registry.example/mesh"]);
    }
    let sums = |directory: &TempDir| fs::read_to_string(directory.path().join("SHA256SUMS")).unwrap();
    assert_eq!(sums(&once), sums(&again), "two packages of the same sources differ");

    let registry = Registry::start(&cluster);
    for chart in ["weft-crds", "weft-control-plane", "weft-viz", "weft-agent"] {
        let packages = once.path().join("charts");
        let layout = TempDir::new().unwrap();
        let archive = packages.join(format!("{chart}-{VERSION}.oci.tar"));
        succeeded(&Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(layout.path()).output().unwrap());
        let reference = format!("{}/charts/{chart}", registry.address);
        let mut push = cluster.command("crane");
        push.args(["push", "--insecure"]).arg(layout.path()).arg(format!("{reference}:{VERSION}"));
        succeeded(&push.output().unwrap());

        let mut pull = cluster.command("helm");
        pull.args(["pull", &format!("oci://{reference}"), "--version", VERSION, "--plain-http", "--destination"]);
        succeeded(&pull.arg(pulled.path()).output().unwrap());
        let name = format!("{chart}-{VERSION}.tgz");
        assert_eq!(fs::read(pulled.path().join(&name)).unwrap(), fs::read(packages.join(&name)).unwrap(), "{chart}");
    }
    let mut values = cluster.command("helm");
    values.args(["show", "values"]).arg(pulled.path().join(format!("weft-control-plane-{VERSION}.tgz")));
    let values = succeeded(&values.output().unwrap());
    assert!(values.contains("controllerImage: registry.example/mesh/weft-control-plane"), "{values}");
    assert!(!values.contains("localhost/"), "{values}");
}

/// Serves the files of a directory until the process ends.
fn serve(directory: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let _ = answer(connection.unwrap(), &directory);
        }
    });
    format!("http://{address}")
}

fn answer(mut connection: TcpStream, directory: &Path) -> std::io::Result<()> {
    let mut head = BufReader::new(connection.try_clone()?.take(64 << 10));
    let mut line = String::new();
    head.read_line(&mut line)?;
    let name = line.split(' ').nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
    while line.trim() != "" {
        line.clear();
        head.read_line(&mut line)?;
    }
    let (status, body) = match fs::read(directory.join(&name)) {
        Ok(body) if !name.contains("..") => ("200 OK", body),
        _ => ("404 Not Found", Vec::new()),
    };
    write!(connection, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len())?;
    connection.write_all(&body)
}

/// The script of a release, for a prefix.
fn install(release: &Path, from: &str, prefix: &Path, more: &[&str]) -> Output {
    let mut script = Command::new("sh");
    script.arg(release.join("install.sh")).args(["--from", from, "--prefix"]).arg(prefix).args(more);
    script.output().unwrap()
}

/// A sandbox of what was installed, and nothing else of the build.
fn the_example_runs(prefix: &Path) {
    struct Stop(PathBuf, String);
    impl Drop for Stop {
        fn drop(&mut self) {
            let _ = Command::new(&self.0).args(["sandbox", "stop", "--sandbox", &self.1]).output();
        }
    }
    let stop = Stop(prefix.join("bin/weft"), unique_name("t-release"));
    let weft = |arguments: &[&str]| {
        let mut weft = Command::new(&stop.0);
        succeeded(&weft.args(["sandbox", arguments[0], "--sandbox", &stop.1]).args(&arguments[1..]).output().unwrap())
    };
    let manifests = prefix.join("share/weft/examples/mesh");
    // What does not run is reported before the command returns, and nothing else waits for it.
    let wrong =
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: odd, namespace: shop}\nspec: {replicas: many}\n";
    let unused = "apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: nightly, namespace: shop}\n";
    fs::write(manifests.join("odd.yaml"), format!("{wrong}---\n{unused}")).unwrap();
    let said = weft(&["run", "--detach", manifests.to_str().unwrap()]);
    for (kind, fault) in
        [("manifest ", "odd.yaml:4:18: Deployment shop/odd: "), ("ignored ", "odd.yaml:6: CronJob nightly: ")]
    {
        assert!(said.lines().any(|line| line.starts_with(kind) && line.contains(fault)), "{fault}: {said}");
    }
    let client = ["weft-client", "http1", "--target", "web.shop:80", "--count", "5", "--json"];
    let report = weft(&[&["exec", "shop/client", "--"][..], &client].concat());
    let report: Report = serde_json::from_str(&report).unwrap();
    assert_eq!((report.requests, report.failures), (5, 0), "{report:?}");
    assert_vouched_for(&report, "client.shop.serviceaccount.identity.linkerd.cluster.local");
}

fn refusal(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_script_installs_what_was_released_and_nothing_else() {
    let (release, keys) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (key, stranger) = (keys.path().join("key"), keys.path().join("stranger"));
    for path in [&key, &stranger] {
        let mut generate = Command::new("ssh-keygen");
        succeeded(&generate.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path).output().unwrap());
        let public = fs::read_to_string(path.with_extension("pub")).unwrap();
        fs::write(path.with_extension("signers"), format!("weft-release {public}")).unwrap();
    }
    let signers = |path: &Path| path.with_extension("signers").display().to_string();
    dist(release.path(), &["--only", "command-line", "--sign-key", &key.display().to_string()]);
    let url = serve(release.path().to_owned());

    let prefix = TempDir::new().unwrap();
    let said = succeeded(&install(release.path(), &url, prefix.path(), &["--signers", &signers(&key)]));
    assert!(said.contains(VERSION) && said.contains("not in PATH"), "{said}");
    let version = Command::new(prefix.path().join("bin/weft")).arg("--version").output().unwrap();
    assert!(succeeded(&version).contains(VERSION));
    for file in ["share/man/man1/weft.1", "share/zsh/site-functions/_weft"] {
        assert!(prefix.path().join(file).is_file(), "{file}");
    }
    the_example_runs(prefix.path());
    // From a directory, over what is there.
    succeeded(&install(release.path(), &release.path().display().to_string(), prefix.path(), &[]));

    let nothing = TempDir::new().unwrap();
    let by_another = install(release.path(), &url, nothing.path(), &["--signers", &signers(&stranger)]);
    assert!(refusal(&by_another).contains("not signed"), "{by_another:?}");
    let archive = fs::read_dir(release.path()).unwrap().map(|entry| entry.unwrap().path());
    let archive = archive.into_iter().find(|path| path.to_string_lossy().ends_with(".tar.gz")).unwrap();
    fs::write(&archive, "something else").unwrap();
    let changed = install(release.path(), &url, nothing.path(), &["--signers", &signers(&key)]);
    assert!(refusal(&changed).contains("nothing is installed"), "{changed:?}");
    fs::write(release.path().join("SHA256SUMS"), "").unwrap();
    let without = install(release.path(), &url, nothing.path(), &[]);
    assert!(refusal(&without).contains("has no weft-linux-"), "{without:?}");
    assert_eq!(fs::read_dir(nothing.path()).unwrap().count(), 0);
}
