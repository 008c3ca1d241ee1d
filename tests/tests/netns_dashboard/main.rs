//! The dashboard of a running mesh in a real browser: right numbers, no complaints of the browser, text that stays
//! text, every control by keyboard, no sideways scrolling on a phone. With `WEFT_PICTURES_DIR`, the pictures of its
//! pages are left there: those of the documents are taken so.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod browser;

use std::{collections::BTreeSet, path::Path, process::Command};

use browser::Browser;
use serde_json::{Value, json};
use weft_test_kit::{
    binaries,
    manifests::Manifests,
    mesh::{Mesh, Options, Shared, unique_name},
    process::Process,
    wait::patience,
};

static MESH: Shared =
    Shared::with(|| (Manifests::example().unwrap(), Options { name: unique_name("t-see"), ..Options::default() }));

const WIDE: (u32, u32) = (1280, 860);
/// The width of a common phone.
const PHONE: (u32, u32) = (390, 844);
/// How pages are looked at: size, theme, and the end of a picture's name.
const LOOKS: [((u32, u32), &str, &str); 4] =
    [(WIDE, "light", "light"), (WIDE, "dark", "dark"), (PHONE, "light", "phone"), (PHONE, "dark", "phone-dark")];
/// The name of a program that would be a picture if it were markup; the kernel keeps 15 bytes of a name.
const MARKUP: &str = "<img src=q>";

/// A dashboard of the mesh, at a free port.
struct Dashboard {
    _process: Process,
    /// `http://ADDRESS:PORT`.
    origin: String,
    key: String,
}

impl Dashboard {
    async fn of(mesh: &Mesh) -> Self {
        Self::at(mesh, "localhost").await
    }

    async fn at(mesh: &Mesh, address: &str) -> Self {
        let mut command = Command::new(binaries::directory().unwrap().join("weft"));
        command.args(["dashboard", "--port", "0", "--show", "url", "--sandbox", mesh.name(), "--address", address]);
        let process = Process::start(&mut command, patience());
        process.says("#key=").await;
        let line = process.lines("#key=").remove(0);
        let (origin, key) = line.split_once("/#key=").unwrap();
        Self { origin: origin.to_owned(), key: key.to_owned(), _process: process }
    }

    /// A browser that shows the first page.
    async fn browser(&self, size: (u32, u32), scheme: &str) -> Browser {
        let mut browser = Browser::start().await.unwrap();
        browser.looks(size, scheme).await.unwrap();
        browser.open(&self.origin, &format!("/#key={}", self.key)).await.unwrap();
        browser
    }
}

/// A request every 25 ms from a client to `web`, each on a connection of its own, so that the kernel decides about it;
/// never ends.
async fn traffic(mesh: &Mesh) {
    let client = mesh.pod_of("shop", "client").await.unwrap();
    loop {
        let arguments = ["http1", "--target", "web.shop:80", "--duration", "2s", "--pause", "25ms", "--fresh"];
        assert!(mesh.load("shop", &client, &arguments).await.unwrap().requests > 0);
    }
}

/// Does this while there is traffic.
async fn during_traffic(mesh: &Mesh, act: impl Future<Output = ()>) {
    tokio::select! {
        () = act => {}
        () = traffic(mesh) => unreachable!("it never ends"),
    }
}

/// Goes to a page by its address, as a link would.
async fn go(browser: &mut Browser, hash: &str) {
    browser.value(&format!("location.hash = {}", json!(hash))).await.unwrap();
    browser.until(&format!("decodeURIComponent(location.hash) === {}", json!(hash))).await.unwrap();
}

async fn picture(browser: &mut Browser, name: &str) {
    let png = browser.picture().await.unwrap();
    assert!(png.starts_with(b"\x89PNG"), "{name} is no picture");
    if let Some(directory) = std::env::var_os("WEFT_PICTURES_DIR") {
        std::fs::write(Path::new(&directory).join(format!("{name}.png")), png).unwrap();
    }
}

/// Numbers of the page are those of the load: every request once, on an edge that no other test uses.
#[test]
fn the_page_counts_every_request_of_a_known_load() {
    MESH.test(async |mesh| {
        let dashboard = Dashboard::of(mesh).await;
        let mut browser = dashboard.browser(WIDE, "light").await;
        go(&mut browser, "#/ns/shop").await;
        // What was before the first two scrapes is not counted.
        browser.until("document.querySelector('.coverage')?.textContent.includes('proxies answered')").await.unwrap();
        let edge = "[...document.querySelectorAll('table.cards tr')].find((row) => row.cells[0].textContent === 'stranger → web')";
        let counted = format!("{edge}?.querySelector('[data-count]')?.dataset.count ?? '0'");
        let arguments = ["http1", "--target", "web.shop:80", "--count", "500"];
        assert_eq!(mesh.load("shop", "stranger", &arguments).await.unwrap().failures, 0);
        browser.until(&format!("({counted}) === '500'")).await.unwrap();
        let protection = browser.value(&format!("{edge}.innerText")).await.unwrap();
        assert!(protection.as_str().unwrap().contains("mutual TLS"), "{protection}");
        assert_eq!(browser.complaints(), Vec::<String>::new());
    });
}

