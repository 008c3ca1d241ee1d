//! `kernels`: tests on other kernels than this machine's, each booted in qemu with the agent and its datapath test.
//!
//! Kernels differ in what their verifiers accept, and a test on one of them proves nothing about another. Kernels come
//! from the packages of Debian and Ubuntu ([`packages`]), go with the programs into an initramfs ([`image`]), and run
//! in an emulator ([`machine`]); only that emulator is installed on this machine. One kernel takes minutes, so `cargo
//! xtask test` leaves this out.

mod image;
mod machine;
pub(crate) mod packages;

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use weft_xtask::{
    command::{self, step},
    ebpf,
    setup::{self, Scope},
    workspace::{self, Workspace},
};

use crate::processor::{Accelerator, Processor, ensure_standard_library};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask kernels                boot every kernel of the list
  cargo xtask kernels 5.15 6.1       only these
  cargo xtask kernels --list         what there is, and what is expected of each
  cargo xtask kernels 6.1 --refresh  look for a newer package of it first
  cargo xtask kernels 6.12-arm64     with programs for aarch64, on an emulated one

On each kernel: `weft-agent features`, then `weft-agent run` and `status` at the root of the cgroup2 tree, then the agent's
whole datapath test (programs verified, attached, replaced in place; redirection of both families and directions).
Where it is degraded it must say so, and on a kernel that is too old it must refuse and say what is missing.
Packages are kept in ~/.cache/weft/kernels (WEFT_CACHE_DIR), logs in the target directory under xtask/kernels.
Not part of `cargo xtask test`.")]
pub(crate) struct Args {
    /// The kernels to boot [default: all]
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,
    /// List the kernels, and stop
    #[arg(long)]
    list: bool,
    /// Fetch the newest package of each kernel, even if one is cached
    #[arg(long)]
    refresh: bool,
    /// Time limit for one kernel, in seconds
    #[arg(long, default_value_t = 1200, value_name = "SECONDS")]
    timeout: u64,
    /// The kind of emulation
    #[arg(long, value_enum, default_value_t = Accelerator::Tcg)]
    accelerator: Accelerator,
}

/// A kernel and its source.
#[derive(Debug)]
struct Kernel {
    /// Its name here.
    name: &'static str,
    processor: Processor,
    /// The emulator's CPU model.
    cpu: &'static str,
    archive: packages::Archive,
    /// The suite in the archive.
    suite: &'static str,
    /// The package that depends on the newest image.
    package: &'static str,
    expected: Expected,
}

/// The expected behaviour of the agent on a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// Everything works.
    Full,
    /// Everything works, but differently because these features are missing, which the agent reports.
    Degraded(&'static [&'static str]),
    /// It refuses to start, and names these features.
    Refused(&'static [&'static str]),
}

const KERNELS: [Kernel; 8] = [
    Kernel {
        name: "5.4",
        processor: Processor::X86_64,
        cpu: "max",
        archive: packages::Archive::Ubuntu,
        suite: "focal-updates",
        package: "linux-image-virtual",
        expected: Expected::Refused(&["links to cgroups", "program sk_lookup", "map ringbuf"]),
    },
    Kernel {
        name: "5.10",
        processor: Processor::X86_64,
        cpu: "max",
        archive: packages::Archive::DebianSecurity,
        suite: "bullseye-security",
        package: "linux-image-cloud-amd64",
        expected: Expected::Degraded(&[
            "SO_NETNS_COOKIE",
            "bpf_get_netns_cookie in sock_ops",
            "bpf_get_netns_cookie in getsockopt",
        ]),
    },
    Kernel {
        name: "5.15",
        processor: Processor::X86_64,
        cpu: "max",
        archive: packages::Archive::Ubuntu,
        suite: "jammy-updates",
        package: "linux-image-virtual",
        expected: Expected::Full,
    },
    Kernel {
        name: "6.1",
        processor: Processor::X86_64,
        cpu: "max",
        archive: packages::Archive::Debian,
        suite: "bookworm",
        package: "linux-image-cloud-amd64",
        expected: Expected::Full,
    },
    Kernel {
        name: "6.8",
        processor: Processor::X86_64,
        cpu: "max",
        archive: packages::Archive::Ubuntu,
        suite: "noble-updates",
        package: "linux-image-virtual",
        expected: Expected::Full,
    },
    Kernel {
        name: "6.12",
        processor: Processor::X86_64,
        // With it, under qemu 7.2, this kernel's allocator hit a double fault at a cmpxchg16b with impossible flags,
        // which looks like a bug of the emulator. Others need the instruction: without it Linux 7.2 denies every
        // redirected connection.
        cpu: "max,-cx16",
        archive: packages::Archive::Debian,
        suite: "trixie",
        package: "linux-image-cloud-amd64",
        expected: Expected::Full,
    },
    Kernel {
        name: "6.12-arm64",
        processor: Processor::Aarch64,
        // Emulating the default method of signing pointers would take most of the time.
        cpu: "max,pauth-impdef=on",
        archive: packages::Archive::Debian,
        suite: "trixie",
        package: "linux-image-cloud-arm64",
        expected: Expected::Full,
    },
    Kernel {
        name: "sid",
        processor: Processor::X86_64,
        cpu: "max",
        archive: packages::Archive::Debian,
        suite: "sid",
        package: "linux-image-cloud-amd64",
        expected: Expected::Full,
    },
];

