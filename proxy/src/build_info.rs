//! What this program is made of, as metrics under Linkerd's names.
//!
//! Linkerd's label `date` is left out: two builds of one commit are the same program.

use prometheus_client::{
    metrics::{family::Family, gauge::ConstGauge},
    registry::Registry,
};
use rustls::crypto::CryptoProvider;

type Info = Family<Vec<(&'static str, String)>, ConstGauge, fn() -> ConstGauge>;

/// Registers `proxy_build_info` and `rustls_info`; the crypto provider has to be installed.
pub(crate) fn register(registry: &mut Registry) {
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let build = [
        ("version", env!("CARGO_PKG_VERSION")),
        // Set by `cargo xtask dist`.
        ("git_sha", option_env!("WEFT_GIT_SHA").unwrap_or_default()),
        ("profile", profile),
        ("vendor", "weft"),
    ];
    registry.register(
        "proxy_build_info",
        "Proxy build info",
        info(build.map(|(key, value)| (key, value.to_owned())).into()),
    );
    if let Some(provider) = CryptoProvider::get_default() {
        registry.register("rustls_info", "Proxy TLS info", info(tls(provider)));
    }
}

fn tls(provider: &CryptoProvider) -> Vec<(&'static str, String)> {
    // Linkerd's lists have a comma after each name.
    let list = |names: &mut dyn Iterator<Item = Option<&str>>| {
        names.flatten().flat_map(|name| [name, ","]).collect::<String>()
    };
    vec![
        ("tls_suites", list(&mut provider.cipher_suites.iter().map(|suite| suite.suite().as_str()))),
        ("tls_kx_groups", list(&mut provider.kx_groups.iter().map(|group| group.name().as_str()))),
        ("tls_rand", format!("{:?}", provider.secure_random)),
        ("tls_key_provider", format!("{:?}", provider.key_provider)),
        ("tls_fips", provider.fips().to_string()),
    ]
}

fn info(labels: Vec<(&'static str, String)>) -> Info {
    let info = Info::new_with_constructor(|| ConstGauge::new(1));
    drop(info.get_or_create(&labels));
    info
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrape_says_what_is_running() {
        weft_tls::install_crypto_provider();
        let mut registry = Registry::default();
        register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for part in [
            concat!("proxy_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\",git_sha=\""),
            "profile=\"debug\",vendor=\"weft\"} 1\n",
            "rustls_info{tls_suites=\"TLS13_AES_128_GCM_SHA256,TLS13_AES_256_GCM_SHA384,TLS13_CHACHA20_POLY1305_SHA256,\"",
            "tls_kx_groups=\"X25519MLKEM768,X25519,secp256r1,secp384r1,\"",
            "tls_rand=\"AwsLcRs\",tls_key_provider=\"AwsLcRs\",tls_fips=\"false\"} 1\n",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
