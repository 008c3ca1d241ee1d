//! The files of the page, inside the program.

use bytes::Bytes;
use http::{Response, StatusCode};

use super::{Body, respond};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const ICON: &str = "image/svg+xml";

/// Path, type and content.
const ASSETS: [(&str, &str, &str); 17] = [
    ("/", HTML, include_str!("index.html")),
    ("/style.css", CSS, include_str!("style.css")),
    ("/icon.svg", ICON, include_str!("icon.svg")),
    ("/api.js", SCRIPT, include_str!("api.js")),
    ("/app.js", SCRIPT, include_str!("app.js")),
    ("/dom.js", SCRIPT, include_str!("dom.js")),
    ("/edges.js", SCRIPT, include_str!("edges.js")),
    ("/format.js", SCRIPT, include_str!("format.js")),
    ("/graph.js", SCRIPT, include_str!("graph.js")),
    ("/kernel.js", SCRIPT, include_str!("kernel.js")),
    ("/layout.js", SCRIPT, include_str!("layout.js")),
    ("/namespace.js", SCRIPT, include_str!("namespace.js")),
    ("/namespaces.js", SCRIPT, include_str!("namespaces.js")),
    ("/parts.js", SCRIPT, include_str!("parts.js")),
    ("/plot.js", SCRIPT, include_str!("plot.js")),
    ("/resource.js", SCRIPT, include_str!("resource.js")),
    ("/tap.js", SCRIPT, include_str!("tap.js")),
];

/// A file of the page; `None` if there is none with this path.
pub fn asset(path: &str) -> Option<Response<Body>> {
    let (_, kind, content) = ASSETS.iter().find(|(known, _, _)| *known == path)?;
    Some(respond(StatusCode::OK, kind, Bytes::from_static(content.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_the_page_names_is_there_and_its_own() {
        for (name, _, content) in ASSETS.iter() {
            for quote in ['"', '\''] {
                for address in content.split(quote).filter(|part| part.starts_with("./") || part.starts_with('/')) {
                    let path = address.strip_prefix('.').unwrap_or(address);
                    if path.ends_with(".js") || path.ends_with(".css") || path.ends_with(".svg") {
                        assert!(asset(path).is_some(), "{name} names {address}");
                    }
                }
            }
            let foreign = content.replace("http://www.w3.org/2000/svg", "");
            assert!(!foreign.contains("://"), "{name} names an address outside");
        }
        assert!(asset("/../Cargo.toml").is_none());
    }

    /// What would make markup from a string.
    #[test]
    fn no_script_parses_markup() {
        for (name, kind, content) in ASSETS.iter().filter(|(_, kind, _)| *kind == SCRIPT) {
            for forbidden in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "Function("]
            {
                assert!(!content.contains(forbidden), "{name} ({kind}) uses {forbidden}");
            }
        }
    }
}
