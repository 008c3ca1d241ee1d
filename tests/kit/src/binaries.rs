//! Finds the programs under test: beside the running one, in cargo's build directory, or in `WEFT_BIN_DIR`.

use std::{
    env, io,
    path::{Path, PathBuf},
};

/// The directory with `weft`, `weft-agent`, `weft-proxy`, `weft-control-plane` and the examples.
///
/// # Errors
/// Names the program that is missing and how to build it.
pub fn directory() -> io::Result<PathBuf> {
    let directory = match env::var_os("WEFT_BIN_DIR") {
        Some(directory) => PathBuf::from(directory),
        None => beside(&env::current_exe()?),
    };
    for program in ["weft", "weft-agent", "weft-proxy", "weft-control-plane", "weft-echo", "weft-client"] {
        if !directory.join(program).is_file() {
            let message = format!(
                "{program} is not in {}: build the workspace (cargo xtask demo and cargo xtask test do) or set WEFT_BIN_DIR",
                directory.display()
            );
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
    }
    Ok(directory)
}

/// Test programs are in a subdirectory of the directory of the others.
fn beside(program: &Path) -> PathBuf {
    let directory = program.parent().unwrap_or(Path::new("."));
    match directory.file_name() {
        Some(name) if name == "deps" => directory.parent().unwrap_or(directory).to_owned(),
        _ => directory.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_one_level_up_from_a_test_program() {
        assert_eq!(beside(Path::new("/t/debug/deps/netns_mesh-1")), Path::new("/t/debug"));
        assert_eq!(beside(Path::new("/t/debug/weft-demo")), Path::new("/t/debug"));
    }
}
