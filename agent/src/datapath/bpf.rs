//! The bpf(2) calls that aya 0.14 does not offer for every program type: links that can be pinned, reopened, queried
//! for their target, and given another program without a gap.
//!
//! Owns all `unsafe` of the agent for bpf(2). Refuses to know programs, pods and the meaning of paths.
//! Structures are the kernel's (include/uapi/linux/bpf.h); links need Linux 5.7, netns links 5.9.

#![expect(unsafe_code, reason = "bpf(2) calls that the loader has no function for")]

use std::{
    ffi::{CStr, CString},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::bpf_insn;
use tokio::io::{Interest, unix::AsyncFd};

const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_MAP_FREEZE: libc::c_long = 22;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_UPDATE: libc::c_long = 29;
const BPF_LINK_DETACH: libc::c_long = 34;

/// Attach point of a program in the kernel (`enum bpf_attach_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum AttachType {
    SockCreate = 2,
    SockOps = 3,
    Connect4 = 10,
    Connect6 = 11,
    PostBind4 = 12,
    PostBind6 = 13,
    GetSockopt = 21,
    GetPeerName4 = 29,
    GetPeerName6 = 30,
    SkLookup = 36,
}

impl AttachType {
    /// Type of programs that it accepts (`enum bpf_prog_type`).
    fn program_type(self) -> u32 {
        match self {
            Self::SockCreate | Self::PostBind4 | Self::PostBind6 => 9,
            Self::SockOps => 13,
            Self::Connect4 | Self::Connect6 | Self::GetPeerName4 | Self::GetPeerName6 => 18,
            Self::GetSockopt => 25,
            Self::SkLookup => 30,
        }
    }
}

/// A map, program or link. It is removed once it has no descriptor and no pin.
#[derive(Debug)]
pub(crate) struct Object(OwnedFd);

/// A program's attachment. Dropping it detaches the program unless it is pinned.
#[derive(Debug)]
pub(crate) struct Link(Object);

