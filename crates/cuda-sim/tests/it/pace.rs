//! What runs at each pace without a wait, that queries run nothing, and where a machine gets its
//! pace.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Mutex;

use crate::common::*;
use cuda_driver::{Driver, DriverResult};
use cuda_sim::{ExploreLimits, Pace, SimConfig, SimConfigError, SimDriver, explore};
use kv_testkit::Random;

const PACES: [Pace; 4] = [Pace::Random, Pace::Slowest, Pace::Fastest, Pace::OneBehind];

fn query_stream(sim: &SimDriver, stream: u64) -> DriverResult<bool> {
    // SAFETY: handles are looked up.
    unsafe { sim.stream_query(stream) }
}

fn sync_event(sim: &SimDriver, event: u64) {
    // SAFETY: handles are looked up.
    unsafe { sim.event_synchronize(event) }.unwrap();
}

fn one_behind() -> (SimDriver, Notes) {
    let sim = paced(Pace::OneBehind, 1);
    let ran = Notes::new(&sim);
    (sim, ran)
}

#[test]
fn a_query_answers_before_anything_runs_after_it() {
    let second_answers: BTreeSet<[bool; 2]> = (0..100)
        .map(|seed| {
            let sim = paced(Pace::Random, seed);
            let [stream, other] = [(); 2].map(|()| sim.stream_create(false).unwrap());
            let event = sim.event_create(false).unwrap();
            record(&sim, event, stream).unwrap();
            assert!(!query(&sim, event).unwrap(), "seed {seed}: nothing has run yet");
            let event_done = query(&sim, event).unwrap();
            sync_event(&sim, event);
            Notes::new(&sim).enqueue(&sim, other, 1);
            assert!(!query_stream(&sim, other).unwrap(), "seed {seed}: nothing has run yet");
            [event_done, query_stream(&sim, other).unwrap()]
        })
        .collect();
    let both =
        |at: usize| second_answers.iter().map(|answers| answers[at]).collect::<BTreeSet<_>>();
    assert_eq!([both(0), both(1)], [(); 2].map(|()| BTreeSet::from([false, true])));
}

#[test]
fn after_a_query_run_none_to_three_operations_of_any_stream() {
    let seen: BTreeSet<usize> = (0..200)
        .map(|seed| {
            let sim = paced(Pace::Random, seed);
            let ran = Notes::new(&sim);
            let streams = [(); 5].map(|()| sim.stream_create(false).unwrap());
            for (number, &stream) in (0..).zip(&streams) {
                ran.enqueue(&sim, stream, number);
            }
            assert!(ran.numbers().is_empty());
            assert!(!query_stream(&sim, streams[0]).unwrap());
            ran.numbers().len()
        })
        .collect();
    assert_eq!(seen, BTreeSet::from([0, 1, 2, 3]));
}

#[test]
fn a_lost_device_is_told_by_the_query_after_the_one_that_saw_it_well() {
    let (mut answered, mut refused) = (0, 0);
    for seed in 0..50 {
        let sim = paced(Pace::Random, seed);
        let (stream, event) = (sim.stream_create(false).unwrap(), sim.event_create(false).unwrap());
        let memory = sim.mem_alloc(4).unwrap();
        launch_copy(&sim, (memory, memory + 4), 4, stream).unwrap();
        record(&sim, event, stream).unwrap();
        assert!(!query(&sim, event).unwrap(), "seed {seed}: the kernel has not run");
        match query(&sim, event) {
            Ok(done) => answered += u32::from(!done),
            Err(_) => refused += 1,
        }
    }
    assert!(answered > 0 && refused > 0 && answered + refused == 50, "{answered} and {refused}");
}

#[test]
fn in_an_exploration_two_queries_in_a_row_may_find_nothing_done() {
    let seen = Mutex::new(BTreeSet::new());
    let found = explore(&SimConfig::default(), ExploreLimits::default(), |sim| {
        bind(sim, 0);
        let (stream, event) = (sim.stream_create(false).unwrap(), sim.event_create(false).unwrap());
        record(sim, event, stream).unwrap();
        let answers = [(); 3].map(|()| query(sim, event).unwrap());
        seen.lock().unwrap().insert(answers);
        Ok(())
    });
    assert!(found.unwrap().complete);
    // Three times `false` is missing: after two such answers an operation runs first.
    let expected = [[true; 3], [false, true, true], [false, false, true]];
    assert_eq!(seen.into_inner().unwrap(), expected.into());
}

