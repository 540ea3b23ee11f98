//! Loads by layers: what a load brings goes to the device layer by layer, and the engine waits for each layer before it
//! launches it.

use std::time::{Duration, Instant};

use cuda_driver::guard;
use kv_kernels::{BlockPair, link::HostDirection};
use kv_manager::{GroupId, LayerLoad, StepPlan};
use kv_tier::Arrived;
use smallvec::SmallVec;

use crate::runs::{Kind, Run};
use crate::{KvCache, KvWorker, StepError};

/// The longest wait for what loads bring, whatever the options say.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

const BACK: Kind = Kind::Carry(HostDirection::ToPages);

/// What the open step copies of loads.
#[derive(Debug, Default)]
pub(crate) struct OpenLayers {
    loads: Vec<Load>,
    /// Of each group, the layers that the engine has waited for; none of a group without loads.
    waited: Vec<Vec<bool>>,
    /// The copies come after those of the plan.
    ordered: bool,
    /// Until when the step waits.
    deadline: Option<Instant>,
}

#[derive(Debug)]
struct Load {
    of: LayerLoad,
    /// Bytes of the block, from its first on, that are copied or enqueued to be.
    sent: u64,
}

impl OpenLayers {
    /// `layers` are those of each group.
    pub(crate) fn take(&mut self, plan: &StepPlan, layers: impl Iterator<Item = u32>) {
        self.clear();
        if plan.layer_loads.is_empty() {
            return;
        }
        self.loads.extend(plan.layer_loads.iter().map(|&of| Load { of, sent: 0 }));
        for (group, layers) in (0..).map(GroupId).zip(layers) {
            let loads = self.loads_of(group).next().is_some();
            self.waited.push(vec![false; if loads { layers as usize } else { 0 }]);
        }
    }

    fn loads_of(&self, group: GroupId) -> impl Iterator<Item = &Load> {
        self.loads.iter().filter(move |load| load.of.group == group)
    }

    pub(crate) fn clear(&mut self) {
        self.loads.clear();
        self.waited.clear();
        (self.ordered, self.deadline) = (false, None);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.loads.is_empty()
    }

    fn run(&self, group: GroupId) -> Run {
        let pair = |load: &Load| BlockPair { source: load.of.from, destination: load.of.to };
        Run { kind: BACK, behind_work: false, pairs: self.loads_of(group).map(pair).collect() }
    }
}

impl KvWorker {
    /// Whether loads bring blocks layer by layer that the open step reads: the engine then
    /// [waits for each layer](Self::wait_for_layer).
    #[must_use]
    pub fn loads_layers(&self) -> bool {
        !self.layers.is_empty()
    }

    /// Waits until what loads bring of a layer for the open step has come, and has the compute streams wait for its copy
    /// to the devices. To be called before the layer is launched, for every layer of every group, if the step
    /// [loads by layers](Self::loads_layers); else it returns at once. Layers count from 0 in each group.
    ///
    /// A block that is wrong, or has not come when the step has waited for
    /// [`wait_max`](kv_manager::LowerOptions::wait_max) all together, is waited for no more: the layer is launched all the
    /// same, the manager is told, and the sequences that read the block are set back.
    ///
    /// # Ordering
    /// Waits on the host.
    ///
    /// # Errors
    /// [`StepError::Layer`] for a layer or a group that there is not, and [`StepError::HostCopy`] or [`StepError::Device`] if a copy
    /// was refused. The call can be made again.
    #[track_caller]
    pub fn wait_for_layer(&mut self, group: GroupId, layer: u32) -> Result<(), StepError> {
        let _site = cuda_driver::site::enter();
        let of = self.options.groups.get(usize::from(group.0));
        let layers = of.map_or(0, |of| of.shape.layers());
        if layer >= layers {
            return Err(StepError::Layer { group, layer, layers });
        }
        if self.layers.loads_of(group).next().is_none() {
            return Ok(());
        }
        let end = self.layer_end(group, layer);
        self.await_loads(|worker| worker.layers.loads_of(group).all(|load| load.sent >= end))?;
        guard!("cache.work-waits-for-layers", self.await_layer_copies()?);
        let waited = self.layers.waited.get_mut(usize::from(group.0));
        if let Some(waited) = waited.and_then(|of| of.get_mut(layer as usize)) {
            *waited = true;
        }
        Ok(())
    }

    /// Ends the loads of the open step: all of its copies are enqueued, and what became of the loads is known here.
    /// Whether the engine has waited for all layers, as often as it is asked before the step is left.
    pub(crate) fn end_layers(&mut self) -> Result<bool, StepError> {
        if self.layers.is_empty() {
            return Ok(true);
        }
        self.await_loads(|worker| worker.layers.loads.iter().all(|load| worker.has_ended(load)))?;
        let waited = self.layers.waited.iter().flatten().all(|waited| *waited);
        guard!("cache.unwaited-layers-stay-so", {}, else self.layers.clear());
        Ok(waited)
    }

