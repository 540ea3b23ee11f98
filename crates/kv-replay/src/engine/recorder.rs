//! Records what a run does over time, if it is to be recorded.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use cuda_sim::{OperationTime, SimDriver};
use kv_plane::manager::{GroupId, Manager, Waiting};
use kv_plane::{NoRoom, Sequence};
use kv_pool::stats::EvictionAges;

use super::cache::Compute;
use crate::report::RunReport;
use crate::series::{
    Asked, Histogram, HistogramReport, Name, Sample, Sampler, Series, Span, TimelineBuilder, Track,
};
use crate::trace::Trace;

/// Most operations whose times a simulated device keeps between two looks.
const OPERATIONS_MAX: usize = 1 << 16;

/// What a copy waits for while others to the same device are on the link.
const LINK: &str = "copies to the device";

/// Calls that may wait for devices or workers.
const WAITING_CALLS: [&str; 2] = ["begin a step", "drain"];

const ENGINE: u32 = 0;

/// Most requests of which the recorder knows what they wait for.
const WAITING_MAX: usize = 1 << 16;

/// Records a run, or nothing.
#[derive(Debug, Default)]
pub(super) struct Recorder(Option<Box<Recording>>);

/// A moment, by the host's clock, and by that of the run, with what the host had waited by then. Nothing if nothing is
/// recorded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment(Option<(Instant, [u64; 2])>);

#[derive(Debug)]
struct Recording {
    began: Instant,
    sim: Option<Simulated>,
    /// What the engine waits for in calls that wait.
    waits_for: &'static str,
    block_bytes: u64,
    sampler: Sampler,
    timeline: TimelineBuilder,
    calls: BTreeMap<&'static str, Histogram>,
    waits: BTreeMap<&'static str, Histogram>,
    moves: BTreeMap<&'static str, Histogram>,
    /// What requests wait for, and since when.
    waiting: HashMap<usize, (&'static str, u64)>,
    /// What was asked for so far; known from the first request on.
    asked: Option<Asked>,
    age_at_reuse: Histogram,
    age_at_loss: Histogram,
    cache_at_loss: Histogram,
    age_at_eviction: Histogram,
    ages: EvictionAges,
    /// Blocks found on the device, in host memory, and not any more.
    hits: [u64; 3],
    last: Sample,
}

#[derive(Clone, Copy, Debug)]
struct StreamTrack {
    track: u32,
    device: u32,
    /// What went over the link in it: to the device, and to the host.
    bytes: [u64; 2],
}

#[derive(Debug)]
struct Simulated {
    sim: Arc<SimDriver>,
    began_ns: u64,
    compute: Vec<u64>,
    streams: BTreeMap<u64, StreamTrack>,
    /// What the compute streams did since the engine's last wait.
    fresh: Vec<Span>,
}

impl Recorder {
    /// Records a run from now on. `sim` is the simulated machine and its compute streams.
    pub(super) fn on(
        sim: Option<(Arc<SimDriver>, Vec<u64>)>,
        waits_for: &'static str,
        block_bytes: u64,
    ) -> Self {
        let sim = sim.map(|(sim, compute)| {
            let _ = sim.take_times();
            sim.keep_times(OPERATIONS_MAX);
            let began_ns = nanos(sim.virtual_now());
            Simulated { sim, began_ns, compute, streams: BTreeMap::new(), fresh: Vec::new() }
        });
        Self(Some(Box::new(Recording {
            began: Instant::now(),
            sim,
            waits_for,
            block_bytes,
            sampler: Sampler::default(),
            timeline: TimelineBuilder::default(),
            calls: BTreeMap::new(),
            waits: BTreeMap::new(),
            moves: BTreeMap::new(),
            waiting: HashMap::new(),
            asked: None,
            age_at_reuse: Histogram::default(),
            age_at_loss: Histogram::default(),
            cache_at_loss: Histogram::default(),
            age_at_eviction: Histogram::default(),
            ages: EvictionAges::default(),
            hits: [0; 3],
            last: Sample::default(),
        })))
    }

    pub(super) fn begin(&self) -> Moment {
        Moment(self.0.as_ref().map(|on| (Instant::now(), [on.now(), on.waited()])))
    }

    pub(super) fn called(&mut self, name: &'static str, since: Moment) {
        let (Some(on), Moment(Some((host, since)))) = (&mut self.0, since) else { return };
        on.call(name, host, since);
    }