#[test]
fn in_an_exploration_work_runs_between_the_hosts_write_and_its_query() {
    let seen = Mutex::new(BTreeSet::new());
    let found = explore(&SimConfig::default(), ExploreLimits::default(), |sim| {
        bind(sim, 0);
        let (stream, event) = (sim.stream_create(false).unwrap(), sim.event_create(false).unwrap());
        let (memory, host) = (sim.mem_alloc(1).unwrap(), pinned(sim, 1));
        host_write(host, b"a");
        upload_async(sim, memory, host, 1, stream).unwrap();
        record(sim, event, stream).unwrap();
        host_write(host, b"b");
        let done = query(sim, event).unwrap();
        host_write(host, b"c");
        let arrived = download(sim, memory, 1, stream).unwrap()[0];
        seen.lock().unwrap().insert((done, arrived));
        Ok(())
    });
    assert!(found.unwrap().complete);
    let done = [(true, b'a'), (true, b'b')];
    let not_done = [(false, b'a'), (false, b'b'), (false, b'c')];
    assert_eq!(seen.into_inner().unwrap(), done.into_iter().chain(not_done).collect());
}

#[test]
fn one_behind_no_query_moves_the_device() {
    let (sim, ran) = one_behind();
    let (stream, event) = (sim.stream_create(false).unwrap(), sim.event_create(false).unwrap());
    ran.enqueue(&sim, stream, 1);
    record(&sim, event, stream).unwrap();
    for _ in 0..100 {
        assert!(!query(&sim, event).unwrap() && !query_stream(&sim, stream).unwrap());
    }
    assert_eq!(ran.numbers(), [1]);
    ran.enqueue(&sim, stream, 2);
    assert!(query(&sim, event).unwrap(), "the record is no longer the last");
    assert!(!query_stream(&sim, stream).unwrap());
}

#[test]
fn one_behind_the_default_stream_stands_still_behind_the_last_operation_before_it() {
    let (sim, ran) = one_behind();
    let blocking = sim.stream_create(true).unwrap();
    ran.enqueue(&sim, blocking, 1);
    ran.enqueue(&sim, 0, 2);
    ran.enqueue(&sim, 0, 3);
    assert!(ran.numbers().is_empty(), "2 is not the last, but comes after 1, which is");
    ran.enqueue(&sim, blocking, 4);
    assert_eq!(ran.numbers(), [1, 2], "4 comes after 3");
    ran.enqueue(&sim, blocking, 5);
    assert_eq!(ran.numbers(), [1, 2]);
    sync(&sim, 0).unwrap();
    assert_eq!(ran.numbers(), [1, 2, 3, 4]);
}

#[test]
fn one_behind_a_released_hold_and_a_new_pace_leave_the_last_operation() {
    let (sim, ran) = one_behind();
    let stream = sim.stream_create(false).unwrap();
    sim.hold(stream);
    for number in 1..=3 {
        ran.enqueue(&sim, stream, number);
    }
    assert!(ran.numbers().is_empty());
    sim.release_hold(stream);
    assert_eq!(ran.numbers(), [1, 2]);
    sim.set_pace(Pace::Slowest);
    ran.enqueue(&sim, stream, 4);
    assert_eq!(ran.numbers(), [1, 2]);
    sim.set_pace(Pace::OneBehind);
    assert_eq!(ran.numbers(), [1, 2, 3]);
}

#[test]
fn one_behind_a_destroyed_stream_keeps_its_last_operation_until_it_is_waited_for() {
    let (sim, ran) = one_behind();
    let [gone, stream] = [(); 2].map(|()| sim.stream_create(false).unwrap());
    let event = sim.event_create(false).unwrap();
    ran.enqueue(&sim, gone, 1);
    record(&sim, event, gone).unwrap();
    // SAFETY: the stream is alive, and nothing uses it afterwards.
    unsafe { sim.stream_destroy(gone) }.unwrap();
    wait(&sim, stream, event).unwrap();
    ran.enqueue(&sim, stream, 2);
    assert_eq!(ran.numbers(), [1]);
    sync(&sim, stream).unwrap();
    assert_eq!(ran.numbers(), [1, 2]);
    assert_eq!(sim.run_all(), 0);
}

