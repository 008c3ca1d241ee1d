//! The maps, and the operations of the programs on them. Refuses decisions.

use core::{
    convert::Infallible,
    ptr::{self, read_volatile},
    sync::atomic::{Ordering, compiler_fence},
};

use aya_ebpf::{
    bindings::{
        BPF_F_CLONE, BPF_F_NO_PREALLOC, BPF_SK_STORAGE_GET_F_CREATE, bpf_map_type::BPF_MAP_TYPE_SK_STORAGE,
        bpf_sk_lookup, bpf_sock,
    },
    btf_maps::{self, SkStorage},
    helpers::generated::{
        bpf_get_smp_processor_id, bpf_ktime_get_ns, bpf_sk_storage_delete, bpf_sk_storage_get, bpf_spin_lock,
        bpf_spin_unlock,
    },
    macros::{btf_map, map},
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, RingBuf, SockHash, lpm_trie::Key},
};
use weft_ebpf_abi::{
    address::Address,
    counter,
    event::RING_BYTES,
    pod::{
        self, ADMISSION_SLOTS, AdmissionKey, MAX_ADMISSIONS, Owner, Pod, PortBlock, PortBlockKey, SHARED_CGROUP, Subnet,
    },
    socket::{
        Client, ClientKey, Flow, FlowKey, ListenerKey, Lookup, MAX_CLIENTS, MAX_LISTENERS, MAX_WAITING, MIN_FLOWS,
        ProxyKey, Slots, SocketState, Waiting, kind,
    },
    switch,
    verdict::{Direction, Verdict},
};

#[map]
static PODS: HashMap<u64, Pod> = HashMap::with_max_entries(pod::MAX_PODS, BPF_F_NO_PREALLOC);
#[map]
static PORTS: HashMap<PortBlockKey, PortBlock> = HashMap::with_max_entries(pod::MAX_PORT_BLOCKS, BPF_F_NO_PREALLOC);
#[map]
static SUBNETS: LpmTrie<Subnet, u8> = LpmTrie::with_max_entries(pod::MAX_SUBNETS, BPF_F_NO_PREALLOC);
#[btf_map]
static SOCKETS: SkStorage<SocketState> = SkStorage::new();
#[map]
static CLIENTS: HashMap<ClientKey, Client> = HashMap::with_max_entries(MAX_CLIENTS, BPF_F_NO_PREALLOC);
#[btf_map]
static NAMESPACES: InheritedStorage<u64> = InheritedStorage::new();
#[map]
static WAITING: HashMap<FlowKey, Waiting> = HashMap::with_max_entries(MAX_WAITING, BPF_F_NO_PREALLOC);
#[map]
// The loader enlarges it on nodes with many processors.
static FLOWS: LruHashMap<FlowKey, Flow> = LruHashMap::with_max_entries(MIN_FLOWS, 0);
#[map]
static OVERFLOW: Array<u32> = Array::with_max_entries(1, 0);
// The loader gives each processor one. An array of its own kind for that may not have a lock.
#[btf_map]
static LOOKUPS: btf_maps::Array<Lookup, 1> = btf_maps::Array::new();
// Used by the pods' stubs, which the agent makes.
#[map]
static STEERING: ProgramArray = ProgramArray::with_max_entries(1, 0);
#[map]
pub(crate) static LISTENERS: SockHash<ListenerKey> = SockHash::with_max_entries(MAX_LISTENERS, 0);
#[map]
static PROXIES: HashMap<ProxyKey, Slots> = HashMap::with_max_entries(MAX_LISTENERS, BPF_F_NO_PREALLOC);
#[map]
static ADMISSIONS: HashMap<AdmissionKey, u64> = HashMap::with_max_entries(MAX_ADMISSIONS, BPF_F_NO_PREALLOC);
#[map]
pub(crate) static EVENTS: RingBuf = RingBuf::with_byte_size(RING_BYTES, 0);
#[map]
static STATS: PerCpuArray<u64> = PerCpuArray::with_max_entries(counter::COUNT, 0);
#[map]
static SWITCHES: Array<u32> = Array::with_max_entries(switch::COUNT, 0);