/// Every page in both themes and both sizes: nothing scrolls sideways, and the browser has no complaint.
#[test]
fn every_page_fits_a_phone_and_a_screen_in_both_themes() {
    MESH.test(async |mesh| {
        let dashboard = Dashboard::of(mesh).await;
        let web = mesh.pod_of("shop", "web").await.unwrap();
        let pages = [
            ("namespaces", "#/".to_owned(), "a[href='#/ns/shop']"),
            ("namespace", "#/ns/shop".to_owned(), ".graph a"),
            ("workload", "#/ns/shop/deployment/web".to_owned(), ".plot .c-rps[d^=M]"),
            ("pod", format!("#/ns/shop/pod/{web}"), ".verdicts .tag"),
            ("tap", "#/tap?namespace=shop&kind=deployment&name=web".to_owned(), ".stream tbody tr"),
        ];
        let mut browser = dashboard.browser(WIDE, "light").await;
        let look = async {
            for (name, hash, shown) in &pages {
                go(&mut browser, hash).await;
                browser.until(&format!("document.querySelector({})", json!(shown))).await.unwrap();
                for (size, scheme, suffix) in LOOKS {
                    browser.looks(size, scheme).await.unwrap();
                    // What is drawn for a width is drawn again.
                    browser.until(&fits(size)).await.unwrap_or_else(|error| panic!("{name} at {size:?}: {error:#}"));
                    let ground = browser.value("getComputedStyle(document.body).backgroundColor").await.unwrap();
                    let is_dark = ground.as_str().unwrap().starts_with("rgb(13,");
                    assert_eq!(is_dark, scheme == "dark", "{name}: {ground}");
                    picture(&mut browser, &format!("dashboard-{name}-{suffix}")).await;
                    assert_eq!(browser.complaints(), Vec::<String>::new(), "{name} {suffix}");
                }
            }
            // What does not fit would have been seen. At once, because the page is drawn again with what arrives.
            let broad = format!("document.querySelector('h1').style.paddingLeft = '500px', {}", fits(PHONE));
            assert_eq!(browser.value(&broad).await.unwrap(), false);
        };
        during_traffic(mesh, look).await;
    });
}

