//! The whole state of a manager, to be compared before and after a call that is not granted.

use crate::prelude::*;

/// All that a manager notes, and each block of its pools: but for how often something was looked up, waited for or refused.
pub(crate) fn state(manager: &Manager) -> String {
    let groups = (0..).map_while(|group| manager.pool(GroupId(group)));
    let pools: Vec<_> = groups.map(|pool| pool.snapshot().blocks).collect();
    let mut all = format!("{manager:#?}\n{pools:#?}");
    for count in ["lookups", "hits", "prefix", "load", "room", "row", "busy"] {
        let lines = all.lines().filter(|line| !is_count(line, count));
        all = lines.collect::<Vec<_>>().join("\n");
    }
    all
}

fn is_count(line: &str, name: &str) -> bool {
    let value = line.trim_start().strip_prefix(name).and_then(|rest| rest.strip_prefix(": "));
    value.is_some_and(|value| value.trim_end_matches(',').parse::<u64>().is_ok())
}

/// The first lines that differ.
pub(crate) fn difference(before: &str, after: &str) -> Option<String> {
    let differs =
        before.lines().zip(after.lines()).enumerate().find(|(_, (one, other))| one != other);
    match differs {
        Some((at, (one, other))) => {
            let around: Vec<_> = before.lines().skip(at.saturating_sub(12)).take(12).collect();
            Some(format!("{}\n- {one}\n+ {other}", around.join("\n")))
        }
        None if before.len() != after.len() => Some("one is longer".into()),
        None => None,
    }
}

/// What is cached in the first group, after each of the claims of a block that are granted: the order of eviction.
pub(crate) fn evictions(manager: &mut Manager) -> Vec<Vec<(Location, Option<BlockHash>)>> {
    let (mut held, mut all): (Vec<Sequence>, _) = (Vec::new(), Vec::new());
    for id in 900_000.. {
        let mut request = Request::new(vec![id]);
        request.waits = false;
        match manager.ask_all(&mut [request], 1).pop() {
            Some(Answer::Admitted(sequence)) => held.push(sequence),
            _ => break,
        }
        let blocks = manager.pool(GroupId(0)).unwrap().snapshot().blocks;
        let mut cached: Vec<_> = blocks.iter().map(|block| (block.location, block.hash)).collect();
        cached.sort_by_key(|(at, _)| (at.tier, at.id));
        all.push(cached);
    }
    all
}
