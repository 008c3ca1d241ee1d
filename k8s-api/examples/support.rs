//! Generates docs/compatibility.md, the chart's list of values and the proxy's list of variables from the table of
//! Linkerd's settings.

use std::{env, fs, io, path::Path};

use weft_k8s_api::support;

fn main() -> io::Result<()> {
    let own = env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?;
    let root = Path::new(&own).join("..");
    fs::create_dir_all(root.join("charts/weft-control-plane/files"))?;
    fs::write(root.join("docs/compatibility.md"), support::document())?;
    fs::write(root.join("proxy/src/config/linkerd.txt"), support::proxy_variables())?;
    fs::write(root.join("charts/weft-control-plane/files/linkerd-values.json"), support::chart_values())
}
