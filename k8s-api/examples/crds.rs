//! Writes the custom resource definitions of Weft's types into a directory: `crds DIRECTORY`. Run by `cargo xtask
//! codegen`.

use std::{env, error::Error, fs, path::PathBuf};

use weft_k8s_api::crds;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = PathBuf::from(env::args_os().nth(1).ok_or("expected a directory")?);
    for definition in crds::all() {
        let path = directory.join(&definition.file);
        fs::write(&path, definition.yaml).map_err(|error| format!("{}: cannot be written: {error}", path.display()))?;
    }
    Ok(())
}
