//! Messages between processes: what goes in comes out, and nothing else is taken for a message.

use crate::prelude::*;

/// A plan with something in every field.
fn plan() -> StepPlan {
    let mut options = options(4, 4);
    options.scrubs = true;
    let mut manager = made(options);
    let tenant = manager.add_tenant().unwrap();
    let mut first = computed(&mut manager, 0..15);
    manager.commit(&mut first, 1, &[100]).unwrap();
    drop(first);
    let step = manager.begin_step().unwrap();
    let mut request = Request::new((50..58).collect());
    request.tenant = tenant;
    let mut requests = [request];
    // The first step's blocks can be claimed when the next one is complete, which has no plan.
    drop(step);
    let step = manager.begin_step().unwrap();
    let mut second = admitted(manager.ask_all(&mut requests, u64::MAX).pop().unwrap());
    let plan = manager.stage(&step, &mut [&mut second]).unwrap().clone();
    assert!(!plan.copies.is_empty() && !plan.scrubs.is_empty() && !plan.edits.is_empty());
    plan
}

fn bytes(plan: &StepPlan) -> Vec<u8> {
    let mut bytes = Vec::new();
    plan.to_bytes(&mut bytes);
    bytes
}

#[test]
fn every_message_comes_out_as_it_went_in() {
    let plan = plan();
    assert_eq!(Message::from_bytes(&bytes(&plan)).unwrap(), Message::Plan(plan));
    let mut manager = manager(8, 0);
    let _sequence = admit(&mut manager, 0..20);
    let snapshot = manager.snapshot();
    let mut bytes = Vec::new();
    snapshot.to_bytes(&mut bytes);
    assert_eq!(Message::from_bytes(&bytes).unwrap(), Message::Snapshot(snapshot));
    for outcome in [Outcome::Done, Outcome::Failed] {
        let completion = Completion { worker: WorkerId(u16::MAX), step: u64::MAX, outcome };
        bytes.clear();
        completion.to_bytes(&mut bytes);
        assert_eq!(Message::from_bytes(&bytes).unwrap(), Message::Completion(completion));
    }
}

/// One of each message, with something in every field.
fn messages() -> [(Message, Vec<u8>); 6] {
    let (group, name, id) = (GroupId(3), BlockHash::from_u128(0x0102_0304_0506), BlockId::from);
    let at = |tier, of| Location { tier, id: id(of) };
    let row =
        |number, start| BatchRow { row: Row::new(number), start, tokens: 5, drafts: 2, input: 1 };
    let transfer = |ticket, tier, direction| {
        let blocks = vec![(name, id(21)), (BlockHash::ROOT, id(22))];
        Transfer { ticket: TicketId(ticket), tier, group, direction, blocks }
    };
    let plan = StepPlan {
        step: 9,
        after: 7,
        copies: vec![BlockCopy {
            group,
            from: at(Tier::Primary, 4),
            to: at(Tier::Secondary, 5),
            tokens: 16,
            written_by: 6,
        }],
        scrubs: vec![BlockScrub { group, block: id(8), after: 1 }],
        edits: vec![RowEdit { group, row: Row::new(2), first: 10, count: 2 }],
        edit_ids: entries([11, -1]),
        batch: vec![row(1, Start::At(12)), row(2, Start::Open { resolved: 13, upper: 15 })],
        draft_batch: vec![row(3, Start::At(14))],
        forgets: vec![Forget::Block(Tier::Third, group, name), Forget::All(Tier::Fourth)],
        transfers: vec![
            transfer(17, Tier::Third, Direction::Store),
            transfer(18, Tier::Fourth, Direction::Load),
        ],
        layer_loads: vec![LayerLoad { ticket: TicketId(16), group, from: id(23), to: id(24) }],
        moves: vec![GranuleMove { granule: 25, from: None, to: Some(group) }],
    };
    let tables = vec![SnapshotTable { width: 2, ids: entries([26, -1]) }];
    let snapshot = Snapshot { step: 9, tables, granules: vec![Some(group), None] };
    let worker = WorkerId(27);
    let done = Completion { worker, step: 9, outcome: Outcome::Failed };
    let wrong = vec![(1, BlockFault::Late), (2, BlockFault::Missing)];
    let settled = Settled { worker, ticket: TicketId(17), wrong };
    let dropped = Dropped { worker, tier: Tier::Third, blocks: vec![(group, name)] };
    let gained = Gained { worker, tier: Tier::Third, blocks: vec![(group, name)] };
    let of = |write: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = Vec::new();
        write(&mut bytes);
        bytes
    };
    [
        (Message::Plan(plan.clone()), of(&|into| plan.to_bytes(into))),
        (Message::Snapshot(snapshot.clone()), of(&|into| snapshot.to_bytes(into))),
        (Message::Completion(done), of(&|into| done.to_bytes(into))),
        (Message::Settled(settled.clone()), of(&|into| settled.to_bytes(into))),
        (Message::Dropped(dropped.clone()), of(&|into| dropped.to_bytes(into))),
        (Message::Gained(gained.clone()), of(&|into| gained.to_bytes(into))),
    ]
}

