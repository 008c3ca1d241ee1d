//! The embedded kernel programs: loads them over pinned maps, attaches them by links. Of pods, it knows only the cookie
//! for which a stub is made.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    sync::{Arc, OnceLock},
};

use aya::{
    Ebpf, EbpfError, EbpfLoader,
    programs::{CgroupSock, CgroupSockAddr, CgroupSockopt, Program, ProgramError, ProgramFd, SkLookup, SockOps},
};
use weft_ebpf_abi::{
    map,
    socket::{FLOWS_PER_CPU, MIN_FLOWS},
};
use weft_runtime::error::chain;

use crate::{
    cgroup,
    datapath::{
        bpf::{AttachType, Link},
        cookies::{CookieSource, Cookies, Namespaces},
        pins::{Pins, PinsError},
        steering::{Spares, Steering, SteeringError},
    },
};

/// The object that `cargo xtask ebpf` built.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/weft-ebpf"));
/// Identifies the build of the object.
const DIGEST: &str = env!("WEFT_EBPF_DIGEST");

/// The program that the stubs call which are attached to pods' network namespaces.
const SK_LOOKUP: &str = "weft_sk_lookup";
/// Bytes of the ring buffer of debug logs, which is there without them, too: some 200 lines. aya's own size is 128 KiB.
const LOG_BYTES: u32 = 32 * 1024;
/// The processors that this node may have, such as `0-7`.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// The digest's place while programs are being replaced.
const UNFINISHED: &str = "unfinished";

/// A program that is attached to the cgroup: its name in the object, its pin's name, and the hook.
struct CgroupProgram {
    name: &'static str,
    pin: &'static str,
    hook: AttachType,
}

/// Stores the namespace's cookie in sockets; before the others, which read it.
const SOCK_CREATE: CgroupProgram =
    CgroupProgram { name: "weft_sock_create", pin: "sock_create", hook: AttachType::SockCreate };

/// In the order of attachment and of replacement: programs that answer for redirected connections come before those
/// that hand them over, and these before those that redirect.
const CGROUP_PROGRAMS: [CgroupProgram; 8] = [
    CgroupProgram { name: "weft_post_bind4", pin: "post_bind4", hook: AttachType::PostBind4 },
    CgroupProgram { name: "weft_post_bind6", pin: "post_bind6", hook: AttachType::PostBind6 },
    CgroupProgram { name: "weft_getsockopt", pin: "getsockopt", hook: AttachType::GetSockopt },
    CgroupProgram { name: "weft_sock_ops", pin: "sock_ops", hook: AttachType::SockOps },
    CgroupProgram { name: "weft_getpeername4", pin: "getpeername4", hook: AttachType::GetPeerName4 },
    CgroupProgram { name: "weft_getpeername6", pin: "getpeername6", hook: AttachType::GetPeerName6 },
    CgroupProgram { name: "weft_connect4", pin: "connect4", hook: AttachType::Connect4 },
    CgroupProgram { name: "weft_connect6", pin: "connect6", hook: AttachType::Connect6 },
];

/// The pins of those that redirect, in all layouts.
pub(crate) const REDIRECTING: [&str; 2] = ["connect4", "connect6"];

