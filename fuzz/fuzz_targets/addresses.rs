//! Networks and default policies of policy resources and annotations.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weft_k8s_api::policy::{Cidr, DefaultPolicy, IdentityMatch};

fuzz_target!(|text: &str| {
    if let Ok(network) = text.parse::<Cidr>() {
        let printed = network.to_string();
        assert_eq!(printed.parse::<Cidr>().expect("what is printed can be read"), network, "{printed}");
    }
    if let Ok(policy) = text.parse::<DefaultPolicy>() {
        assert_eq!(policy.label().parse::<DefaultPolicy>().expect("a label is a policy"), policy);
    }
    let _ = text.parse::<IdentityMatch>();
});
