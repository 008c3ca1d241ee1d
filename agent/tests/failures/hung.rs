//! A descriptor whose close hangs: a file of a FUSE file system whose server never answers FUSE_FLUSH, like a network
//! file system whose server is down.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    os::fd::{AsRawFd as _, IntoRawFd as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use weft_test_kit::{
    pod::{APPLICATION_UID, PROXY_UID},
    world::World,
};

// From the kernel's include/uapi/linux/fuse.h.
const FORGET: u32 = 2;
const OPEN: u32 = 14;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
const HEADER_BYTES: usize = 16;
const INIT_BYTES: usize = 64;
const OPEN_BYTES: usize = 16;
/// The smallest buffer that the kernel accepts for a server's read is 8 KiB, plus the largest write.
const BUFFER_BYTES: usize = 256 * 1024;

/// A mounted file. When it is dropped, a process that hangs in it continues with an error.
struct HungFile {
    path: PathBuf,
    server: Option<JoinHandle<()>>,
    flushed: Arc<AtomicBool>,
}

impl HungFile {
    fn mount(path: PathBuf) -> Self {
        File::create(&path).unwrap();
        let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=100444,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        mount(Some("weft-test"), &path, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
        let flushed = Arc::new(AtomicBool::new(false));
        let server = thread::spawn({
            let flushed = Arc::clone(&flushed);
            move || serve(device, &flushed)
        });
        Self { path, server: Some(server), flushed }
    }

    /// Whether a process has begun to close it.
    fn is_flushed(&self) -> bool {
        self.flushed.load(Ordering::Relaxed)
    }
}

impl Drop for HungFile {
    fn drop(&mut self) {
        // By force: every pending request ends with an error, and so does the server.
        let unmounted = umount2(&self.path, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH);
        let served = self.server.take().map(JoinHandle::join);
        if !thread::panicking() {
            unmounted.unwrap();
            served.unwrap().unwrap();
        }
    }
}

/// Serves until the file system is unmounted.
fn serve(mut device: File, flushed: &AtomicBool) {
    let mut request = vec![0; BUFFER_BYTES];
    while device.read(&mut request).is_ok() {
        let opcode = u32::from_ne_bytes(request[4..8].try_into().unwrap());
        let (error, mut body): (i32, Vec<u8>) = match opcode {
            INIT => (0, vec![0; INIT_BYTES]),
            OPEN => (0, vec![0; OPEN_BYTES]),
            FLUSH => {
                flushed.store(true, Ordering::Relaxed);
                continue;
            }
            FORGET | INTERRUPT | BATCH_FORGET => continue,
            _ => (-libc::ENOSYS, Vec::new()),
        };
        if opcode == INIT {
            // Version 7.31, and the maximum write size.
            for (at, value) in [(0, 7_u32), (4, 31), (20, 4096)] {
                body[at..at + 4].copy_from_slice(&value.to_ne_bytes());
            }
        }
        let length = u32::try_from(HEADER_BYTES + body.len()).unwrap();
        let mut answer = [&length.to_ne_bytes()[..], &error.to_ne_bytes(), &request[8..16]].concat();
        answer.append(&mut body);
        // A request that was interrupted needs no answer.
        let _ = device.write(&answer);
    }
}

/// Runs the commands of this file.
pub(crate) fn follow(words: &[&str]) -> Option<String> {
    let ["open-hung", path] = words else { return None };
    // Not closed by the process that runs the commands, which would hang.
    let _ = File::open(Path::new(path)).unwrap().into_raw_fd();
    Some("ok".into())
}

pub(crate) fn delays_nobody_else(world: &mut World) {
    world.kill_agent();
    world.unload();
    let mut server = world.pod("b", APPLICATION_UID);
    server.ok("serve 8080");
    let path = std::env::temp_dir().join(format!("weft-hung-{}", std::process::id()));
    // Before the file: if this check fails, the file has to go first, for a process that hangs in it does not end.
    let mut proxy = world.pod("b", PROXY_UID);
    let file = HungFile::mount(path.clone());
    // Opened before its listeners, so that the search finds it first.
    proxy.ok(&format!("open-hung {}", path.display()));
    proxy.ok("proxy");
    world.start_agent(&[]);

    // While the first search of b hangs, which lasts until its limit, others are served: c is enrolled before it ends.
    let (refused, is_first) = thread::scope(|scope| {
        let world = &*world;
        let searching = scope.spawn(|| world.enrol(world.request("b")).unwrap_err());
        world.eventually("a search that hangs", |_| file.is_flushed().then_some(()));
        world.enrol(world.request("c")).unwrap();
        let is_first = !searching.is_finished();
        (searching.join().unwrap(), is_first)
    });
    assert!(refused.message().contains("descriptor on which the agent hangs"), "{refused}");
    assert!(is_first, "the enrolment of c waited for b's");
    // The child that hangs keeps its pod's turn, but no other pod's.
    let again = || world.enrol(world.request("b")).unwrap_err();
    assert!(again().message().contains("an earlier search"), "{}", again());
    world.withdraw("c");
    world.enrol(world.request("c")).unwrap();
    let pods = world.status().pods;
    assert!(again().message().contains("an earlier search"), "{}", again());
    let inbound: Vec<_> = pods.iter().map(|pod| (pod.pod.as_ref().unwrap().name.as_str(), pod.inbound)).collect();
    assert_eq!(inbound, [("b", false), ("c", true)]);

    drop(file);
    world.eventually("an enrolment", |world| world.enrol(world.request("b")).ok());
    world.pod("c", PROXY_UID).connect("10.98.0.2:8080").reached(4143);
    assert!(world.pod("b", APPLICATION_UID).say("attest").starts_with("flags=3 "));
    fs::remove_file(path).unwrap();
}