    pub(super) fn waits(&mut self, request: usize, waiting: &Waiting) {
        let cause = match waiting {
            Waiting::Prefix { .. } => "prefix",
            Waiting::Load { .. } => "load",
            Waiting::Bound(_) => "room",
        };
        self.waits_for(request, Some(cause));
    }

    pub(super) fn lacks(&mut self, request: usize, no_room: &NoRoom) {
        let cause = if let NoRoom::Row = no_room { "row" } else { "room" };
        self.waits_for(request, Some(cause));
    }

    /// It waits no longer.
    pub(super) fn goes_on(&mut self, request: usize) {
        self.waits_for(request, None);
    }

    fn waits_for(&mut self, request: usize, waits_for: Option<&'static str>) {
        let Some(on) = &mut self.0 else { return };
        let now = on.now();
        let before = match waits_for {
            Some(cause) if on.waiting.len() < WAITING_MAX => {
                let entry = on.waiting.entry(request).or_insert((cause, now));
                if entry.0 == cause { None } else { Some(std::mem::replace(entry, (cause, now))) }
            }
            _ => on.waiting.remove(&request),
        };
        if let Some((cause, since)) = before {
            on.waits.entry(cause).or_default().add(now.saturating_sub(since), 1);
        }
    }

    /// A request of the trace was admitted for the first time, with this sequence.
    pub(super) fn looked_up(
        &mut self,
        trace: &Trace,
        number: usize,
        sequence: &Sequence,
        block_tokens: u64,
    ) {
        let (Some(on), Some(entry)) = (&mut self.0, trace.requests.get(number)) else { return };
        // The last token of a prompt is always computed, so its block is not looked up.
        let of_prompt = |tokens: u64| entry.input_length.saturating_sub(1) / tokens;
        let ids = entry.hash_ids.get(..of_prompt(trace.block_tokens) as usize);
        let (ids, blocks) = (ids.unwrap_or(&entry.hash_ids), of_prompt(block_tokens));
        let found = sequence.cached_tokens() / block_tokens;
        let in_host = sequence.onboarded_blocks() as u64;
        on.hits[0] += found.saturating_sub(in_host);
        on.hits[1] += in_host.min(found);
        let pieces = ids.len() as u64;
        let asked = on.asked.get_or_insert_with(|| {
            Asked::new(trace.requests.iter().map(|request| request.hash_ids.len()).sum())
        });
        for (at, &id) in (0..).zip(ids) {
            // The blocks of this piece, and how many of them were found.
            let [begin, end] = [at, at + 1].map(|at| blocks * at / pieces.max(1));
            let here = end.min(found).saturating_sub(begin);
            if let Some(before) = asked.ask(id, end - begin, entry.timestamp_ms) {
                let age = entry.timestamp_ms.saturating_sub(before.time_ms);
                let gone = end - begin - here;
                on.age_at_reuse.add(age, here);
                on.age_at_loss.add(age, gone);
                on.cache_at_loss.add(before.cache_blocks, gone);
                on.hits[2] += gone;
            }
        }
    }

    /// The end of an iteration: how many requests run, wait and are suspended.
    pub(super) fn sample(&mut self, lists: [usize; 3], cache: &impl Compute, report: &RunReport) {
        let Some(on) = &mut self.0 else { return };
        on.take_operations();
        on.note_ages(cache.manager());
        let sample = on.sample_of(lists, cache, report);
        on.last = sample;
        on.sampler.add(sample);
    }

    pub(super) fn finish(self) -> Option<Series> {
        self.0.map(|on| on.finish())
    }
}

impl Recording {
    /// Nanoseconds since the run began, by the clock of the run.
    fn now(&self) -> u64 {
        match &self.sim {
            Some(of) => nanos(of.sim.virtual_now()).saturating_sub(of.began_ns),
            None => nanos(self.began.elapsed()),
        }
    }

    /// How long the host has waited for devices. Where it does not say so, calls that wait do nothing else.
    fn waited(&self) -> u64 {
        self.sim.as_ref().map_or(0, |of| nanos(of.sim.virtual_waited()))
    }

    fn call(&mut self, name: &'static str, host: Instant, [begin_ns, waited]: [u64; 2]) {
        self.calls.entry(name).or_default().add(nanos(host.elapsed()), 1);
        let end_ns = self.now();
        self.take_operations();
        let length = end_ns.saturating_sub(begin_ns);
        let waited = match self.sim {
            Some(_) => (self.waited() - waited).min(length),
            None if WAITING_CALLS.contains(&name) => length,
            None => 0,
        };
        // A call enqueues first, and waits then.
        let middle = end_ns - waited;
        let (track, name) = (ENGINE, Name::Text(name));
        self.timeline.add(Span { track, name, cause: None, begin_ns, end_ns: middle, count: 1 });
        if waited > 0 {
            let cause = Some(self.cause(middle, end_ns));
            self.timeline.add(Span { track, name, cause, begin_ns: middle, end_ns, count: 1 });
        }
    }

