//! `weft-control-plane`: discovery, policy and identity. Everything is in the library beside it.

use std::process::ExitCode;

#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    weft_control_plane::main()
}
