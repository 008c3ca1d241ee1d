//! Packaged charts: the archive that `helm package` would make, without its times, and the same as an OCI artefact.
//!
//! The artefact is an OCI layout in a tar (`skopeo copy oci-archive:FILE docker://REGISTRY/charts/NAME:VERSION`) with
//! the media types of <https://helm.sh/docs/topics/registries/>, so that `helm install oci://REGISTRY/charts/NAME`
//! takes it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use weft_xtask::command::step;

use super::{
    VERSION,
    image::{Files, Layer, digest, layout, sha256},
    programs::in_registry,
    release::compressed,
    versioned,
};

/// Charts in the order of installation; the last one is for clusters with Linkerd.
pub(super) const CHARTS: [&str; 4] = ["weft-crds", "weft-control-plane", "weft-viz", "weft-agent"];
/// The files in which images are named.
const VALUES: [&str; 2] = ["values.yaml", "values-ha.yaml"];
/// What says which files are not part of a chart.
const IGNORED: &str = ".helmignore";

/// Packs every chart in both forms; returns the files.
///
/// # Errors
/// When a chart cannot be read or has another version than the programs.
pub(super) fn pack_all(charts: &Path, directory: &Path, registry: &str) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let mut written = Vec::new();
    for name in CHARTS {
        step(&format!("pack {name}"));
        let package = pack(&charts.join(name), name, registry).with_context(|| format!("pack {name}"))?;
        let artefact = artefact(&charts.join(name).join("Chart.yaml"), &package)?;
        for (path, content) in
            [(versioned(directory, name, ".tgz")?, package), (versioned(directory, name, ".oci.tar")?, artefact)]
        {
            fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
            written.push(path);
        }
    }
    Ok(written)
}

/// The archive: every file below a directory of the chart's name.
fn pack(chart: &Path, name: &str, registry: &str) -> Result<Vec<u8>> {
    let ignored = fs::read_to_string(chart.join(IGNORED)).unwrap_or_default();
    let endings = ignored.lines().map(ending).collect::<Result<Vec<_>>>()?;
    let mut files = Files::default();
    let mut open = vec![chart.to_path_buf()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))? {
            let path = entry?.path();
            let below = path.strip_prefix(chart).context("a file of the chart is below it")?.display().to_string();
            if endings.iter().any(|ending| below.ends_with(ending)) || below == IGNORED {
                continue;
            }
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let mut content = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            if VALUES.contains(&below.as_str()) {
                content = in_registry(&content, registry);
            }
            files.add(&format!("/{name}/{below}"), 0o644, content.into_bytes());
        }
    }
    compressed(Layer::pack(&files)?.content())
}

/// A pattern of `.helmignore`, of which our charts use endings alone.
fn ending(pattern: &str) -> Result<&str> {
    let ending = pattern.strip_prefix('*').unwrap_or(pattern);
    if ending.is_empty() || ending.contains(['*', '?', '!', '/', '#']) {
        bail!("{IGNORED} says `{pattern}`, which is not understood here: use the end of a name");
    }
    Ok(ending)
}

/// The layout: Chart.yaml as configuration, the archive as the one layer.
fn artefact(metadata: &Path, package: &[u8]) -> Result<Vec<u8>> {
    let name = || metadata.display().to_string();
    let text = fs::read_to_string(metadata).with_context(name)?;
    let metadata: Value = serde_yaml_ng::from_str(&text).with_context(name)?;
    if metadata["version"] != VERSION {
        bail!("{} says version {}, and the programs are {VERSION}", name(), metadata["version"]);
    }
    let config = metadata.to_string().into_bytes();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.cncf.helm.config.v1+json",
            "digest": digest(&sha256(&config)),
            "size": config.len(),
        },
        "layers": [{
            "mediaType": "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
            "digest": digest(&sha256(package)),
            "size": package.len(),
        }],
        "annotations": {
            "org.opencontainers.image.title": metadata["name"],
            "org.opencontainers.image.version": metadata["version"],
            "org.opencontainers.image.description": metadata["description"],
        },
    });
    let manifest = manifest.to_string().into_bytes();
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest(&sha256(&manifest)),
            "size": manifest.len(),
            "annotations": {"org.opencontainers.image.ref.name": VERSION},
        }],
    });
    let index = index.to_string().into_bytes();
    let mut archive = Vec::new();
    layout(&mut archive, &[package, &config, &manifest], &[("index.json", &index)])?;
    Ok(archive)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, io::Read as _};

    use super::*;

    fn chart() -> (tempfile::TempDir, Vec<u8>) {
        let chart = tempfile::tempdir().expect("a directory");
        for (path, text) in [
            ("Chart.yaml", format!("name: x\nversion: {VERSION}\ndescription: d\n")),
            ("values.yaml", "image: localhost/weft-agent\nother: localhost/x\n".to_owned()),
            ("templates/a.yaml", "kind: A\n".to_owned()),
            ("templates/a.yaml.orig", "kind: Old\n".to_owned()),
            (IGNORED, "*.orig\n".to_owned()),
        ] {
            let path = chart.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("create");
            fs::write(path, text).expect("write");
        }
        let package = pack(chart.path(), "x", "registry.example/mesh").expect("packs");
        (chart, package)
    }

    fn unpack(tar: impl std::io::Read) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        for entry in tar::Archive::new(tar).entries().expect("a tar") {
            let mut entry = entry.expect("an entry");
            let (path, mut content) = (entry.path().expect("a path").display().to_string(), Vec::new());
            entry.read_to_end(&mut content).expect("reads");
            found.insert(path, String::from_utf8_lossy(&content).into_owned());
        }
        found
    }

    #[test]
    fn a_package_has_the_charts_files_and_names_images_in_the_registry() {
        let (_directory, package) = chart();
        let found = unpack(flate2::read::GzDecoder::new(&package[..]));
        assert!(found["x/values.yaml"].contains("image: registry.example/mesh/weft-agent"), "{found:?}");
        assert!(found["x/values.yaml"].contains("other: localhost/x"), "{found:?}");
        assert!(found.contains_key("x/templates/a.yaml"));
        assert!(!found.contains_key("x/templates/a.yaml.orig") && !found.contains_key("x/.helmignore"), "{found:?}");
    }

    #[test]
    fn the_same_chart_is_packed_to_the_same_bytes() {
        assert_eq!(chart().1, chart().1);
    }

    #[test]
    fn the_artefact_leads_to_the_package() {
        let (directory, package) = chart();
        let found = unpack(&artefact(&directory.path().join("Chart.yaml"), &package).expect("an artefact")[..]);
        let json = |path: &str| serde_json::from_str::<Value>(&found[path]).expect("json");
        let of = |digest: &Value| digest.as_str().expect("a digest").replace("sha256:", "blobs/sha256/");
        let manifest = json(&of(&json("index.json")["manifests"][0]["digest"]));
        assert_eq!(json(&of(&manifest["config"]["digest"]))["name"], "x");
        assert_eq!(manifest["layers"][0]["digest"], format!("sha256:{}", sha256(&package)));
        assert!(found.contains_key(&of(&manifest["layers"][0]["digest"])));
    }

    #[test]
    fn patterns_that_are_not_understood_are_refused() {
        assert_eq!(ending("*.orig").expect("an ending"), ".orig");
        assert!(ending("a/*").is_err() && ending("!b").is_err());
    }
}