/// Why programs could not be put in force.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProgramsError {
    #[error("cannot read how many processors this node may have from {POSSIBLE}")]
    Processors(#[source] io::Error),
    #[error("cannot load the kernel programs")]
    Load(#[source] Box<EbpfError>),
    #[error("the kernel refused program {name}: {reason}")]
    Verify { name: &'static str, reason: String },
    #[error("the embedded object has no program {name}: rebuild it with `cargo xtask ebpf`")]
    Missing { name: &'static str },
    #[error(transparent)]
    Steering(#[from] SteeringError),
    #[error("cannot attach {name}")]
    Attach { name: &'static str, source: io::Error },
    #[error("cannot detach {name}")]
    Detach { name: &'static str, source: io::Error },
    #[error("cannot pin {path}")]
    Pin { path: String, source: io::Error },
    #[error("the programs pinned in {pin_dir} are attached to another cgroup: run `weft-agent unload` first")]
    OtherCgroup { pin_dir: String },
    #[error("cannot learn the cookies of network namespaces")]
    Cookies(#[source] io::Error),
    #[error(transparent)]
    Pins(#[from] PinsError),
}

/// Settings of the programs that are fixed at start.
#[derive(Debug)]
pub(crate) struct Programs {
    pins: Pins,
    debug_log: bool,
    cookies: CookieSource,
    steering: OnceLock<Arc<Steering>>,
    spares: Option<Spares>,
}

impl Programs {
    pub(crate) fn new(pins: Pins, debug_log: bool, cookies: CookieSource) -> Self {
        Self { pins, debug_log, cookies, steering: OnceLock::new(), spares: None }
    }

    /// Digest of the attached programs: an agent with the same digest need not replace anything.
    pub(crate) fn digest(&self) -> String {
        let debug = if self.debug_log { "+debug" } else { "" };
        let cookies = if self.cookies == CookieSource::Sockets { "+cookies" } else { "" };
        format!("{DIGEST}{debug}{cookies}")
    }

    /// Parses the object, and creates the maps or opens their pins. The programs are not loaded yet.
    pub(crate) fn open(&self) -> Result<Ebpf, ProgramsError> {
        let (level, cookies_in_sockets) = (self.log_level(), u8::from(self.cookies == CookieSource::Sockets));
        let processors = processors()?;
        let mut loader = EbpfLoader::new();
        for name in map::ALL {
            loader.map_pin_path(name, self.pins.map(name));
        }
        loader
            .map_max_entries(map::FLOWS, processors.saturating_mul(FLOWS_PER_CPU).max(MIN_FLOWS))
            .map_max_entries(map::LOGS, LOG_BYTES)
            .map_max_entries(map::LOOKUPS, processors)
            .override_global(aya_log::LEVEL, &level, true)
            .override_global("COOKIES_IN_SOCKETS", &cookies_in_sockets, true)
            .load(OBJECT)
            .map_err(|error| ProgramsError::Load(Box::new(error)))
    }

    /// The log level is a constant to the verifier, which removes the code of a level that is off.
    fn log_level(&self) -> u8 {
        if self.debug_log { aya_log::Level::Trace as u8 } else { 0 }
    }

    /// The source of the pods' stubs. The maps are pinned by now.
    fn steering(&self) -> Result<&Arc<Steering>, ProgramsError> {
        if let Some(steering) = self.steering.get() {
            return Ok(steering);
        }
        let steering = Steering::open(&self.pins)?;
        Ok(self.steering.get_or_init(|| Arc::new(steering)))
    }

    /// Loads pods' stubs in advance from now on, so that no enrolment waits for one.
    pub(crate) fn keep_spares(&mut self) -> Result<(), ProgramsError> {
        let steering = Arc::clone(self.steering()?);
        let failed = |source| ProgramsError::Attach { name: SK_LOOKUP, source };
        self.spares = Some(Spares::keep(steering).map_err(failed)?);
        Ok(())
    }

    /// A pod's stub.
    fn stub(&self, netns_cookie: u64) -> Result<OwnedFd, ProgramsError> {
        let spare = self.spares.as_ref().and_then(Spares::take);
        let spare = match spare {
            Some(spare) => spare,
            None => self.steering()?.spare()?,
        };
        Ok(spare.assign(netns_cookie)?)
    }

    /// Puts the cgroup programs in force: attaches missing ones, replaces those of another build in place. Changes
    /// nothing unless the kernel accepts every program, including the pods' program.
    ///
    /// Returns whether anything changed. If so, the caller replaces the pods' programs too and then records the digest.
    /// Until that is done, the next agent of any build replaces all of them again.
    pub(crate) fn attach(&self, ebpf: &mut Ebpf, cgroup: &File) -> Result<bool, ProgramsError> {
        let current = self.pins.programs()?.is_some_and(|digest| digest == self.digest());
        let cgroup_id =
            cgroup.metadata().map_err(|source| ProgramsError::Attach { name: CGROUP_PROGRAMS[0].name, source })?.ino();
        let mut changes = Vec::new();
        let sock_create = (self.cookies == CookieSource::Sockets).then_some(SOCK_CREATE);
        for program in sock_create.into_iter().chain(CGROUP_PROGRAMS) {
            match self.attached(&program, cgroup_id)? {
                Some(_) if current => {}
                link => {
                    let verified = load(ebpf, program.name)?;
                    changes.push((program, verified, link));
                }
            }
        }
        if !current {
            let steering = load(ebpf, SK_LOOKUP)?;
            self.pins.set_programs(UNFINISHED)?;
            Steering::share(&self.pins, &steering)?;
        }
        let changed = !changes.is_empty() || !current;
        for (CgroupProgram { name, pin, hook }, program, link) in changes {
            let failed = |source| ProgramsError::Attach { name, source };
            if let Some(link) = link {
                link.update(program.as_fd()).map_err(failed)?;
            } else {
                let path = self.pins.link(pin);
                let link = Link::create(program.as_fd(), cgroup.as_fd(), hook).map_err(failed)?;
                link.pin(&path).map_err(|source| ProgramsError::Pin { path: path.display().to_string(), source })?;
            }
        }
        Ok(changed)
    }

    /// The way to get cookies of namespaces. This process's cgroup need not be below the one to which the programs are
    /// attached: if not, its own cgroup also has the program that fills `namespaces`, while this process runs.
    pub(crate) fn cookies(&self, ebpf: &mut Ebpf, namespaces: Option<Namespaces>) -> Result<Cookies, ProgramsError> {
        let Some(namespaces) = namespaces else { return Ok(Cookies::Kernel) };
        let program = load(ebpf, SOCK_CREATE.name)?;
        let attach = || Link::create(program.as_fd(), File::open(cgroup::own()?)?.as_fd(), SOCK_CREATE.hook);
        Cookies::in_sockets(namespaces, attach).map_err(ProgramsError::Cookies)
    }

    /// The link of a program that is attached to the cgroup.
    fn attached(&self, program: &CgroupProgram, cgroup_id: u64) -> Result<Option<Link>, ProgramsError> {
        let path = self.pins.link(program.pin);
        let failed = |source| ProgramsError::Attach { name: program.name, source };
        let Some(link) = Link::open(&path).map_err(failed)? else { return Ok(None) };
        match link.target(program.hook).map_err(failed)? {
            id if id == cgroup_id => Ok(Some(link)),
            // The cgroup was removed; the link keeps nothing alive.
            0 => {
                std::fs::remove_file(&path).map_err(failed)?;
                Ok(None)
            }
            _ => Err(ProgramsError::OtherCgroup { pin_dir: self.pins.root().display().to_string() }),
        }
    }

    /// Steers a pod's inbound connections, which are not steered yet. Returns its link.
    pub(crate) fn attach_pod(&self, netns_cookie: u64, netns: &File) -> Result<Link, ProgramsError> {
        let path = self.pins.pod_link(netns_cookie);
        let failed = |source| ProgramsError::Attach { name: SK_LOOKUP, source };
        let program = self.stub(netns_cookie)?;
        let link = Link::create(program.as_fd(), netns.as_fd(), AttachType::SkLookup).map_err(failed)?;
        link.pin(&path).map_err(|source| ProgramsError::Pin { path: path.display().to_string(), source })?;
        Ok(link)
    }

    /// Replaces a pod's program by this build's stub.
    pub(crate) fn update_pod(&self, netns_cookie: u64) -> Result<(), ProgramsError> {
        let failed = |source| ProgramsError::Attach { name: SK_LOOKUP, source };
        if let Some(link) = Link::open(&self.pins.pod_link(netns_cookie)).map_err(failed)? {
            let program = self.stub(netns_cookie)?;
            link.update(program.as_fd()).map_err(failed)?;
        }
        Ok(())
    }

    /// Stops steering a pod's inbound connections and removes its pins.
    pub(crate) fn detach_pod(&self, netns_cookie: u64) -> Result<(), ProgramsError> {
        detach(&self.pins.pod_link(netns_cookie), SK_LOOKUP)?;
        Ok(self.pins.remove_pod(netns_cookie)?)
    }

    /// Whether a pod's network namespace is gone, according to its link; `None` if it has no link.
    pub(crate) fn is_gone(&self, netns_cookie: u64) -> Result<Option<bool>, ProgramsError> {
        let failed = |source| ProgramsError::Attach { name: SK_LOOKUP, source };
        let link = Link::open(&self.pins.pod_link(netns_cookie)).map_err(failed)?;
        let target = link.map(|link| link.target(AttachType::SkLookup)).transpose().map_err(failed)?;
        Ok(target.map(|target| target == 0))
    }
}

/// The greatest number of a processor that this node may have, and one more: numbers may have gaps.
fn processors() -> Result<u32, ProgramsError> {
    let possible = std::fs::read_to_string(POSSIBLE).map_err(ProgramsError::Processors)?;
    beyond(&possible).ok_or_else(|| ProgramsError::Processors(io::ErrorKind::InvalidData.into()))
}

/// The number after the last one of a list of ranges.
fn beyond(ranges: &str) -> Option<u32> {
    ranges.trim().rsplit(['-', ',']).next()?.parse::<u32>().ok()?.checked_add(1)
}

/// Detaches the programs that redirect. Those that answer for redirected connections stay: a proxy may not have asked
/// about the last ones yet. True if there were pods.
pub(crate) fn stop(pins: &Pins) -> Result<bool, ProgramsError> {
    if !pins.exists()? {
        return Ok(false);
    }
    for program in CGROUP_PROGRAMS.iter().filter(|program| REDIRECTING.contains(&program.pin)) {
        detach(&pins.link(program.pin), program.name)?;
    }
    let pods = pins.pods()?;
    for (cookie, _) in &pods {
        detach(&pins.pod_link(*cookie), SK_LOOKUP)?;
    }
    Ok(!pods.is_empty())
}

/// Detaches and removes everything: programs that redirect first, programs that answer for redirected connections last.
/// Needs no agent and no programs. True if there was anything to remove.
pub(crate) fn unload(pins: &Pins) -> Result<bool, ProgramsError> {
    if !pins.exists()? {
        return Ok(false);
    }
    stop(pins)?;
    for program in CGROUP_PROGRAMS.iter().rev().chain([&SOCK_CREATE]) {
        detach(&pins.link(program.pin), program.name)?;
    }
    pins.remove_all()?;
    Ok(true)
}

fn detach(pin: &Path, name: &'static str) -> Result<(), ProgramsError> {
    let failed = |source| ProgramsError::Detach { name, source };
    Link::open(pin).map_err(failed)?.map_or(Ok(()), |link| link.detach()).map_err(failed)
}

/// Loads a program into the kernel's verifier, unless that is done.
fn load(ebpf: &mut Ebpf, name: &'static str) -> Result<ProgramFd, ProgramsError> {
    let program = ebpf.program_mut(name).ok_or(ProgramsError::Missing { name })?;
    if let Some(verified) = program.fd().ok().and_then(|program| program.try_clone().ok()) {
        return Ok(verified);
    }
    let verified = match program {
        Program::CgroupSockAddr(program) => CgroupSockAddr::load(program),
        Program::CgroupSock(program) => CgroupSock::load(program),
        Program::CgroupSockopt(program) => CgroupSockopt::load(program),
        Program::SockOps(program) => SockOps::load(program),
        Program::SkLookup(program) => SkLookup::load(program),
        _ => return Err(ProgramsError::Missing { name }),
    };
    verified
        .and_then(|()| program.fd()?.try_clone().map_err(ProgramError::IOError))
        .map_err(|error| ProgramsError::Verify { name, reason: reason(name, &error) })
}

/// The reason for the refusal of a program, on one line: the kernel's error and the last line of the verifier. The
/// verifier's log goes to the agent's log.
fn reason(name: &str, error: &ProgramError) -> String {
    let ProgramError::LoadError { io_error, verifier_log } = error else { return chain(error) };
    let log = verifier_log.to_string();
    tracing::debug!(program = name, log, "the verifier's log");
    match last_word(&log) {
        Some(word) => format!("{io_error}; the verifier says: {word}"),
        None => io_error.to_string(),
    }
}

/// The last line of a verifier's log that is not a statistic.
fn last_word(log: &str) -> Option<&str> {
    const STATISTICS: [&str; 3] = ["processed ", "verification time ", "stack depth "];
    let lines = log.lines().rev().map(str::trim);
    lines.into_iter().find(|line| !line.is_empty() && !STATISTICS.iter().any(|head| line.starts_with(head)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_up_to_the_last_one() {
        assert_eq!(["0\n", "0-7\n", "0-3,8-11\n", "", "some\n"].map(beyond), [Some(1), Some(8), Some(12), None, None]);
    }

    #[test]
    fn the_verifiers_last_word_is_no_statistic() {
        let log = "0: (85) call bpf_bind#64\n; return 1\nunknown opcode ff\nverification time 12 usec\nstack depth 8\n\
                   processed 3 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0\n\n";
        assert_eq!(last_word(log), Some("unknown opcode ff"));
        assert_eq!(last_word("processed 0 insns\n"), None);
        assert_eq!(last_word(""), None);
    }
}
