//! Sizes and counts that a caller can pass, with 0, 1, ordinary values, the most there is, and values whose products
//! overflow: each is taken or refused with a typed error, within the memory that `main.rs` bounds.

use crate::prelude::*;
use kv_tier::HostPiece;

const NUMBERS: [u32; 7] = [0, 1, 7, 4096, 1 << 30, i32::MAX as u32, u32::MAX];
const LONG: [u64; 9] = [0, 1, 7, 10, 1 << 20, u32::MAX as u64, 1 << 63, u64::MAX - 1, u64::MAX];

#[test]
fn options_of_any_size_are_taken_or_refused() {
    let (mut made, mut refused) = (0, 0);
    for sequences_max in NUMBERS {
        for blocks_per_sequence_max in NUMBERS {
            for steps_in_flight_max in NUMBERS {
                let pool = PoolConfig::primary_only(8);
                let mut options = ManagerOptions {
                    sequences_max,
                    steps_in_flight_max,
                    ..ManagerOptions::new(steps_in_flight_max, pool)
                };
                options.groups[0].blocks_per_sequence_max = blocks_per_sequence_max;
                options.groups[0].watermark_blocks = steps_in_flight_max;
                match Manager::new(options) {
                    Ok(_) => made += 1,
                    Err(_) => refused += 1,
                }
                let _ = Replica::new(sequences_max, [(GroupKind::Full, blocks_per_sequence_max)]);
            }
        }
    }
    assert!(made > 50 && refused > 100, "{made} {refused}");
    for tokens in NUMBERS {
        for other in NUMBERS {
            let kinds = [
                GroupKind::Full,
                GroupKind::Window { tokens, sinks: other },
                GroupKind::State { checkpoint_tokens: tokens, drafts: 0 },
            ];
            for kind in kinds {
                let further = GroupOptions {
                    block_tokens: other,
                    blocks_per_sequence_max: other,
                    watermark_blocks: other,
                    ..group(kind, 8)
                };
                let options = with_groups(options(8, 0), [further]);
                let Ok(mut manager) = Manager::new(options) else { continue };
                let mut requests = [Request::new((0..9).collect())];
                for answer in manager.ask_all(&mut requests, u64::MAX) {
                    let Answer::Admitted(mut sequence) = answer else { continue };
                    step(&mut manager, &mut [&mut sequence]);
                    let _ = manager.truncate(&mut sequence, 7).unwrap();
                }
                let _ = Replica::new(other, [(kind, tokens)]);
            }
        }
    }
    for blocks in LONG {
        let pool = PoolConfig { secondary_blocks: blocks, ..PoolConfig::primary_only(blocks) };
        let made = Manager::new(ManagerOptions { scrubs: true, ..ManagerOptions::new(16, pool) });
        assert_eq!(made.is_ok(), (1..=1 << 20).contains(&blocks), "{blocks}");
    }
}

#[test]
fn events_of_any_number_are_kept_or_refused() {
    for events_max in [0, 1, 7, 1 << 20, 1 << 40, usize::MAX - 1, usize::MAX] {
        let made = Manager::new(ManagerOptions { events_max, ..options(8, 8) });
        assert_eq!(made.is_ok(), events_max <= 1 << 20, "{events_max}");
        let reader = made.ok().and_then(|manager| manager.events());
        assert_eq!(reader.is_some(), (1..=1 << 20).contains(&events_max));
    }
    let pool = PoolConfig::primary_only(1 << 20);
    let options = ManagerOptions { events_max: 1, ..ManagerOptions::new(1 << 20, pool) };
    assert!(Manager::new(options).is_err(), "4 TiB of token ids");
}