    /// Copies what has come, until `enough` or the deadline. What has not come then is given up.
    fn await_loads(&mut self, enough: impl Fn(&Self) -> bool) -> Result<(), StepError> {
        let wait_max = self.options.tiers.rules.wait_max;
        let deadline = match self.layers.deadline {
            Some(deadline) => deadline,
            None => *self.layers.deadline.insert(Instant::now() + wait_max.min(LONGEST_WAIT)),
        };
        loop {
            let is_late = Instant::now() >= deadline;
            self.note_over()?;
            self.work_tiers();
            self.send_layers()?;
            if enough(self) {
                return Ok(());
            }
            if is_late {
                let tickets: Vec<_> = self.layers.loads.iter().map(|load| load.of.ticket).collect();
                let give_up = |ticket| self.tiers.give_up(ticket);
                guard!("cache.late-loads-are-given-up", tickets.into_iter().for_each(give_up));
                self.work_tiers();
                return self.send_layers();
            }
            std::thread::yield_now();
        }
    }

    /// Whether a load is not open here any more, and all of it that the step reads is copied.
    fn has_ended(&self, load: &Load) -> bool {
        let LayerLoad { ticket, group, from, .. } = load.of;
        load.sent >= self.host_block_bytes(group) && self.tiers.arrived(ticket, from).is_none()
    }

    fn host_block_bytes(&self, group: GroupId) -> u64 {
        self.parts.iter().map(|part| part.of(group).shape().block_bytes()).sum()
    }

    /// The end of a layer among the bytes of a block, of the device that has it last.
    fn layer_end(&self, group: GroupId, layer: u32) -> u64 {
        let (mut first, mut end) = (0, 0);
        for part in self.parts.iter().map(|part| part.of(group)) {
            let (bytes, layers) = (part.shape().block_bytes(), part.layers());
            if let Some(at) = layers.iter().position(|&of| of == layer) {
                end = first + bytes / layers.len() as u64 * (at as u64 + 1);
            }
            first += bytes;
        }
        end
    }

    /// Takes in which steps are over on the devices: transfers wait for their copies. They are told of later.
    fn note_over(&mut self) -> Result<(), StepError> {
        for step in &self.in_flight {
            for fence in &step.fences {
                if !fence.is_complete()? {
                    return Ok(());
                }
            }
            self.tiers.note_completed(step.step);
        }
        Ok(())
    }

    fn send_layers(&mut self) -> Result<(), StepError> {
        // Copies of the plan that were refused come first.
        self.send_copies()?;
        let Self { parts, layers, tiers, awaited, gate, copies, .. } = self;
        copies.get_or_insert_with(|| gate.lease());
        if !layers.ordered {
            for group in (0..).map(GroupId).take(awaited.len()) {
                let run = layers.run(group);
                for part in parts.iter_mut().filter(|_| !run.pairs.is_empty()) {
                    part.order_layers(group, &run)?;
                }
            }
            layers.ordered = true;
        }
        let groups = (0..).map(GroupId).take(awaited.len());
        let sections: SmallVec<[u64; 4]> =
            groups.map(|group| tiers.section_bytes(group, parts)).collect();
        for load in &mut layers.loads {
            let LayerLoad { ticket, group, from, to } = load.of;
            let section = sections[usize::from(group.0)];
            let arrived = tiers.arrived(ticket, from);
            let is_wrong = matches!(arrived, Some(Arrived::Wrong));
            // What is not right is of another owner, or of nobody: it stays where it is.
            if guard!("cache.wrong-loads-stay", is_wrong, else false) {
                load.sent = u64::MAX;
                continue;
            }
            let here = match arrived {
                Some(Arrived::Sections(right)) => right as u64 * section,
                // What has ended is as it will be: right, or zeros.
                _ => u64::MAX,
            };
            let mut first = 0;
            for part in parts.iter_mut() {
                let bytes = part.of(group).shape().block_bytes();
                let [sent, end] =
                    [load.sent, here].map(|at| at.clamp(first, first + bytes) - first);
                let sent = part.send_layers(group, (from, to), sent..end)?;
                if sent > 0 {
                    awaited[usize::from(group.0)].note(BACK.lane(), to.index());
                    load.sent = first + sent;
                }
                first += bytes;
            }
        }
        Ok(())
    }

    /// Has the compute streams wait for the copies so far.
    fn await_layer_copies(&mut self) -> Result<(), StepError> {
        let needed = std::array::from_fn(|lane| lane == BACK.lane());
        self.fence_copies(needed)?;
        self.awaited.iter_mut().for_each(|awaited| awaited.clear(BACK.lane()));
        Ok(())
    }
}

impl KvCache {
    /// Whether the step that was staged last reads blocks that loads bring layer by layer; see
    /// [`KvWorker::loads_layers`].
    #[must_use]
    pub fn loads_layers(&self) -> bool {
        self.workers.worker.loads_layers()
    }

    /// Waits for what loads bring of a layer, before the engine launches it; see [`KvWorker::wait_for_layer`].
    ///
    /// # Ordering
    /// Waits on the host.
    ///
    /// # Errors
    /// As [`KvWorker::wait_for_layer`].
    #[track_caller]
    pub fn wait_for_layer(&mut self, group: GroupId, layer: u32) -> Result<(), StepError> {
        self.workers.worker.wait_for_layer(group, layer)
    }
}
