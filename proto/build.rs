//! Generates the code of the contracts in `proto/`; protox is a compiler in Rust, so no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["weft/agent/v1/agent.proto", "spiffe/workload.proto", "opentelemetry/trace.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    println!("cargo::rerun-if-changed=proto");
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
