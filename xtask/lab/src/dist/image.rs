//! Container images without a container daemon: layers as tars, and one archive that every importer accepts.
//!
//! The archive is an OCI layout (`oci-layout`, `index.json`, `blobs/`) with docker's `manifest.json` beside it, so that
//! `ctr images import` takes it, by which kind loads archives into their nodes, and docker's tools find what they read.
//! The same inputs give the same bytes: names are sorted, times are zero, owners are root.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{BufWriter, Write},
    path::Path,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The permissions of programs.
pub(super) const PROGRAM_MODE: u32 = 0o711;

/// Part of a file system: files by absolute path.
#[derive(Debug, Default)]
pub(crate) struct Files(BTreeMap<String, (u32, Vec<u8>)>);

impl Files {
    /// Adds a file with these permissions.
    pub(crate) fn add(&mut self, path: &str, mode: u32, content: Vec<u8>) {
        self.0.insert(path.trim_start_matches('/').to_owned(), (mode, content));
    }

    /// Adds a program of this host. Users other than root execute it and cannot read it. Where they have no capability,
    /// the kernel then keeps other processes of the same user from the program's memory and descriptors from its first
    /// instruction on (`PR_SET_DUMPABLE` in prctl(2)), and not only from when it forbids that by itself.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn add_program(&mut self, path: &str, from: &Path) -> Result<()> {
        self.add_file(path, PROGRAM_MODE, from)
    }

    /// Adds a library of this host, which its users have to read.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn add_library(&mut self, path: &str, from: &Path) -> Result<()> {
        self.add_file(path, 0o755, from)
    }

    fn add_file(&mut self, path: &str, mode: u32, from: &Path) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("read {}", from.display()))?;
        self.add(path, mode, content);
        Ok(())
    }
}

/// A layer of an image; images can share it.
#[derive(Debug)]
pub(crate) struct Layer {
    tar: Vec<u8>,
    digest: String,
}

impl Layer {
    /// Packs files.
    ///
    /// # Errors
    /// When a path does not fit into a tar.
    pub(crate) fn pack(files: &Files) -> Result<Self> {
        let mut tar = tar::Builder::new(Vec::new());
        let directories: BTreeSet<&str> = files.0.keys().flat_map(|path| parents(path)).collect();
        for directory in directories {
            append(&mut tar, directory, tar::EntryType::Directory, 0o755, &[])?;
        }
        for (path, (mode, content)) in &files.0 {
            append(&mut tar, path, tar::EntryType::Regular, *mode, content)?;
        }
        let tar = tar.into_inner().context("pack a layer")?;
        Ok(Self { digest: sha256(&tar), tar })
    }

    /// The layer as a tar archive, not compressed.
    pub(super) fn content(&self) -> &[u8] {
        &self.tar
    }
}

/// The metadata of an image.
#[derive(Debug)]
pub(crate) struct Image<'a> {
    /// Registry, repository and tag, such as `localhost/weft-proxy:0.1.0`.
    pub(crate) name: &'a str,
    /// In the terms of container images: amd64, arm64.
    pub(crate) architecture: &'a str,
    /// From the bottom up.
    pub(crate) layers: &'a [&'a Layer],
    pub(crate) entrypoint: &'a str,
    /// Numeric user and group.
    pub(crate) user: &'a str,
    pub(crate) labels: &'a [(&'a str, &'a str)],
}

impl Image<'_> {
    /// Writes the archive; an existing one is replaced atomically.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self, to: &Path) -> Result<()> {
        let partial = to.with_extension("partial");
        let file = File::create(&partial).with_context(|| format!("create {}", partial.display()))?;
        let mut out = BufWriter::new(file);
        self.archive(&mut out)
            .and_then(|()| Ok(out.flush()?))
            .with_context(|| format!("write {}", partial.display()))?;
        fs::rename(&partial, to).with_context(|| format!("rename {} to {}", partial.display(), to.display()))
    }

    fn archive(&self, out: impl Write) -> Result<()> {
        let config = self.config().to_string().into_bytes();
        let manifest = self.manifest(&config).to_string().into_bytes();
        let index = self.index(&manifest).to_string().into_bytes();
        let docker = self.docker_manifest(&config).to_string().into_bytes();
        // Layers are large, so they are borrowed.
        let layers = self.layers.iter().map(|layer| layer.content());
        let blobs: Vec<&[u8]> = layers.chain([&config[..], &manifest]).collect();
        // docker reads `manifest.json` wherever it is in the archive.
        layout(out, &blobs, &[("index.json", &index), ("manifest.json", &docker)])
    }

    /// The image's configuration (OCI image spec, `config.md`).
    fn config(&self) -> Value {
        let labels: BTreeMap<_, _> = self.labels.iter().copied().collect();
        json!({
            "created": "1970-01-01T00:00:00Z",
            "architecture": self.architecture,
            "os": "linux",
            "config": { "Entrypoint": [self.entrypoint], "User": self.user, "WorkingDir": "/", "Labels": labels },
            "rootfs": { "type": "layers", "diff_ids": self.layers.iter().map(|layer| digest(&layer.digest)).collect::<Vec<_>>() },
        })
    }

    fn manifest(&self, config: &[u8]) -> Value {
        let layer = |layer: &&Layer| {
            json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": digest(&layer.digest),
                "size": layer.tar.len(),
            })
        };
        json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest(&sha256(config)),
                "size": config.len(),
            },
            "layers": self.layers.iter().map(layer).collect::<Vec<_>>(),
        })
    }

    /// containerd reads the name from its own annotation, other importers from OCI's, in which it is a tag.
    fn index(&self, manifest: &[u8]) -> Value {
        let tag = self.name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": digest(&sha256(manifest)),
                "size": manifest.len(),
                "platform": { "architecture": self.architecture, "os": "linux" },
                "annotations": { "io.containerd.image.name": self.name, "org.opencontainers.image.ref.name": tag },
            }],
        })
    }

    fn docker_manifest(&self, config: &[u8]) -> Value {
        json!([{
            "Config": blob(&sha256(config)),
            "RepoTags": [self.name],
            "Layers": self.layers.iter().map(|layer| blob(&layer.digest)).collect::<Vec<_>>(),
        }])
    }
}

