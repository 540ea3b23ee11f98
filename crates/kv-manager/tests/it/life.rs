//! The life of a sequence, call by call.

use crate::prelude::*;

#[test]
fn a_prompt_is_computed_in_chunks_and_decoded_with_overlap() {
    let mut manager = manager(16, 0);
    let step = manager.begin_step().unwrap();
    let mut sequence = admit_within(&mut manager, 0..10, 6);
    assert_eq!((sequence.next(), sequence.block_count(GroupId(0))), (6, 3));
    let plan = manager.stage(&step, &mut [&mut sequence]).unwrap();
    assert_eq!((plan.step, plan.after), (1, 0));
    assert_eq!((plan.batch[0].start, plan.batch[0].tokens), (Start::At(0), 6));
    manager.finish_step(step).unwrap();

    let step = manager.begin_step().unwrap();
    manager.reserve(&mut sequence, 4).unwrap().given().unwrap();
    manager.stage(&step, &mut [&mut sequence]).unwrap();
    manager.finish_step(step).unwrap();
    assert!(manager.begin_step().is_err(), "two steps are in flight");
    done(&mut manager, 1);

    // The next token is staged before the last one is known.
    let step = manager.begin_step().unwrap();
    let reserved = manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    assert_eq!(reserved.blocks, 0);
    let plan = manager.stage(&step, &mut [&mut sequence]).unwrap();
    assert_eq!(plan.batch[0].start, Start::At(10));
    manager.finish_step(step).unwrap();
    assert_eq!(manager.commit(&mut sequence, 2, &[100]).unwrap(), Committed::Taken);
    assert_eq!(manager.commit(&mut sequence, 3, &[101]).unwrap(), Committed::Taken);
    assert_eq!((sequence.known(), sequence.resolved()), (12, 11));
    assert_eq!(manager.first_pool().stats().primary.cached, 0);
    drop(sequence);
    done(&mut manager, 3);

    let step = manager.begin_step().unwrap();
    let mut requests = [Request::new((0..10).collect())];
    let sequence = admitted(manager.ask_all(&mut requests, 100).pop().unwrap());
    assert_eq!((sequence.cached_tokens(), sequence.next()), (8, 2));
    drop(sequence);
    drop(step);
    manager.first_pool().check_integrity().unwrap();
}

#[test]
fn admission_leaves_the_watermark_while_sequences_run() {
    let pool = PoolConfig::primary_only(16);
    let mut options = ManagerOptions::new(4, pool);
    options.groups[0].watermark_blocks = 4;
    let mut manager = made(options);
    let mut admit = |tokens: u32, first: u32| {
        let mut requests = [Request::new((first..first + tokens).collect())];
        manager.ask_all(&mut requests, u64::MAX).pop().unwrap()
    };
    // With nothing running there is nothing to leave blocks for.
    drop(admitted(admit(64, 0)));
    let _running = admitted(admit(32, 1000));
    assert!(matches!(admit(17, 2000), Answer::NoRoom(_)), "5 of 8 blocks would leave 3");
    let mut grows = admitted(admit(16, 2000));
    assert!(matches!(admit(1, 3000), Answer::NoRoom(_)));
    assert_eq!(
        manager.reserve(&mut grows, 32).unwrap().given().unwrap().blocks,
        4,
        "they are for those that run"
    );
}

#[test]
fn errors_name_their_cause_wherever_they_are_printed() {
    let mut manager = manager(2, 0);
    let mut sequence = admit(&mut manager, 0..7);
    let number = staged(&mut manager, &mut [&mut sequence]).step;
    done(&mut manager, number);
    manager.commit(&mut sequence, number, &[7]).unwrap();
    let no_room = manager.reserve(&mut sequence, 9).unwrap().given().unwrap_err();
    let no_host = manager.suspend(&mut sequence).unwrap_err();
    let mut other = Manager::new(manager.options().clone()).unwrap();
    let foreign = other.fork(&mut sequence).unwrap_err();
    let printed = [no_room.to_string(), no_host.to_string(), foreign.to_string()];
    assert_eq!(
        printed,
        [
            "too few blocks: group 0: 2 blocks were asked for, 0 can be claimed and 0 more once the work \
             that uses them is complete",
            "the sequence was not suspended: group 0: 1 blocks were asked for of the Secondary tier, \
             which was made without blocks",
            "the sequence belongs to another manager",
        ]
    );
    // Nor do they say it twice.
    let chains = [format!("{no_room:?}"), format!("{no_host:?}"), format!("{foreign:?}")];
    assert_eq!(chains, printed);
}

#[test]
fn a_sequence_is_printed_in_one_short_line() {
    let mut manager = manager(1024, 0);
    let sequence = admit(&mut manager, 0..4000);
    let line = format!("{sequence:?}");
    assert!(line.len() < 200 && !line.contains('\n'), "{line}");
    assert!(line.contains("number: 0") && line.contains("known: 4000"), "{line}");
    assert!(format!("{:?}", Answer::Admitted(sequence)).len() < 220);
}
