//! `run --drill KIND=…`: what a run is made to live through, which no user of a run needs.

use std::str::FromStr;

use kv_replay::engine::workers::{KillWorker, StopWorker};

use crate::fleet::{KillNode, StopNode};

/// A fault drill.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Drill {
    KillWorker(KillWorker),
    StopWorker(StopWorker),
    KillNode(KillNode),
    StopNode(StopNode),
    PartNode(StopNode),
    TierFaults(u64),
    /// A protection is disabled.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    Sabotage(crate::sabotage::Sabotage),
    /// A worker does wrong in a step.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    Misbehave(kv_replay::engine::workers::Misbehave),
}

const KINDS: &str =
    "kill-worker, stop-worker, kill-node, stop-node, part-node or tier-faults, each with =";

impl FromStr for Drill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        fn read<T: FromStr<Err: ToString>>(value: &str) -> Result<T, String> {
            value.parse().map_err(|error: T::Err| error.to_string())
        }
        let unknown = || format!("unknown drill {text:?}; expected {KINDS}");
        let (kind, value) = text.split_once('=').ok_or_else(unknown)?;
        match kind {
            "kill-worker" => Ok(Self::KillWorker(read(value)?)),
            "stop-worker" => Ok(Self::StopWorker(read(value)?)),
            "kill-node" => Ok(Self::KillNode(read(value)?)),
            "stop-node" => Ok(Self::StopNode(read(value)?)),
            "part-node" => Ok(Self::PartNode(read(value)?)),
            "tier-faults" => kv_replay::command_line::whole(value).map(Self::TierFaults),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            "sabotage" => Ok(Self::Sabotage(read(value)?)),
            #[cfg(all(feature = "sabotage", debug_assertions))]
            "misbehave" => Ok(Self::Misbehave(read(value)?)),
            _ => Err(unknown()),
        }
    }
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
    ($($(#[$cfg:meta])* $name:ident: $kind:ident($of:ty);)*) => {
        $($(#[$cfg])* pub(crate) fn $name(&self) -> Vec<$of> {
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
        kill_worker: KillWorker(KillWorker);
        stop_worker: StopWorker(StopWorker);
        kill_node: KillNode(KillNode);
        stop_node: StopNode(StopNode);
        part_node: PartNode(StopNode);
    }

    /// The seed of a tier with faults.
    pub(crate) fn tier_faults(&self) -> Option<u64> {
        let seed = |drill: &Drill| match *drill {
            Drill::TierFaults(seed) => Some(seed),
            _ => None,
        };
        self.drills.iter().find_map(seed)
    }

    /// Which protection is disabled.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) fn sabotage(&self) -> Option<crate::sabotage::Sabotage> {
        let what = |drill: &Drill| match *drill {
            Drill::Sabotage(what) => Some(what),
            _ => None,
        };
        self.drills.iter().find_map(what)
    }

    /// What a worker does wrong.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(crate) fn misbehave(&self) -> Option<kv_replay::engine::workers::Misbehave> {
        let wrong = |drill: &Drill| match *drill {
            Drill::Misbehave(wrong) => Some(wrong),
            _ => None,
        };
        self.drills.iter().find_map(wrong)
    }

    /// What is missing for some drill, or cannot be beside it.
    pub(crate) fn problem(&self, workers: bool, nodes: bool, etcd: bool) -> Option<&'static str> {
        let problem = |drill: &Drill| match drill {
            Drill::KillWorker(_) | Drill::StopWorker(_) if !workers => {
                Some("--drill of a worker is for runs with --workers")
            }
            Drill::KillNode(_) | Drill::StopNode(_) | Drill::PartNode(_) if !nodes => {
                Some("--drill of a node is for runs with --nodes or --prefill-nodes")
            }
            Drill::PartNode(_) if etcd => Some("--drill part-node cannot be used with --etcd"),
            Drill::TierFaults(_) if nodes => {
                Some("--drill tier-faults cannot be used with --nodes or --prefill-nodes")
            }
            #[cfg(all(feature = "sabotage", debug_assertions))]
            Drill::Misbehave(_) if !workers => {
                Some("--drill of a worker is for runs with --workers")
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
        assert_eq!(drills.kill_worker(), ["3@1".parse().unwrap()]);
        assert_eq!(drills.stop_node(), ["2@20:300".parse().unwrap()]);
        assert_eq!(drills.part_node(), ["1@0:5".parse().unwrap()]);
        assert_eq!((drills.tier_faults(), drills.kill_node()), (Some(9), Vec::new()));
        let refused = |text: &str| text.parse::<Drill>().unwrap_err();
        assert!(refused("1@2").contains("unknown drill \"1@2\"; expected kill-worker"));
        assert!(refused("kill=1@2").contains("unknown drill"));
        assert!(refused("kill-worker=1@0").contains("expected WORKER@STEP"));
        assert!(refused("stop-node=1@20").contains("is not I@MS:FOR_MS"));
        assert!(refused("tier-faults=x").contains("expected a whole number"));
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