/// Boots the selected kernels.
///
/// # Errors
/// When something is missing that cannot be installed or fetched, and when a kernel did not behave as expected.
pub(crate) fn run(args: &Args) -> Result<()> {
    let chosen = choose(&args.kernels)?;
    if args.list {
        for kernel in &chosen {
            println!("{:10} {} ({}), {}", kernel.name, kernel.package, kernel.suite, kernel.expected.words());
        }
        return Ok(());
    }
    if !Processor::X86_64.is_native() {
        bail!("kernels are booted on x86_64 machines only, and this one is {}", std::env::consts::ARCH);
    }
    let workspace = Workspace::load()?;
    let toolchain = setup::ensure(Scope::Build)?;
    setup::install_packages(Scope::Kernels)?;
    ebpf::build(&workspace, &toolchain)?;
    let mut built = Vec::new();
    for processor in Processor::ALL {
        if chosen.iter().any(|kernel| kernel.processor == processor) {
            built.push(build(&workspace, processor)?);
        }
    }
    let mut failed = Vec::new();
    let mut rows = Vec::new();
    for kernel in chosen {
        let begin = std::time::Instant::now();
        let programs = built.iter().find(|programs| programs.processor == kernel.processor);
        let outcome = programs
            .context("its programs were not built")
            .and_then(|programs| try_one(&workspace, kernel, programs, args));
        let seconds = begin.elapsed().as_secs();
        rows.push(match outcome {
            Ok(release) => format!("{:10} {release:32} {:8} {seconds:5} s", kernel.name, kernel.expected.words()),
            Err(error) => {
                failed.push(kernel.name);
                format!("{:10} FAILED after {seconds} s: {error:#}", kernel.name)
            }
        });
    }
    for row in rows {
        println!("{row}");
    }
    if !failed.is_empty() {
        bail!("kernels failed: {}", failed.join(", "));
    }
    Ok(())
}

fn choose(names: &[String]) -> Result<Vec<&'static Kernel>> {
    if names.is_empty() {
        return Ok(KERNELS.iter().collect());
    }
    let known = || KERNELS.map(|kernel| kernel.name).join(", ");
    let find = |name: &String| {
        KERNELS
            .iter()
            .find(|kernel| kernel.name == name)
            .with_context(|| format!("no kernel {name}: there are {}", known()))
    };
    names.iter().map(find).collect()
}

/// The agent and its test, as cargo names them.
fn build(workspace: &Workspace, processor: Processor) -> Result<image::Programs> {
    step(&format!("build the agent and its datapath test for {}", processor.name()));
    let mut cargo = command::cargo();
    // With the whole workspace's features, so that nothing is built twice; see `build`.
    cargo
        .current_dir(&workspace.root)
        .args(["test", "--workspace", "--test", "datapath", "--no-run", "--message-format", "json-render-diagnostics"])
        .stderr(std::process::Stdio::inherit());
    if !processor.is_native() {
        setup::install_packages(Scope::KernelsArm64)?;
        let target = processor.target();
        ensure_standard_library(&target)?;
        let linker = format!("CARGO_TARGET_{}_LINKER", target.replace('-', "_").to_uppercase());
        cargo.args(["--target", &target]).env(linker, processor.tool("gcc"));
    }
    let messages = command::output(&mut cargo)?;
    let executable = |name: &str| {
        let named = |message: &Value| message["target"]["name"] == name && message["executable"].is_string();
        let mut messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let found = messages.rfind(named).map(|message| PathBuf::from(workspace::text(&message["executable"])));
        found.with_context(|| format!("cargo named no executable for {name}"))
    };
    Ok(image::Programs { processor, agent: executable("weft-agent")?, test: executable("datapath")? })
}

