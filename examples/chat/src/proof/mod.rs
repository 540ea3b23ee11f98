//! The proof: whatever the engine and its cache do, every logit has the bits that a plain cache gives.
//!
//! The plain cache ([`crate::plain`]) computes one sequence at a time, over contiguous memory of the host. The engine
//! computes the same jobs in every mixture of [`Mixture`], and all logits are compared bit by bit. Then rules are broken on
//! purpose, and the text must differ.

mod conversations;
mod mixtures;
mod oracle;

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
pub use conversations::{Size, jobs};
use cuda_driver::Device;
pub use mixtures::Mixture;
use mixtures::{BLOCK_TOKENS, MadeFaults};
pub use oracle::{Difference, Oracle};

use crate::engine::{Engine, EngineCounts, EngineOptions, Event, Sabotage};
use crate::job::Job;
use crate::model::Model;
use crate::setup::{self, Devices};
use crate::text::Text;

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Rows of logits that were compared, each of the whole vocabulary.
    pub logits: u64,
    /// What the engines have done.
    pub counts: EngineCounts,
    /// What tiers below have done wrong.
    pub faults: u64,
    /// Layers that were not on the first device.
    pub layers_elsewhere: u64,
    /// Bytes that evictions have moved to host memory, and onboarding back.
    pub moved_bytes: u64,
}

/// A proof over given devices.
#[derive(Debug)]
pub struct Proof<'a> {
    model: Arc<Model>,
    text: &'a Text,
    jobs: Vec<Job>,
    oracle: Oracle,
    /// Blocks of the longest sequence.
    most: u32,
}

impl<'a> Proof<'a> {
    /// Computes what is expected.
    ///
    /// # Errors
    /// What the model says.
    pub fn new(model: Arc<Model>, text: &'a Text, size: Size) -> anyhow::Result<Self> {
        let jobs = jobs(text, size)?;
        let oracle = Oracle::new(&model, &jobs)?;
        // Drafts reach beyond the last token.
        let tokens = |job: &Job| job.prompt.len() + job.tokens_max + job.drafts as usize + 2;
        let most = jobs.iter().map(tokens).max().unwrap_or(0) as u32;
        Ok(Self { model, text, jobs, oracle, most: most.div_ceil(BLOCK_TOKENS) })
    }

    /// The oracle.
    #[must_use]
    pub fn oracle(&self) -> &Oracle {
        &self.oracle
    }

    /// Runs a mixture, and compares every logit.
    ///
    /// # Errors
    /// The first difference, and whatever fails.
    pub fn run(&self, mixture: Mixture, devices: &Devices) -> anyhow::Result<Seen> {
        let two = [&devices.devices[0], devices.devices.last().unwrap_or(&devices.devices[0])];
        let used: Vec<Device> = match mixture {
            Mixture::Split => two.into_iter().cloned().collect(),
            _ => devices.devices.clone(),
        };
        let (mut engine, faults) = self.engine(mixture, &used, None)?;
        let mut seen = Seen::default();
        for _ in 0..mixture.rounds() {
            for job in &self.jobs {
                engine.submit(job.clone());
            }
            let mut step = 0;
            while !engine.is_idle() {
                mixture.disturb(&mut engine, step, self.most)?;
                step += 1;
                for event in engine.step()? {
                    seen.logits += self.oracle.compare(&event, |job| job % self.jobs.len())?;
                }
            }
            if mixture == Mixture::Below {
                settle(&mut engine)?;
            }
        }
        seen.counts = engine.counts();
        seen.moved_bytes = engine.cache().stats().copied_bytes;
        let elsewhere = engine.cache().parts().iter().skip(1).map(|part| part.layers().len());
        seen.layers_elsewhere = elsewhere.sum::<usize>() as u64;
        engine.close()?;
        seen.faults = faults.map_or(0, |made| count_faults(&made));
        if let Some(sim) = &devices.sim {
            ensure!(sim.findings().is_empty(), "{:?}", sim.findings());
            ensure!(sim.races().is_empty(), "{:?}", sim.races());
        }
        Ok(seen)
    }

    /// Runs with a rule broken, on a simulated device of its own, and returns the first token that differs.
    ///
    /// # Errors
    /// Whatever fails. That nothing differs is no error here.
    pub fn sabotaged(&self, sabotage: Sabotage) -> anyhow::Result<Option<Difference>> {
        let devices = Devices::simulated(1)?;
        let mixture = match sabotage {
            // Steps of several pieces.
            Sabotage::StagingReuse => Mixture::Suspended,
            Sabotage::IgnoredSkip | Sabotage::DraftsNamed => Mixture::Shared,
        };
        let (mut engine, _) = self.engine(mixture, &devices.devices, Some(sabotage))?;
        let mut first: Option<Difference> = None;
        for _ in 0..mixture.rounds() {
            for job in &self.jobs {
                engine.submit(job.clone());
            }
            for event in engine.run()? {
                let job = match event {
                    Event::Done { job, .. } | Event::Tokens { job, .. } => job % self.jobs.len(),
                };
                let found = self.oracle.difference(&event, job)?;
                first = first.or(found);
            }
        }
        engine.close()?;
        Ok(first)
    }

