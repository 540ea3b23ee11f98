//! A plan as one HTML page that needs nothing else.

use std::fmt::Write as _;

use super::{Against, Choice, ChoiceReport, Rules};
use crate::page::{document, escaped};
use kv_replay::report::{bytes, grouped};

const SCRIPT: &str = include_str!("../page/assets/plan.js");

/// The page of these choices.
pub(super) fn page(
    reports: &[ChoiceReport],
    rules: &Rules,
    assumed: &[String],
    (against, target_ms): (Option<&Against>, Option<u64>),
) -> String {
    let mut main = String::from(
        "<section aria-labelledby=\"short\"><h2 id=\"short\">In short</h2><article class=\"card\">\n",
    );
    for sentence in sentences(reports).into_iter().chain(verdicts(reports, target_ms)) {
        let _ = writeln!(main, "<p>{}</p>", escaped(&sentence));
    }
    main.push_str("</article></section>\n");
    choices(&mut main, reports, rules);
    if let Some(against) = against {
        let _ = writeln!(
            main,
            "<section aria-labelledby=\"against\"><h2 id=\"against\">Against a run</h2><pre>{}</pre></section>",
            escaped(&against.to_string())
        );
    }
    main.push_str(
        "<section aria-labelledby=\"assumed\"><h2 id=\"assumed\">What was assumed</h2><ul>\n",
    );
    for one in assumed {
        let _ = writeln!(main, "<li>{}</li>", escaped(one));
    }
    main.push_str("</ul></section>\n<h2>Charts</h2>\n");
    let data: Vec<_> = reports.iter().map(|report| report.json(rules)).collect();
    document("plan", &main, &serde_json::to_string(&data).unwrap_or_default(), SCRIPT)
}

/// What stands out.
fn sentences(reports: &[ChoiceReport]) -> Vec<String> {
    let mut said = Vec::new();
    let numbered = || reports.iter().zip(1_usize..);
    if let Some((best, number)) = numbered()
        .min_by(|a, b| a.0.time_to_first_token_ms.p99.total_cmp(&b.0.time_to_first_token_ms.p99))
    {
        let times = best.time_to_first_token_ms;
        said.push(format!(
            "Number {number} answers soonest: 99 in 100 requests have their first token within {:.0} ms, half of them within {:.0} ms.",
            times.p99, times.p50
        ));
    }
    if let Some((best, number)) = numbered().max_by(|a, b| a.0.hit_rate.total_cmp(&b.0.hit_rate)) {
        said.push(format!(
            "Number {number} finds most: {:.1} % of the blocks, where {:.1} % are possible; it saves {} of {} prompt tokens.",
            100.0 * best.hit_rate,
            100.0 * best.best_hit_rate,
            grouped(best.prefill_tokens_saved),
            grouped(best.prompt_tokens)
        ));
    }
    said
}

/// Which choices serve less than arrives, and the smallest that keeps what was asked for.
pub(super) fn verdicts(reports: &[ChoiceReport], target_ms: Option<u64>) -> Vec<String> {
    let numbered = || reports.iter().zip(1_usize..);
    let overloaded = numbered().filter(|(report, _)| report.is_overloaded());
    let mut said: Vec<_> = overloaded
        .map(|(report, number)| {
            format!(
                "Number {number} is overloaded: requests wait {:.2} s longer for each second of arrivals, and its GPUs are busy for {:.0} % of the time.",
                report.queue_growth,
                100.0 * report.busy
            )
        })
        .collect();
    let Some(target_ms) = target_ms else { return said };
    let keeps = |report: &ChoiceReport| {
        report.time_to_first_token_ms.p99 <= target_ms as f64 && !report.is_overloaded()
    };
    let size = |report: &ChoiceReport| {
        let Choice { gpus, device_blocks, host_blocks, disk_blocks, .. } = report.choice;
        (gpus, device_blocks, host_blocks, disk_blocks)
    };
    let least =
        numbered().filter(|(report, _)| keeps(report)).min_by_key(|(report, _)| size(report));
    said.push(match least {
        Some((report, number)) => format!(
            "Number {number} is the smallest choice in which 99 in 100 requests have their first token within {target_ms} ms: {:.0} ms.",
            report.time_to_first_token_ms.p99
        ),
        None => format!(
            "In no choice have 99 in 100 requests their first token within {target_ms} ms; give more GPUs or memory."
        ),
    });
    said
}

fn choices(main: &mut String, reports: &[ChoiceReport], rules: &Rules) {
    main.push_str(
        "<section aria-labelledby=\"choices\"><h2 id=\"choices\">Choices</h2><div class=\"wide\" tabindex=\"0\" role=\"region\" aria-labelledby=\"choices\"><table><thead><tr>",
    );
    for head in [
        "No.",
        "GPUs",
        "device blocks",
        "host memory each",
        "files each",
        "policy",
        "hit rate",
        "best possible",
        "prompt tokens saved",
        "first token p50",
        "p99",
        "each further token p50",
        "p99",
        "tokens a second",
        "GPUs busy",
        "link",
    ] {
        let _ = write!(main, "<th scope=\"col\">{head}</th>");
    }
    main.push_str("</tr></thead><tbody>\n");
    for (report, number) in reports.iter().zip(1_usize..) {
        let choice = &report.choice;
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let ms = |ms: f64| format!("{ms:.0} ms");
        let _ = write!(main, "<tr><th scope=\"row\">{number}</th>");
        for cell in [
            choice.gpus.to_string(),
            grouped(choice.device_blocks),
            bytes(choice.host_blocks.saturating_mul(rules.block_bytes)),
            bytes(choice.disk_blocks.saturating_mul(rules.block_bytes)),
            choice.policy.name().to_owned(),
            percent(report.hit_rate),
            percent(report.best_hit_rate),
            grouped(report.prefill_tokens_saved),
            ms(report.time_to_first_token_ms.p50),
            ms(report.time_to_first_token_ms.p99),
            format!("{:.1} ms", report.time_per_output_token_ms.p50),
            format!("{:.1} ms", report.time_per_output_token_ms.p99),
            format!("{:.0}", report.generated_tokens_per_s),
            percent(report.busy),
            percent(report.link_to_device.max(report.link_to_host)),
        ] {
            let _ = write!(main, "<td>{}</td>", escaped(&cell));
        }
        main.push_str("</tr>\n");
    }
    main.push_str("</tbody></table></div></section>\n");
}
