//! The sk_lookup program, which every pod gets an instance of: parsed once, loaded for each pod with its cookie as a
//! constant. Refuses to create or change pinned maps: they are there before a pod is.
//!
//! aya's loader reads the BTF of the whole kernel for each load, which these programs do not need; that is most of the
//! time of an enrolment, and a hundred pods that start at once would wait for one another.

use std::{
    collections::{HashMap, HashSet},
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
};

use aya::maps::{MapData, MapError};
use aya_obj::{EbpfSectionKind, Object, ParseError, relocation::EbpfRelocationError};
use weft_ebpf_abi::map;

use crate::{bpf, pins::Pins};

/// The program in the object.
const PROGRAM: &str = "weft_sk_lookup";
/// The global that tells the instance whose it is.
const COOKIE: &str = "NETNS_COOKIE";

/// The program before it knows its pod.
#[derive(Debug)]
pub(crate) struct Steering {
    object: Object,
    maps: HashMap<&'static str, MapData>,
}

/// Why the program could not be prepared or loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SteeringError {
    #[error("cannot read the embedded object")]
    Parse(#[source] ParseError),
    #[error("the embedded object has no program {PROGRAM}")]
    Missing,
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
    /// Parses the object and keeps what this program takes. The maps are pinned by now.
    ///
    /// # Errors
    /// The object is not one, or a map is not pinned.
    pub(crate) fn new(object: &[u8], constants: &[(&str, &[u8])], pins: &Pins) -> Result<Self, SteeringError> {
        let mut object = Object::parse(object).map_err(SteeringError::Parse)?;
        let constants = constants.iter().map(|(name, bytes)| (*name, (*bytes, true))).collect();
        object.patch_map_data(constants).map_err(SteeringError::Parse)?;
        let section = object.programs.get(PROGRAM).ok_or(SteeringError::Missing)?.section_index;
        // Every program has a section of its own; what is in no program's is called by all.
        let others: HashSet<usize> =
            object.programs.values().map(|program| program.section_index).filter(|other| *other != section).collect();
        object.programs.retain(|name, _| name == PROGRAM);
        object.functions.retain(|(section, _), _| !others.contains(section));
        // Debug information is the debugger's; the kernel needs none of it for this type of program.
        (object.btf, object.btf_ext) = (None, None);
        let mut maps = HashMap::new();
        for name in map::ALL {
            let map = MapData::from_pin(pins.map(name)).map_err(|source| SteeringError::OpenMap { name, source })?;
            maps.insert(name, map);
        }
        Ok(Self { object, maps })
    }

    /// Loads the program for a pod.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn load(&self, netns_cookie: u64) -> Result<OwnedFd, SteeringError> {
        let mut object = self.object.clone();
        let cookie = netns_cookie.to_ne_bytes();
        object.patch_map_data(HashMap::from([(COOKIE, (cookie.as_slice(), true))])).map_err(SteeringError::Parse)?;
        let mut constants = Vec::new();
        let mut maps: Vec<(String, RawFd, aya_obj::Map)> = Vec::new();
        for (name, map) in object.maps.drain() {
            if let Some(pinned) = self.maps.get(name.as_str()) {
                maps.push((name, pinned.fd().as_fd().as_raw_fd(), map));
            } else if map.section_kind() == EbpfSectionKind::Rodata {
                let data = MapData::create(map.clone(), &name, None).map_err(SteeringError::Constants)?;
                bpf::fill_and_freeze(data.fd().as_fd(), map.value_size(), map.data())
                    .map_err(SteeringError::WriteConstants)?;
                maps.push((name, data.fd().as_fd().as_raw_fd(), map));
                // The program holds it from when it is loaded.
                constants.push(data);
            }
        }
        let sections: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let by_name = maps.iter().map(|(name, fd, map)| (name.as_str(), *fd, map));
        object.relocate_maps(by_name, &sections).map_err(SteeringError::Link)?;
        object.relocate_calls(&sections).map_err(SteeringError::Link)?;
        let program = object.programs.get(PROGRAM).ok_or(SteeringError::Missing)?;
        let function = object.functions.get(&program.function_key()).ok_or(SteeringError::Missing)?;
        bpf::load_sk_lookup(PROGRAM, &function.instructions, &program.license).map_err(SteeringError::Verify)
    }
}