#[test]
fn tokens_of_any_number_are_taken_or_refused() {
    for tokens in LONG {
        let mut manager = manager(8, 8);
        let mut request = Request::named(tokens, vec![BlockHash::from_u128(7); 2]);
        (request.tokens_max, request.hit_max) = (tokens, tokens);
        request.content = Content { shared_tokens: tokens, ..Content::default() };
        request.content.inputs = vec![(tokens, vec![1])];
        let answer = manager.ask_all(&mut [request], tokens).pop();
        assert_eq!(
            answer.is_some_and(|answer| matches!(answer, Answer::Admitted(_))),
            tokens == 10
        );

        let mut request = Request::new((0..10).collect());
        (request.tokens_max, request.hit_max) = (tokens, tokens);
        let formats = manager.formats();
        let (answer, adoption) = manager.adopt(&mut request, tokens, &formats);
        let mut sequence = admitted(answer);
        if let Some(adoption) = adoption {
            let right = usize::try_from(tokens).unwrap();
            assert!(manager.adopted(&mut sequence, adoption, right).unwrap() <= 9);
        }

        let mut sequence = computed(&mut manager, 20..30);
        assert_eq!(manager.truncate(&mut sequence, tokens).is_ok(), tokens <= 10);
        let named = Tokens::Named { count: tokens, names: &[] };
        assert!(manager.extend(&mut sequence, named).is_err());
        assert!(manager.commit(&mut sequence, tokens, named).is_err() || tokens <= 1);
    }
}

#[test]
fn room_of_any_number_is_given_or_refused() {
    for tokens in NUMBERS {
        let mut manager = manager(8, 0);
        let mut sequence = admit(&mut manager, 0..5);
        match manager.reserve(&mut sequence, tokens) {
            Ok(Room::Given(_)) => assert!(tokens <= 32),
            Ok(Room::Lacks(NoRoom::Blocks(missing))) => assert_eq!(missing.group, GroupId(0)),
            Err(ReserveError::TooLong { blocks, .. }) => assert!(blocks > 2048),
            answer => panic!("{answer:?}"),
        }
        let (group, tier) = (GroupId(0), Tier::Primary);
        assert_eq!(manager.set_budget(group, tier, tokens.into()).is_ok(), tokens <= 8);
    }
}

#[test]
fn ends_of_a_draft_model_of_any_number_are_taken_or_refused() {
    for number in LONG {
        let further = GroupOptions {
            blocks_per_sequence_max: 8,
            draft_model: true,
            ..group(GroupKind::Full, 8)
        };
        let options = with_groups(options(8, 0), [further]);
        let mut manager = made(options);
        let mut request = Request::new((0..9).collect());
        let (answer, adoption) = adopt(&mut manager, &mut request, 8);
        let mut sequence = admitted(answer);
        let mut adoption = adoption.unwrap();
        adoption.set_draft_tokens(number);
        let all = adoption.block_count();
        assert_eq!(manager.adopted(&mut sequence, adoption, all), Ok(8));
        assert_eq!(sequence.draft_end(), number.min(8));
        let tokens = u32::try_from(number).unwrap_or(u32::MAX);
        let reserved = manager.reserve_draft(&mut sequence, tokens);
        let is_given = matches!(reserved, Ok(Room::Given(())));
        assert_eq!(is_given, sequence.draft_end() + u64::from(tokens) <= 32, "{tokens}");
        for (step, end) in [(number, 8), (1, number)] {
            // No step has computed anything by the draft model.
            let taken = manager.commit_draft(&mut sequence, step, end);
            assert_eq!(taken.is_ok(), step == 0, "{step}: step 0 is of before");
        }
    }
}

#[test]
fn workers_and_steps_of_any_number_are_known_or_refused() {
    for step in LONG {
        for worker in [0, 1, 255, u16::MAX].map(WorkerId) {
            let mut manager = manager(8, 0);
            drop(computed(&mut manager, 0..5));
            let completion = Completion { worker, step, outcome: Outcome::Failed };
            let expected = match (worker, step) {
                (WorkerId(0), 0..=1) => Ok(()),
                (WorkerId(0), _) => Err(CompletionError::NotStaged { step, latest: 1 }),
                _ => Err(CompletionError::NoWorker { worker, workers: 1 }),
            };
            assert_eq!(manager.complete(completion), expected);
            let known = worker == WorkerId(0);
            assert!(manager.fence_worker(worker).is_err() && manager.join_worker(worker).is_err());
            assert_eq!(manager.lose_worker(worker).is_ok(), known);
        }
    }
    let replica = Replica::new(4, [(GroupKind::Full, 4)]).unwrap();
    for row in NUMBERS {
        assert_eq!(replica.row(GroupId(0), Row::new(row)).is_some(), row < 4);
    }
}