/// Only where there is no entry (include/uapi/linux/bpf.h).
const BPF_NOEXIST: u64 = 1;

/// Socket storage that an accepted socket inherits from its listener, which aya does not support. The fields are only
/// types: the loader reads them from the BTF (libbpf's map definitions).
#[repr(C)]
struct InheritedStorage<T> {
    r#type: *const [i32; BPF_MAP_TYPE_SK_STORAGE as usize],
    key: *const i32,
    value: *const T,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; (BPF_F_NO_PREALLOC | BPF_F_CLONE) as usize],
}

// SAFETY: the pointers are never read; the loader replaces them by a map.
unsafe impl<T> Sync for InheritedStorage<T> {}

impl<T> InheritedStorage<T> {
    const fn new() -> Self {
        Self {
            r#type: ptr::null(),
            key: ptr::null(),
            value: ptr::null(),
            max_entries: ptr::null(),
            map_flags: ptr::null(),
        }
    }
}

/// The entry of a network namespace, if it belongs to a meshed pod. When it is replaced or removed, the kernel (since
/// 6.1) writes another pod's entry into the same memory at once: before anything passes, ask [`is_current`].
#[inline(always)]
pub(crate) fn pod(netns_cookie: u64) -> Option<&'static Pod> {
    // SAFETY: the memory remains an entry of this map until the program ends (RCU), and every bit pattern is one.
    unsafe { PODS.get_ptr(netns_cookie).map(|pod| &*pod) }
}

/// Whether everything that was read so far from the entry of a network namespace was this namespace's.
#[inline(always)]
pub(crate) fn is_current(netns_cookie: u64, pod: &Pod) -> bool {
    // The compiler takes an entry for constant, and may not move reads behind the look-up.
    compiler_fence(Ordering::SeqCst);
    PODS.get_ptr(netns_cookie).is_some_and(|current| ptr::eq(current, pod))
}

/// The cookie that a pod's stub left for this look-up; 0, which no namespace has, if another look-up came between them
/// on this processor, which takes a preempted process that asks sock_diag, or a PREEMPT_RT kernel.
#[inline(always)]
pub(crate) fn lookup(context: *mut bpf_sk_lookup) -> u64 {
    // SAFETY: the helper takes no context. The kernel keeps a look-up on its processor.
    let Some(lookup) = LOOKUPS.get_ptr_mut(unsafe { bpf_get_smp_processor_id() }) else { return 0 };
    // SAFETY: under the lock. It also keeps interrupts away, and with them all other look-ups on this processor.
    let (owner, netns_cookie) = unsafe {
        let lock = (&raw mut (*lookup).lock).cast();
        bpf_spin_lock(lock);
        let left = (read_volatile(&raw const (*lookup).context), read_volatile(&raw const (*lookup).netns_cookie));
        bpf_spin_unlock(lock);
        left
    };
    if owner == context as u64 { netns_cookie } else { 0 }
}

/// Whether the pod's rules skip a port.
#[inline(always)]
pub(crate) fn skips_port(pod: &Pod, netns_cookie: u64, direction: Direction, port: u16) -> bool {
    let Ok(skips) = pod.skips_port(netns_cookie, direction, port, |key, bit| -> Result<_, Infallible> {
        // SAFETY: as in `pod`.
        Ok(unsafe { PORTS.get_ptr(key).is_some_and(|block| (*block).contains(bit)) })
    });
    skips
}

/// Whether the pod's rules skip connections from an address.
#[inline(always)]
pub(crate) fn skips_subnet(pod: &Pod, netns_cookie: u64, client: &Address) -> bool {
    let Ok(skips) = pod.skips_subnet(netns_cookie, client, |subnet| -> Result<_, Infallible> {
        Ok(SUBNETS.get(Key::new(Subnet::HEAD_BITS + 128, subnet)).is_some())
    });
    skips
}

