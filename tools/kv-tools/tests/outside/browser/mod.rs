//! The page of a report in a headless browser: both themes, a narrow and a wide window, by mouse and by keyboard. It says
//! nothing on the console, and no text lies over other text or is cut off. The trace file is read by speedscope, whose folder
//! `KV_SPEEDSCOPE` names.
//!
//! Without a Chromium, or the folder, trials are listed as ignored; with `KV_REQUIRE_BROWSER=1` those that need a browser alone fail
//! instead. `KV_CHROMIUM` names one.

mod devtools;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use devtools::{Browser, chromium};
use kv_replay::config::{ModelCost, RunConfig, Verify};
use kv_replay::device::{SimSizes, open};
use kv_replay::engine;
use kv_replay::generate::{GenerateOptions, generate};
use kv_tools::page::{self, ReportOptions};
use kv_tools::plan::{self, Choice, PlanOptions, Rules};
use kv_tools::policies::evict::Eviction;
use libtest_mimic::{Failed, Trial};
use serde_json::Value;
use tempfile::TempDir;

/// Windows of a phone and of a desk, and what their systems ask for.
const LOOKS: [(u32, &str); 4] = [(390, "light"), (390, "dark"), (1440, "light"), (1440, "dark")];

pub(crate) fn trials() -> Vec<Trial> {
    let required = std::env::var_os("KV_REQUIRE_BROWSER").is_some_and(|value| value == "1");
    let absent = chromium().is_none() && !required;
    let no_viewer = absent || speedscope().is_none();
    let browser = "no Chromium here; name one by KV_CHROMIUM";
    let viewer_too = "no Chromium, or no speedscope; name its folder by KV_SPEEDSCOPE";
    type Run = fn() -> Result<(), Failed>;
    let trials: [(&str, Run, bool, &str); 3] = [
        ("the_page_looks_right_in_every_window_and_theme", looks, absent, browser),
        ("charts_and_the_timeline_answer_to_mouse_and_keyboard", answers, absent, browser),
        ("another_viewer_reads_the_trace_file", viewer, no_viewer, viewer_too),
    ];
    let trials = trials.map(|(name, trial, ignored, why)| {
        let trial = Trial::test(name, trial).with_ignored_flag(ignored);
        if ignored { trial.with_kind(why) } else { trial }
    });
    trials.into()
}

/// The folder `dist/release` of the npm package speedscope, a viewer of traces by others.
fn speedscope() -> Option<PathBuf> {
    std::env::var_os("KV_SPEEDSCOPE").map(PathBuf::from)
}

/// A page of two runs with its trace file, and the page of a plan.
struct Pages {
    _folder: TempDir,
    page: PathBuf,
    events: PathBuf,
    plan: PathBuf,
}

fn pages() -> Result<Pages, Failed> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let runs = [run(&at("small cache.json"), 300)?, run(&at("large cache.json"), 2048)?];
    let (out, events) = (at("page.html"), at("events.json"));
    let options = ReportOptions { runs: &runs, out: &out, trace_events: Some(&events), json: None };
    page::run(&options)?;
    let plan = at("plan.html");
    let trace = generate(&GenerateOptions { requests: 200, seed: 1 })?;
    let mut rules = Rules::default();
    rules.block_tokens = 512;
    rules.model = ModelCost { prefill_tokens_per_s: 60_000, decode_step_us: 9000 };
    let choices = [Eviction::Lru, Eviction::HitDensity].map(|policy| Choice {
        gpus: 2,
        device_blocks: 900,
        host_blocks: 900,
        disk_blocks: 5000,
        policy,
    });
    let options = PlanOptions {
        read: &[],
        target_ms: None,
        trace: &trace,
        rules: &rules,
        choices: &choices,
        assumed: &[
            "A sentence with a long_word_that_has_no_space_in_it_at_all_and_goes_on_and_on."
                .to_owned(),
        ],
        against: None,
        out: Some(&plan),
        json: None,
    };
    plan::run(&options, |_| ())?;
    Ok(Pages { page: out, events, plan, _folder: folder })
}