/// A plan with this number wherever there is one.
fn plan_of(number: u64) -> StepPlan {
    let small = number as u32;
    let block = BlockId::new(small >> 1).unwrap();
    let at = |tier| Location { tier, id: block };
    let row = Row::new(small);
    StepPlan {
        step: number,
        after: number,
        moves: vec![GranuleMove {
            granule: small,
            from: Some(GroupId(small as u16)),
            to: Some(GroupId(small as u16)),
        }],
        copies: vec![BlockCopy {
            group: GroupId(small as u16),
            from: at(Tier::Fourth),
            to: at(Tier::Primary),
            tokens: small,
            written_by: number,
        }],
        scrubs: vec![BlockScrub { group: GroupId(small as u16), block, after: small }],
        edits: vec![RowEdit { group: GroupId(small as u16), row, first: small, count: small }],
        edit_ids: vec![block.into()],
        forgets: vec![
            Forget::Block(Tier::Third, GroupId(number as u16), BlockHash::ROOT),
            Forget::All(Tier::Fourth),
        ],
        transfers: vec![Transfer {
            ticket: TicketId(number),
            tier: Tier::Third,
            group: GroupId(small as u16),
            direction: Direction::Load,
            blocks: vec![(BlockHash::from_u128(number.into()), block)],
        }],
        layer_loads: vec![LayerLoad {
            ticket: TicketId(number),
            group: GroupId(small as u16),
            from: block,
            to: block,
        }],
        draft_batch: vec![BatchRow {
            row,
            start: Start::At(number),
            tokens: small,
            drafts: 0,
            input: 0,
        }],
        batch: vec![
            BatchRow { row, start: Start::At(number), tokens: small, drafts: small, input: small },
            BatchRow {
                row,
                start: Start::Open { resolved: number, upper: number },
                tokens: 1,
                drafts: small,
                input: small,
            },
        ],
    }
}

/// Bytes that are no messages, of many lengths, and messages with numbers of any size.
#[test]
fn messages_of_any_size_are_read_or_refused() {
    let mut buffer = Vec::new();
    for length in [0, 1, 8, 11, 12, 20, 21, 4096, 1 << 20] {
        for byte in [0, b'K', 0xFF] {
            let bytes = vec![byte; length];
            assert!(Message::from_bytes(&bytes).is_err());
            let read = Message::read_from(&mut &bytes[..], &mut buffer);
            assert_eq!(read.ok().flatten(), None);
        }
    }
    for number in LONG {
        let (small, plan) = (number as u32, plan_of(number));
        let snapshot = Snapshot {
            step: number,
            tables: vec![SnapshotTable {
                width: small,
                ids: TableEntry::new(small as i32).into_iter().collect(),
            }],
            granules: vec![None, Some(GroupId(small as u16))],
        };
        let worker = WorkerId(small as u16);
        let done = Completion { worker, step: number, outcome: Outcome::Failed };
        let mut bytes = Vec::new();
        plan.to_bytes(&mut bytes);
        let plan_bytes = bytes.len();
        snapshot.to_bytes(&mut bytes);
        let snapshot_bytes = bytes.len();
        done.to_bytes(&mut bytes);
        let all = [0..plan_bytes, plan_bytes..snapshot_bytes, snapshot_bytes..bytes.len()];
        let read = all.map(|range| Message::from_bytes(&bytes[range]).unwrap());
        let mut replica = Replica::new(2, [(GroupKind::Full, 2)]).unwrap();
        assert!(
            replica.check(&plan, &[]).is_err()
                && replica.restore(&snapshot, &[u64::MAX; 8]).is_err()
        );
        assert!(replica.check(&plan, &[(small, number)]).is_err());
        let sent = [Message::Plan(plan), Message::Snapshot(snapshot), Message::Completion(done)];
        assert_eq!(read, sent);
        let wrong = vec![(small, BlockFault::Fenced)];
        let settled = Settled { worker, ticket: TicketId(number), wrong };
        let blocks = vec![(GroupId(number as u16), BlockHash::from_u128(number.into()))];
        let dropped = Dropped { worker, tier: Tier::Fourth, blocks };
        let mut bytes = Vec::new();
        settled.to_bytes(&mut bytes);
        assert_eq!(Message::from_bytes(&bytes), Ok(Message::Settled(settled)));
        bytes.clear();
        dropped.to_bytes(&mut bytes);
        assert_eq!(Message::from_bytes(&bytes), Ok(Message::Dropped(dropped)));
    }
}

