//! The sk_lookup program, of which every pod gets an instance: parsed once, verified in advance, and assigned to a pod
//! with its cookie as the last constant. Refuses to create or change pinned maps: they exist before any pod.
//!
//! aya's loader reads the BTF of the whole kernel for each load, which these programs do not need, and the verifier
//! takes milliseconds for each instance: a hundred pods that start at once would wait for one another. So some
//! instances are always loaded without a pod. Until an instance has a cookie it would refuse every connection, and it
//! is not attached.
//!
//! ```text
//! spare:  map of constants, open -> program, verified
//! assign: cookie into the constants -> constants frozen -> attached to the pod
//! ```

use std::{
    collections::{HashMap, HashSet},
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use aya::maps::{MapData, MapError};
use aya_obj::{EbpfSectionKind, Object, ParseError, relocation::EbpfRelocationError};
use weft_ebpf_abi::map;

use crate::datapath::{bpf, pins::Pins};

/// The program in the object.
const PROGRAM: &str = "weft_sk_lookup";
/// The global with the cookie of the instance's pod.
const COOKIE: &str = "NETNS_COOKIE";

/// Value of the cookie by which its position is found.
const MARK: u64 = 0x7765_6674_6d61_726b;
/// Number of instances in advance: the most pods that a kubelet starts by default. Each takes 8 KiB of the kernel's
/// memory.
const SPARES: usize = 110;
/// Pause before new ones are loaded: after one is taken, more may follow, and need the processors.
const BURST: Duration = Duration::from_secs(1);

/// The program before it is assigned to a pod.
#[derive(Debug)]
pub(crate) struct Steering {
    object: Object,
    maps: HashMap<&'static str, MapData>,
    /// The map of constants with the cookie: its name, its content, and the cookie's position.
    constants: String,
    values: Vec<u8>,
    cookie_at: usize,
}

/// An instance without a pod.
#[derive(Debug)]
pub(crate) struct Spare {
    program: OwnedFd,
    constants: MapData,
}

/// Instances loaded in advance.
#[derive(Debug)]
pub(crate) struct Spares(Receiver<Spare>);

/// Why the program could not be prepared or loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SteeringError {
    #[error("cannot read the embedded object")]
    Parse(#[source] ParseError),
    #[error("the embedded object has no program {PROGRAM}")]
    Missing,
    #[error("the embedded object has no constant {COOKIE}")]
    NoCookie,
    #[error("cannot open map {name}")]
    OpenMap { name: &'static str, source: MapError },
    #[error("cannot make the constants of {PROGRAM}")]
    Constants(#[source] MapError),
    #[error("cannot write the constants of {PROGRAM}")]
    WriteConstants(#[source] io::Error),
    #[error("cannot link {PROGRAM}")]
    Link(#[source] EbpfRelocationError),
    #[error("the kernel refused {PROGRAM}")]
    Verify(#[source] io::Error),
}

impl Steering {
    /// Parses the object and keeps the parts that this program needs. The maps are pinned by now.
    ///
    /// # Errors
    /// When the object is invalid, or a map is not pinned.
    pub(crate) fn new(object: &[u8], constants: &[(&str, &[u8])], pins: &Pins) -> Result<Self, SteeringError> {
        let mut object = Object::parse(object).map_err(SteeringError::Parse)?;
        let mark = MARK.to_ne_bytes();
        let mut globals: HashMap<_, _> = constants.iter().map(|(name, bytes)| (*name, (*bytes, true))).collect();
        globals.insert(COOKIE, (mark.as_slice(), true));
        object.patch_map_data(globals).map_err(SteeringError::Parse)?;
        let marked = object.maps.iter().filter(|(_, map)| map.section_kind() == EbpfSectionKind::Rodata).find_map(
            |(name, map)| Some((name.clone(), map.data().windows(mark.len()).position(|window| window == mark)?)),
        );
        let (constants, cookie_at) = marked.ok_or(SteeringError::NoCookie)?;
        let values = object.maps.get(&constants).map(|map| map.data().to_vec()).unwrap_or_default();
        let section = object.programs.get(PROGRAM).ok_or(SteeringError::Missing)?.section_index;
        // Every program has its own section; the other sections are functions that all of them call.
        let others: HashSet<usize> =
            object.programs.values().map(|program| program.section_index).filter(|other| *other != section).collect();
        object.programs.retain(|name, _| name == PROGRAM);
        object.functions.retain(|(section, _), _| !others.contains(section));
        // Debug information is not needed for this type of program.
        (object.btf, object.btf_ext) = (None, None);
        let mut maps = HashMap::new();
        for name in map::ALL {
            let map = MapData::from_pin(pins.map(name)).map_err(|source| SteeringError::OpenMap { name, source })?;
            maps.insert(name, map);
        }
        Ok(Self { object, maps, constants, values, cookie_at })
    }

    /// Loads an instance.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn spare(&self) -> Result<Spare, SteeringError> {
        let mut object = self.object.clone();
        let (mut open, mut frozen) = (None, Vec::new());
        let mut maps: Vec<(String, RawFd, aya_obj::Map)> = Vec::new();
        for (name, map) in object.maps.drain() {
            if let Some(pinned) = self.maps.get(name.as_str()) {
                maps.push((name, pinned.fd().as_fd().as_raw_fd(), map));
            } else if map.section_kind() == EbpfSectionKind::Rodata {
                let data = MapData::create(map.clone(), &name, None).map_err(SteeringError::Constants)?;
                let fd = data.fd().as_fd().as_raw_fd();
                if name == self.constants {
                    open = Some(data);
                } else {
                    bpf::fill_and_freeze(data.fd().as_fd(), map.value_size(), map.data())
                        .map_err(SteeringError::WriteConstants)?;
                    // The program holds it once it is loaded.
                    frozen.push(data);
                }
                maps.push((name, fd, map));
            }
        }
        let constants = open.ok_or(SteeringError::NoCookie)?;
        let sections: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let by_name = maps.iter().map(|(name, fd, map)| (name.as_str(), *fd, map));
        object.relocate_maps(by_name, &sections).map_err(SteeringError::Link)?;
        object.relocate_calls(&sections).map_err(SteeringError::Link)?;
        let program = object.programs.get(PROGRAM).ok_or(SteeringError::Missing)?;
        let function = object.functions.get(&program.function_key()).ok_or(SteeringError::Missing)?;
        let program = bpf::load_sk_lookup(PROGRAM, &function.instructions, &program.license);
        Ok(Spare { program: program.map_err(SteeringError::Verify)?, constants })
    }

    /// Assigns an instance to a pod, permanently.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn assign(&self, spare: Spare, netns_cookie: u64) -> Result<OwnedFd, SteeringError> {
        let mut values = self.values.clone();
        values.splice(self.cookie_at..self.cookie_at + size_of::<u64>(), netns_cookie.to_ne_bytes());
        let size = u32::try_from(values.len()).unwrap_or(u32::MAX);
        bpf::fill_and_freeze(spare.constants.fd().as_fd(), size, &values).map_err(SteeringError::WriteConstants)?;
        Ok(spare.program)
    }
}

impl Spares {
    /// Keeps instances loaded in advance, in a low-priority thread that ends with the receiver.
    ///
    /// # Errors
    /// When a thread cannot be created.
    pub(crate) fn keep(steering: Arc<Steering>) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(SPARES);
        thread::Builder::new().name("spares".into()).spawn(move || {
            // Failure only costs priority.
            let _ = rustix::process::nice(19);
            if let Err(error) = refill(&steering, &sender) {
                tracing::warn!(error = crate::error::chain(&error), "pods' programs are not loaded in advance");
            }
        })?;
        Ok(Self(receiver))
    }

    /// Takes an instance, if there is one.
    pub(crate) fn take(&self) -> Option<Spare> {
        self.0.try_recv().ok()
    }
}

fn refill(steering: &Steering, sender: &SyncSender<Spare>) -> Result<(), SteeringError> {
    loop {
        match sender.try_send(steering.spare()?) {
            Ok(()) => {}
            Err(TrySendError::Disconnected(_)) => return Ok(()),
            Err(TrySendError::Full(spare)) => {
                if sender.send(spare).is_err() {
                    return Ok(());
                }
                thread::sleep(BURST);
            }
        }
    }
}