#[test]
fn one_behind_a_program_that_polls_ends() {
    let (sim, ran) = one_behind();
    let [stream, other] = [(); 2].map(|()| sim.stream_create(false).unwrap());
    ran.enqueue(&sim, other, 1);
    ran.enqueue(&sim, stream, 2);
    let polls = (0..1u32 << 20).take_while(|_| !query_stream(&sim, stream).unwrap()).count();
    assert!([1 << 16, 2 << 16].contains(&polls), "{polls} queries");
}

#[test]
fn a_wait_that_would_hang_runs_what_it_does_not_wait_for() {
    for pace in PACES {
        let sim = paced(pace, 1);
        let ran = Notes::new(&sim);
        let [held, other] = [(); 2].map(|()| sim.stream_create(false).unwrap());
        sim.hold(held);
        ran.enqueue(&sim, held, 1);
        ran.enqueue(&sim, other, 2);
        sync(&sim, held).unwrap_err();
        assert_eq!(
            ran.numbers(),
            [2],
            "{pace:?}: a device does not stand still while a host hangs"
        );
    }
}

/// An operation of the model: a mark, or a wait for the first operations of a stream.
#[derive(Clone, Copy)]
enum Op {
    Mark(u32),
    Wait { stream: usize, count: usize },
    Record,
}

/// The operations that the device must have run, derived from the rule alone.
#[derive(Default)]
struct Model {
    streams: [Vec<Op>; 4],
    /// Number of operations of each stream that have run.
    done: [usize; 4],
}

impl Model {
    fn can_run(&self, stream: usize) -> bool {
        match self.streams[stream].get(self.done[stream]) {
            None => false,
            Some(&Op::Wait { stream, count }) => self.done[stream] >= count,
            Some(_) => true,
        }
    }

    /// Runs `stream` up to its `count`th operation, and for each wait first the awaited operations.
    fn run_to(&mut self, stream: usize, count: usize) {
        while self.done[stream] < count {
            if let Op::Wait { stream, count } = self.streams[stream][self.done[stream]] {
                self.run_to(stream, count);
            }
            self.done[stream] += 1;
        }
    }

    /// Runs every operation that can run, except the last of each stream.
    fn keep_one_behind(&mut self) {
        while let Some(stream) = (0..4).find(|&stream| {
            self.done[stream] + 1 < self.streams[stream].len() && self.can_run(stream)
        }) {
            self.done[stream] += 1;
        }
    }

    fn marks(&self) -> Vec<u32> {
        let done = self.streams.iter().zip(self.done).flat_map(|(ops, done)| &ops[..done]);
        let mut marks: Vec<u32> = done
            .filter_map(|op| if let Op::Mark(number) = op { Some(*number) } else { None })
            .collect();
        marks.sort_unstable();
        marks
    }
}

#[test]
fn one_behind_exactly_what_the_rule_says_has_run_after_every_call() {
    for seed in 0..300u64 {
        let sim = paced(Pace::OneBehind, seed);
        let ran = Notes::new(&sim);
        let streams = [(); 4].map(|()| sim.stream_create(false).unwrap());
        let events = [(); 4].map(|()| sim.event_create(false).unwrap());
        let mut recorded = [None; 4];
        let mut model = Model::default();
        let mut random = Random::new(seed);
        let mut below = |bound: u64| random.below(bound) as usize;
        for number in 0..60 {
            let (at, which) = (below(4), below(4));
            match below(10) {
                0..4 => {
                    ran.enqueue(&sim, streams[at], number);
                    model.streams[at].push(Op::Mark(number));
                }
                4..6 => {
                    record(&sim, events[which], streams[at]).unwrap();
                    model.streams[at].push(Op::Record);
                    recorded[which] = Some((at, model.streams[at].len()));
                }
                6..8 => {
                    wait(&sim, streams[at], events[which]).unwrap();
                    if let Some((stream, count)) = recorded[which] {
                        model.streams[at].push(Op::Wait { stream, count });
                    }
                }
                8 => {
                    sync(&sim, streams[at]).unwrap();
                    model.run_to(at, model.streams[at].len());
                }
                _ => {
                    sync_event(&sim, events[which]);
                    if let Some((stream, count)) = recorded[which] {
                        model.run_to(stream, count);
                    }
                }
            }
            model.keep_one_behind();
            let mut numbers = ran.numbers();
            numbers.sort_unstable();
            assert_eq!(numbers, model.marks(), "seed {seed}, call {number}");
            for (stream, &handle) in streams.iter().enumerate() {
                let is_idle = model.done[stream] == model.streams[stream].len();
                assert_eq!(
                    query_stream(&sim, handle).unwrap(),
                    is_idle,
                    "seed {seed}, call {number}"
                );
            }
        }
    }
}