/// Two groups that share `granules` granules of so many blocks.
fn sharing(granules: u32, blocks: [u32; 2]) -> ManagerOptions {
    let pool = |blocks: u32| PoolConfig::primary_only(u64::from(granules) * u64::from(blocks));
    let group =
        |blocks| GroupOptions { blocks_per_sequence_max: 4, ..GroupOptions::new(16, pool(blocks)) };
    ManagerOptions {
        sequences_max: 4,
        shared: Some(SharedMemory { granules, granule_blocks: blocks.to_vec() }),
        ..ManagerOptions::of(blocks.map(group).into())
    }
}

#[test]
fn granules_of_any_number_are_shared_or_refused() {
    let (mut made, mut refused) = (0, 0);
    for granules in NUMBERS {
        for blocks in NUMBERS {
            match Manager::new(sharing(granules, [blocks, 1])) {
                Ok(mut manager) => {
                    made += 1;
                    for budget in NUMBERS {
                        let set = manager.set_granules(budget);
                        assert_eq!(set.is_ok(), budget <= granules);
                    }
                }
                Err(_) => refused += 1,
            }
            let memory = SharedMemory { granules, granule_blocks: vec![blocks, 1] };
            let replica = Replica::new(4, [(GroupKind::Full, 4); 2]).unwrap();
            let replica = Replica::sharing(replica, &memory);
            assert!(replica.is_err() || granules > 0 && blocks > 0);
        }
    }
    assert!(made >= 6 && refused >= 20, "{made} and {refused}");
}

#[test]
fn keys_of_tenants_and_ids_of_placeholders_are_any_numbers() {
    let mut manager = manager(8, 0);
    for length in [0, 1, 16, 1 << 16] {
        manager.add_tenant_with_key(&vec![0xFF; length]).unwrap();
    }
    for first in NUMBERS {
        for last in NUMBERS {
            manager.set_placeholder_ids(vec![first..=last, last..=first]);
            let mut request = Request::new(vec![first, last]);
            let answer = manager.ask_all(std::slice::from_mut(&mut request), u64::MAX).pop();
            assert!(matches!(answer, Some(Answer::Refused(_))), "{first} to {last}: {answer:?}");
        }
    }
}

#[test]
fn plans_and_snapshots_of_any_size_are_checked() {
    for number in LONG {
        let small = number as u32;
        let plan = StepPlan { step: number, ..StepPlan::default() };
        assert_eq!(plan.check_follows(0).is_ok(), number > 0);
        assert!(plan.check_follows(number).is_err());
        let edits = vec![RowEdit { group: GroupId(0), row: Row::new(1), first: 0, count: 1 }];
        let id = BlockId::new(small >> 1).unwrap();
        let plan = StepPlan { edits, edit_ids: vec![id.into()], ..StepPlan::default() };
        let size = usize::try_from(number).unwrap();
        assert_eq!(plan.check_table(size, &[1]).is_ok(), number > 1);
        assert_eq!(plan.check_table(2, &[size]).is_ok(), number > 0);
        assert_eq!(plan.check_blocks(&[[number, 0]]).is_ok(), number > id.index() as u64);
        let snapshot = Snapshot {
            step: number,
            tables: vec![SnapshotTable { width: 1, ids: vec![id.into(), TableEntry::NONE] }],
            granules: Vec::new(),
        };
        assert_eq!(
            Replica::new(2, [(GroupKind::Full, 1)]).unwrap().restore(&snapshot, &[number]).is_ok(),
            number > id.index() as u64
        );
        assert!(
            Replica::new(1, [(GroupKind::Full, 1)]).unwrap().restore(&snapshot, &[number]).is_err()
        );
    }
}