/// Writes the report of a run with so many device blocks.
fn run(path: &Path, device_blocks: u64) -> Result<PathBuf, Failed> {
    let config = RunConfig {
        block_tokens: 64,
        device_blocks,
        host_blocks: 512,
        max_batch: 4,
        step_tokens: 4096,
        verify: Verify::None,
        series: true,
        ..RunConfig::default()
    };
    let mut trace = generate(&GenerateOptions { requests: 24, seed: 5 })?;
    for (request, number) in trace.requests.iter_mut().zip(0..) {
        // Each has as many letters as there may be.
        request.tenant = (number % 4 > 0).then(|| "w".repeat(64 / (number % 4)).into());
        request.input_length = request.input_length.min(8_000);
        request.hash_ids.truncate(request.input_length.div_ceil(512) as usize);
        request.output_length = request.output_length.min(20);
    }
    let devices = open(&"sim".parse()?, SimSizes::for_config(&config))?;
    let report = engine::run(&config, &trace, &devices, &mut ())?;
    std::fs::write(path, serde_json::to_vec(&report)?)?;
    Ok(path.to_owned())
}

fn url(path: &Path) -> String {
    format!("file://{}", path.display().to_string().replace(' ', "%20"))
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: &T, expected: &T) -> Result<(), Failed> {
    match found == expected {
        true => Ok(()),
        false => Err(format!("{what}: found {found:?}, expected {expected:?}").into()),
    }
}

fn looks() -> Result<(), Failed> {
    let pages = pages()?;
    let mut browser = Browser::start()?;
    browser.look(1440, "light")?;
    browser.open(&url(&pages.page))?;
    let mut backs = Vec::new();
    for (width, theme) in LOOKS {
        browser.look(width, theme)?;
        for folded in [true, false] {
            let open = format!(
                "document.querySelectorAll('details').forEach((one) => one.open = {})",
                !folded
            );
            browser.value(&open)?;
            browser.drawn()?;
            let wrong = browser.value(include_str!("layout.js"))?;
            let wrong: Vec<_> = wrong.as_array().into_iter().flatten().collect();
            same(&format!("{width} wide, {theme}"), &wrong, &Vec::new())?;
        }
        same("the theme", &browser.value("root.dataset.theme")?, &theme.into())?;
        backs.push(browser.value("getComputedStyle(document.body).backgroundColor")?);
    }
    same("themes by background", &(backs[0] == backs[2], backs[0] == backs[1]), &(true, false))?;
    browser.value("document.getElementById('theme').click()")?;
    same("the theme of the button", &browser.value("root.dataset.theme")?, &"light".into())?;
    browser.open(&url(&pages.plan))?;
    for (width, theme) in LOOKS {
        browser.look(width, theme)?;
        let wrong = browser.value(include_str!("layout.js"))?;
        same(&format!("a plan {width} wide, {theme}"), &wrong, &Value::Array(Vec::new()))?;
    }
    same("charts of a plan", &browser.value("plots.length")?, &4.into())?;
    same("said on the console", &browser.complaints, &Vec::new())
}

/// The middle of the plot at this index, which is scrolled to.
fn middle(browser: &mut Browser, index: &str) -> Result<[f64; 2], Failed> {
    let at = format!(
        "(() => {{ const over = plots.at({index}).drawn.over; over.scrollIntoView({{ block: 'center' }}); \
         const at = over.getBoundingClientRect(); return [at.left + at.width / 2, at.top + at.height / 2]; }})()"
    );
    let found = browser.value(&at)?;
    let number = |of: &Value| of.as_f64().ok_or("no number");
    Ok([number(&found[0])?, number(&found[1])?])
}

