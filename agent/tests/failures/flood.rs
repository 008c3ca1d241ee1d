//! A pod that produces events faster than they can be read.

use std::time::Duration;

use aya::maps::{Array, Map};
use weft_ebpf_abi::{map, switch};
use weft_proto::agent::WatchRequest;
use weft_test_kit::{
    pod::APPLICATION_UID,
    world::{Mesh, World},
};

use crate::kernel;

pub(crate) fn delays_nothing(world: &mut World) {
    let mesh = Mesh::new(world);
    let is_watched = |world: &World| {
        let switches = Array::<_, u32>::try_from(Map::Array(kernel::data(&world.pins(), map::SWITCHES))).unwrap();
        switches.get(&switch::TRACE, 0).unwrap() == 1
    };
    let mut floods: Vec<_> = (0..2).map(|_| world.pod("a", APPLICATION_UID)).collect();
    let mut watch = world.watch(WatchRequest::default());
    floods.iter_mut().for_each(|flood| flood.ok("flood"));
    // More events than one batch of the agent's reader; a slow machine loses some, a fast one reads them all.
    let mut seen = 0;
    world.eventually("a flood of events", |world| {
        seen += (0..1_000).map_while(|_| watch.try_next(Duration::ZERO)).count();
        (seen >= 5_000 || world.status().events_dropped > 0).then_some(())
    });
    for _ in 0..3 {
        world.withdraw("b");
        world.mesh("b");
    }
    assert!(is_watched(world), "the flood was traced all the while");
    drop(watch);
    world.eventually("the end of tracing", |world| (!is_watched(world)).then_some(()));
    drop(floods);
    mesh.is_meshed(world);
}
