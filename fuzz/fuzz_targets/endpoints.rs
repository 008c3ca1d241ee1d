//! Changes of endpoints, as a destination controller sends them.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

fuzz_target!(|bytes: &[u8]| weft_proxy::fuzz::endpoints(bytes));
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    weft_proxy::fuzz::mutate_message(data, size, max_size, seed, fuzzer_mutate)
});
