//! What came of it, as a table.

use std::fmt::Write;

use kv_replay::trace::Trace;

use crate::Options;
use crate::drill::Outcome;
use crate::instance::{BLOCK_TOKENS, Sizes};

/// The table, and the first disagreements.
pub fn of(
    options: &Options,
    trace: &Trace,
    sizes: Sizes,
    routed: &Outcome,
    in_turn: &Outcome,
    best_tokens: u64,
) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_all(&mut text, options, trace, sizes, routed, in_turn, best_tokens);
    text
}

fn write_all(
    text: &mut String,
    options: &Options,
    trace: &Trace,
    sizes: Sizes,
    routed: &Outcome,
    in_turn: &Outcome,
    best_tokens: u64,
) -> std::fmt::Result {
    let (requests, instances) = (trace.requests.len(), options.instances);
    writeln!(
        text,
        "{requests} requests, {} prompt tokens, {instances} instances of {} blocks on the device, {} in host memory and {} below, of {BLOCK_TOKENS} tokens",
        routed.prompt_tokens, sizes.device, sizes.host, sizes.below
    )?;
    writeln!(text)?;
    writeln!(
        text,
        "  who chooses        hit rate  on the device  below it  requests of each instance"
    )?;
    let rate = |tokens: u64| 100.0 * tokens as f64 / routed.prompt_tokens as f64;
    for (name, way) in [("dynamo-kv-router", routed), ("round robin", in_turn)] {
        let (near, far) = (way.near_tokens, way.far_tokens);
        let shares: Vec<_> = way.shares.iter().map(u64::to_string).collect();
        writeln!(
            text,
            "  {name:<18} {:>7.2}% {:>13.2}% {:>8.2}%  {}",
            rate(near + far),
            rate(near),
            rate(far),
            shares.join(" ")
        )?;
    }
    writeln!(
        text,
        "  best possible      {:>7.2}%  one cache without an end, never reset",
        rate(best_tokens)
    )?;
    writeln!(text)?;
    let wire = &routed.wire;
    writeln!(
        text,
        "  wire    {} messages of {} events, {} of which the router refused, {:.1} MB; {} lost on purpose: {} gaps seen, {} messages replayed, {} times all told anew",
        wire.messages,
        wire.events,
        wire.refused,
        wire.bytes as f64 / 1e6,
        wire.lost,
        wire.gaps,
        wire.replayed,
        wire.told_anew
    )?;
    writeln!(
        text,
        "  events  the publishers lagged {} times, and told all anew; {} resets, {} restart of the router",
        wire.log_losses, routed.resets, wire.restarts
    )?;
    writeln!(
        text,
        "  scores  {requests} compared with what the instance found, {} above 0, {} of these with a salt or an adapter: {} disagreements",
        routed.scored,
        routed.scoped,
        routed.disagreements.len()
    )?;
    for one in routed.disagreements.iter().take(10) {
        writeln!(text, "          {one}")?;
    }
    Ok(())
}