/// Set in the environment of a child process.
const CHILD: &str = "CUDA_SIM_PACE_CHILD";

/// Runs test `name` again in a process with `CUDA_SIM_PACE` set to `word`. Returns its output if it
/// failed.
fn passes_with(name: &str, word: Option<&str>) -> Result<(), String> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("pace::{name}")]).env(CHILD, "1");
    match word {
        Some(word) => command.env("CUDA_SIM_PACE", word),
        None => command.env_remove("CUDA_SIM_PACE"),
    };
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let passed = output.status.success() && said.contains("1 passed");
    if passed { Ok(()) } else { Err(said + &String::from_utf8_lossy(&output.stderr)) }
}

/// Number of three operations that have run after each call, and after a query.
fn progress(sim: &SimDriver) -> [usize; 4] {
    bind(sim, 0);
    let (stream, ran) = (sim.stream_create(false).unwrap(), Notes::new(sim));
    let mut progress = [0; 4];
    for (number, so_far) in (0..3).zip(&mut progress) {
        ran.enqueue(sim, stream, number);
        *so_far = ran.numbers().len();
    }
    let _ = query_stream(sim, stream).unwrap();
    progress[3] = ran.numbers().len();
    progress
}

#[test]
fn a_machine_has_the_pace_of_the_environment_unless_its_program_chooses() {
    let of_pace = |pace| match pace {
        Pace::Slowest => BTreeSet::from([[0, 0, 0, 0]]),
        Pace::OneBehind => BTreeSet::from([[0, 1, 2, 2]]),
        Pace::Fastest => BTreeSet::from([[1, 2, 3, 3]]),
        _ => (0..=3).map(|after_query| [0, 0, 0, after_query]).collect(),
    };
    let words = ["random", "slowest", "fastest", "one-behind"];
    if std::env::var_os(CHILD).is_some() {
        let word = std::env::var("CUDA_SIM_PACE").unwrap_or_else(|_| "random".to_owned());
        let expected = PACES[words.iter().position(|other| *other == word).unwrap()];
        assert_eq!(SimConfig::default().pace, expected);
        let seen = |change: &dyn Fn(SimConfig) -> SimDriver| -> BTreeSet<[usize; 4]> {
            let seeds = (0..30).map(|seed| SimConfig { seed, ..SimConfig::default() });
            seeds.map(|config| progress(&change(config))).collect()
        };
        let new = |config| SimDriver::new(config).unwrap();
        assert_eq!(seen(&new), of_pace(expected));
        for pace in PACES {
            assert_eq!(seen(&|config| new(SimConfig { pace, ..config })), of_pace(pace));
            let set = |config| {
                let sim = new(config);
                sim.set_pace(pace);
                sim
            };
            assert_eq!(seen(&set), of_pace(pace));
        }
        return;
    }
    let name = "a_machine_has_the_pace_of_the_environment_unless_its_program_chooses";
    for word in words.map(Some).into_iter().chain([None]) {
        assert_eq!(passes_with(name, word), Ok(()), "{word:?}");
    }
}

#[test]
fn no_machine_is_built_in_an_environment_with_an_unknown_pace() {
    if std::env::var_os(CHILD).is_some() {
        let chosen = SimConfig { pace: Pace::Fastest, ..SimConfig::default() };
        for config in [SimConfig::default(), chosen] {
            let refused = SimDriver::new(config.clone()).unwrap_err();
            assert!(
                matches!(&refused, SimConfigError::Environment { variable: "CUDA_SIM_PACE", found, .. }
                    if found == "slow"),
                "{refused:?}"
            );
            let limits = ExploreLimits::default();
            assert_eq!(explore(&config, limits, |_| Ok(())).unwrap_err(), refused);
        }
        return;
    }
    let name = "no_machine_is_built_in_an_environment_with_an_unknown_pace";
    assert_eq!(passes_with(name, Some("slow")), Ok(()));
}