    /// What the compute streams did for the longest time in a period, or waited for.
    fn cause(&mut self, begin_ns: u64, end_ns: u64) -> Name {
        let Some(of) = &mut self.sim else { return Name::Text(self.waits_for) };
        let mut times: BTreeMap<Name, u64> = BTreeMap::new();
        for span in of.fresh.drain(..) {
            let both = span.end_ns.min(end_ns).saturating_sub(span.begin_ns.max(begin_ns));
            *times.entry(what(&span)).or_default() += both;
        }
        let longest = times.into_iter().filter(|(_, ns)| *ns > 0).max_by_key(|&(_, ns)| ns);
        longest.map_or(Name::Text(self.waits_for), |(name, _)| name)
    }

    fn take_operations(&mut self) {
        let Some(of) = &mut self.sim else { return };
        for operation in of.sim.take_times() {
            let span = of.span(&operation);
            let is_compute = of.compute.contains(&operation.stream);
            if is_compute {
                let queued = of.queued(&span, operation.to_device);
                of.fresh.extend(queued);
                self.timeline.add(queued[0]);
                self.timeline.add(queued[1]);
                continue;
            } else if let Some(name) = way(&operation) {
                let took = span.end_ns.saturating_sub(span.begin_ns);
                self.moves.entry(name).or_default().add(took, 1);
            }
            self.timeline.add(span);
        }
        // A wait is explained by what the device has done lately.
        let surplus = of.fresh.len().saturating_sub(OPERATIONS_MAX);
        of.fresh.drain(..surplus);
    }

    fn note_ages(&mut self, manager: &Manager) {
        let mut ages = EvictionAges::default();
        for group in (0..).map_while(|id| manager.pool(GroupId(id))) {
            let of = group.eviction_ages();
            ages.evicted += of.evicted;
            ages.total_ms += of.total_ms;
        }
        let evicted = ages.evicted - self.ages.evicted;
        if let Some(mean) = (ages.total_ms - self.ages.total_ms).checked_div(evicted) {
            self.age_at_eviction.add(mean, evicted);
        }
        self.ages = ages;
    }

    fn sample_of(&self, lists: [usize; 3], cache: &impl Compute, report: &RunReport) -> Sample {
        let (manager, moved) = (cache.manager(), cache.moved());
        let (stats, lower) = (manager.stats(), manager.lower_stats());
        let pool = manager.pool(GroupId(0)).map(|pool| pool.counters()).unwrap_or_default();
        let [device, host] = stats.blocks;
        let bytes = |blocks: u64| blocks.saturating_mul(self.block_bytes);
        let [running, waiting, suspended] = lists.map(|list| list as u64);
        let ways = moved.map(|moved| moved.ways);
        Sample {
            time_ns: self.now(),
            iterations: self.last.iterations + 1,
            running,
            waiting,
            suspended,
            device_in_use: device.in_use,
            device_cached: device.cached,
            device_free: device.free,
            device_retiring: device.retiring,
            host_in_use: host.in_use,
            host_cached: host.cached,
            host_free: host.free,
            host_retiring: host.retiring,
            lower_names: lower.names.iter().sum(),
            lookups: report.block_lookups,
            hits_device: self.hits[0],
            hits_host: self.hits[1],
            lost: self.hits[2],
            bytes_to_host: ways.map_or_else(
                || bytes(stats.offloaded_blocks + stats.suspended_blocks),
                |ways| ways.device_to_host,
            ),
            bytes_to_device: ways
                .map_or_else(|| bytes(stats.onboarded_blocks), |ways| ways.host_to_device),
            bytes_within: ways
                .map_or_else(|| bytes(stats.copied_on_write), |ways| ways.copy_on_write),
            bytes_stored: ways.map_or_else(
                || bytes(lower.stored_blocks.iter().sum()),
                |ways| ways.stored.iter().sum(),
            ),
            bytes_loaded: ways.map_or_else(
                || bytes(lower.loaded_blocks.iter().sum()),
                |ways| ways.loaded.iter().sum(),
            ),
            evicted: pool.evicted,
            refused: pool.refused,
            regretted: pool.regretted,
            stalls_prefix: stats.stalls.prefix,
            stalls_load: stats.stalls.load,
            stalls_room: stats.stalls.room,
            stalls_row: stats.stalls.row,
            stalls_growth: moved.map_or(0, |moved| moved.growth_stalls),
            preemptions: report.preemptions,
            finished: report.finished,
            prompt_tokens: stats.prompt_tokens.saturating_sub(stats.cached_tokens),
            generated_tokens: report.generated_tokens,
        }
    }