#[repr(C)]
#[derive(Default)]
struct ObjectAttr {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct InfoAttr {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

#[repr(C)]
#[derive(Default)]
struct LinkCreateAttr {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkUpdateAttr {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkDetachAttr {
    link_fd: u32,
}

#[repr(C)]
#[derive(Default)]
struct MapCreateAttr {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct UpdateAttr {
    map_fd: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct FreezeAttr {
    map_fd: u32,
}

/// The first part of the union's member for loading programs, as of Linux 4.17; the kernel treats the rest as zero.
#[repr(C)]
#[derive(Default)]
struct ProgLoadAttr {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// The first part of `struct bpf_link_info`: the union's first eight bytes are the cgroup's id or, in their lower
/// half, the network namespace's inode.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    prog_id: u32,
    pad: u32,
    target: u64,
    attach_type: u32,
    rest: [u32; 9],
}

/// Lets an async task wait until the owner of a descriptor, of a map or another object, has records.
pub(crate) fn readable<T: AsFd + AsRawFd>(owner: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: aya's ring buffers and loggers, and `OwnedFd`, own their descriptor, name the same one always, and live
    // as long as the registration, which owns them.
    unsafe { AsyncFd::register_with_interest(owner, Interest::READABLE) }.map_err(io::Error::from)
}

fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<i32> {
    // SAFETY: `attr` is the structure of this command, alive and of the given size; pointers in it are to memory that
    // the callers below keep alive over the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::try_from(result).unwrap_or_default()) }
}

fn bpf_fd<T>(command: libc::c_long, attr: &mut T) -> io::Result<OwnedFd> {
    let fd = bpf(command, attr)?;
    // SAFETY: the command returned a new file descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn raw(fd: BorrowedFd<'_>) -> u32 {
    // File descriptors are never negative.
    fd.as_raw_fd().cast_unsigned()
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from)
}

/// An instruction (`struct bpf_insn`).
pub(crate) fn instruction(code: u8, to: u8, from: u8, off: i16, imm: i32) -> bpf_insn {
    bpf_insn { code, _bitfield_align_1: [], _bitfield_1: bpf_insn::new_bitfield_1(to, from), off, imm }
}

/// Loads what belongs to a map into a register; `kind` says what (`BPF_PSEUDO_*`).
fn load_of(to: u8, kind: u8, map: BorrowedFd<'_>) -> [bpf_insn; 2] {
    const LOAD: u8 = 0x18;
    [instruction(LOAD, to, kind, 0, map.as_raw_fd()), instruction(0, 0, 0, 0, 0)]
}

/// Loads a map into a register.
pub(crate) fn load_map(to: u8, map: BorrowedFd<'_>) -> [bpf_insn; 2] {
    const BPF_PSEUDO_MAP_FD: u8 = 1;
    load_of(to, BPF_PSEUDO_MAP_FD, map)
}

/// Loads the address of an array's first value into a register. Linux 5.2.
pub(crate) fn load_value(to: u8, map: BorrowedFd<'_>) -> [bpf_insn; 2] {
    const BPF_PSEUDO_MAP_VALUE: u8 = 2;
    load_of(to, BPF_PSEUDO_MAP_VALUE, map)
}

/// Makes a map of one number, which programs cannot write.
///
/// # Errors
/// The kernel's own.
pub(crate) fn create_constant() -> io::Result<OwnedFd> {
    const BPF_MAP_TYPE_ARRAY: u32 = 2;
    const BPF_F_RDONLY_PROG: u32 = 1 << 7;
    let mut attr = MapCreateAttr {
        map_type: BPF_MAP_TYPE_ARRAY,
        key_size: 4,
        value_size: 8,
        max_entries: 1,
        map_flags: BPF_F_RDONLY_PROG,
    };
    bpf_fd(BPF_MAP_CREATE, &mut attr)
}

/// Gives such a map its number, for ever.
///
/// # Errors
/// The kernel's own.
pub(crate) fn set_constant(map: BorrowedFd<'_>, number: u64) -> io::Result<()> {
    let key = 0_u32;
    let mut attr = UpdateAttr {
        map_fd: raw(map),
        key: (&raw const key) as u64,
        value: (&raw const number) as u64,
        ..UpdateAttr::default()
    };
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr)?;
    bpf(BPF_MAP_FREEZE, &mut FreezeAttr { map_fd: raw(map) }).map(drop)
}

/// Has the kernel verify an sk_lookup program, without a log.
pub(crate) fn load_sk_lookup(name: &str, instructions: &[bpf_insn], license: &CStr) -> io::Result<OwnedFd> {
    let mut prog_name = [0; 16];
    // The last byte stays zero.
    prog_name.iter_mut().take(15).zip(name.bytes()).for_each(|(to, from)| *to = from);
    let mut attr = ProgLoadAttr {
        prog_type: AttachType::SkLookup.program_type(),
        insn_cnt: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        insns: instructions.as_ptr() as u64,
        license: license.as_ptr() as u64,
        prog_name,
        expected_attach_type: AttachType::SkLookup as u32,
        ..ProgLoadAttr::default()
    };
    bpf_fd(BPF_PROG_LOAD, &mut attr)
}

/// Loads a program that lets everything pass, to detect whether the kernel has a hook.
pub(crate) fn load_trivial(hook: AttachType) -> io::Result<OwnedFd> {
    // r0 = 1; exit. In all hooks used here, 1 lets the call pass.
    let program = [instruction(0xb7, 0, 0, 0, 1), instruction(0x95, 0, 0, 0, 0)];
    let license = c"GPL";
    let mut attr = ProgLoadAttr {
        prog_type: hook.program_type(),
        insn_cnt: 2,
        insns: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        // sock_ops has one hook, which older kernels expect to be 0.
        expected_attach_type: if hook == AttachType::SockOps { 0 } else { hook as u32 },
        ..ProgLoadAttr::default()
    };
    bpf_fd(BPF_PROG_LOAD, &mut attr)
}

impl AsFd for Object {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Object {
    /// Opens a pinned object; `None` if there is no such pin.
    pub(crate) fn open(pin: &Path) -> io::Result<Option<Self>> {
        let path = c_path(pin)?;
        let mut attr = ObjectAttr { pathname: path.as_ptr() as u64, ..ObjectAttr::default() };
        match bpf_fd(BPF_OBJ_GET, &mut attr) {
            Ok(fd) => Ok(Some(Self(fd))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Pins it: the pin keeps it alive. There may be several.
    pub(crate) fn pin(&self, pin: &Path) -> io::Result<()> {
        let path = c_path(pin)?;
        let mut attr = ObjectAttr { pathname: path.as_ptr() as u64, bpf_fd: raw(self.0.as_fd()), file_flags: 0 };
        bpf(BPF_OBJ_PIN, &mut attr).map(drop)
    }
}

impl Link {
    /// Attaches a program to a cgroup or a network namespace.
    pub(crate) fn create(program: BorrowedFd<'_>, target: BorrowedFd<'_>, attach_type: AttachType) -> io::Result<Self> {
        let mut attr =
            LinkCreateAttr { prog_fd: raw(program), target_fd: raw(target), attach_type: attach_type as u32, flags: 0 };
        bpf_fd(BPF_LINK_CREATE, &mut attr).map(|fd| Self(Object(fd)))
    }

    /// Opens a pinned link; `None` if there is no such pin.
    pub(crate) fn open(pin: &Path) -> io::Result<Option<Self>> {
        Ok(Object::open(pin)?.map(Self))
    }

    /// Pins the link: the pin keeps the program attached.
    pub(crate) fn pin(&self, pin: &Path) -> io::Result<()> {
        self.0.pin(pin)
    }

    /// Replaces the attached program atomically.
    pub(crate) fn update(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        let mut attr =
            LinkUpdateAttr { link_fd: raw(self.0.as_fd()), new_prog_fd: raw(program), ..LinkUpdateAttr::default() };
        bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
    }

    /// Detaches the program at once. Closing the last reference and removing the pin would also do it, but later. A
    /// link without a target is not an error. Linux 5.9.
    pub(crate) fn detach(&self) -> io::Result<()> {
        let mut attr = LinkDetachAttr { link_fd: raw(self.0.as_fd()) };
        match bpf(BPF_LINK_DETACH, &mut attr) {
            Err(error) if error.raw_os_error() != Some(libc::ENOLINK) => Err(error),
            _ => Ok(()),
        }
    }

    /// The target of the link: a cgroup's id (its inode number) or a network namespace's inode number; 0 if it is
    /// gone.
    pub(crate) fn target(&self, attach_type: AttachType) -> io::Result<u64> {
        let mut info = LinkInfo::default();
        let mut attr = InfoAttr {
            bpf_fd: raw(self.0.as_fd()),
            info_len: u32::try_from(size_of::<LinkInfo>()).unwrap_or_default(),
            info: (&raw mut info) as u64,
        };
        bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
        Ok(if attach_type == AttachType::SkLookup { info.target & u64::from(u32::MAX) } else { info.target })
    }
}
