//! Who carries the steps of a schedule out: this process, or workers that are told of them by bytes.

use super::transfer::{self, Move};
use super::work::{Bench, Work};
use crate::prelude::*;

/// What a worker process does in a step instead of its work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Act {
    /// It ends.
    Ends,
    /// It says that it cannot go on.
    Refuses,
    /// It says that the step has failed.
    Fails,
}

/// What was read in a step that is complete, of each sequence what is not as it should be.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) step: u64,
    pub(super) work: Arc<Work>,
    pub(super) wrong: Vec<Option<String>>,
    pub(super) compared: u64,
}

/// Those who carry steps out.
pub(super) trait Hands: Sized {
    type Workers: Workers + Debug;

    /// Stages a batch, with the work for it.
    fn stage(
        &mut self,
        cache: &mut KvCache<Self::Workers>,
        step: &OpenStep,
        batch: &mut [&mut Sequence],
        work: &Arc<Work>,
    ) -> Result<(), StepError>;

    /// Enqueues the work of a step that was staged.
    fn enqueue(&mut self, cache: &mut KvCache<Self::Workers>, work: &Work) -> Result<(), Failure>;

    /// Takes in that a step was finished: what it reads is compared when it is complete.
    fn finished(&mut self, step: u64, work: Arc<Work>);

    /// What has been read in steps that are complete by now, and that count.
    fn seen(&mut self, cache: &KvCache<Self::Workers>) -> Vec<Seen>;

    /// Copies blocks to others, and waits until that is done. Only where the devices are here.
    fn copy(cache: &KvCache<Self::Workers>, moves: &[Move]) -> Result<(), Failure>;

    /// Closes the cache; what is not as it should be behind it.
    fn close(self, cache: KvCache<Self::Workers>) -> Result<(), String>;
}

/// The parts are in this process.
#[derive(Debug)]
pub(super) struct Here {
    bench: Bench,
    pending: VecDeque<(u64, Arc<Work>)>,
}

impl Here {
    pub(super) fn new(cache: &KvCache) -> Self {
        Self { bench: Bench::new(cache.parts(), cache.options(), 0), pending: VecDeque::new() }
    }
}

impl Hands for Here {
    type Workers = InProcess;

    fn stage(
        &mut self,
        cache: &mut KvCache,
        step: &OpenStep,
        batch: &mut [&mut Sequence],
        work: &Arc<Work>,
    ) -> Result<(), StepError> {
        cache.stage_with(step, batch, &mut |part, step| self.bench.send(part, work, step))
    }

    fn enqueue(&mut self, cache: &mut KvCache, work: &Work) -> Result<(), Failure> {
        if cache.loads_layers() {
            let layers: Vec<u32> =
                cache.options().groups.iter().map(|group| group.shape.layers()).collect();
            for (group, layers) in (0..).map(GroupId).zip(layers) {
                (0..layers).try_for_each(|layer| cache.wait_for_layer(group, layer))?;
            }
        }
        self.bench.enqueue(cache.parts(), work)
    }

    fn finished(&mut self, step: u64, work: Arc<Work>) {
        self.pending.push_back((step, work));
    }

    fn seen(&mut self, cache: &KvCache) -> Vec<Seen> {
        let completed = cache.manager().completed_step();
        let mut seen = Vec::new();
        while let Some((step, work)) = self.pending.pop_front_if(|(step, _)| *step <= completed) {
            let (wrong, compared) = self.bench.check(&work);
            seen.push(Seen { step, work, wrong, compared });
        }
        seen
    }

    fn copy(cache: &KvCache, moves: &[Move]) -> Result<(), Failure> {
        transfer::copy(cache, moves)
    }

    fn close(self, cache: KvCache) -> Result<(), String> {
        drop(self);
        cache.close().map_err(|errors| format!("{errors:?}"))
    }
}

pub(super) use there::There;

mod there {
    use std::collections::HashMap;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::sync::{Arc, Mutex};
    use std::thread;
    use std::time::Duration;

    use cuda_driver::Stream;
    use cuda_sim::{Pace, SimConfig};
    use kv_plane::manager::{Outcome, WorkerId};
    use kv_plane::processes::{Connection, Order, Orders, Processes, serve};
    use kv_plane::{GroupId, KvCache, KvCacheOptions, KvWorker, OpenStep, Sequence, StepError};

    use super::super::transfer::Move;
    use super::super::work::{Bench, Work};
    use super::{Act, Hands, Seen};
    use crate::common::engine::Failure;
    use crate::machine::{device, sim};

    /// Longer than anything takes here.
    const LONG: Duration = Duration::from_secs(120);

    type Failed = Box<dyn std::error::Error + Send + Sync>;

    /// What passes beside the bytes: the works, and what was read.
    #[derive(Debug, Default)]
    struct Shared {
        works: HashMap<u64, Arc<Work>>,
        seen: Vec<(WorkerId, Seen)>,
    }

    /// The parts are those of worker processes, which are threads here, each with a machine of its own.
    #[derive(Debug)]
    pub(in super::super) struct There {
        shared: Arc<Mutex<Shared>>,
        workers: u16,
        judged: usize,
    }