    fn engine(
        &self,
        mixture: Mixture,
        devices: &[Device],
        sabotage: Option<Sabotage>,
    ) -> anyhow::Result<(Engine, Option<MadeFaults>)> {
        let mut options = setup::options(self.model.config(), BLOCK_TOKENS, 1)?;
        let faults = mixture.adapt(&mut options, self.most);
        let mut cache = setup::cache(devices, options)?;
        // Otherwise the first steps would find no host memory yet.
        cache.wait_for_host()?;
        let options = EngineOptions { chunk_tokens: mixture.chunk_tokens(), sabotage };
        Ok((Engine::new(cache, Arc::clone(&self.model), options)?, faults))
    }

    /// Everything, with a line for each part of it.
    ///
    /// # Errors
    /// The first difference, a count that is 0, and a sabotaged run whose text is right.
    pub fn report(&self, devices: &Devices) -> anyhow::Result<()> {
        let mut all = Seen::default();
        for mixture in Mixture::ALL {
            let start = Instant::now();
            let seen = self.run(mixture, devices).with_context(|| mixture.name())?;
            let took = start.elapsed().as_secs_f64();
            println!(
                "  {:<36} {:>5} rows of logits equal, {took:.1} s",
                mixture.name(),
                seen.logits
            );
            all.add(&seen);
        }
        all.report()?;
        for (sabotage, name) in [
            (Sabotage::StagingReuse, "staging buffers reused too early"),
            (Sabotage::IgnoredSkip, "a skip ignored"),
            (Sabotage::DraftsNamed, "drafts named before they are checked"),
        ] {
            if sabotage == Sabotage::StagingReuse
                && !cfg!(all(feature = "sabotage", debug_assertions))
            {
                println!("  {name}: not run, the build has no such switch");
                continue;
            }
            let found = self.sabotaged(sabotage).with_context(|| name)?;
            let Difference { job, place, expected, found, .. } =
                found.with_context(|| format!("{name}: the text is right all the same"))?;
            let found = found.map_or("the end".to_owned(), |id| self.text.token(id));
            let expected = self.text.token(expected);
            println!(
                "  {name}: job {job} differs from token {place} on, {found} instead of {expected}"
            );
        }
        Ok(())
    }
}

impl Seen {
    fn add(&mut self, other: &Self) {
        self.logits += other.logits;
        self.faults += other.faults;
        self.layers_elsewhere += other.layers_elsewhere;
        self.moved_bytes += other.moved_bytes;
        self.counts.add(&other.counts);
    }

    /// Prints all counts, none of which may be 0.
    fn report(&self) -> anyhow::Result<()> {
        let EngineCounts {
            steps,
            sequences,
            reused,
            onboarded,
            joined,
            loaded,
            suspended,
            restarted,
            forked,
            drafted,
            accepted,
            open_starts,
        } = self.counts;
        let named = [
            ("rows of logits compared", self.logits),
            ("steps", steps),
            ("sequences", sequences),
            ("… that reused a prefix", reused),
            ("… that joined a prefix being computed", joined),
            ("… onboarded from host memory", onboarded),
            ("… loaded from the tier below", loaded),
            ("suspended", suspended),
            ("restarted", restarted),
            ("forked", forked),
            ("drafts accepted", accepted),
            ("drafts rejected", drafted - accepted),
            ("rows staged before their start was known", open_starts),
            ("faults of the tier below", self.faults),
            ("layers on the other device", self.layers_elsewhere),
            ("bytes moved to and from host memory", self.moved_bytes),
        ];
        for (name, count) in named {
            println!("  {name:<44} {count:>12}");
        }
        match named.iter().find(|(_, count)| *count == 0) {
            Some((name, _)) => bail!("the proof has shown nothing of this: {name}"),
            None => Ok(()),
        }
    }
}

/// Lets stores to the tier below end: they use what steps leave of the link.
fn settle(engine: &mut Engine) -> anyhow::Result<()> {
    let mut quiet = 0;
    while quiet < 100 {
        engine.step()?;
        let stats = engine.cache().manager().lower_stats();
        quiet = if stats.open_tickets == 0 { quiet + 1 } else { 0 };
    }
    Ok(())
}

fn count_faults(made: &MadeFaults) -> u64 {
    let made = made.lock();
    made.map_or(0, |made| {
        made.iter().flat_map(|faults| faults.by_name()).map(|(_, count)| count).sum()
    })
}
