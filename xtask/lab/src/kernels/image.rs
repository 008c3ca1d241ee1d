//! The initramfs: the agent, its test, `ip`, their libraries, a busybox, the module for veth, and a script that runs
//! them.

use std::{
    collections::BTreeSet,
    fs,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use weft_xtask::command;

use super::packages::{self, Fetched};
use crate::{libraries, processor::Processor};

/// Starts the line with the result of a step: its name and exit code follow.
pub(super) const END: &str = "weft-end";
/// Names of the steps, in their order.
pub(super) const FEATURES: &str = "features";
pub(super) const AGENT: &str = "agent";
pub(super) const DATAPATH: &str = "datapath";

/// The one driver that the test needs and distributions do not build in.
const MODULE: &str = "veth";

/// The programs in the machine.
#[derive(Debug)]
pub(super) struct Programs {
    pub(super) processor: Processor,
    /// The path of the agent that the test uses.
    pub(super) agent: PathBuf,
    pub(super) test: PathBuf,
}

/// Writes the initramfs and returns its path.
///
/// # Errors
/// When a program or module is missing or something cannot be written.
pub(super) fn make(directory: &Path, kernel: &Fetched, programs: &Programs, full: bool) -> Result<PathBuf> {
    let root = directory.join("root");
    let _ = fs::remove_dir_all(directory);
    for path in ["proc", "sys", "dev", "run", "tmp", "busybox", "modules"] {
        fs::create_dir_all(root.join(path)).with_context(|| format!("create {}", root.display()))?;
    }
    let strip = programs.processor.tool("strip");
    for program in [&programs.agent, &programs.test] {
        let inside = within(&root, program)?;
        copy(program, &inside)?;
        command::run(Command::new(&strip).arg(&inside))?;
    }
    if programs.processor.is_native() {
        own_userland(&root, programs)?;
    } else {
        packages::userland(programs.processor, &root)?;
        fs::rename(root.join("usr/bin/busybox"), root.join("busybox/busybox")).context("take busybox")?;
    }
    let modules = modules(&kernel.modules, MODULE)?;
    for (index, module) in modules.iter().enumerate() {
        fs::write(root.join(format!("modules/{index}.ko")), module)?;
    }
    let init = root.join("init");
    fs::write(&init, script(programs, modules.len(), full))?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    archive(&root, &directory.join("initramfs"))
}

/// This machine's own programs and libraries.
fn own_userland(root: &Path, programs: &Programs) -> Result<()> {
    let busybox = command::find("busybox").context("no busybox")?;
    let ip = command::find("ip").context("no ip")?;
    copy(&busybox, &root.join("busybox/busybox"))?;
    copy(&ip, &root.join("bin/ip"))?;
    let mut needed = libraries::of(&[programs.agent.clone(), programs.test.clone(), ip])?;
    // A statically linked one needs none, which ldd reports as an error.
    needed.extend(libraries::of(&[busybox]).unwrap_or_default());
    needed.iter().try_for_each(|library| copy(library, &within(root, library)?))
}

/// The init script. Results go to a serial line to which the kernel does not write.
fn script(programs: &Programs, modules: usize, full: bool) -> String {
    let (agent, test) = (programs.agent.display(), programs.test.display());
    let (_, line) = programs.processor.lines();
    let insmod: String = (0..modules).map(|index| format!("insmod /modules/{index}.ko\n")).collect();
    let datapath = if full { format!("run {DATAPATH} {test} --color never\n") } else { String::new() };
    format!(
        "#!/busybox/busybox sh
/busybox/busybox --install -s /busybox
export PATH=/bin:/busybox HOME=/ WEFT_TEST_PATIENCE_SECONDS=300
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /run
mount -t securityfs securityfs /sys/kernel/security
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpffs /sys/fs/bpf
{insmod}ip link set lo up
exec >/dev/{line} 2>&1
run() {{
    name=$1
    shift
    \"$@\"
    echo \"{END} $name $?\"
}}
serve() {{
    {agent} run --socket /run/weft.sock &
    agent=$!
    until {agent} status --socket /run/weft.sock 2>/dev/null; do
        kill -0 $agent 2>/dev/null || {{ wait $agent; return 1; }}
        sleep 1
    done
    kill $agent
    wait $agent
    {agent} unload
}}
uname -a
run {FEATURES} {agent} features
run {AGENT} serve
{datapath}reboot -f
"
    )
}

/// A path of this machine, inside the initramfs.
fn within(root: &Path, path: &Path) -> Result<PathBuf> {
    Ok(root.join(path.strip_prefix("/").with_context(|| format!("{} is not absolute", path.display()))?))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let parent = to.parent().context("a file has a directory")?;
    fs::create_dir_all(parent)?;
    fs::copy(from, to).with_context(|| format!("copy {} to {}", from.display(), to.display())).map(drop)
}

/// A module and its dependencies, in the order of loading. A built-in module has no file.
fn modules(directory: &Path, name: &str) -> Result<Vec<Vec<u8>>> {
    let mut files = Vec::new();
    collect(&directory.join("kernel"), &mut files)?;
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    load(&files, name, &mut seen, &mut order)?;
    Ok(order)
}

fn load(files: &[PathBuf], name: &str, seen: &mut BTreeSet<String>, order: &mut Vec<Vec<u8>>) -> Result<()> {
    let is_named = |path: &&PathBuf| {
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
        file.split_once(".ko").is_some_and(|(stem, _)| stem.replace('-', "_") == name.replace('-', "_"))
    };
    let Some(path) = files.iter().find(is_named).filter(|_| seen.insert(name.to_owned())) else { return Ok(()) };
    let module = read_module(path)?;
    for dependency in dependencies(&module) {
        load(files, &dependency, seen, order)?;
    }
    order.push(module);
    Ok(())
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() { collect(&path, files)? } else { files.push(path) }
    }
    Ok(())
}

