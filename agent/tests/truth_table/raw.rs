//! The system calls for which no crate in the tree has a safe function: socket options of any length, io_uring, a
//! signal that interrupts, and a short BPF program. Owns all `unsafe` of the truth table, and refuses to know its
//! purpose.

#![expect(unsafe_code, reason = "system calls of kinds of sockets that no safe crate offers")]

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use io_uring::{IoUring, opcode, types};
use nix::errno::Errno;
use socket2::{SockAddr, Socket};

/// Reads a socket option into a buffer of this size; returns the bytes that the kernel says it wrote.
pub(crate) fn option(socket: &impl AsRawFd, level: i32, name: i32, room: usize) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0u8; room];
    let mut length = libc::socklen_t::try_from(room).unwrap();
    // SAFETY: the buffer has `room` bytes, and both outlive the call.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, bytes.as_mut_ptr().cast(), &raw mut length) };
    Errno::result(result)?;
    bytes.truncate(length as usize);
    Ok(bytes)
}

/// Sets an option with an integer value.
pub(crate) fn set_option(socket: &impl AsRawFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    set_bytes(socket, level, name, &value.to_ne_bytes())
}

/// Sets an option of any length.
pub(crate) fn set_bytes(socket: &impl AsRawFd, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    let length = libc::socklen_t::try_from(value.len()).unwrap();
    // SAFETY: the value outlives the call and has this length.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), length) };
    Ok(Errno::result(result).map(drop)?)
}

/// Connects with a submission queue entry in place of connect(2).
pub(crate) fn connect_by_ring(socket: &Socket, target: &SockAddr) -> io::Result<()> {
    let mut ring = IoUring::new(2)?;
    let entry = opcode::Connect::new(types::Fd(socket.as_raw_fd()), target.as_ptr().cast(), target.len()).build();
    // SAFETY: the address outlives the operation, because the completion is awaited here.
    unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    ring.submit_and_wait(1)?;
    let result = ring.completion().next().ok_or(io::ErrorKind::UnexpectedEof)?.result();
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

/// Where a packet is sent on a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkAddress {
    pub(crate) bytes: [u8; 6],
    pub(crate) interface: u32,
}

/// The address for a packet socket that sends IPv4.
pub(crate) fn link_address(to: &LinkAddress) -> io::Result<SockAddr> {
    // SAFETY: what is written is a valid `sockaddr_ll`, for which the storage has room, and its length.
    let ((), address) = unsafe {
        SockAddr::try_init(|storage, length| {
            let link = &mut *storage.cast::<libc::sockaddr_ll>();
            link.sll_family = libc::AF_PACKET as u16;
            link.sll_protocol = (libc::ETH_P_IP as u16).to_be();
            link.sll_ifindex = to.interface.cast_signed();
            link.sll_halen = to.bytes.len() as u8;
            link.sll_addr[..to.bytes.len()].copy_from_slice(&to.bytes);
            *length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            Ok(())
        })
    }?;
    Ok(address)
}

/// Calls `block` and interrupts it with signals until it returns.
pub(crate) fn interrupted<T>(block: impl FnOnce() -> T) -> T {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: an action without flags and with a handler that does nothing; all zero is a valid `sigaction`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
    }
    let returned = AtomicBool::new(false);
    // SAFETY: returns the calling thread's own handle.
    let blocked = unsafe { libc::pthread_self() };
    thread::scope(|scope| {
        scope.spawn(|| {
            while !returned.load(Ordering::SeqCst) {
                // SAFETY: the thread is alive, because it joins this one before it leaves the scope.
                unsafe { libc::pthread_kill(blocked, libc::SIGUSR1) };
                thread::yield_now();
            }
        });
        let result = block();
        returned.store(true, Ordering::SeqCst);
        result
    })
}

/// A socket-level load balancer: connections below a cgroup to one address and port are changed to another. In force
/// until it is dropped.
#[derive(Debug)]
pub(crate) struct Balancer {
    _link: OwnedFd,
}

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_PROG_TYPE_CGROUP_SOCK_ADDR: u32 = 18;
const BPF_CGROUP_INET4_CONNECT: u32 = 10;
/// Offsets in `struct bpf_sock_addr` (include/uapi/linux/bpf.h).
const USER_IP4: i16 = 4;
const USER_PORT: i16 = 24;

#[repr(C)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// The head of `union bpf_attr` for BPF_PROG_LOAD; the kernel treats omitted fields as zero.
#[repr(C)]
struct LoadAttr {
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

#[repr(C)]
struct LinkAttr {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

impl Balancer {
    /// Attaches a load balancer to a cgroup.
    pub(crate) fn attach(cgroup: &impl AsRawFd, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> io::Result<Self> {
        const LOAD: u8 = 0x61; // BPF_LDX | BPF_MEM | BPF_W
        const STORE: u8 = 0x63; // BPF_STX | BPF_MEM | BPF_W
        const MOVE: u8 = 0xb4; // BPF_ALU | BPF_MOV | BPF_K, 32 bits
        const MOVE_64: u8 = 0xb7; // BPF_ALU64 | BPF_MOV | BPF_K
        const JUMP_UNLESS: u8 = 0x56; // BPF_JMP32 | BPF_JNE | BPF_K
        const EXIT: u8 = 0x95; // BPF_JMP | BPF_EXIT
        let at = |code, destination: u8, source: u8, offset, immediate| Instruction {
            code,
            registers: source << 4 | destination,
            offset,
            immediate,
        };
        // Both are in network order in the context.
        let address = |address: Ipv4Addr| i32::from_ne_bytes(address.octets());
        let port = |port: u16| i32::from(port.to_be());
        let program = [
            at(LOAD, 2, 1, USER_IP4, 0),
            at(JUMP_UNLESS, 2, 0, 6, address(from.0)),
            at(LOAD, 2, 1, USER_PORT, 0),
            at(JUMP_UNLESS, 2, 0, 4, port(from.1)),
            at(MOVE, 2, 0, 0, address(to.0)),
            at(STORE, 1, 2, USER_IP4, 0),
            at(MOVE, 2, 0, 0, port(to.1)),
            at(STORE, 1, 2, USER_PORT, 0),
            at(MOVE_64, 0, 0, 0, 1),
            at(EXIT, 0, 0, 0, 0),
        ];
        let mut load = LoadAttr {
            prog_type: BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
            insn_cnt: u32::try_from(program.len()).unwrap(),
            insns: program.as_ptr() as u64,
            license: c"Apache-2.0".as_ptr() as u64,
            log_level: 0,
            log_size: 0,
            log_buf: 0,
            kern_version: 0,
            prog_flags: 0,
            prog_name: [0; 16],
            prog_ifindex: 0,
            expected_attach_type: BPF_CGROUP_INET4_CONNECT,
        };
        let program = bpf(BPF_PROG_LOAD, &mut load)?;
        let mut link = LinkAttr {
            prog_fd: program.as_raw_fd().cast_unsigned(),
            target_fd: cgroup.as_raw_fd().cast_unsigned(),
            attach_type: BPF_CGROUP_INET4_CONNECT,
            flags: 0,
        };
        Ok(Self { _link: bpf(BPF_LINK_CREATE, &mut link)? })
    }
}

fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the structure is that of the command, of the given size, and what it points to outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    let fd = Errno::result(result)?;
    // SAFETY: both commands return a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap()) })
}