/// Processes of one version understand each other: the bytes change with the version alone.
#[test]
fn messages_have_the_bytes_that_they_had() {
    let found = messages().map(|(message, bytes)| {
        assert_eq!(Message::from_bytes(&bytes), Ok(message));
        (bytes.len(), xxhash_rust::xxh3::xxh3_64(&bytes))
    });
    let expected = [
        (468, 6_622_664_589_578_065_905),
        (60, 8_605_339_986_945_692_927),
        (36, 14_487_025_759_695_306_503),
        (52, 15_143_312_090_075_686_946),
        (52, 4_875_073_667_074_281_918),
        (52, 10_657_931_872_590_703_377),
    ];
    assert_eq!(found, expected);
}

#[test]
fn messages_are_read_from_a_stream_one_by_one() {
    let plan = plan();
    let done = Completion { worker: WorkerId(3), step: 9, outcome: Outcome::Done };
    let mut stream = Vec::new();
    plan.to_bytes(&mut stream);
    done.to_bytes(&mut stream);
    let (mut from, mut buffer) = (&stream[..], Vec::new());
    let mut read = || Message::read_from(&mut from, &mut buffer).unwrap();
    assert_eq!(read(), Some(Message::Plan(plan)));
    assert_eq!(read(), Some(Message::Completion(done)));
    assert_eq!(read(), None);
    for length in 1..stream.len() {
        let mut from = &stream[..length];
        let mut last = Ok(None);
        while let Ok(message @ Some(_)) = Message::read_from(&mut from, &mut buffer) {
            last = Ok(message);
        }
        let end: std::io::Result<_> = last;
        let whole = bytes(&self::plan()).len();
        assert_eq!(end.unwrap().is_some(), length >= whole, "cut to {length}");
    }
    let mut endless = [&stream[..8], &u32::MAX.to_le_bytes()].concat();
    endless.extend_from_slice(&stream);
    let error = Message::read_from(&mut &endless[..], &mut buffer).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    stream[0] = b'X';
    let error = Message::read_from(&mut &stream[..], &mut buffer).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
}

#[test]
fn a_changed_or_cut_message_is_refused() {
    let whole = bytes(&plan());
    for length in 0..whole.len() {
        assert!(Message::from_bytes(&whole[..length]).is_err(), "cut to {length}");
    }
    for bit in 0..whole.len() * 8 {
        let mut changed = whole.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(Message::from_bytes(&changed).is_err(), "bit {bit} is another");
    }
    let longer = [&whole[..], &[0]].concat();
    assert!(matches!(Message::from_bytes(&longer), Err(BytesError::Length { .. })));
}

