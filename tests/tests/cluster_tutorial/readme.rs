//! README's commands for a cluster, as its readers run them: a mesh by `weft install`, and an application from `dist`.

use std::process::Command;

use tempfile::TempDir;
use weft_test_kit::binaries;
use weft_tests::{
    cluster::Cluster,
    output::succeeded,
    tutorial::{self, Block, Shell},
};

use crate::world::{SHOP, World};

const README: &str = "README.md";
/// The first command that is run: those before it build what the tests have built, and load it into nodes.
const FIRST: &str = "weft check --pre\n";
/// Its last commands: the first is run here, the second at the end of the checks of this mesh.
const REMOVAL: &str = "kubectl delete namespace shop outside\nweft uninstall | kubectl delete -f -";

/// Runs the commands, with what `dist` writes of the binaries under test.
pub(super) fn follow(world: &World) {
    // The tutorial's end does not wait for its own application to be gone.
    forget(world);
    let directory = TempDir::new().unwrap();
    let mut dist = Command::new(binaries::directory().unwrap().join("weft-lab"));
    dist.args(["dist", "--profile", "dev", "--no-build", "--only", "application", "--output"]);
    succeeded(&dist.arg(directory.path().join("dist")).output().unwrap());

    let text = std::fs::read_to_string(Cluster::repository().join(README)).unwrap();
    let blocks = tutorial::blocks(&text);
    assert!(blocks.iter().any(|block| block.code.trim() == REMOVAL), "{README} removes what it installs");
    let block = blocks.into_iter().find(|block| block.code.contains(FIRST)).unwrap();
    let code = block.code[block.code.find(FIRST).unwrap()..].to_owned();
    assert!(code.contains("weft install | kubectl apply") && code.contains("dist/shop.yaml"), "{code}");
    let mut shell = Shell::start(directory.path(), &[("PATH", world.cluster.path())]).unwrap();
    if let Err(error) = shell.run(&Block { code, ..block }) {
        panic!("{README}: {error:#}");
    }
    // Its application is not needed any more, and goes while others come.
    world.cluster.kubectl(&["delete", "namespace", SHOP, "outside", "--wait=false"]).unwrap();
}

/// Waits until its application is gone.
pub(super) fn forget(world: &World) {
    let namespaces = [SHOP, "outside"].map(|namespace| format!("namespace/{namespace}"));
    let wait = [&["wait", "--for=delete", "--timeout=180s"][..], &namespaces.each_ref().map(String::as_str)].concat();
    world.cluster.kubectl(&wait).unwrap();
}