/// Writes an OCI layout with these blobs, and these files beside it.
///
/// # Errors
/// When it cannot be written.
pub(super) fn layout(out: impl Write, blobs: &[&[u8]], top: &[(&str, &[u8])]) -> Result<()> {
    let blobs: BTreeMap<String, &[u8]> = blobs.iter().map(|content| (blob(&sha256(content)), *content)).collect();
    let mut tar = tar::Builder::new(out);
    for directory in ["blobs", "blobs/sha256"] {
        append(&mut tar, directory, tar::EntryType::Directory, 0o755, &[])?;
    }
    let version = ("oci-layout", &br#"{"imageLayoutVersion":"1.0.0"}"#[..]);
    for (path, content) in
        blobs.iter().map(|(path, content)| (path.as_str(), *content)).chain(top.iter().copied()).chain([version])
    {
        append(&mut tar, path, tar::EntryType::Regular, 0o644, content)?;
    }
    tar.finish().context("end the archive")
}

/// Adds a file or directory, with everything that could differ from one build to the next left out.
fn append(
    tar: &mut tar::Builder<impl Write>,
    path: &str,
    kind: tar::EntryType,
    mode: u32,
    content: &[u8],
) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    tar.append_data(&mut header, path, content).with_context(|| format!("pack {path}"))
}

/// The directories above a relative path, from the top.
fn parents(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(at, _)| &path[..at])
}

pub(super) fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn digest(hex: &str) -> String {
    format!("sha256:{hex}")
}

fn blob(hex: &str) -> String {
    format!("blobs/sha256/{hex}")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn archive(order: &[&str]) -> Vec<u8> {
        let mut files = Files::default();
        for path in order {
            files.add(path, 0o755, path.as_bytes().to_vec());
        }
        let layer = Layer::pack(&files).expect("packs");
        let image = Image {
            name: "localhost/weft-x:0.1.0",
            architecture: "arm64",
            layers: &[&layer],
            entrypoint: "/x",
            user: "2102:2102",
            labels: &[("org.opencontainers.image.title", "x")],
        };
        let mut bytes = Vec::new();
        image.archive(&mut bytes).expect("writes");
        bytes
    }

    fn unpack(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        for entry in tar::Archive::new(archive).entries().expect("a tar") {
            let mut entry = entry.expect("an entry");
            let path = entry.path().expect("a path").display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).expect("reads");
            found.insert(path, content);
        }
        found
    }

    #[test]
    fn users_execute_programs_and_read_libraries_alone() {
        let mut files = Files::default();
        files.add_program("/weft-proxy", Path::new("/dev/null")).expect("reads");
        files.add_library("/lib/a.so", Path::new("/dev/null")).expect("reads");
        let layer = Layer::pack(&files).expect("packs");
        let mut archive = tar::Archive::new(layer.content());
        let owned = archive.entries().expect("a tar").map(|entry| {
            let entry = entry.expect("an entry");
            let header = entry.header();
            let path = entry.path().expect("a path").display().to_string();
            (path, header.mode().expect("a mode"), header.uid().expect("a user"), header.gid().expect("a group"))
        });
        let expected = [("lib", 0o755), ("lib/a.so", 0o755), ("weft-proxy", 0o711)];
        assert_eq!(owned.collect::<Vec<_>>(), expected.map(|(path, mode)| (path.to_owned(), mode, 0, 0)));
    }

    #[test]
    fn the_order_of_adding_does_not_matter() {
        assert_eq!(archive(&["/x", "/lib/a/b.so"]), archive(&["/lib/a/b.so", "/x"]));
    }

    #[test]
    fn every_reference_leads_to_a_blob_with_that_digest() {
        let found = unpack(&archive(&["/x", "/lib/a/b.so"]));
        for (path, content) in
            found.iter().filter(|(path, content)| path.starts_with("blobs/sha256/") && !content.is_empty())
        {
            assert_eq!(path, &blob(&sha256(content)));
        }
        let json = |path: &str| serde_json::from_slice::<Value>(&found[path]).expect("json");
        let of = |digest: &Value| digest.as_str().expect("a digest").replace("sha256:", "blobs/sha256/");
        let manifest = json(&of(&json("index.json")["manifests"][0]["digest"]));
        let config = json(&of(&manifest["config"]["digest"]));
        assert_eq!(config["config"]["User"], "2102:2102");
        assert_eq!(config["architecture"], "arm64");
        // Uncompressed, so a layer's digest and its diff id are the same.
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        let docker = json("manifest.json");
        assert_eq!(docker[0]["RepoTags"][0], "localhost/weft-x:0.1.0");
        assert_eq!(docker[0]["Layers"][0], of(&manifest["layers"][0]["digest"]));
        let layer = unpack(&found[docker[0]["Layers"][0].as_str().expect("a path")]);
        assert_eq!(layer.keys().collect::<Vec<_>>(), ["lib", "lib/a", "lib/a/b.so", "x"]);
    }
}