    impl There {
        pub(in super::super) fn start(
            options: &KvCacheOptions,
            workers: u16,
            (config, pace): (SimConfig, Pace),
        ) -> (KvCache<Processes>, Self) {
            let shared = Arc::<Mutex<Shared>>::default();
            let own = Arc::clone(&shared);
            let of_worker = options.clone();
            let connect = move |_| {
                let (here, there) = UnixStream::pair()?;
                let peer = there.try_clone()?;
                let (shared, options) = (Arc::clone(&shared), of_worker.clone());
                let config = config.clone();
                let serves = thread::Builder::new().spawn(move || {
                    let connection = Connection::socket(there).unwrap();
                    let sim = sim(config);
                    sim.set_pace(pace);
                    let served = serve(connection, |orders| {
                        let worked = work(orders, &sim, options, &shared);
                        worked.map(|said| said.into_bytes())
                    });
                    drop(served);
                })?;
                Ok(Connection::socket(here)?.ended_by(move || {
                    let _ = peer.shutdown(Shutdown::Both);
                    serves.join().map_err(|_| std::io::Error::other("the worker has panicked"))
                }))
            };
            let mut processes =
                Processes::start(options.clone(), workers, LONG, connect).unwrap().in_lockstep();
            for worker in (0..workers).map(WorkerId) {
                processes.ask(worker, b"").unwrap();
            }
            let cache = KvCache::start(processes).unwrap();
            (cache, Self { shared: own, workers, judged: 0 })
        }
    }

    fn work(
        orders: &mut Orders,
        sim: &cuda_sim::SimDriver,
        options: KvCacheOptions,
        shared: &Mutex<Shared>,
    ) -> Result<String, Failed> {
        orders.question()?;
        orders.answer(b"")?;
        let device = device(sim);
        let id = orders.worker();
        let mut kv = KvWorker::new(&[Stream::new(&device)?], options, (id, orders.workers()))?;
        let bench = Bench::new(kv.parts(), kv.options(), usize::from(id.0));
        orders.wait_on_host();
        orders.begin(&mut kv)?;
        while let Some(order) = orders.next(&mut kv)? {
            let plan = match order {
                Order::Step { plan, .. } => plan,
                Order::Completed { step, .. } => {
                    let mut shared = shared.lock().unwrap();
                    if let Some(work) = shared.works.get(&step).cloned() {
                        let (wrong, compared) = bench.check(&work);
                        shared.seen.push((id, Seen { step, work, wrong, compared }));
                    }
                    continue;
                }
            };
            let given = shared.lock().unwrap().works.get(&plan.step).cloned();
            let Some(given) = given else {
                kv.carry_out(plan, |_, _| Ok(()))?;
                kv.finish(Outcome::Done)?;
                continue;
            };
            let act = given.act.filter(|(worker, _)| *worker == id).map(|(_, act)| act);
            match act {
                Some(Act::Ends) => return Ok(String::new()),
                Some(Act::Refuses) => return Err("it was told to".into()),
                _ => {}
            }
            kv.carry_out(plan, |part, step| bench.send(part, &given, step))?;
            if kv.loads_layers() {
                let groups = kv.options().groups.iter().map(|group| group.shape.layers());
                for (group, layers) in (0..).map(GroupId).zip(groups.collect::<Vec<_>>()) {
                    (0..layers).try_for_each(|layer| kv.wait_for_layer(group, layer))?;
                }
            }
            bench.enqueue(kv.parts(), &given).map_err(|error| error.to_string())?;
            let fails = act == Some(Act::Fails);
            kv.finish(if fails { Outcome::Failed } else { Outcome::Done })?;
        }
        drop(bench);
        kv.close()?;
        drop(device);
        let (findings, leaks) = (sim.findings(), sim.check_leaks());
        let clean = findings.is_empty() && leaks.is_clean();
        Ok(if clean { String::new() } else { format!("worker {id:?}: {findings:?}, {leaks}") })
    }

    impl Hands for There {
        type Workers = Processes;

        fn stage(
            &mut self,
            cache: &mut KvCache<Processes>,
            step: &OpenStep,
            batch: &mut [&mut Sequence],
            work: &Arc<Work>,
        ) -> Result<(), StepError> {
            let number = step.number();
            self.shared.lock().unwrap().works.insert(number, Arc::clone(work));
            let staged = cache.stage_with(step, batch, &number.to_le_bytes());
            if staged.is_err() {
                self.shared.lock().unwrap().works.remove(&number);
            }
            staged
        }

        fn enqueue(&mut self, _: &mut KvCache<Processes>, _: &Work) -> Result<(), Failure> {
            Ok(())
        }

        fn finished(&mut self, _: u64, _: Arc<Work>) {}

        fn seen(&mut self, cache: &KvCache<Processes>) -> Vec<Seen> {
            let completed = cache.manager().completed_step();
            let mut shared = self.shared.lock().unwrap();
            // Steps that were in flight when a worker failed count for nobody.
            let replaced = cache.workers().replaced();
            for replaced in &replaced[self.judged..] {
                let void = replaced.completed + 1..=replaced.staged;
                shared.works.retain(|step, _| !void.contains(step));
                shared.seen.retain(|(_, seen)| !void.contains(&seen.step));
            }
            self.judged = replaced.len();
            shared.works.retain(|step, _| *step > completed);
            let over = |of: &mut (WorkerId, Seen)| of.1.step <= completed;
            shared.seen.extract_if(.., over).map(|(_, seen)| seen).collect()
        }

        fn copy(_: &KvCache<Processes>, _: &[Move]) -> Result<(), Failure> {
            Err("the devices are elsewhere".into())
        }

        fn close(self, cache: KvCache<Processes>) -> Result<(), String> {
            let said = cache.close().map_err(|errors| format!("{errors:?}"))?;
            if said.len() != usize::from(self.workers) {
                return Err(format!("{} of {} workers have closed", said.len(), self.workers));
            }
            let said: Vec<_> = said.into_iter().map(String::from_utf8).collect();
            match said.iter().find(|said| said.as_ref().is_ok_and(|said| !said.is_empty())) {
                Some(said) => Err(format!("{said:?}")),
                None => Ok(()),
            }
        }
    }
}