#[test]
fn transfers_of_any_size_are_checked() {
    let name = BlockHash::ROOT;
    let tier = || -> Box<dyn LowerTier> { Box::new(MemoryTier::new(MemoryTierOptions::default())) };
    for number in LONG {
        let (ticket, direction) = (TicketId(number), Direction::Load);
        let block = BlockId::new((number % (1 << 31)) as u32).unwrap();
        let group = GroupId(number as u16);
        let transfer =
            Transfer { ticket, tier: Tier::Third, group, direction, blocks: vec![(name, block)] };
        let of = |transfer: &Transfer| {
            let (step, transfers) = (number, vec![transfer.clone()]);
            StepPlan { step, transfers, ..StepPlan::default() }
        };
        let first = Transfer { group: GroupId(0), ..transfer.clone() };
        let tiers = TierTransfers::new(vec![tier()], 0);
        let check = |plan: &StepPlan, host| tiers.check(plan, &[host], []);
        assert_eq!(check(&of(&transfer), u64::MAX).is_ok(), number > 0 && number as u16 == 0);
        assert_eq!(check(&of(&first), u64::MAX).is_ok(), number > 0);
        assert_eq!(check(&of(&first), number).is_ok(), number > block.index() as u64);
        let again = tiers.check(&of(&first), &[u64::MAX], [&first]);
        assert!(matches!(again, Err(PlanError::Ticket { .. })), "{again:?}");
        let farther = Transfer { tier: Tier::Fourth, ..first };
        assert!(matches!(check(&of(&farther), u64::MAX), Err(PlanError::Tier { .. })));
    }
}

#[test]
fn addresses_of_a_shared_host_tier_are_any_numbers() {
    let numbers = || NUMBERS.into_iter().map(u64::from).chain([99, 100, u64::MAX - 1, u64::MAX]);
    for format in numbers() {
        let mut shared = manager(4, 2);
        let memory: Vec<Arc<dyn HostBlocks>> = vec![Arc::new(OneBlock)];
        let share = shared.share_host(format, memory).unwrap();
        for address in numbers() {
            for bytes in [0, 1, 100, 200, 201] {
                let end = address.checked_add(bytes as u64);
                let fits = bytes == 0 || end.is_some_and(|end| end <= 200);
                let read = share.read(address, &mut vec![0; bytes]);
                assert_eq!(read, fits, "{bytes} bytes at {address}");
            }
        }
        // Four blocks leave the device, the last two of which stay in host memory.
        let names = |first: u64| (first..first + 4).map(|of| BlockHash::from_u128(of.into()));
        for first in [1, 11] {
            let mut requests = [Request::named(16, names(first).collect())];
            let mut sequence = admitted(shared.ask_all(&mut requests, u64::MAX).pop().unwrap());
            step(&mut shared, &mut [&mut sequence]);
        }
        let wanted: Vec<_> = names(1).map(|name| (GroupId(0), name)).collect();
        let loan = wanted.iter().find_map(|of| share.lend(&[*of])).unwrap();
        for address in numbers() {
            let first = loan.blocks()[0].address;
            let within = (first..first + 100).contains(&address);
            let covered = loan.covered(address);
            assert_eq!(covered, within.then_some(first + 100), "{address}");
        }
        for at in [0, 1, usize::MAX] {
            assert_eq!(loan.header(at).is_ok(), at == 0);
        }
    }
}

/// A host block of 100 bytes.
#[derive(Debug)]
struct OneBlock;

impl HostBlocks for OneBlock {
    fn block_bytes(&self) -> usize {
        100
    }

    fn read(&self, _: BlockId, offset: usize, into: &mut [u8]) -> bool {
        assert!(offset + into.len() <= 100);
        into.fill(1);
        true
    }

    fn write(&self, _: BlockId, offset: usize, from: &[u8]) -> bool {
        assert!(offset + from.len() <= 100);
        true
    }