/// The message with `change` made to its bytes, and a checksum that is right.
fn forged(plan: &StepPlan, change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = bytes(plan);
    let end = bytes.len() - 8;
    change(&mut bytes[..end]);
    let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[..end]);
    bytes[end..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

#[test]
fn a_forged_message_is_refused_without_much_memory() {
    let plan = plan();
    let version = forged(&plan, |bytes| bytes[4] = 10);
    assert_eq!(Message::from_bytes(&version), Err(BytesError::Version { version: 10 }));
    let kind = forged(&plan, |bytes| bytes[6] = 77);
    assert_eq!(Message::from_bytes(&kind), Err(BytesError::Value { field: "kind", value: 77 }));
    // The number of copies.
    let many = forged(&plan, |bytes| bytes[28..32].copy_from_slice(&u32::MAX.to_le_bytes()));
    assert!(matches!(Message::from_bytes(&many), Err(BytesError::Length { .. })));
    let group = forged(&plan, |bytes| bytes[34] = 1);
    let expected = BytesError::Value { field: "group", value: 1 << 16 };
    assert_eq!(Message::from_bytes(&group), Err(expected));
    let tier = forged(&plan, |bytes| bytes[36] = 4);
    assert_eq!(Message::from_bytes(&tier), Err(BytesError::Value { field: "tier", value: 4 }));
    let id = forged(&plan, |bytes| bytes[43] = 0x80);
    assert!(matches!(Message::from_bytes(&id), Err(BytesError::Value { field: "block id", .. })));
}

#[test]
fn a_worker_refuses_plans_that_do_not_fit() {
    let mut replica = Replica::new(4, [(GroupKind::Full, 8)]).unwrap();
    let edit = |row, first, count| StepPlan {
        step: 1,
        edits: vec![RowEdit { group: GroupId(0), row: Row::new(row), first, count }],
        edit_ids: vec![TableEntry::from(7); 2],
        ..StepPlan::default()
    };
    let refused = [
        (edit(4, 0, 2), "plan 1 names row 4 of a block table with 4 rows"),
        (edit(0, 7, 2), "plan 1 changes 2 entries from 7 on in rows of 8"),
        (
            edit(0, u32::MAX, u32::MAX),
            "plan 1 changes 4294967295 entries from 4294967295 on in rows of 8",
        ),
        (edit(0, 0, 1), "plan 1 has 2 block ids for edits of 1 entries"),
    ];
    for (plan, message) in refused {
        assert_eq!(replica.check(&plan, &[]).unwrap_err().to_string(), message);
        assert_eq!(
            (replica.step(), replica.row(GroupId(0), Row::new(0)).unwrap()),
            (0, &[TableEntry::NONE; 8][..])
        );
    }
    replica.check(&edit(3, 6, 2), &[]).unwrap();
    assert_eq!(
        replica.row(GroupId(0), Row::new(3)).unwrap(),
        entries([-1, -1, -1, -1, -1, -1, 7, 7])
    );
    let again = replica.check(&edit(3, 6, 2), &[]).unwrap_err();
    assert_eq!(again, PlanError::Gap { step: 1, after: 0, last: 1 });
}

#[test]
fn a_new_worker_begins_with_a_snapshot() {
    let mut manager = manager(8, 0);
    let mut sequence = computed(&mut manager, 0..10);
    let mut replica = Replica::new(
        manager.options().sequences_max,
        [(GroupKind::Full, manager.options().groups[0].blocks_per_sequence_max)],
    )
    .unwrap();
    replica.restore(&manager.snapshot(), &[u64::MAX; 8]).unwrap();
    manager.commit(&mut sequence, 1, &[5]).unwrap();
    manager.reserve(&mut sequence, 7).unwrap().given().unwrap();
    let plan = step(&mut manager, &mut [&mut sequence]);
    let id = sequence.block(GroupId(0), 4).unwrap().index() as u64;
    // The last block has no memory.
    let error = replica.check(&plan, &[(BLOCK, id)]).unwrap_err();
    let row = sequence.row().unwrap();
    assert_eq!(error, PlanError::NoBlocks { step: plan.step, row, end: 17 });
    assert_eq!(replica.step(), plan.after, "nothing has changed");
    replica.check(&plan, &[(BLOCK, id + 1)]).unwrap();
    let row = replica.row(GroupId(0), sequence.row().unwrap()).unwrap();
    let ids: Vec<_> = (0..5).map(|at| TableEntry::from(sequence.block(GroupId(0), at))).collect();
    assert_eq!(row[..5], ids);
    let mut other = Replica::new(1, [(GroupKind::Full, 1)]).unwrap();
    assert!(matches!(
        other.restore(&manager.snapshot(), &[u64::MAX; 8]),
        Err(PlanError::Snapshot { .. })
    ));
}

#[test]
fn a_batch_without_blocks_is_refused() {
    let mut manager = manager(8, 0);
    let mut sequence = admit(&mut manager, 0..10);
    let mut plan = step(&mut manager, &mut [&mut sequence]);
    plan.edits.clear();
    plan.edit_ids.clear();
    let mut replica = Replica::new(256, [(GroupKind::Full, 2048)]).unwrap();
    let (step, row) = (1, sequence.row().unwrap());
    assert_eq!(
        replica.check(&plan, &[(BLOCK, 8)]).map(drop),
        Err(PlanError::NoBlocks { step, row, end: 10 })
    );
}

#[test]
fn a_refused_batch_takes_back_edits_that_overlap() {
    let mut replica = Replica::new(2, [(GroupKind::Full, 4)]).unwrap();
    let row = Row::new(1);
    let edit = |first, count| RowEdit { group: GroupId(0), row, first, count };
    let plan = |step, edits: Vec<RowEdit>, edit_ids: Vec<TableEntry>, tokens| {
        let batch = vec![BatchRow { row, start: Start::At(0), tokens, drafts: 0, input: 0 }];
        StepPlan { step, after: step - 1, edits, edit_ids, batch, ..StepPlan::default() }
    };
    replica.check(&plan(1, vec![edit(0, 4)], entries([1, 2, 3, -1]), 6), &[(2, 4)]).unwrap();
    let edits = vec![edit(0, 3), edit(1, 3)];
    let overlapping = plan(2, edits, entries([3, 0, 0, 2, 1, 4]), 8);
    let refused = replica.check(&overlapping, &[(2, 4)]).unwrap_err();
    assert_eq!(refused, PlanError::NoBlocks { step: 2, row, end: 8 });
    assert_eq!(
        (replica.step(), replica.row(GroupId(0), row).unwrap()),
        (1, &entries([1, 2, 3, -1])[..])
    );
    replica.check(&overlapping, &[(2, 5)]).unwrap();
    assert_eq!(replica.row(GroupId(0), row).unwrap(), entries([3, 2, 1, 4]));
}

#[test]
fn rows_that_cannot_be_computed_together_are_refused_and_nothing_has_changed() {
    let mut manager = manager(8, 0);
    let mut sequence = admit(&mut manager, 0..10);
    let plan = step(&mut manager, &mut [&mut sequence]);
    let replica = Replica::new(256, [(GroupKind::Full, 2048)]).unwrap();
    let (step, row) = (1, sequence.row().unwrap());
    let with = |change: fn(&mut StepPlan)| {
        let mut wrong = plan.clone();
        change(&mut wrong);
        wrong
    };
    let refused = [
        (with(|plan| plan.batch.push(plan.batch[0])), PlanError::RowTwice { step, row }),
        (with(|plan| plan.draft_batch = vec![plan.batch[0]; 2]), PlanError::RowTwice { step, row }),
        (
            with(|plan| plan.draft_batch = std::mem::take(&mut plan.batch)),
            PlanError::DraftRow { step, row },
        ),
        (
            with(|plan| plan.batch[0].start = Start::Open { resolved: 9, upper: 0 }),
            PlanError::Start { step, row, resolved: 9, upper: 0 },
        ),
        (
            with(|plan| plan.batch[0].drafts = plan.batch[0].tokens),
            PlanError::Drafts { step, row, tokens: 10, drafts: 10 },
        ),
    ];
    for (wrong, error) in refused {
        let mut here = replica.clone();
        assert_eq!(here.check(&wrong, &[(BLOCK, 8)]).map(drop), Err(error));
        assert_eq!(format!("{here:?}"), format!("{replica:?}"), "{error}");
        here.check(&plan, &[(BLOCK, 8)]).unwrap();
    }
}

/// Entries of a block table, -1 for none.
fn entries<const N: usize>(ids: [i32; N]) -> Vec<TableEntry> {
    ids.map(|id| TableEntry::new(id).unwrap()).to_vec()
}
