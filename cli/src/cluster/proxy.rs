//! The proxy between this program and an API server, chosen as kubectl chooses it.
//!
//! The client library compares `NO_PROXY` with the proxy's own address instead of the API server's.

use std::{env, net::IpAddr};

use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;
use kube::config::Kubeconfig;

/// The `proxy-url` of a context's cluster, which holds whatever `NO_PROXY` says.
pub(super) fn given(kubeconfig: &Kubeconfig, context: Option<&str>) -> Option<String> {
    let context = context.or(kubeconfig.current_context.as_deref())?;
    let context = kubeconfig.contexts.iter().find(|named| named.name == context)?.context.as_ref()?;
    let cluster = kubeconfig.clusters.iter().find(|named| named.name == context.cluster)?.cluster.as_ref()?;
    cluster.proxy_url.clone().filter(|url| !url.is_empty())
}

/// The proxy of `HTTPS_PROXY`, if `NO_PROXY` does not exempt this API server.
pub(super) fn from_environment(server: &Uri) -> Option<String> {
    let value =
        |names: [&str; 2]| names.into_iter().find_map(|name| env::var(name).ok().filter(|text| !text.is_empty()));
    let proxy = value(["HTTPS_PROXY", "https_proxy"])?;
    chosen(server, proxy, &value(["NO_PROXY", "no_proxy"]).unwrap_or_default())
}

fn chosen(server: &Uri, proxy: String, exempt: &str) -> Option<String> {
    let host = server.host()?.trim_start_matches('[').trim_end_matches(']');
    // As Go's programs do: a local cluster works behind a corporate proxy.
    if host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback()) {
        return None;
    }
    let proxy = if proxy.contains("://") { proxy } else { format!("http://{proxy}") };
    Matcher::builder().https(proxy.as_str()).no(exempt).build().intercept(server)?;
    Some(proxy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_proxied(server: &str, exempt: &str) -> bool {
        chosen(&server.parse().unwrap(), "http://192.0.2.1:3128".to_owned(), exempt).is_some()
    }

    #[test]
    fn no_proxy_is_about_the_api_server() {
        let server = "https://api.shop.example:6443";
        assert!(is_proxied(server, ""));
        assert!(is_proxied(server, "192.0.2.1,other.example"));
        for exempt in ["*", "api.shop.example", ".shop.example", "other.example, shop.example"] {
            assert!(!is_proxied(server, exempt), "{exempt}");
        }
        assert!(!is_proxied("https://10.96.0.1", "10.0.0.0/8"));
        assert!(is_proxied("https://10.96.0.1", "10.97.0.0/16"));
    }

    #[test]
    fn this_host_and_plain_http_need_no_proxy() {
        for server in ["https://127.0.0.1:6443", "https://localhost:6443", "https://[::1]:6443", "http://10.0.0.1:8001"]
        {
            assert!(!is_proxied(server, ""), "{server}");
        }
    }

    #[test]
    fn a_proxy_without_a_scheme_speaks_http() {
        let server = "https://10.96.0.1".parse().unwrap();
        assert_eq!(chosen(&server, "proxy:3128".to_owned(), "").as_deref(), Some("http://proxy:3128"));
        assert_eq!(chosen(&server, "socks5://proxy:1080".to_owned(), "").as_deref(), Some("socks5://proxy:1080"));
    }
}
