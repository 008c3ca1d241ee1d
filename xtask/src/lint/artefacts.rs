//! What is shipped beside programs: charts are checked by `helm lint` with their schemas, scripts by shellcheck.

use std::{path::PathBuf, process::Command};

use anyhow::{Context as _, Result, bail};

use crate::{
    command::{self, step},
    lab::Lab,
    setup::packages,
    workspace::Workspace,
};

/// Charts, and the values files of each that have to satisfy its schema beside its own defaults.
const CHARTS: [(&str, &[&str]); 4] =
    [("weft-crds", &[]), ("weft-control-plane", &["values-ha.yaml"]), ("weft-viz", &[]), ("weft-agent", &[])];
const SCRIPTS: [&str; 2] = ["install.sh", ".ci/run"];

/// Checks charts.
///
/// # Errors
/// When helm is not to be had, or finds an error or a warning.
pub(super) fn charts(workspace: &Workspace) -> Result<()> {
    let printed = command::output(&mut Lab::build(workspace)?.command(&["kube", "tools", "helm"]))?;
    let helm = PathBuf::from(printed.lines().next().context("the lab named no directory of helm")?).join("helm");
    step("helm lint");
    for (chart, more) in CHARTS {
        let directory = workspace.root.join("charts").join(chart);
        lint(Command::new(&helm).args(["lint", "--strict", "--quiet"]).arg(&directory))?;
        for values in more {
            let values = directory.join(values);
            lint(Command::new(&helm).args(["lint", "--strict", "--quiet", "--values"]).arg(values).arg(&directory))?;
        }
    }
    Ok(())
}

/// Helm remarks that certificates are missing, which is as it should be, and says on standard output what is wrong.
fn lint(helm: &mut Command) -> Result<()> {
    let output = helm.output().context("start helm")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stdout).trim());
    }
    Ok(())
}

/// Checks shell scripts.
///
/// # Errors
/// When shellcheck is not to be had, or finds something.
pub(super) fn scripts(workspace: &Workspace) -> Result<()> {
    packages::ensure(&packages::SHELLCHECK)?;
    step("shellcheck");
    command::run(Command::new("shellcheck").args(SCRIPTS).current_dir(&workspace.root))
}