    fn finish(mut self) -> Series {
        self.take_operations();
        let engine = Track { name: "engine".to_owned(), ..Track::default() };
        let mut tracks = vec![engine];
        let mut link = None;
        if let Some(of) = &self.sim {
            of.sim.keep_times(0);
            let profile = of.sim.config().profile;
            link = Some([profile.htod.bytes_per_s(), profile.dtoh.bytes_per_s()]);
            tracks.extend(of.named_tracks());
        }
        let told = |histograms: &BTreeMap<&'static str, Histogram>| {
            let of = histograms.iter().map(|(&name, of)| (name.to_owned(), of.report()));
            of.collect::<BTreeMap<String, HistogramReport>>()
        };
        Series {
            clock: if self.sim.is_some() { "virtual" } else { "host" }.to_owned(),
            link_bytes_per_s: link,
            waits_ns: told(&self.waits),
            moves_ns: told(&self.moves),
            calls_ns: told(&self.calls),
            age_at_reuse_ms: self.age_at_reuse.report(),
            age_at_loss_ms: self.age_at_loss.report(),
            cache_at_loss_blocks: self.cache_at_loss.report(),
            age_at_eviction_ms: self.age_at_eviction.report(),
            samples: self.sampler.samples(),
            timeline: self.timeline.finish(tracks),
        }
    }
}

impl Simulated {
    /// The track of a stream that an operation of `device` has named.
    fn stream(&mut self, stream: u64, device: u32) -> &mut StreamTrack {
        let track = ENGINE + 1 + self.streams.len() as u32;
        let new = StreamTrack { track, device, bytes: [0; 2] };
        self.streams.entry(stream).or_insert(new)
    }

    fn span(&mut self, operation: &OperationTime) -> Span {
        let of = self.stream(operation.stream, operation.device);
        // Another device's work may have been what named the stream first.
        of.device = operation.device;
        of.bytes[0] += operation.to_device;
        of.bytes[1] += operation.to_host;
        let track = of.track;
        let since = |at| nanos(at).saturating_sub(self.began_ns);
        let (begin_ns, end_ns) = (since(operation.ready), since(operation.end));
        let awaits = operation.awaits.map(|other| self.stream(other, operation.device).track);
        let cause = awaits.map(Name::Track);
        let name = Name::Text(if cause.is_some() { "wait" } else { operation.name });
        Span { track, name, cause, begin_ns, end_ns, count: 1 }
    }

    /// What a compute stream did: a copy to the device first waits for those of other streams that are on the link.
    fn queued(&self, span: &Span, to_device: u64) -> [Span; 2] {
        let profile = self.sim.config().profile;
        let alone = nanos(profile.htod.time(to_device) + profile.htod_setup);
        let begin_ns = match (span.cause, to_device) {
            (None, 1..) => span.end_ns.saturating_sub(alone).max(span.begin_ns),
            _ => span.begin_ns,
        };
        let cause = Some(Name::Text(LINK));
        let waits = Span { name: Name::Text("wait"), cause, end_ns: begin_ns, ..*span };
        [waits, Span { begin_ns, ..*span }]
    }

    /// The tracks, named by what went through them.
    fn named_tracks(&self) -> Vec<Track> {
        let mut streams: Vec<_> = self.streams.iter().collect();
        streams.sort_unstable_by_key(|(_, of)| of.track);
        let named = streams.into_iter().map(|(stream, of)| {
            let does = match of.bytes {
                _ if self.compute.contains(stream) => "compute",
                [0, 0] => "other",
                [down, up] if down >= up => "copies to the device",
                _ => "copies to host memory",
            };
            let name = format!("device {}: {does}", of.device);
            Track { name, device: Some(of.device), ..Track::default() }
        });
        named.collect()
    }
}

/// What a span of a compute stream is to those who wait for it.
fn what(span: &Span) -> Name {
    span.cause.unwrap_or(span.name)
}

/// What a copy between a device and host memory is for.
fn way(operation: &OperationTime) -> Option<&'static str> {
    match (operation.to_device, operation.to_host) {
        (0, 0) => None,
        (down, up) if down >= up => Some("onboard"),
        _ => Some("offload"),
    }
}

fn nanos(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
