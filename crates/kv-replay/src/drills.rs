//! `run --drill KIND=…`: what a run is made to live through, which no user of a run needs.

use std::str::FromStr;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use kv_replay::command_line::whole;
use kv_replay::engine::workers::WorkerDrill;

use crate::fleet::{NodeDrill, NodeFault};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Drill {
    Worker(WorkerDrill),
    Node(NodeDrill),
    TierFaults(u64),
    /// Two requests get one block, and the store refuses nothing.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    Sabotage,
}

const KINDS: [&str; 6] =
    ["kill-worker", "stop-worker", "kill-node", "stop-node", "part-node", "tier-faults"];

/// `WHO@AT`, or `WHO@AT:FOR`.
fn parts(text: &str, has_wait: bool) -> Option<(u16, u64, u64)> {
    let (who, at) = text.split_once('@')?;
    let (at, wait) = if has_wait { at.split_once(':')? } else { (at, "0") };
    Some((who.parse().ok()?, at.parse().ok()?, wait.parse().ok()?))
}

fn of_worker(text: &str, has_wait: bool) -> Result<Drill, String> {
    // Steps are counted from 1.
    let found = parts(text, has_wait).filter(|&(_, step, _)| step > 0);
    let expected = match has_wait {
        true => "WORKER@STEP:MILLISECONDS, such as 1@20:500",
        false => "WORKER@STEP, such as 1@20",
    };
    let (worker, step, ms) =
        found.ok_or_else(|| format!("{text:?} is no drill; expected {expected}"))?;
    let wait = has_wait.then(|| Duration::from_millis(ms));
    Ok(Drill::Worker(WorkerDrill { worker, step, wait }))
}

fn of_node(text: &str, fault: Option<fn(Duration) -> NodeFault>) -> Result<Drill, String> {
    let found =
        parts(text, fault.is_some()).filter(|&(_, at, wait)| at.max(wait) <= u32::MAX.into());
    let expected = if fault.is_some() { "I@MS:FOR_MS" } else { "I@MS" };
    let (node, at, wait) = found.ok_or_else(|| format!("{text:?} is not {expected}"))?;
    let fault = fault.map_or(NodeFault::Kill, |fault| fault(Duration::from_millis(wait)));
    Ok(Drill::Node(NodeDrill { node, at: Duration::from_millis(at), fault }))
}

impl FromStr for Drill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || {
            let [first @ .., last] = KINDS;
            let kinds = first.join(", ");
            format!("unknown drill {text:?}; expected {kinds} or {last}, each with =")
        };
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if text == "sabotage" {
            return Ok(Self::Sabotage);
        }
        let (kind, value) = text.split_once('=').ok_or_else(unknown)?;
        match kind {
            "kill-worker" => of_worker(value, false),
            "stop-worker" => of_worker(value, true),
            "kill-node" => of_node(value, None),
            "stop-node" => of_node(value, Some(NodeFault::Stop)),
            "part-node" => of_node(value, Some(NodeFault::Part)),
            "tier-faults" => whole(value).map(Self::TierFaults),
            _ => Err(unknown()),
        }
    }
}

/// Says of a flag that is none, and that names a drill, how it is written.
pub(crate) fn with_tip(mut error: clap::Error) -> clap::Error {
    if let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg)
        && let Some(kind) = KINDS.into_iter().find(|kind| flag.strip_prefix("--") == Some(kind))
    {
        let tip = format!("write '--drill {kind}=…'");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// The drills of a run.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Drills {
    /// Has the run live through a fault; can be given several times. Workers and nodes are counted from 0.
    /// kill-worker=I@STEP kills worker I when it has been sent the plan of step STEP, and stop-worker=I@STEP:MS stops it before
    /// it gets the plan until it has been waited for so long. kill-node=I@MS kills node I when all have listened for MS
    /// milliseconds, stop-node=I@MS:FOR_MS stops it, and part-node=I@MS:FOR_MS parts it from all others (what NIXL reads goes
    /// on). tier-faults=SEED puts a tier in memory below the host, which is late, fails, tears, corrupts, swaps and loses blocks.
    #[arg(long = "drill", value_name = "KIND=…")]
    drills: Vec<Drill>,
}

