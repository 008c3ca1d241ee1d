//! Values of the chart, as the injector reads them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weft_k8s_api::values::Values;

fuzz_target!(|yaml: &str| {
    if let Ok(values) = Values::parse(yaml) {
        let _ = values.inject_config("linkerd", "");
        let _ = values.redirection();
    }
});
