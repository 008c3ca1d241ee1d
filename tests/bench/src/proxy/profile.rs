//! Where a contender's proxies spend their time while a row runs: `perf record` on both processes, and the samples
//! folded by stack and by group.
//!
//! ```text
//! perf record ──samples──> perf script ──text──> folded stacks (a file for a flame graph) ──> groups (a table)
//! ```
//!
//! A sample belongs to the first group that a frame of it names, from the innermost frame outwards: what copies memory
//! or drops a value counts for the code that asked for it. perf and the clock that it samples with are Linux's; HAProxy
//! has no symbols beyond its dynamic ones, so that most of its own code is `other`.

mod group;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Serialize;
use tokio::{
    process::{Child, Command},
    time::timeout,
};

use super::site::Proxies;
use crate::target::number;
use group::Frame;
pub use group::Group;

const PERF: &str = "perf";
/// Samples per second of each thread that runs. No divisor of the clock's usual frequencies, with which it would march
/// in step.
const FREQUENCY: &str = "997";
/// Bytes of the stack that are copied with each sample and unwound later: our programs keep no frame pointers.
const CALL_GRAPH: &str = "dwarf,16384";
/// Time for perf to write what it has.
const ENDS_WITHIN: Duration = Duration::from_secs(60);
/// Time to unwind all samples of a row.
const UNWINDS_WITHIN: Duration = Duration::from_secs(600);
/// Time for perf to find every thread of both processes.
const ATTACHES_WITHIN: Duration = Duration::from_millis(500);

/// Part of the samples of both proxies by group, and the files with the stacks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Profile {
    /// Samples of the client's proxy.
    pub outbound: Shares,
    /// Samples of the server's proxy.
    pub inbound: Shares,
    /// A line for each stack, outermost frame first, and its number of samples, as `flamegraph.pl` and
    /// `inferno-flamegraph` read them.
    pub folded: PathBuf,
}

/// Samples of one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Shares {
    /// Number of samples.
    pub samples: u64,
    /// Samples by group.
    pub groups: BTreeMap<Group, u64>,
}

/// A running `perf record`.
pub(super) struct Recording {
    perf: Child,
    data: PathBuf,
    proxies: Proxies,
}

/// Whether there is a perf that can sample.
///
/// # Errors
/// When perf is not installed or not permitted; the message says which.
pub(super) async fn check() -> anyhow::Result<()> {
    can_sample(PERF).await
}

async fn can_sample(program: &str) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let mut perf = Command::new(program);
    perf.args(["record", "--quiet", "--event", "cpu-clock", "--output"]).arg(directory.path().join("data"));
    let output = perf.args(["--", "true"]).stdin(Stdio::null()).output().await.context(
        "--profile needs perf: install it (Debian: linux-perf, Ubuntu: linux-tools-generic), or leave --profile out",
    )?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "--profile: perf cannot sample here: {}", said.trim());
    Ok(())
}

impl Recording {
    /// Begins to sample both proxies.
    ///
    /// # Errors
    /// perf does not start.
    pub(super) async fn start(proxies: Proxies, data: PathBuf) -> anyhow::Result<Self> {
        let mut command = Command::new(PERF);
        command
            .args(["record", "--quiet", "--event", "cpu-clock", "--freq", FREQUENCY, "--call-graph", CALL_GRAPH])
            .args(["--pid", &format!("{},{}", proxies.outbound, proxies.inbound), "--output"])
            .arg(&data)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let perf = command.spawn().context("start perf record")?;
        tokio::time::sleep(ATTACHES_WITHIN).await;
        Ok(Self { perf, data, proxies })
    }

