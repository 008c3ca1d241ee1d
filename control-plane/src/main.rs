//! `weft-control-plane`: discovery, policy and identity. Everything is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    weft_control_plane::main()
}
