//! Lists of ports in annotations.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weft_k8s_api::ports::{PortList, PortSet};

fuzz_target!(|text: &str| {
    if let Ok(ports) = text.parse::<PortSet>() {
        let printed = ports.to_string();
        assert_eq!(printed.parse::<PortSet>().expect("what is printed can be read"), ports, "{printed}");
    }
    let _ = PortList::read(text);
});