    /// Ends the recording, writes the stacks to `folded` and counts them by group.
    ///
    /// # Errors
    /// perf failed, or took no sample.
    pub(super) async fn finish(self, folded: PathBuf) -> anyhow::Result<Profile> {
        let Self { perf, data, proxies } = self;
        let pid = perf.id().context("perf record ended by itself")?;
        kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGINT).context("end perf record")?;
        let recorded = timeout(ENDS_WITHIN, perf.wait_with_output()).await.context("perf record does not end")??;
        let mut script = Command::new(PERF);
        script.args(["script", "--no-inline", "--fields", "pid,ip,sym,dso", "--input"]).arg(&data).kill_on_drop(true);
        let unwound = timeout(UNWINDS_WITHIN, script.stdin(Stdio::null()).output());
        let Output { status, stdout, stderr } = unwound.await.context("perf script does not end")??;
        let said = || [&*recorded.stderr, &*stderr].map(String::from_utf8_lossy).concat();
        anyhow::ensure!(status.success(), "perf script: {}", said().trim());
        let text = String::from_utf8_lossy(&stdout);
        let samples = samples(&text);
        anyhow::ensure!(!samples.is_empty(), "perf took no sample: {}", said().trim());
        write_folded(&folded, &samples, proxies)?;
        // Much larger than all else, and of no use without these very programs.
        fs::remove_file(&data).with_context(|| format!("remove {}", data.display()))?;
        let of = |pid: u32| Shares::of(samples.iter().filter(|sample| sample.pid == pid));
        Ok(Profile { outbound: of(proxies.outbound), inbound: of(proxies.inbound), folded })
    }
}

impl Shares {
    fn of<'a>(samples: impl Iterator<Item = &'a Sample>) -> Self {
        let mut shares = Self::default();
        for sample in samples {
            shares.samples += 1;
            *shares.groups.entry(Group::of(&sample.frames)).or_default() += 1;
        }
        shares
    }

    /// The part of the samples that a group has, from 0 to 1.
    fn share(&self, group: Group) -> f64 {
        self.groups.get(&group).copied().unwrap_or_default() as f64 / self.samples.max(1) as f64
    }
}

impl Profile {
    /// By group: microseconds in the outbound and the inbound proxy for each request, and the part of both together.
    pub(super) fn parts(&self, outbound_us: f64, inbound_us: f64) -> Vec<(Group, [f64; 3])> {
        let all = outbound_us + inbound_us;
        let mut parts: Vec<_> = Group::ALL
            .into_iter()
            .map(|group| {
                let (outbound, inbound) =
                    (self.outbound.share(group) * outbound_us, self.inbound.share(group) * inbound_us);
                let part = if all > 0.0 { (outbound + inbound) / all } else { 0.0 };
                (group, [outbound, inbound, part])
            })
            .collect();
        parts.sort_by(|(_, one), (_, other)| other[2].total_cmp(&one[2]));
        parts
    }

    /// The groups as lines of a table.
    pub(super) fn lines(&self, outbound_us: f64, inbound_us: f64) -> Vec<[String; 4]> {
        let line = |(group, [outbound, inbound, part]): (Group, [f64; 3])| {
            [group.label().to_owned(), number(outbound), number(inbound), format!("{:.1}", part * 100.0)]
        };
        self.parts(outbound_us, inbound_us).into_iter().filter(|(_, parts)| parts[2] > 0.0).map(line).collect()
    }
}

/// One sample.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sample {
    pid: u32,
    /// Innermost first.
    frames: Vec<Frame>,
}

/// What `perf script --fields pid,ip,sym,dso` prints: a line with the process, a line for each frame, an empty line.
fn samples(text: &str) -> Vec<Sample> {
    let mut samples: Vec<Sample> = Vec::new();
    let mut open = false;
    for line in text.lines() {
        if line.trim().is_empty() {
            open = false;
            continue;
        }
        if !open {
            let Some(pid) = line.split_whitespace().next().and_then(|pid| pid.parse().ok()) else { continue };
            samples.push(Sample { pid, frames: Vec::new() });
            open = true;
            continue;
        }
        if let (Some(sample), Some(frame)) = (samples.last_mut(), Frame::parse(line)) {
            sample.frames.push(frame);
        }
    }
    samples.retain(|sample| !sample.frames.is_empty());
    samples
}