macro_rules! of_kind {
    ($($name:ident: $kind:ident($of:ty);)*) => {
        $(pub(crate) fn $name(&self) -> Vec<$of> {
            let one = |drill: &Drill| match *drill {
                Drill::$kind(of) => Some(of),
                _ => None,
            };
            self.drills.iter().filter_map(one).collect()
        })*
    };
}

impl Drills {
    of_kind! {
        of_workers: Worker(WorkerDrill);
        of_nodes: Node(NodeDrill);
        tier_faults: TierFaults(u64);
    }

    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) fn sabotage(&self) -> bool {
        self.drills.contains(&Drill::Sabotage)
    }

    /// What is missing for some drill, or cannot be beside it.
    pub(crate) fn problem(&self, workers: bool, nodes: bool, etcd: bool) -> Option<&'static str> {
        let problem = |drill: &Drill| match drill {
            Drill::Worker(_) if !workers => Some("--drill of a worker is for runs with --workers"),
            Drill::Node(_) if !nodes => {
                Some("--drill of a node is for runs with --nodes or --prefill-nodes")
            }
            Drill::Node(NodeDrill { fault: NodeFault::Part(_), .. }) if etcd => {
                Some("--drill part-node cannot be used with --etcd")
            }
            Drill::TierFaults(_) if nodes => {
                Some("--drill tier-faults cannot be used with --nodes or --prefill-nodes")
            }
            _ => None,
        };
        self.drills.iter().find_map(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drills_have_their_kind_before_what_they_say() {
        let drills = ["kill-worker=3@1", "stop-node=2@20:300", "part-node=1@0:5", "tier-faults=9"];
        let drills = Drills { drills: drills.map(|text| text.parse().unwrap()).into() };
        assert_eq!(drills.of_workers(), [WorkerDrill { worker: 3, step: 1, wait: None }]);
        let node = |node, at, fault| NodeDrill { node, at: Duration::from_millis(at), fault };
        let stop = node(2, 20, NodeFault::Stop(Duration::from_millis(300)));
        let part = node(1, 0, NodeFault::Part(Duration::from_millis(5)));
        assert_eq!((drills.tier_faults(), drills.of_nodes()), (vec![9], vec![stop, part]));
        assert_eq!("kill-node=3@4".parse(), Ok(Drill::Node(node(3, 4, NodeFault::Kill))));
        for (text, expected) in [
            ("1@2", "unknown drill \"1@2\"; expected kill-worker, "),
            ("kill=1@2", "unknown drill"),
            ("kill-worker=1@0", "\"1@0\" is no drill; expected WORKER@STEP, such as 1@20"),
            ("kill-worker=x@3", "expected WORKER@STEP, "),
            ("stop-worker=1@2:3:4", "expected WORKER@STEP:MILLISECONDS, "),
            ("stop-node=1@20", "is not I@MS:FOR_MS"),
            ("kill-node=65536@1", "is not I@MS"),
            ("tier-faults=x", "expected a whole number"),
        ] {
            let refused = text.parse::<Drill>().unwrap_err();
            assert!(refused.contains(expected), "{text}: {refused}");
        }
    }

    #[test]
    fn a_drill_needs_what_it_is_about() {
        let problem = |text: &str, workers, nodes, etcd| {
            let drills = Drills { drills: vec![text.parse().unwrap()] };
            drills.problem(workers, nodes, etcd).is_some()
        };
        for text in ["kill-worker=0@1", "stop-worker=0@1:1"] {
            assert!(problem(text, false, true, false) && !problem(text, true, false, false));
        }
        for text in ["kill-node=0@1", "stop-node=0@1:1", "part-node=0@1:1"] {
            assert!(problem(text, true, false, false) && !problem(text, false, true, false));
        }
        assert!(problem("part-node=0@1:1", false, true, true));
        assert!(!problem("kill-node=0@1", false, true, true));
        assert!(problem("tier-faults=1", false, true, false));
        assert!(!problem("tier-faults=1", true, false, false));
    }
}