/// Whether the page is as wide as the screen, and no wider.
fn fits((width, _): (u32, u32)) -> String {
    format!("innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
}

/// What the mesh says is text: a process whose name is markup is seen under that name, and makes no element. (Proxies
/// refuse requests whose paths have such characters.)
#[test]
fn markup_in_a_name_stays_text() {
    MESH.test(async |mesh| {
        let programs = tempfile::tempdir().unwrap();
        let program = programs.path().join(MARKUP);
        std::os::unix::fs::symlink(binaries::directory().unwrap().join("weft-client"), &program).unwrap();
        let dashboard = Dashboard::of(mesh).await;
        let mut browser = dashboard.browser(WIDE, "dark").await;
        let client = mesh.pod_of("shop", "client").await.unwrap();
        go(&mut browser, &format!("#/ns/shop/pod/{client}")).await;
        // Open, with or without the scrapes that the page itself makes.
        browser.until("/Waiting|redirect|pass/.test(document.querySelector('.verdicts')?.textContent)").await.unwrap();
        let is_seen = format!(
            "[...document.querySelectorAll('.stream td')].some((cell) => cell.textContent.includes({}))",
            json!(MARKUP)
        );
        let seen = browser.until(&is_seen);
        let program = program.to_str().unwrap();
        let command =
            [program, "http1", "--target", "web.shop:80", "--duration", "3s", "--pause", "100ms", "--fresh", "--json"];
        let (seen, sent) = tokio::join!(seen, mesh.exec("shop", &client, &command));
        seen.unwrap();
        assert!(sent.unwrap().status.success());
        assert_eq!(browser.value("document.images.length").await.unwrap(), 0);
        // An address, too.
        go(&mut browser, &format!("#/ns/shop/deployment/{MARKUP}")).await;
        browser.until(&format!("document.querySelector('h1')?.textContent.includes({})", json!(MARKUP))).await.unwrap();
        assert_eq!(browser.value("document.images.length").await.unwrap(), 0);
        assert_eq!(browser.complaints(), Vec::<String>::new());
        // The browser itself refuses markup from strings here.
        let attempt =
            "(() => { try { document.body.innerHTML = '<p>'; return 'made'; } catch { return 'refused'; } })()";
        assert_eq!(browser.value(attempt).await.unwrap(), "refused");
    });
}

/// With Tab alone: the skip link, every link and every control, each with a visible focus.
#[test]
fn everything_is_reached_by_keyboard() {
    MESH.test(async |mesh| {
        let dashboard = Dashboard::of(mesh).await;
        let web = mesh.pod_of("shop", "web").await.unwrap();
        let mut browser = dashboard.browser(WIDE, "light").await;
        for hash in ["#/", "#/ns/shop", &format!("#/ns/shop/pod/{web}"), "#/tap"] {
            go(&mut browser, hash).await;
            browser.until("document.querySelector('main section')").await.unwrap();
            // The page must not change between the list and the walk.
            if browser.value("document.getElementById('hold').getAttribute('aria-pressed')").await.unwrap() == "false" {
                browser.value("document.getElementById('hold').click()").await.unwrap();
            }
            browser.value("document.activeElement.blur(); scrollTo(0, 0)").await.unwrap();
            let wanted = "[...document.querySelectorAll('a[href], button, input, select, summary')]";
            let name = "((one) => (one.getAttribute('href')?.baseVal ?? one.getAttribute('href') ?? '') + '|' + one.tagName + '|' + (one.name ?? '') + '|' + one.textContent)";
            let wanted: BTreeSet<String> = texts(&browser.value(&format!("{wanted}.map({name})")).await.unwrap());
            let mut reached = BTreeSet::new();
            for _ in 0..wanted.len() * 3 {
                browser.press("Tab").await.unwrap();
                let focus = format!(
                    "(() => {{ const one = document.activeElement; if (one === document.body) return null; \
                     const style = getComputedStyle(one), box = one.querySelector('.box'); \
                     const seen = style.outlineStyle !== 'none' || (box && getComputedStyle(box).strokeWidth === '2px'); \
                     return [{name}(one), !!seen]; }})()"
                );
                let focused = browser.value(&focus).await.unwrap();
                let Some(pair) = focused.as_array() else { continue };
                assert_eq!(pair[1], true, "no visible focus on {} of {hash}", pair[0]);
                reached.insert(pair[0].as_str().unwrap().to_owned());
                if wanted.is_subset(&reached) {
                    break;
                }
            }
            let missed: Vec<_> = wanted.difference(&reached).collect();
            assert!(missed.is_empty(), "not reached with Tab on {hash}: {missed:?}");
        }
    });
}

fn texts(value: &Value) -> BTreeSet<String> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

/// The agent's answer on a pod's page, asked by typing.
#[test]
fn a_pods_page_explains_a_connection() {
    MESH.test(async |mesh| {
        let dashboard = Dashboard::of(mesh).await;
        let client = mesh.pod_of("shop", "client").await.unwrap();
        let mut browser = dashboard.browser(WIDE, "light").await;
        go(&mut browser, &format!("#/ns/shop/pod/{client}")).await;
        browser.until("document.querySelector('input[name=destination]')").await.unwrap();
        browser.value("document.querySelector('input[name=destination]').focus()").await.unwrap();
        browser.type_text("payments:80").await.unwrap();
        browser.press("Enter").await.unwrap();
        browser.until("document.querySelector('.answer')?.textContent.includes('redirect')").await.unwrap();
        // The question stays while the numbers beside it are refreshed.
        assert_eq!(
            browser.value("document.querySelector('input[name=destination]').value").await.unwrap(),
            "payments:80"
        );
        let decided = "document.querySelector('.verdicts')?.textContent.includes('redirect outbound')";
        during_traffic(mesh, async { browser.until(decided).await.unwrap() }).await;
    });
}

/// A mistyped name: the tap waits, and the page says for what.
#[test]
fn a_tap_without_pods_says_so() {
    MESH.test(async |mesh| {
        let dashboard = Dashboard::of(mesh).await;
        let mut browser = dashboard.browser(WIDE, "light").await;
        go(&mut browser, "#/tap?namespace=shop&kind=deployment&name=nothing").await;
        browser.until("document.querySelector('.notice div')?.textContent.startsWith('no pod')").await.unwrap();
        assert_eq!(browser.complaints(), Vec::<String>::new());
    });
}

/// Without the key, with a wrong one, and after the end of `weft dashboard`, the page says what to do; and it is where
/// `--address` says.
#[test]
fn a_page_that_cannot_ask_says_what_to_do() {
    MESH.test(async |mesh| {
        let dashboard = Dashboard::at(mesh, "127.0.0.2").await;
        assert!(dashboard.origin.starts_with("http://127.0.0.2:"), "{}", dashboard.origin);
        let mut browser = Browser::start().await.unwrap();
        browser.open(&dashboard.origin, "/#key=wrong").await.unwrap();
        browser
            .until("document.body.innerText.includes('Open the address that weft dashboard printed')")
            .await
            .unwrap();
        let mut browser = dashboard.browser(PHONE, "dark").await;
        browser.until("document.querySelector(\"a[href='#/ns/shop']\")").await.unwrap();
        drop(dashboard);
        browser.until("document.body.innerText.includes('These numbers are old')").await.unwrap();
    });
}
