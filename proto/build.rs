//! Generates the code of the contracts in `proto/`, and descriptors of Linkerd's; protox is a compiler in Rust, so no
//! `protoc` is needed.

use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files =
        ["weft/agent/v1/agent.proto", "weft/viz/v1/viz.proto", "spiffe/workload.proto", "opentelemetry/trace.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    // The dashboard's interface is these messages as JSON. A request may leave out what it does not ask.
    tonic_prost_build::configure()
        .type_attribute(
            ".weft.viz.v1",
            "#[derive(serde::Serialize, serde::Deserialize)] #[serde(rename_all = \"camelCase\")]",
        )
        .message_attribute(".weft.viz.v1", "#[serde(default)]")
        .compile_fds(descriptors)?;

    let linkerd = protox::Compiler::new(["proto/linkerd"])?
        .include_imports(true)
        .open_files(["destination.proto", "inbound.proto", "outbound.proto"])?
        .encode_file_descriptor_set();
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    fs::write(out.join("linkerd.descriptors"), linkerd)?;
    Ok(())
}
