//! `weft-proxy`: the sidecar. Everything is in the library beside it.

use std::process::ExitCode;

#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    #[cfg(feature = "jemalloc")]
    {
        // Memory that is free is returned after ten seconds by a thread of the allocator: by itself it does so only
        // while a program allocates, and a proxy that has become idle does not.
        let _none = tikv_jemalloc_ctl::background_thread::write(true);
    }
    weft_proxy::main()
}