/// Counts a verdict.
#[inline(always)]
pub(crate) fn count(direction: Direction, verdict: Verdict) {
    count_at(counter::of(direction, verdict));
}

/// Adds one to a counter.
#[inline(always)]
pub(crate) fn count_at(index: u32) {
    if let Some(counter) = STATS.get_ptr_mut(index) {
        // SAFETY: the slot is this CPU's, and programs of these types do not preempt one another on it for long enough
        // to matter for a statistic.
        unsafe { *counter += 1 };
    }
}

/// Whether events are watched.
#[inline(always)]
pub(crate) fn watched() -> bool {
    switch(switch::TRACE) != 0
}

/// The value of a switch.
#[inline(always)]
pub(crate) fn switch(index: u32) -> u32 {
    SWITCHES.get(index).copied().unwrap_or_default()
}

/// Enrols a network namespace, unless it is enrolled already. Without room it stays unenrolled: then no proxy becomes
/// ready.
#[inline(always)]
pub(crate) fn enrol(netns_cookie: u64, pod: &Pod) {
    if PODS.insert(netns_cookie, pod, BPF_NOEXIST).is_err() && self::pod(netns_cookie).is_none() {
        count_at(counter::ADMISSIONS_REFUSED);
    }
}

/// Admits a network namespace that no agent has enrolled yet, so that a proxy in it can write entries to maps that the
/// whole node shares. Limited per cgroup, because namespaces cost an application nothing; and in total, because if
/// containers have no cgroups of their own (`is_shared`) one cgroup stands for the whole node.
#[inline(always)]
pub(crate) fn admit(netns_cookie: u64, cgroup: u64, is_shared: bool) -> bool {
    let key = |slot| AdmissionKey { cgroup, slot, pad: 0 };
    if is_shared {
        let key = AdmissionKey { cgroup: netns_cookie, slot: SHARED_CGROUP, pad: 0 };
        if ADMISSIONS.get_ptr(key).is_some() || ADMISSIONS.insert(key, netns_cookie, 0).is_ok() {
            return true;
        }
    } else {
        for slot in 0..ADMISSION_SLOTS {
            // SAFETY: as in `pod`.
            if ADMISSIONS.get_ptr(key(slot)).is_some_and(|admitted| unsafe { *admitted } == netns_cookie) {
                return true;
            }
        }
        for slot in 0..ADMISSION_SLOTS {
            if ADMISSIONS.insert(key(slot), netns_cookie, BPF_NOEXIST).is_ok() {
                return true;
            }
        }
    }
    count_at(counter::ADMISSIONS_REFUSED);
    false
}

/// Whether a pod's proxy has, or recently had, a listener on a port in [`LISTENERS`].
#[inline(always)]
pub(crate) fn listens(netns_cookie: u64, pod: &Pod, port: u16) -> bool {
    PROXIES.get_ptr(proxy_key(netns_cookie, pod.proxy(), port)).is_some()
}

/// The slots of such listeners.
#[inline(always)]
pub(crate) fn slots(netns_cookie: u64, pod: &Pod, port: u16) -> Slots {
    slots_of(proxy_key(netns_cookie, pod.proxy(), port))
}

#[inline(always)]
fn slots_of(key: ProxyKey) -> Slots {
    // SAFETY: as in `pod`.
    PROXIES.get_ptr(key).map_or(0, |slots| unsafe { *slots })
}

/// Adds a proxy that has a listener to PROXIES. Without room it is never attested, and so never ready.
#[inline(always)]
pub(crate) fn set_listens(netns_cookie: u64, owner: Owner, port: u16, slot: u8) {
    let key = proxy_key(netns_cookie, owner, port);
    if PROXIES.insert(key, slots_of(key) | 1 << slot, 0).is_err() {
        count_at(counter::LISTENERS_LOST);
    }
}

#[inline(always)]
fn proxy_key(netns_cookie: u64, owner: Owner, port: u16) -> ProxyKey {
    ProxyKey { netns_cookie, owner, port: u32::from(port), pad: 0 }
}