/// Fetches and boots one kernel and checks its output. Returns its release.
fn try_one(workspace: &Workspace, kernel: &Kernel, programs: &image::Programs, args: &Args) -> Result<String> {
    let fetched = packages::fetch(kernel, args.refresh)?;
    let directory = workspace.target.join("xtask/kernels").join(kernel.name);
    let initramfs = image::make(&directory, &fetched, programs, !matches!(kernel.expected, Expected::Refused(_)))?;
    step(&format!("boot {}", fetched.release));
    let said = machine::boot(&machine::Machine {
        kernel: &fetched.image,
        initramfs: &initramfs,
        directory: &directory,
        processor: kernel.processor,
        cpu: kernel.cpu,
        timeout: Duration::from_secs(args.timeout),
        accelerator: args.accelerator,
    })?;
    judge(&said, kernel.expected).with_context(|| format!("see the logs in {}", directory.display()))?;
    Ok(fetched.release)
}

/// Compares the machine's output with the expected behaviour.
fn judge(said: &str, expected: Expected) -> Result<()> {
    let ended = |step: &str| -> Result<bool> {
        let prefix = format!("{} {step} ", image::END);
        let code = said.lines().find_map(|line| line.trim().strip_prefix(&prefix));
        Ok(code.with_context(|| format!("{step} did not end"))? == "0")
    };
    match expected {
        Expected::Full | Expected::Degraded(_) => {
            for step in [image::FEATURES, image::AGENT, image::DATAPATH] {
                if !ended(step)? {
                    bail!("{step} failed");
                }
            }
            // A test program that ran no test also succeeds.
            if !said.contains("test result: ok.") {
                bail!("{} reported no result", image::DATAPATH);
            }
            let degradations: Vec<&str> = said.lines().filter(|line| line.contains("degraded: ")).collect();
            let Expected::Degraded(features) = expected else {
                return degradations.first().map_or(Ok(()), |line| bail!("it is degraded: {line}"));
            };
            for feature in features {
                if !degradations.iter().any(|line| line.contains(feature)) {
                    bail!("the agent did not say what the lack of {feature} means");
                }
            }
        }
        Expected::Refused(features) => {
            for step in [image::FEATURES, image::AGENT] {
                if ended(step)? {
                    bail!("{step} found nothing missing");
                }
            }
            let refusal = said.lines().find(|line| line.contains("lacks what redirection needs"));
            let refusal = refusal.context("the agent did not say what is missing")?;
            for feature in features {
                if !refusal.contains(feature) {
                    bail!("the agent did not say that {feature} is missing, but: {refusal}");
                }
            }
        }
    }
    Ok(())
}

impl Expected {
    fn words(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Degraded(_) => "degraded",
            Self::Refused(_) => "refused",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "weft-end features 0\nweft-end agent 0\ntest result: ok. 20 passed\nweft-end datapath 0\n";
    const OLD: Expected = Expected::Refused(&["SO_NETNS_COOKIE"]);

    #[test]
    fn a_kernel_passes_when_every_step_did() {
        judge(GOOD, Expected::Full).expect("all is well");
        let cases = [
            (GOOD.replace("weft-end agent 0", "weft-end agent 1"), "agent failed"),
            (GOOD.replace("weft-end datapath 0", ""), "datapath did not end"),
            (GOOD.replace("test result: ok. 20 passed", ""), "no result"),
        ];
        for (said, expected) in cases {
            let error = judge(&said, Expected::Full).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_degraded_kernel_says_so_and_no_other_is() {
        let degraded = Expected::Degraded(&["SO_NETNS_COOKIE"]);
        let said = format!("{GOOD}WARN the host lacks a feature feature=\"SO_NETNS_COOKIE\" without=\"degraded: x\"\n");
        judge(&said, degraded).expect("all is well, in its way");
        assert!(judge(GOOD, degraded).is_err(), "it said nothing of it");
        assert!(judge(&said, Expected::Full).is_err(), "it should have everything");
        assert!(judge(&said.replace("weft-end datapath 0", "weft-end datapath 1"), degraded).is_err());
    }

    #[test]
    fn an_old_kernel_passes_when_the_agent_says_why_it_refuses() {
        let said = "weft-end features 1\nweft-agent: Linux 5.10 lacks what redirection needs: SO_NETNS_COOKIE for x\n\
                    weft-end agent 1\n";
        judge(said, OLD).expect("refused with its reason");
        assert!(judge(GOOD, OLD).is_err(), "it should have refused");
        assert!(judge(&said.replace("SO_NETNS_COOKIE", "BTF"), OLD).is_err(), "the reason is another one");
        assert!(judge(&said.replace("lacks what", "?"), OLD).is_err(), "no reason");
    }

    #[test]
    fn unknown_kernels_are_refused_with_those_that_there_are() {
        let error = choose(&["4.19".to_owned()]).expect_err("there is none").to_string();
        assert!(error.contains("5.15, 6.1"), "{error}");
        assert_eq!(choose(&[]).expect("all").len(), KERNELS.len());
    }
}