/// A module's bytes, unpacked: not every busybox can load a packed one.
fn read_module(path: &Path) -> Result<Vec<u8>> {
    let program = match path.extension().and_then(|ending| ending.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).with_context(|| format!("read {}", path.display())),
    };
    let output = Command::new(program).arg("-dc").arg(path).output().with_context(|| format!("start {program}"))?;
    if !output.status.success() {
        bail!("{program} cannot unpack {}: {}", path.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// The names in a module's own record `depends=a,b` (section .modinfo, strings ended by zero).
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Packs a directory in the kernel's format (cpio, newc).
fn archive(root: &Path, to: &Path) -> Result<PathBuf> {
    let mut names = vec![PathBuf::from(".")];
    let mut index = 0;
    while let Some(name) = names.get(index).cloned() {
        let path = root.join(&name);
        if path.is_dir() && !path.is_symlink() {
            for entry in fs::read_dir(&path)? {
                names.push(name.join(entry?.file_name()));
            }
        }
        index += 1;
    }
    let mut cpio = Command::new("cpio")
        .args(["--create", "--format=newc", "--null", "--quiet", "--owner=0:0"])
        .current_dir(root)
        .stdin(Stdio::piped())
        .stdout(fs::File::create(to)?)
        .spawn()
        .context("start cpio")?;
    let mut input = cpio.stdin.take().context("cpio reads names")?;
    for name in &names {
        input.write_all(name.as_os_str().as_encoded_bytes())?;
        input.write_all(b"\0")?;
    }
    drop(input);
    if !cpio.wait()?.success() {
        bail!("cpio failed on {}", root.display());
    }
    Ok(to.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_a_module_depends_on() {
        assert_eq!(dependencies(b"\x7fELF\0license=GPL\0depends=a,b-c\0name=x\0"), ["a", "b-c"]);
        assert_eq!(dependencies(b"\x7fELF\0depends=\0name=x\0"), Vec::<String>::new());
        assert_eq!(dependencies(b""), Vec::<String>::new());
    }

    #[test]
    fn an_old_kernel_is_not_given_the_datapath_test() {
        let programs =
            Programs { processor: Processor::Aarch64, agent: "/a/weft-agent".into(), test: "/a/datapath".into() };
        assert!(script(&programs, 1, true).contains("run datapath /a/datapath --color never\n"));
        assert!(!script(&programs, 1, false).contains("/a/datapath"));
        assert!(script(&programs, 2, false).contains("insmod /modules/1.ko\n"));
        assert!(script(&programs, 2, false).contains("exec >/dev/ttyAMA0 2>&1\n"));
    }
}