/// Has a connection wait for its proxy; false without room.
#[inline(always)]
pub(crate) fn wait(key: &FlowKey, connection: &Waiting) -> bool {
    WAITING.insert(key, connection, 0).is_ok()
}

/// A connection that waits for its proxy.
#[inline(always)]
pub(crate) fn waiting(key: &FlowKey) -> Option<Waiting> {
    // SAFETY: as in `pod`; an entry may be reused while it is read. Only the proxy's question and the agent, for
    // entries of a minute ago, remove one, and neither happens twice.
    WAITING.get_ptr(key).map(|connection| unsafe { *connection })
}

/// Announces a connection that has no room to wait. The map evicts the oldest entry.
#[inline(always)]
pub(crate) fn add_flow(key: &FlowKey, flow: &Flow) {
    let _ = FLOWS.insert(key, flow, 0);
}

/// A connection that has no room to wait.
#[inline(always)]
pub(crate) fn flow(key: &FlowKey) -> Option<Flow> {
    // SAFETY: an LRU entry may be reused while it is read; it lives for microseconds in a map of a thousand.
    FLOWS.get_ptr(key).map(|flow| unsafe { *flow })
}

/// Ends the announcement of such a connection.
#[inline(always)]
pub(crate) fn remove_flow(key: &FlowKey) {
    let _ = FLOWS.remove(key);
}

/// Notes that connections may be in FLOWS from now on.
#[inline(always)]
pub(crate) fn set_overflow() {
    if let Some(overflow) = OVERFLOW.get_ptr_mut(0) {
        // SAFETY: one word, and programs that write it at the same time write the same.
        unsafe { overflow.write_volatile(1) };
    }
}

/// Whether connections may be in FLOWS.
#[inline(always)]
pub(crate) fn overflow() -> bool {
    OVERFLOW.get(0).is_some_and(|overflow| *overflow != 0)
}

/// Ends the wait of a connection.
#[inline(always)]
pub(crate) fn stop_waiting(key: &FlowKey) {
    let _ = WAITING.remove(key);
}

/// The key of a client's socket. The verifier lets a program that may read kernel memory use an address as a number.
#[inline(always)]
fn client_key(sk: *mut bpf_sock) -> ClientKey {
    ClientKey(sk as u64)
}

/// Keeps what a client's socket dialled until the socket closes; false without room.
#[inline(always)]
pub(crate) fn add_client(sk: *mut bpf_sock, netns_cookie: u64, state: &SocketState) -> bool {
    // SAFETY: reads a clock.
    let connecting_since_ns = unsafe { bpf_ktime_get_ns() };
    let client = Client { state: *state, netns_cookie, connecting_since_ns, source_port: 0, pad: 0 };
    CLIENTS.insert(client_key(sk), client, 0).is_ok()
}

/// What the socket of a redirected connection dialled, wherever that is kept, for a program that runs with the socket
/// locked; and when connect(2) was called, if that is known. An entry in the map is marked: its SYN is about to be
/// sent, or was.
#[inline(always)]
pub(crate) fn connecting(sk: *mut bpf_sock, netns_cookie: u64, port: u16) -> Option<(&'static SocketState, u64)> {
    // SAFETY: as in `pod`. Nothing removes the entry while its socket connects.
    if let Some(client) = CLIENTS.get_ptr_mut(client_key(sk)).map(|client| unsafe { &mut *client })
        // One that a closed socket left has another pod's cookie, or this socket's connect(2) would have replaced it.
        && client.netns_cookie == netns_cookie
    {
        let since_ns = client.connecting_since_ns;
        (client.connecting_since_ns, client.source_port) = (0, u32::from(port));
        return Some((&client.state, since_ns));
    }
    socket(sk).filter(|state| state.kind == kind::CLIENT).map(|state| (state, 0))
}

