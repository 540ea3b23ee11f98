//! The page: its parts in one file.

use std::fmt::Write as _;

use super::{RunFile, Summary};
use crate::report::grouped;

const STYLE: &str = include_str!("assets/page.css");
const COMMON: &str = include_str!("assets/common.js");
const SCRIPT: &str = include_str!("assets/page.js");
const CHARTS: &str = include_str!("assets/uPlot.iife.min.js");
const CHARTS_STYLE: &str = include_str!("assets/uPlot.min.css");
const LICENCE: &str = include_str!("assets/LICENSE-uPlot");

/// Nothing may be fetched: the page is all there is.
const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";

/// The page of these runs and their summaries, in the same order.
pub(super) fn page(runs: &[RunFile], summaries: &[Summary]) -> String {
    let mut main = String::from(
        "<section aria-labelledby=\"summary\"><h2 id=\"summary\">In short</h2><div class=\"runs\">\n",
    );
    for (run, summary) in runs.iter().zip(summaries) {
        card(&mut main, run, summary);
    }
    main.push_str("</div></section>\n");
    totals(&mut main, runs);
    document("report", &main, &serde_json::to_string(runs).unwrap_or_default(), SCRIPT)
}

/// A page that needs nothing else: what is above the charts, the data of the charts as JSON, and the script that draws them.
pub(crate) fn document(name: &str, main: &str, data: &str, script: &str) -> String {
    let mut page = String::new();
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>kv-replay {name}</title>\n<link rel=\"icon\" href=\"data:,\">\n\
         <style>\n{CHARTS_STYLE}\n{STYLE}</style>\n</head>\n<body>\n\
         <a class=\"skip\" href=\"#main\">To the {name}</a>\n\
         <header><h1>kv-replay {name}</h1><button id=\"theme\" type=\"button\">Dark or light</button></header>\n\
         <main id=\"main\">\n{main}\
         <div id=\"charts\"></div>\n<noscript><p>The charts need JavaScript.</p></noscript>\n</main>\n"
    );
    let data = data.replace('<', "\\u003c");
    let _ = write!(
        page,
        "<footer><details><summary>Licence of the charts (uPlot)</summary><pre>{}</pre></details></footer>\n\
         <script type=\"application/json\" id=\"data\">{data}</script>\n<script>{CHARTS}</script>\n\
         <script>\n{COMMON}</script>\n<script>\n{script}</script>\n</body>\n</html>\n",
        escaped(LICENCE)
    );
    page
}

fn card(page: &mut String, run: &RunFile, summary: &Summary) {
    let [name, limited, helps] =
        [&run.name, &summary.limited_by, &summary.helps].map(|text| escaped(text));
    let _ = writeln!(
        page,
        "<article class=\"card\"><h3>{name}</h3>\
         <p><strong>What limited it.</strong> {limited}</p>\
         <p><strong>What would help most.</strong> {helps}</p><ul>"
    );
    for fact in &summary.facts {
        let _ = writeln!(page, "<li>{}</li>", escaped(fact));
    }
    page.push_str("</ul></article>\n");
}

/// The totals of the runs, a column each.
fn totals(page: &mut String, runs: &[RunFile]) {
    type Figure = fn(&RunFile) -> String;
    let rows: [(&str, Figure); 14] = [
        ("Device", |run| run.device.clone()),
        ("Requests finished", |run| {
            format!("{} of {}", grouped(run.finished), grouped(run.requests))
        }),
        ("Hit rate of blocks", |run| format!("{:.1} %", 100.0 * run.hit_rate())),
        ("Prompt tokens", |run| grouped(run.prompt_tokens)),
        ("of these from the cache", |run| grouped(run.prefix_tokens_reused)),
        ("Tokens generated", |run| grouped(run.generated_tokens)),
        ("Device blocks", |run| grouped(run.device_blocks)),
        ("Host blocks", |run| grouped(run.host_blocks)),
        ("Policy, and what is stored", |run| format!("{}, {}", run.policy, run.store)),
        ("Blocks evicted", |run| grouped(run.blocks_evicted)),
        ("Blocks stored in host memory", |run| grouped(run.blocks_offloaded)),
        ("Blocks brought back", |run| grouped(run.blocks_onboarded)),
        ("Preemptions", |run| grouped(run.preemptions)),
        ("Blocks compared, and wrong", |run| {
            format!("{}, {}", grouped(run.verified_blocks), grouped(run.corrupt_blocks))
        }),
    ];
    page.push_str("<section aria-labelledby=\"totals\"><h2 id=\"totals\">Totals</h2><div class=\"wide\" tabindex=\"0\" role=\"region\" aria-labelledby=\"totals\"><table><thead><tr><td></td>");
    for run in runs {
        let _ = write!(page, "<th scope=\"col\">{}</th>", escaped(&run.name));
    }
    page.push_str("</tr></thead><tbody>\n");
    for (name, figure) in rows {
        let _ = write!(page, "<tr><th scope=\"row\">{name}</th>");
        for run in runs {
            let _ = write!(page, "<td>{}</td>", escaped(&figure(run)));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div></section>\n");
}

/// Text that is no markup.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;
    use crate::page::summarise;

    #[test]
    fn names_are_text_and_never_markup() {
        let name = "</script><b onload=\"x\">&".to_owned();
        let run = RunFile { name: name.clone(), device: name, ..RunFile::default() };
        let page = page(std::slice::from_ref(&run), &[summarise(&run)]);
        assert!(!page.contains("<b onload"), "markup");
        assert!(page.contains("&lt;/script&gt;&lt;b onload=&quot;x&quot;&gt;&amp;"));
        assert!(page.contains("\\u003c/script>"), "in the data");
    }

    #[test]
    fn the_charts_are_the_published_ones() {
        let page = include_str!("assets/README.md");
        for (name, text) in [("uPlot.iife.min.js", CHARTS), ("uPlot.min.css", CHARTS_STYLE)] {
            let digest = Sha256::digest(text.as_bytes());
            let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            assert!(page.contains(&format!("| {name} | {digest} |")), "{name} has {digest}");
        }
    }

    #[test]
    fn the_page_fetches_nothing() {
        let run = RunFile::default();
        let page = page(std::slice::from_ref(&run), &[summarise(&run)]);
        for fetches in [" src=", "@import", "url(", "fetch(", "XMLHttpRequest"] {
            assert!(!page.contains(fetches), "{fetches}");
        }
        assert!(page.contains("default-src 'none'"));
    }
}
