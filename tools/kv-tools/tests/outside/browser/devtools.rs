//! A headless Chromium, driven by the DevTools protocol over its pipe: JSON messages that end with a zero byte.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use libtest_mimic::Failed;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A browser that says nothing for so long hangs, and fails the trial.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// The browser that `KV_CHROMIUM` names, or the first of those that systems call so.
pub(crate) fn chromium() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("KV_CHROMIUM") {
        return Some(named.into());
    }
    let folders: Vec<_> =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    ["chromium", "chromium-browser", "google-chrome"]
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)))
        .find(|path| path.is_file())
}

/// A browser with one page.
pub(crate) struct Browser {
    child: Child,
    input: ChildStdin,
    output: Receiver<Value>,
    next: u64,
    session: String,
    /// What the page has reported as an error or a warning.
    pub(crate) complaints: Vec<String>,
    _profile: TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Browser {
    pub(crate) fn start() -> Result<Self, Failed> {
        let profile = tempfile::tempdir()?;
        let mut data = OsString::from("--user-data-dir=");
        data.push(profile.path());
        // The browser reads descriptor 3 and writes descriptor 4, which only a shell gives a child without unsafe code.
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1"]);
        command.arg(chromium().ok_or("no browser")?);
        command.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]);
        command.args(["--remote-debugging-pipe", "--hide-scrollbars"]).arg(data);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().ok_or("no input")?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?);
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while lines.read_until(0, &mut message).is_ok_and(|read| read > 0) {
                message.pop();
                let Ok(value) = serde_json::from_slice(&message) else { return };
                if sender.send(value).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let (session, complaints) = (String::new(), Vec::new());
        let mut browser =
            Self { child, input, output, next: 0, session, complaints, _profile: profile };
        let made = browser.call("Target.createTarget", json!({"url": "about:blank"}))?;
        let to = json!({"targetId": made["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", to)?;
        browser.session = attached["sessionId"].as_str().ok_or("no session")?.to_owned();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}))?;
        }
        Ok(browser)
    }

    /// The next message; errors of the page are kept.
    fn hear(&mut self) -> Result<Value, Failed> {
        let message = self.output.recv_timeout(SILENCE_MAX)?;
        let params = &message["params"];
        let complaint = match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => Some(&params["exceptionDetails"]),
            Some("Log.entryAdded") => Some(&params["entry"]),
            Some("Runtime.consoleAPICalled") => Some(params),
            _ => None,
        };
        self.complaints.extend(complaint.map(Value::to_string));
        Ok(message)
    }

    /// Calls a method, and returns its result.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Result<Value, Failed> {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.input.write_all(message.to_string().as_bytes())?;
        self.input.write_all(b"\0")?;
        self.input.flush()?;
        loop {
            let heard = self.hear()?;
            if heard["id"] == json!(self.next) {
                return match heard.get("error") {
                    Some(error) => Err(format!("{method}: {error}").into()),
                    None => Ok(heard["result"].clone()),
                };
            }
        }
    }

    /// Opens a page, and waits until it is there.
    pub(crate) fn open(&mut self, url: &str) -> Result<(), Failed> {
        let answer = self.call("Page.navigate", json!({"url": url}))?;
        if let Some(error) = answer.get("errorText") {
            return Err(format!("{url}: {error}").into());
        }
        while self.hear()?["method"] != "Page.loadEventFired" {}
        Ok(())
    }

    /// The value of an expression in the page; of a promise, what it becomes.
    pub(crate) fn value(&mut self, expression: &str) -> Result<Value, Failed> {
        let how = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", how)?;
        match answer.get("exceptionDetails") {
            Some(details) => {
                let begin: String = expression.chars().take(100).collect();
                Err(format!("{begin}: {}", details["exception"]["description"]).into())
            }
            None => Ok(answer["result"]["value"].clone()),
        }
    }

    /// Waits until the page has drawn what was changed.
    pub(crate) fn drawn(&mut self) -> Result<(), Failed> {
        let twice = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))";
        self.value(twice).map(|_| ())
    }

    /// Sets the width of the window, and the theme that the system asks for.
    pub(crate) fn look(&mut self, width: u32, theme: &str) -> Result<(), Failed> {
        let size =
            json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size)?;
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": theme}]});
        self.call("Emulation.setEmulatedMedia", features)?;
        self.drawn()
    }

    /// An event of the mouse at a point of the window.
    pub(crate) fn mouse(&mut self, kind: &str, [x, y]: [f64; 2], held: bool) -> Result<(), Failed> {
        let button = if held { "left" } else { "none" };
        let event = json!({"type": kind, "x": x, "y": y, "button": button, "buttons": u8::from(held), "clickCount": 1});
        self.call("Input.dispatchMouseEvent", event)?;
        self.drawn()
    }

    /// Presses a key in what has the focus.
    pub(crate) fn press(&mut self, key: &str) -> Result<(), Failed> {
        for kind in ["keyDown", "keyUp"] {
            self.call("Input.dispatchKeyEvent", json!({"type": kind, "key": key}))?;
        }
        self.drawn()
    }
}
