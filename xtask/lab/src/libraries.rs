//! The shared libraries of programs, for file systems that have nothing else: images, and other kernels' machines.

use std::{collections::BTreeSet, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, bail};
use weft_xtask::command;

/// The libraries that programs are linked with, directly and indirectly.
///
/// # Errors
/// When a library is missing, and for a program that is linked statically.
pub(crate) fn of(programs: &[PathBuf]) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for program in programs {
        let text = command::output(Command::new("ldd").arg(program))?;
        found.extend(parse_ldd(&text).with_context(|| format!("libraries of {}", program.display()))?);
    }
    Ok(found)
}

/// Lines are `NAME => PATH (ADDRESS)`, `PATH (ADDRESS)` for the loader, and `NAME (ADDRESS)` for libraries that the
/// kernel maps.
fn parse_ldd(text: &str) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if line.contains("not found") {
            bail!("{}", line.trim());
        }
        let target = line.rsplit("=>").next().unwrap_or(line).trim();
        let path = target.split(" (").next().unwrap_or(target);
        if path.starts_with('/') {
            found.insert(PathBuf::from(path));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_taken_from_where_the_loader_finds_them() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
            \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f9d)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f9d)\n";
        let expected = ["/lib/x86_64-linux-gnu/libgcc_s.so.1", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse_ldd(text).expect("all there"), BTreeSet::from(expected));
        assert_eq!(parse_ldd("\tstatically linked\n").expect("none"), BTreeSet::new());
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = parse_ldd("\tlibfoo.so.1 => not found\n").expect_err("missing");
        assert!(error.to_string().contains("libfoo.so.1"), "{error}");
    }
}