/// What the socket of a connected client with this port dialled, wherever that is kept.
#[inline(always)]
pub(crate) fn dialled(sk: *mut bpf_sock, port: u16) -> Option<(Address, u16)> {
    client(sk, port).or_else(|| {
        let state = socket(sk).filter(|state| state.kind == kind::CLIENT)?;
        Some((state.destination, state.port))
    })
}

/// The same where it is kept in the map, as that of most is.
#[inline(always)]
pub(crate) fn client(sk: *mut bpf_sock, port: u16) -> Option<(Address, u16)> {
    let key = client_key(sk);
    let client = CLIENTS.get_ptr(key)?;
    // SAFETY: as in `pod`; the entry may be another socket's by now, which the second look-up tells.
    let (state, is_own) = unsafe { ((*client).state, (*client).source_port == u32::from(port)) };
    compiler_fence(Ordering::SeqCst);
    let is_current = CLIENTS.get_ptr(key).is_some_and(|current| ptr::eq(current, client));
    (is_current && is_own).then_some((state.destination, state.port))
}

/// Removes what a client's socket dialled.
#[inline(always)]
pub(crate) fn remove_client(sk: *mut bpf_sock) {
    let key = client_key(sk);
    // Nearly always there is none, and a look-up takes no lock.
    if CLIENTS.get_ptr(key).is_some() {
        let _ = CLIENTS.remove(key);
    }
}

/// The recorded state of a socket.
#[inline(always)]
pub(crate) fn socket(sk: *mut bpf_sock) -> Option<&'static SocketState> {
    // SAFETY: the helper checks the socket; aya's wrapper takes sock_addr contexts only, so it is called directly.
    let state = unsafe { bpf_sk_storage_get((&raw const SOCKETS).cast_mut().cast(), sk.cast(), ptr::null_mut(), 0) };
    // SAFETY: null or a value that lives as long as the socket, which the caller's context holds.
    unsafe { state.cast::<SocketState>().as_ref() }
}

/// Records the state of a socket, replacing an earlier one; false without memory.
#[inline(always)]
pub(crate) fn remember(sk: *mut bpf_sock, state: &SocketState) -> bool {
    let flags = BPF_SK_STORAGE_GET_F_CREATE as u64;
    // SAFETY: as in `socket`.
    let slot = unsafe { bpf_sk_storage_get((&raw const SOCKETS).cast_mut().cast(), sk.cast(), ptr::null_mut(), flags) };
    // SAFETY: as in `socket`; the socket's owner is in a system call on it.
    match unsafe { slot.cast::<SocketState>().as_mut() } {
        Some(slot) => {
            *slot = *state;
            true
        }
        None => false,
    }
}

/// The cookie in a socket's storage; 0 if none.
#[inline(always)]
pub(crate) fn namespace(sk: *mut bpf_sock) -> u64 {
    // SAFETY: as in `socket`.
    let cookie =
        unsafe { bpf_sk_storage_get((&raw const NAMESPACES).cast_mut().cast(), sk.cast(), ptr::null_mut(), 0) };
    // SAFETY: as in `socket`.
    unsafe { cookie.cast::<u64>().as_ref() }.copied().unwrap_or_default()
}

/// Stores its namespace's cookie in a socket, unless it is there already. Without memory the socket has none.
#[inline(always)]
pub(crate) fn set_namespace(sk: *mut bpf_sock, mut netns_cookie: u64) {
    let (first, flags) = ((&raw mut netns_cookie).cast(), BPF_SK_STORAGE_GET_F_CREATE as u64);
    // SAFETY: as in `socket`; the first value outlives the call.
    unsafe { bpf_sk_storage_get((&raw const NAMESPACES).cast_mut().cast(), sk.cast(), first, flags) };
}

/// Removes the state of a socket.
#[inline(always)]
pub(crate) fn forget(sk: *mut bpf_sock) {
    // SAFETY: as in `socket`. Having nothing to remove is not an error.
    unsafe { bpf_sk_storage_delete((&raw const SOCKETS).cast_mut().cast(), sk.cast()) };
}
