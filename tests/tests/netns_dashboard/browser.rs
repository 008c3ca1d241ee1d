//! Debian's Chromium, headless, over the DevTools protocol: what a person would see, type and hear of errors.

use std::{
    collections::VecDeque,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, tungstenite::Message};
use weft_test_kit::wait::{Polling, patience, until};

/// How long a browser may take to start, or a page to show something, on a busy machine.
const WITHIN: Duration = Duration::from_secs(60);
/// Between two looks at a page.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A browser with one page. Dropping it ends its processes.
pub(crate) struct Browser {
    process: Child,
    _profile: TempDir,
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    session: String,
    last: u64,
    /// What the page complained about: exceptions, errors on its console, requests that its policy forbade.
    complaints: VecDeque<String>,
}

impl Browser {
    /// Starts a browser with an empty page.
    pub(crate) async fn start() -> Result<Self> {
        let profile = tempfile::tempdir().context("make a directory for the browser")?;
        let process = Command::new("chromium")
            // The tests' root has no user namespaces to put a renderer in.
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"])
            .args(["--disable-dev-shm-usage", "--disable-background-networking", "--force-color-profile=srgb"])
            .args(["--remote-debugging-port=0", "about:blank"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            // Its socket stays in a directory of its own when it is killed.
            .env("TMPDIR", profile.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start chromium; `cargo xtask test` installs it")?;
        let address = address(profile.path()).await?;
        let (socket, _) = tokio_tungstenite::connect_async(&address).await.context("connect to the browser")?;
        let session = String::new();
        let mut browser = Self { process, _profile: profile, socket, session, last: 0, complaints: VecDeque::new() };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"})).await?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attach).await?;
        browser.session = attached["sessionId"].as_str().context("a session has an id")?.to_owned();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable", "Network.enable"] {
            browser.call(domain, json!({})).await?;
        }
        Ok(browser)
    }

    /// Sets the size of the page and the preferences of the person.
    pub(crate) async fn looks(&mut self, (width, height): (u32, u32), scheme: &str) -> Result<()> {
        // Not "mobile": such a page grows with what does not fit, so that nothing is ever too wide.
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size).await?;
        let features = json!([
            {"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}
        ]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features})).await?;
        Ok(())
    }

    /// Goes to an address of a site, and waits until its scripts have run.
    pub(crate) async fn open(&mut self, origin: &str, rest: &str) -> Result<()> {
        let answer = self.call("Page.navigate", json!({"url": format!("{origin}{rest}")})).await?;
        if let Some(error) = answer["errorText"].as_str() {
            bail!("open {origin}: {error}");
        }
        // The page before is complete, too, and is there until the new one has begun.
        self.until(&format!("location.origin === {} && document.readyState === 'complete'", json!(origin))).await
    }

    /// The value of an expression in the page.
    pub(crate) async fn value(&mut self, expression: &str) -> Result<Value> {
        let wanted = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut answer = self.call("Runtime.evaluate", wanted).await?;
        if let Some(problem) = answer.get("exceptionDetails") {
            bail!("{expression}: {problem}");
        }
        Ok(answer["result"]["value"].take())
    }

    /// Waits until an expression is true; the error shows the page's text.
    pub(crate) async fn until(&mut self, expression: &str) -> Result<()> {
        // While a page is replaced there is nothing to evaluate in.
        let seen = until(Polling::every(LOOK_EVERY, WITHIN.max(patience())), async || {
            match self.value(&format!("!!({expression})")).await {
                Ok(Value::Bool(true)) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
        let Err(seen) = seen.await else { return Ok(()) };
        let text = self.value("document.body.innerText").await.unwrap_or_default();
        bail!("not seen ({seen}): {expression}; the page shows: {text}; it complained: {:?}", self.complaints)
    }

    /// Presses a key as a person does.
    pub(crate) async fn press(&mut self, key: &str) -> Result<()> {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            _ => bail!("no key {key}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let event = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": if kind == "keyDown" { text } else { "" }});
            self.call("Input.dispatchKeyEvent", event).await?;
        }
        Ok(())
    }

    /// Types text where the focus is.
    pub(crate) async fn type_text(&mut self, text: &str) -> Result<()> {
        self.call("Input.insertText", json!({"text": text})).await.map(drop)
    }

    /// A picture of the whole page, as PNG.
    pub(crate) async fn picture(&mut self) -> Result<Vec<u8>> {
        let answer =
            self.call("Page.captureScreenshot", json!({"format": "png", "captureBeyondViewport": false})).await?;
        let text = answer["data"].as_str().context("a picture has data")?;
        base64::Engine::decode(&base64::prelude::BASE64_STANDARD, text).context("decode a picture")
    }

    /// What the page complained about since the last call.
    pub(crate) fn complaints(&mut self) -> Vec<String> {
        self.complaints.drain(..).collect()
    }

    async fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.last += 1;
        let mut message = json!({"id": self.last, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        self.socket.send(Message::text(message.to_string())).await.with_context(|| format!("send {method}"))?;
        let answer = tokio::time::timeout(WITHIN, self.answer());
        answer
            .await
            .map_err(|_| anyhow!("{method}: no answer within {}s", WITHIN.as_secs()))?
            .context(method.to_owned())
    }

    /// The answer to the last call. Events that come before it are kept if they are complaints.
    async fn answer(&mut self) -> Result<Value> {
        loop {
            let message =
                self.socket.next().await.context("the browser went away")?.context("read from the browser")?;
            let Message::Text(text) = message else { continue };
            let mut message: Value = serde_json::from_str(&text).context("the browser sends JSON")?;
            if message["id"] == self.last {
                if let Some(error) = message.get("error") {
                    bail!("{error}");
                }
                return Ok(message["result"].take());
            }
            self.complaints.extend(complaint(&message));
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn complaint(event: &Value) -> Option<String> {
    let params = &event["params"];
    match event["method"].as_str()? {
        "Runtime.exceptionThrown" => Some(params["exceptionDetails"].to_string()),
        "Runtime.consoleAPICalled" if params["type"] == "error" => Some(params["args"].to_string()),
        "Log.entryAdded" if params["entry"]["level"] == "error" => {
            Some(format!("{} {}", params["entry"]["text"], params["entry"]["url"]))
        }
        _ => None,
    }
}

/// Where the browser listens: it writes the port and the path into its profile.
async fn address(profile: &Path) -> Result<String> {
    until(Polling::every(LOOK_EVERY, WITHIN.max(patience())), async || {
        let text = std::fs::read_to_string(profile.join("DevToolsActivePort")).unwrap_or_default();
        let (port, path) = text.trim().split_once('\n').context("chromium did not say where it listens")?;
        Ok(format!("ws://127.0.0.1:{port}{path}"))
    })
    .await
}
