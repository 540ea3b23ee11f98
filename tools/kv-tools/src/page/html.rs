//! The page: its parts in one file.

use std::cmp::Reverse;
use std::fmt::Write as _;

use super::{RunFile, Summary};
use kv_replay::report::grouped;

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
    runs.iter().zip(1_usize..).for_each(|(run, number)| tenants(&mut main, run, number));
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

/// Most tenants of a table.
const TENANTS_MAX: usize = 25;

/// The tenants of a run, those with the most prompt tokens first; nothing without tenants.
fn tenants(page: &mut String, run: &RunFile, number: usize) {
    if run.tenants.is_empty() {
        return;
    }
    let id = format!("tenants-{number}");
    let _ = write!(
        page,
        "<section aria-labelledby=\"{id}\"><h2 id=\"{id}\">Tenants of {}</h2><div class=\"wide\" tabindex=\"0\" role=\"region\" aria-labelledby=\"{id}\"><table><thead><tr>",
        escaped(&run.name)
    );
    for head in [
        "Tenant",
        "requests",
        "prompt tokens",
        "share",
        "from the cache",
        "hit rate of blocks",
        "tokens generated",
        "first token p50",
        "p99",
    ] {
        let _ = write!(page, "<th scope=\"col\">{head}</th>");
    }
    page.push_str("</tr></thead><tbody>\n");
    let mut all: Vec<_> = run.tenants.iter().collect();
    all.sort_by_key(|(_, tenant)| Reverse(tenant.prompt_tokens));
    for &(name, tenant) in all.iter().take(TENANTS_MAX) {
        let _ = write!(page, "<tr><th scope=\"row\">{}</th>", escaped(name));
        let ms = |ms: Option<f64>| {
            ms.map_or_else(|| "not measured".to_owned(), |ms| format!("{ms:.0} ms"))
        };
        let share = tenant.prompt_tokens as f64 / run.prompt_tokens.max(1) as f64;
        for cell in [
            grouped(tenant.finished),
            grouped(tenant.prompt_tokens),
            format!("{:.1} %", 100.0 * share),
            grouped(tenant.prefix_tokens_reused),
            format!("{:.1} %", 100.0 * tenant.hit_rate()),
            grouped(tenant.generated_tokens),
            ms(tenant.time_to_first_token_p50_ms),
            ms(tenant.time_to_first_token_p99_ms),
        ] {
            let _ = write!(page, "<td>{cell}</td>");
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>");
    if let Some(more) = all.len().checked_sub(TENANTS_MAX).filter(|&more| more > 0) {
        let _ = write!(page, "<p>{} more have fewer prompt tokens.</p>", grouped(more as u64));
    }
    page.push_str("</section>\n");
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
    use kv_replay::report::TenantReport;

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
    fn tenants_with_the_most_tokens_come_first_and_their_names_are_text() {
        let mut run = RunFile { name: "run".to_owned(), prompt_tokens: 1000, ..RunFile::default() };
        assert!(!page(std::slice::from_ref(&run), &[summarise(&run)]).contains("Tenants of"));
        for number in 0..TENANTS_MAX as u64 + 3 {
            let tenant = TenantReport { prompt_tokens: number, ..TenantReport::default() };
            run.tenants.insert(format!("<b>{number}"), tenant);
        }
        let page = page(std::slice::from_ref(&run), &[summarise(&run)]);
        let at = |name: &str| page.find(&format!("<th scope=\"row\">&lt;b&gt;{name}</th>"));
        assert!(at("27") < at("26") && at("3").is_some() && at("2").is_none());
        assert!(page.contains("3 more have fewer prompt tokens"), "{page}");
        assert!(page.contains("<td>2.7 %</td>") && !page.contains("<b>"));
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
