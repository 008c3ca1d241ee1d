//! Embeds the kernel programs: copies the object that `cargo xtask ebpf` built and names it by a digest.

use std::{env, fs, path::PathBuf, process::ExitCode};

fn main() -> ExitCode {
    println!("cargo::rerun-if-env-changed=WEFT_EBPF_OBJECT");
    let directory = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let object = env::var_os("WEFT_EBPF_OBJECT")
        .map_or_else(|| directory.join("../ebpf/target/bpfel-unknown-none/release/weft-ebpf"), PathBuf::from);
    println!("cargo::rerun-if-changed={}", object.display());
    let bytes = match fs::read(&object) {
        Ok(bytes) => bytes,
        Err(error) => {
            println!("cargo::error=no kernel programs at {}: {error}; run `cargo xtask ebpf`", object.display());
            return ExitCode::FAILURE;
        }
    };
    let embedded = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("weft-ebpf");
    if let Err(error) = fs::write(&embedded, &bytes) {
        println!("cargo::error=cannot write {}: {error}", embedded.display());
        return ExitCode::FAILURE;
    }
    println!("cargo::rustc-env=WEFT_EBPF_DIGEST={:016x}", fnv1a(&bytes));
    ExitCode::SUCCESS
}

/// FNV-1a: enough to distinguish builds; the digest is not a security feature.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