fn answers() -> Result<(), Failed> {
    let pages = pages()?;
    let mut browser = Browser::start()?;
    browser.look(1440, "dark")?;
    browser.open(&url(&pages.page))?;
    let legend = "plots[0].drawn.root.querySelector('.u-legend').innerText";
    let before = browser.value(legend)?;
    let point = middle(&mut browser, "0")?;
    browser.mouse("mouseMoved", point, false)?;
    let after = browser.value(legend)?;
    let told = after.as_str().is_some_and(|text| text.contains('%') && !text.contains('–'));
    same(&format!("values under the mouse, {before} before and {after} then"), &told, &true)?;

    let view = "(({ min, max }) => [min, max])(plots.at(-1).drawn.scales.x)";
    let all = browser.value(view)?;
    let length =
        |of: &Value| of[1].as_f64().zip(of[0].as_f64()).map_or(0.0, |(to, from)| to - from);
    let [x, y] = middle(&mut browser, "-1")?;
    browser.mouse("mouseMoved", [x, y], false)?;
    for (kind, by, held) in
        [("mousePressed", 0.0, true), ("mouseMoved", 100.0, true), ("mouseReleased", 100.0, true)]
    {
        browser.mouse(kind, [x + by, y], held)?;
    }
    let dragged = browser.value(view)?;
    same("a drag zooms", &(length(&dragged) < length(&all) / 5.0), &true)?;
    browser.value("plots.at(-1).drawn.root.parentElement.focus()")?;
    browser.press("0")?;
    same("0 shows all", &browser.value(view)?, &all)?;
    browser.press("+")?;
    let closer = browser.value(view)?;
    same("plus zooms", &(length(&closer) < length(&all) * 0.6), &true)?;
    browser.press("ArrowRight")?;
    let later = browser.value(view)?;
    same("the arrow moves", &(later[0].as_f64() > closer[0].as_f64()), &true)?;
    let button = "[...document.querySelectorAll('.tools button')].at(-1).click()";
    browser.value(button)?;
    same("the button shows all", &browser.value(view)?, &all)?;
    // Over the track of the first span, where that is.
    let span = "(() => { const drawn = plots.at(-1).drawn, of = runs.at(-1).series.timeline, at = drawn.over.getBoundingClientRect(); \
         return [at.left + drawn.valToPos(of.begin_ns[0] + of.length_ns[0] / 2, 'x'), at.top + (of.track[0] + 0.6) / of.tracks.length * at.height]; })()";
    let span = browser.value(span)?;
    browser.mouse(
        "mouseMoved",
        [span[0].as_f64().unwrap_or(0.0), span[1].as_f64().unwrap_or(0.0)],
        false,
    )?;
    let told = browser.value("[...document.querySelectorAll('.told')].at(-1).textContent")?;
    same(
        &format!("what the mouse is over: {told}"),
        &told.as_str().is_some_and(|text| text.contains(" at ")),
        &true,
    )?;
    same("said on the console", &browser.complaints, &Vec::new())
}

/// What speedscope says when it has read a file, or given up.
const READ: &str = "new Promise((done) => { let frames = 0; const look = () => { const text = document.body.innerText; \
    if (document.title.includes('events') || /wrong|unrecognized|unsupported/i.test(text) || ++frames > 900) done([document.title, text]); \
    else requestAnimationFrame(look); }; look(); })";

fn viewer() -> Result<(), Failed> {
    let pages = pages()?;
    let events = std::fs::read_to_string(&pages.events)?;
    let parsed: Value = serde_json::from_str(&events)?;
    let spans = parsed["traceEvents"].as_array().into_iter().flatten();
    let spans = spans.filter(|event| event["ph"] == "X");
    let tracks: BTreeSet<_> =
        spans.map(|span| (span["pid"].as_u64(), span["tid"].as_u64())).collect();
    let script = pages.events.with_extension("js");
    let load = format!("speedscope.loadFileFromBase64('events', btoa({}))", Value::from(events));
    std::fs::write(&script, load)?;
    let mut browser = Browser::start()?;
    browser.look(1440, "light")?;
    let index = speedscope().ok_or("no speedscope")?.join("index.html");
    browser.open(&format!("{}#localProfilePath={}", url(&index), script.display()))?;
    let read = browser.value(READ)?;
    let [title, text] = [0, 1].map(|at| read[at].as_str().unwrap_or_default().to_owned());
    // It has a profile for each thread and stream that did something.
    let first = format!("small cache (pid 1), engine (tid 0) (1/{})", tracks.len());
    same(&format!("{title}: {text}"), &text.contains(&first), &true)
}