    fn pieces(&self, _: BlockId) -> Vec<HostPiece> {
        vec![HostPiece { memory: Arc::new(()), offset: 0, bytes: 100 }]
    }
}

/// Reads and writes at any offset.
#[derive(Debug)]
struct Anywhere;

impl LowerTier for Anywhere {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        for block in &blocks {
            for (offset, bytes) in PLACES {
                let read = block.read_at(offset, &mut vec![0; bytes]);
                let fits = offset.checked_add(bytes).is_some_and(|end| end <= block.len());
                assert_eq!(read.is_ok(), fits, "{bytes} bytes at {offset}");
            }
        }
    }

    fn load(&mut self, mut blocks: Vec<BlockSink>) {
        for block in &mut blocks {
            // Headers of any length, of which none is right.
            for bytes in [0, 1, 71, 72, 73, 1 << 20] {
                let lent = block.lend().unwrap();
                let landed = block.landed(lent, &vec![0; bytes]);
                let fault = if bytes == 72 { BlockFault::Checksum } else { BlockFault::Foreign };
                assert_eq!(landed, Err(fault), "{bytes} bytes");
                if bytes == 72 {
                    break;
                }
            }
        }
        for block in &mut blocks {
            for (offset, bytes) in PLACES {
                let written = block.write_at(offset, &vec![0; bytes]);
                let fits = offset.checked_add(bytes).is_some_and(|end| end <= block.len());
                // Within them, it is wrong: zeros are no record.
                let beyond = written == Err(BlockFault::Foreign);
                assert_eq!(beyond, !fits, "{bytes} bytes at {offset}: {written:?}");
            }
        }
    }

    fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}
    fn clear(&mut self) {}
    fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
}

const PLACES: [(usize, usize); 9] =
    [(0, 0), (0, 1), (71, 2), (72, 100), (72, 101), (171, 1), (172, 0), (173, 0), (usize::MAX, 1)];

#[test]
fn records_are_read_and_written_within_their_bounds() {
    let host: Arc<dyn HostBlocks> = Arc::new(OneBlock);
    for format in LONG {
        let mut tiers = TierTransfers::new(vec![Box::new(Anywhere)], format);
        for direction in [Direction::Store, Direction::Load] {
            let (ticket, tier, group) = (TicketId(format), Tier::Third, GroupId(0));
            let blocks = vec![(BlockHash::ROOT, BlockId::from(0))];
            let transfer = Transfer { ticket, tier, group, direction, blocks };
            tiers.begin(&transfer, &host).unwrap();
            for block in [0, 1, u32::MAX / 2] {
                let arrived = tiers.arrived(ticket, BlockId::new(block).unwrap());
                assert_eq!(
                    arrived.is_some(),
                    block == 0 && direction == Direction::Load,
                    "{block}"
                );
            }
        }
        let rules = FaultRules::all(format);
        let load_pieces = format as u32;
        let options =
            MemoryTierOptions { faults: rules, load_pieces, ..MemoryTierOptions::default() };
        assert!(MemoryTier::new(options).is_empty());
    }
}

#[test]
fn growth_of_any_size_is_asked_for() {
    for tokens in LONG {
        let mut manager = Manager::new(options(8, 0)).unwrap();
        manager.set_budget(GroupId(0), Tier::Primary, 0).unwrap();
        let width = manager.options().groups[0].blocks_per_sequence_max as usize;
        let mut asked = Vec::new();
        let mut grow = |_, count: usize| {
            asked.push(count);
            Ok::<_, std::convert::Infallible>(tokens)
        };
        let mut requests = VecDeque::from([Request::new((0..9).collect())]);
        let admission = manager.growing(Some(&mut grow)).admit(&mut requests, u64::MAX).unwrap();
        assert_eq!(admission.admitted.len() == 1, tokens >= 3, "{tokens}");
        if let Some((_, mut sequence)) = admission.admitted.into_iter().next() {
            let reserved = manager.growing(Some(&mut grow)).reserve(&mut sequence, tokens as u32);
            drop(reserved.unwrap());
        }
        assert_eq!(asked[0], 3);
        assert!(asked.iter().all(|&most| most <= width), "{tokens}: {asked:?}");
    }
}