fn write_folded(path: &Path, samples: &[Sample], proxies: Proxies) -> anyhow::Result<()> {
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for sample in samples {
        let process = if sample.pid == proxies.outbound { "outbound" } else { "inbound" };
        let frames = sample.frames.iter().rev().map(|frame| frame.symbol.replace(';', ":"));
        let stack: Vec<_> = std::iter::once(process.to_owned()).chain(frames).collect();
        *counts.entry(stack.join(";")).or_default() += 1;
    }
    let lines: String = counts.into_iter().map(|(stack, count)| format!("{stack} {count}\n")).collect();
    fs::write(path, lines).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCRIPT: &str = "\
 4711 
\tffffffff81a2b3c4 tcp_sendmsg_locked ([kernel.kallsyms])
\tffffffff81a2b3c5 __x64_sys_writev ([kernel.kallsyms])
\t    7f0000001234 writev+0x10 (/usr/lib/x86_64-linux-gnu/libc.so.6)
\t    55d000001234 _RNvCs1234_7mycrate3foo (/opt/weft-proxy)

 4712 
\t    7f0000001235 __memmove_avx_unaligned_erms (/usr/lib/x86_64-linux-gnu/libc.so.6)
\t    55d000001235 <rustls::record_layer::RecordLayer>::encrypt_outgoing (/opt/weft-proxy)

 4712 
\t    55d000001236 [unknown] (/opt/weft-proxy)

";

    #[test]
    fn samples_are_read_and_belong_to_the_group_of_the_innermost_frame_that_has_one() {
        let samples = samples(SCRIPT);
        assert_eq!(samples.iter().map(|sample| sample.pid).collect::<Vec<_>>(), [4711, 4712, 4712]);
        assert_eq!(samples[0].frames.last().unwrap().symbol, "mycrate::foo");
        let groups: Vec<_> = samples.iter().map(|sample| Group::of(&sample.frames)).collect();
        assert_eq!(groups, [Group::KernelNetwork, Group::Tls, Group::Other]);
    }

    #[test]
    fn stacks_are_folded_from_the_outside_and_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("folded");
        let twice = [samples(SCRIPT), samples(SCRIPT)].concat();
        write_folded(&path, &twice, Proxies { outbound: 4711, inbound: 4712 }).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("outbound;mycrate::foo;writev;__x64_sys_writev;tcp_sendmsg_locked 2\n"), "{text}");
        assert_eq!(text.lines().count(), 3);
    }

    #[test]
    fn parts_are_of_the_cpu_time_of_both_proxies() {
        let shares = |groups: &[(Group, u64)]| Shares {
            samples: groups.iter().map(|(_, count)| count).sum(),
            groups: groups.iter().copied().collect(),
        };
        let profile = Profile {
            outbound: shares(&[(Group::Tls, 1), (Group::KernelNetwork, 3)]),
            inbound: shares(&[(Group::Tls, 5)]),
            folded: PathBuf::new(),
        };
        let parts = profile.parts(20.0, 20.0);
        assert_eq!(parts[0], (Group::Tls, [5.0, 20.0, 0.625]));
        assert_eq!(parts[1], (Group::KernelNetwork, [15.0, 0.0, 0.375]));
        assert_eq!(profile.lines(20.0, 20.0).len(), 2, "groups without samples are left out");
    }

    #[tokio::test]
    async fn without_perf_the_error_names_its_package() {
        let error = can_sample("perf-that-is-not-there").await.unwrap_err().to_string();
        assert!(error.contains("--profile needs perf") && error.contains("linux-perf"), "{error}");
        let error = can_sample("false").await.unwrap_err().to_string();
        assert!(error.contains("cannot sample here"), "{error}");
    }
}
