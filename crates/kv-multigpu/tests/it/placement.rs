//! Compares placements with every possible assignment, for small models; tests refusals and the
//! text form.

use std::cmp::Reverse;
use std::collections::HashSet;

use kv_multigpu::place::{
    GpuCapacity, GpuLoad, HeadShards, KvReplication, LayerShape, Link, LinkMatrix, ModelShape,
    Placement, PlacementError, PlacementKind, Strategy,
};
use kv_testkit::Random;

/// The most GPUs and layers that can be placed.
const GPUS_MAX: usize = 64;
const LAYERS_MAX: usize = 512;

struct Case {
    model: ModelShape,
    gpus: Vec<GpuCapacity>,
    links: LinkMatrix,
}

impl Case {
    fn random(random: &mut Random) -> Self {
        let gpus = 1 + random.below(4) as usize;
        let layers = 1 + random.below(6) as usize;
        let free_scale = [40, 400, 4_000][random.below(3) as usize];
        let model = ModelShape {
            layers: (0..layers)
                .map(|_| LayerShape {
                    weight_bytes: random.below(200),
                    kv_block_bytes: random.below(4) * 8,
                    output_token_bytes: random.below(100),
                })
                .collect(),
            kv_blocks: random.below(6),
            workspace_bytes: random.below(20),
            step_tokens: 1 + random.below(3),
        };
        let capacity = |gpu: usize, random: &mut Random| GpuCapacity {
            uuid: [gpu as u8; 16],
            free_bytes: random.below(free_scale),
            memory_bytes_per_second: 1_000_000_000 * (1 + random.below(3)),
        };
        let gpus: Vec<_> = (0..gpus).map(|gpu| capacity(gpu, random)).collect();
        // Few different links, so that ties occur.
        let links = LinkMatrix::from_fn(gpus.len(), |_, _| Link {
            latency_ns: 10 * random.below(3),
            bytes_per_second: 500_000_000 * (1 + random.below(2)),
        })
        .unwrap();
        Self { model, gpus, links }
    }

    fn place(&self, strategy: Strategy) -> Result<Placement, PlacementError> {
        Placement::layers(&self.model, &self.gpus, &self.links, strategy)
    }

    fn needed(&self, gpu_of_layer: &[usize]) -> Vec<u64> {
        let mut needed = vec![0; self.gpus.len()];
        for (layer, &gpu) in gpu_of_layer.iter().enumerate() {
            if needed[gpu] == 0 && !gpu_of_layer[..layer].contains(&gpu) {
                needed[gpu] = self.model.workspace_bytes;
            }
            let shape = self.model.layers[layer];
            needed[gpu] += shape.weight_bytes + shape.kv_block_bytes * self.model.kv_blocks;
        }
        needed
    }

    fn missing(&self, gpu_of_layer: &[usize]) -> u64 {
        let needed = self.needed(gpu_of_layer);
        needed.iter().zip(&self.gpus).map(|(need, gpu)| need.saturating_sub(gpu.free_bytes)).sum()
    }

    fn nanos(&self, gpu_of_layer: &[usize]) -> u64 {
        let time = |bytes: u64, speed: u64| (bytes * 1_000_000_000).div_ceil(speed);
        let mut nanos = 0;
        for (layer, &gpu) in gpu_of_layer.iter().enumerate() {
            let shape = self.model.layers[layer];
            nanos += time(shape.weight_bytes, self.gpus[gpu].memory_bytes_per_second);
            if let Some(link) =
                gpu_of_layer.get(layer + 1).and_then(|&next| self.links.link(gpu, next))
            {
                let bytes = shape.output_token_bytes * self.model.step_tokens;
                nanos += link.latency_ns + time(bytes, link.bytes_per_second);
            }
        }
        nanos
    }

    fn least_left(&self, gpu_of_layer: &[usize]) -> u64 {
        let needed = self.needed(gpu_of_layer);
        let left = |&gpu: &usize| self.gpus[gpu].free_bytes.saturating_sub(needed[gpu]);
        gpu_of_layer.iter().map(left).min().unwrap()
    }

    /// All assignments of layers to GPUs.
    fn all(&self) -> impl Iterator<Item = Vec<usize>> + use<> {
        let (layers, gpus) = (self.model.layers.len() as u32, self.gpus.len());
        (0..gpus.pow(layers)).map(move |code| {
            (0..layers).map(|layer| code / gpus.pow(layer) % gpus).collect::<Vec<_>>()
        })
    }
}

/// Whether each GPU has at most one run of layers.
fn in_runs(gpu_of_layer: &[usize]) -> bool {
    let runs = gpu_of_layer.chunk_by(|a, b| a == b).map(|run| run[0]);
    let mut seen = HashSet::new();
    runs.into_iter().all(|gpu| seen.insert(gpu))
}

#[test]
fn the_least_cost_is_the_least_of_all_assignments_in_runs() {
    let mut random = Random::new(1);
    let (mut fits, mut refused, mut crossed) = (0, 0, 0);
    for round in 0..600 {
        let case = Case::random(&mut random);
        let cost = |a: &Vec<usize>| (case.missing(a), case.nanos(a), Reverse(case.least_left(a)));
        let best = case.all().filter(|a| in_runs(a)).map(|a| cost(&a)).min().unwrap();
        match case.place(Strategy::LeastCost) {
            Ok(placement) => {
                fits += 1;
                crossed += usize::from(placement.crossings().next().is_some());
                let PlacementKind::Layers { gpu_of_layer, .. } = placement.kind() else { panic!() };
                assert!(in_runs(gpu_of_layer), "round {round}");
                assert_eq!(cost(gpu_of_layer), best, "round {round}");
                let time = placement.step_time();
                let predicted = (time.weights + time.activations).as_nanos();
                assert_eq!(predicted, u128::from(best.1), "round {round}");
            }
            Err(PlacementError::DoesNotFit { short, .. }) => {
                refused += 1;
                let missing: u64 = short.iter().map(|short| short.missing_bytes()).sum();
                assert!(missing > 0 && missing == best.0, "round {round}");
            }
            Err(error) => panic!("round {round}: {error}"),
        }
    }
    // The test is meaningful only if all kinds of cases occur.
    assert!(fits > 100 && refused > 100 && crossed > 30, "{fits} {refused} {crossed}");
}

#[test]
fn by_free_memory_the_fullest_gpu_is_as_little_full_as_can_be() {
    let mut random = Random::new(2);
    let mut split = 0;
    for round in 0..600 {
        let mut case = Case::random(&mut random);
        for gpu in &mut case.gpus {
            gpu.free_bytes += 1_500; // all of it fits everywhere, so that every split is allowed
        }
        let fullness = |a: &Vec<usize>| {
            let needed = case.needed(a);
            let full = needed.iter().zip(&case.gpus).map(|(n, g)| n * 1_000_000_000 / g.free_bytes);
            full.max().unwrap()
        };
        let best = case.all().filter(|a| a.is_sorted()).map(|a| fullness(&a)).min().unwrap();
        let placement = case.place(Strategy::FreeMemory).unwrap();
        let PlacementKind::Layers { gpu_of_layer, .. } = placement.kind() else { panic!() };
        assert!(gpu_of_layer.is_sorted(), "round {round}");
        assert_eq!(fullness(gpu_of_layer), best, "round {round}");
        split += usize::from(gpu_of_layer[0] != gpu_of_layer[gpu_of_layer.len() - 1]);
    }
    assert!(split > 200, "{split}");
}

#[test]
fn what_is_on_the_gpus_adds_up_and_fits_to_the_last_block() {
    let mut random = Random::new(3);
    let mut placed = 0;
    for round in 0..400 {
        let mut case = Case::random(&mut random);
        for strategy in Strategy::ALL {
            let result = case.place(strategy);
            let gpus = case.gpus.len();
            let gpu_of_layer = |layer: usize| match strategy {
                Strategy::RoundRobin => Some(layer % gpus),
                _ => None,
            };
            let placement = match result {
                Ok(placement) => placement,
                Err(PlacementError::DoesNotFit { short, kv_blocks_fit }) => {
                    assert!(short.iter().all(|s| s.free_bytes == case.gpus[s.gpu].free_bytes));
                    assert!(kv_blocks_fit.is_none_or(|fit| fit < case.model.kv_blocks));
                    continue;
                }
                Err(error) => panic!("round {round}: {error}"),
            };
            placed += 1;
            let PlacementKind::Layers { gpu_of_layer: assigned, .. } = placement.kind() else {
                panic!()
            };
            for (gpu, needed) in case.needed(assigned).into_iter().enumerate() {
                let load = placement.load(gpu).unwrap();
                assert_eq!(load.used_bytes(), needed, "round {round} {strategy:?}");
                assert_eq!(load.left_bytes(), case.gpus[gpu].free_bytes - needed);
                let kv: u64 = (0..assigned.len()).map(|l| placement.kv_block_bytes(l, gpu)).sum();
                assert_eq!(load.kv_bytes, kv * case.model.kv_blocks);
            }
            let wanted =
                (0..assigned.len()).all(|l| gpu_of_layer(l).is_none_or(|g| g == assigned[l]));
            assert!(wanted, "round {round} {assigned:?}");
            // One block more than the maximum does not fit, and the refusal names the maximum.
            let most = placement.kv_blocks_max();
            if most < 1 << 40 {
                let assigned = assigned.clone();
                let blocks = std::mem::replace(&mut case.model.kv_blocks, most);
                let again = |case: &Case| {
                    let assigned = assigned.clone();
                    Placement::with_assignment(&case.model, &case.gpus, &case.links, assigned)
                };
                assert_eq!(again(&case).unwrap().kv_blocks_max(), most);
                case.model.kv_blocks = most + 1;
                let Err(PlacementError::DoesNotFit { short, kv_blocks_fit }) = again(&case) else {
                    panic!("round {round}: {} blocks fit", most + 1)
                };
                assert_eq!(kv_blocks_fit, Some(most));
                assert!(short.iter().all(|short| short.missing_bytes() > 0));
                case.model.kv_blocks = blocks;
            }
        }
    }
    assert!(placed > 300, "{placed}");
}

#[test]
fn every_placement_comes_back_from_its_text() {
    let mut random = Random::new(4);
    let mut texts = 0;
    for _ in 0..200 {
        let case = Case::random(&mut random);
        let (gpus, links) = (&case.gpus[..], &case.links);
        let heads = gpus.len() as u64 * 8;
        let kv_heads = [1, 2, 4, 8][random.below(4) as usize];
        let allow = KvReplication::Allow;
        let sharded = Placement::sharded(&case.model, gpus, links, heads, kv_heads, allow);
        let assigned = (0..case.model.layers.len()).map(|layer| layer % gpus.len()).collect();
        let assigned = Placement::with_assignment(&case.model, gpus, links, assigned);
        let by_strategy = Strategy::ALL.into_iter().map(|strategy| case.place(strategy));
        for placement in by_strategy.chain([sharded, assigned]).flatten() {
            texts += 1;
            let text = placement.to_string();
            assert_eq!(text.parse::<Placement>().unwrap(), placement, "{text}");
            // A text with a missing or repeated line is invalid, or describes another placement.
            let lines: Vec<_> = text.lines().collect();
            for without in 0..lines.len() {
                let shorter: Vec<_> = [&lines[..without], &lines[without + 1..]].concat();
                let parsed = shorter.join("\n").parse::<Placement>();
                assert!(
                    parsed.is_err_and(|error| !error.to_string().is_empty())
                        || lines[without].starts_with("layer ")
                );
                let longer = [&lines[..=without], &lines[without..]].concat();
                let parsed = longer.join("\n").parse::<Placement>();
                assert!(parsed.is_err() || lines[without].starts_with("layer "));
            }
        }
    }
    assert!(texts > 300, "{texts}");
}

#[test]
fn a_text_that_is_wrong_says_where() {
    let case = llama(2, 80 << 30);
    let text = case.place(Strategy::Contiguous).unwrap().to_string();
    for (from, to, expected) in [
        ("placement 1", "placement 2", "line 1: expected placement 1, found \"placement 2\""),
        ("blocks 4096", "blocks 04096", "line 2: expected a number, found \"04096\""),
        ("blocks 4096", "blocks -1", "line 2: expected a number, found \"-1\""),
        ("link 0 1", "link 1 0", "line 5: expected the pairs of GPUs in their order, found \"0\""),
        (
            "layers contiguous",
            "layers by-luck",
            "line 7: expected the name of a strategy or \"assigned\", found \"by-luck\"",
        ),
        ("gpu 0\n", "gpu 2\n", "layer 0 is assigned to none of the 2 GPUs"),
        ("end", "end\nend", "expected the end of the text"),
    ] {
        let wrong = text.replacen(from, to, 1);
        assert_ne!(wrong, text);
        let error = wrong.parse::<Placement>().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!("".parse::<Placement>().is_err());
}

/// A model of the shape of Llama-3-70B in 16 bits, and GPUs on fast links.
fn llama(gpus: u8, free_bytes: u64) -> Case {
    let layer = LayerShape {
        weight_bytes: 1_730_000_000,
        kv_block_bytes: 16 * 8 * 128 * 2 * 2,
        output_token_bytes: 8192 * 2,
    };
    let capacity =
        |i| GpuCapacity { uuid: [i; 16], free_bytes, memory_bytes_per_second: 4_000_000_000_000 };
    Case {
        model: ModelShape { step_tokens: 64, ..ModelShape::uniform(80, layer, 4096).unwrap() },
        gpus: (0..gpus).map(capacity).collect(),
        links: LinkMatrix::uniform(
            usize::from(gpus),
            Link { latency_ns: 5_000, bytes_per_second: 397_000_000_000 },
        )
        .unwrap(),
    }
}

#[test]
fn a_placement_explains_itself() {
    let case = llama(2, 90 << 30);
    let contiguous = case.place(Strategy::Contiguous).unwrap();
    let text = contiguous.explain().to_string();
    for part in [
        "80 layers and 4096 KV blocks on 2 GPUs, contiguous",
        "GPU 0: layers 0-39; weights 65994.3 MiB, KV 10240.0 MiB",
        "GPU 1: layers 40-79;",
        "a token: 1 crossings, 16384 bytes over links",
        "a step of 64 tokens: 34.607642ms predicted, 7.642µs of it for activations",
        "KV blocks that would fit: ",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let turns = case.place(Strategy::RoundRobin).unwrap();
    assert_eq!((turns.crossings().count(), turns.link_bytes_per_token()), (79, 79 * 16384));
    assert!(turns.explain().to_string().contains("GPU 0: layers 0, 2, 4,"));
    let (slow, quick) = (turns.step_time(), contiguous.step_time());
    assert!(slow.activations == 79 * quick.activations && slow.weights == quick.weights);
}

#[test]
fn the_least_cost_leaves_out_what_costs_and_balances_what_does_not() {
    // Everything fits on one GPU: no crossing.
    let roomy = llama(4, 200 << 30).place(Strategy::LeastCost).unwrap();
    assert_eq!(roomy.crossings().count(), 0);
    // On two GPUs: one crossing, placed so that both have the same memory left.
    let two = llama(2, 90 << 30).place(Strategy::LeastCost).unwrap();
    assert_eq!(two.load(0).unwrap().layers, 40);
    // Two pairs of GPUs: the slow link between the pairs is used once. In the given order of GPUs
    // it would be used three times.
    let mut pairs = llama(4, 45 << 30);
    pairs.links = LinkMatrix::from_fn(4, |from, to| Link {
        latency_ns: 5_000,
        bytes_per_second: if from % 2 == to % 2 { 397_000_000_000 } else { 25_000_000_000 },
    })
    .unwrap();
    let placement = pairs.place(Strategy::LeastCost).unwrap();
    let slow = placement.crossings().filter(|c| c.from % 2 != c.to % 2).count();
    assert_eq!((placement.crossings().count(), slow), (3, 1));
    assert_eq!(pairs.place(Strategy::Contiguous).unwrap().crossings().count(), 3);
}

#[test]
fn heads_are_divided_with_the_same_blocks_everywhere() {
    let case = llama(8, 40 << 30);
    let (model, gpus, links) = (&case.model, &case.gpus[..], &case.links);
    let refuse = KvReplication::Refuse;
    let placement = Placement::sharded(model, gpus, links, 64, 8, refuse).unwrap();
    assert!(matches!(placement.kind(), PlacementKind::Sharded { .. }));
    let block = model.layers[0].kv_block_bytes;
    for gpu in 0..8 {
        assert_eq!(placement.kv_block_bytes(79, gpu), block / 8);
        assert_eq!(placement.load(gpu).unwrap().kv_bytes, 80 * block / 8 * 4096);
    }
    assert_eq!(placement.link_bytes_per_token(), 80 * 2 * 14 * 16384);
    let text = placement.explain().to_string();
    assert!(text.contains("GPU 3: layers 0-79, heads 24..32 over KV heads 3..4;"), "{text}");
    assert!(text.contains("a token: 160 reductions"), "{text}");
    // Two KV heads on eight GPUs: each head on four GPUs, and four times the KV in total.
    let refused = Placement::sharded(model, gpus, links, 64, 2, refuse).unwrap_err();
    assert_eq!(refused, PlacementError::KvHeads { kv_heads: 2, gpus: 8 });
    let kept = Placement::sharded(model, gpus, links, 64, 2, KvReplication::Allow).unwrap();
    assert_eq!(kept.kv_block_bytes(0, 7), block / 2);
    let odd = Placement::sharded(model, gpus, links, 56, 7, refuse).unwrap_err();
    assert_eq!(odd, PlacementError::KvHeads { kv_heads: 7, gpus: 8 });
    let mut uneven = model.clone();
    uneven.layers[3].kv_block_bytes = 12;
    let error = Placement::sharded(&uneven, gpus, links, 64, 8, refuse).unwrap_err();
    assert_eq!(error, PlacementError::HeadBytes { layer: 3, kv_block_bytes: 12, kv_heads: 8 });
}

#[test]
fn what_makes_no_sense_is_told() {
    let case = llama(2, 80 << 30);
    let place = |model: &ModelShape, gpus: &[GpuCapacity], links: &LinkMatrix| {
        Placement::layers(model, gpus, links, Strategy::LeastCost).unwrap_err()
    };
    assert!(ModelShape::uniform(0, LayerShape::default(), 0).is_err());
    let of = |layers| {
        let layers = vec![LayerShape::default(); layers];
        ModelShape { layers, ..case.model.clone() }
    };
    let none = of(0);
    assert!(matches!(
        place(&none, &case.gpus, &case.links),
        PlacementError::Layers { layers: 0, .. }
    ));
    let many = of(LAYERS_MAX + 1);
    assert!(matches!(place(&many, &case.gpus, &case.links), PlacementError::Layers { .. }));
    assert!(matches!(place(&case.model, &[], &case.links), PlacementError::Gpus { gpus: 0, .. }));
    assert_eq!(
        place(&case.model, &case.gpus[..1], &case.links),
        PlacementError::LinkMatrix { gpus: 1, matrix: 2 }
    );
    let twice = [case.gpus[0], case.gpus[0]];
    assert_eq!(place(&case.model, &twice, &case.links), PlacementError::GpuTwice { gpu: 1 });
    let silent = LinkMatrix::uniform(2, Link { latency_ns: 0, bytes_per_second: 0 }).unwrap();
    assert_eq!(place(&case.model, &case.gpus, &silent), PlacementError::NoSpeed { from: 0, to: 1 });
    let huge =
        LayerShape { weight_bytes: u64::MAX, kv_block_bytes: u64::MAX, output_token_bytes: 0 };
    let huge = ModelShape::uniform(2, huge, u64::MAX).unwrap();
    assert!(matches!(place(&huge, &case.gpus, &case.links), PlacementError::TooLarge { .. }));
    let crowd = llama(9, 80 << 30);
    assert_eq!(
        crowd.place(Strategy::LeastCost).unwrap_err(),
        PlacementError::SearchGpus { gpus: 9, most: 8 }
    );
    for wrong in [vec![0; 79], vec![0; 81], vec![2; 80]] {
        let error = Placement::with_assignment(&case.model, &case.gpus, &case.links, wrong);
        assert!(matches!(error, Err(PlacementError::Assignment { gpus: 2, .. })));
    }
    let refused = llama(2, 60 << 30).place(Strategy::Contiguous).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the model does not fit: GPU 0 lacks 15512908800 bytes (79937418240 of 64424509440), \
         GPU 1 lacks 15512908800 bytes (79937418240 of 64424509440)"
    );
}

/// What `?` in `main` prints for a text that does not describe a placement.
#[test]
fn errors_are_one_line_with_their_causes() {
    let few = HeadShards::new(32, 4, 8, KvReplication::Refuse).unwrap_err();
    let could = "4 KV heads do not divide by 8 GPUs; each could be kept on several";
    assert_eq!(few.to_string(), could);
    let refused = HeadShards::new(8, 8, 3, KvReplication::Refuse).unwrap_err();
    let line = "8 query heads do not divide by 3 GPUs";
    assert_eq!((refused.to_string(), format!("{refused:?}")), (line.into(), line.into()));
}

#[test]
fn figures_of_any_model_that_is_placed_can_be_asked_for() {
    let layer = LayerShape { weight_bytes: 0, kv_block_bytes: 0, output_token_bytes: 1 << 60 };
    let model = ModelShape::uniform(4, layer, 1).unwrap();
    let gpu = |n| GpuCapacity { uuid: [n; 16], free_bytes: 1, memory_bytes_per_second: 1 };
    let gpus: Vec<_> = (0..GPUS_MAX as u8).map(gpu).collect();
    let links = LinkMatrix::uniform(GPUS_MAX, Link { latency_ns: 1, bytes_per_second: 1 }).unwrap();
    let sharded = Placement::sharded(&model, &gpus, &links, 64, 64, KvReplication::Refuse).unwrap();
    assert_eq!(sharded.link_bytes_per_token(), u64::MAX);
    assert!(sharded.explain().to_string().contains("18446744073709551615 bytes over links"));
    let layers = Placement::layers(&model, &gpus, &links, Strategy::RoundRobin).unwrap();
    assert_eq!(layers.link_bytes_per_token(), 3 << 60);
    assert!(layers.explain().to_string().contains("3 crossings"));
}

#[test]
fn loads_that_do_not_add_up_leave_nothing() {
    let load = |weight_bytes, kv_bytes, free_bytes| GpuLoad {
        layers: 1,
        weight_bytes,
        kv_bytes,
        workspace_bytes: 1,
        free_bytes,
    };
    assert_eq!((load(2, 3, 7).used_bytes(), load(2, 3, 7).left_bytes()), (6, 1));
    assert_eq!(load(2, 3, 5).left_bytes(), 0);
    let most = load(u64::MAX, u64::MAX, u64::MAX);
    assert_eq!((most.used_bytes(), most.left_bytes()), (u64::MAX, 0));
}

#[test]
fn more_gpus_than_can_be_placed_on_are_refused_at_the_first_too_many() {
    let link = Link { latency_ns: 1, bytes_per_second: 1 };
    assert!(LinkMatrix::uniform(GPUS_MAX, link).is_ok());
    let refused = PlacementError::Gpus { gpus: GPUS_MAX + 1, most: GPUS_MAX };
    assert_eq!(LinkMatrix::uniform(GPUS_MAX + 1, link), Err(refused.clone()));
    let case = llama(2, 80 << 30);
    let gpu = |n| GpuCapacity { uuid: [n; 16], ..case.gpus[0] };
    let crowd: Vec<_> = (0..=GPUS_MAX as u8).map(gpu).collect();
    let placed = Placement::layers(&case.model, &crowd, &case.links, Strategy::Contiguous);
    assert_eq!(placed, Err(refused));
    // In a text, the line of the first too many is named: none is read behind it.
    let text = case.place(Strategy::Contiguous).unwrap().to_string();
    let (first, _) = text.lines().enumerate().find(|(_, line)| line.starts_with("gpu ")).unwrap();
    let line = |gpu: usize| format!("gpu {gpu:032x} free 1 speed 1\n");
    let gpus: String = (1..=GPUS_MAX + 9).map(line).collect();
    let head: String = text.lines().take(first).map(|line| format!("{line}\n")).collect();
    let rest: String = text.lines().skip(first + 2).map(|line| format!("{line}\n")).collect();
    let error = format!("{head}{gpus}{rest}").parse::<Placement>().unwrap_err();
    let line = first + GPUS_MAX + 2;
    assert!(error.to_string().starts_with(&format!("line {line}: expected fewer GPUs")), "{error}");
}

#[test]
fn of_gpus_without_memory_neither_is_taken_for_empty() {
    let layer = LayerShape { weight_bytes: 10, kv_block_bytes: 0, output_token_bytes: 1 };
    let model = ModelShape::uniform(4, layer, 0).unwrap();
    let gpu = |n| GpuCapacity { uuid: [n; 16], free_bytes: 0, memory_bytes_per_second: 1 };
    let gpus = [gpu(0), gpu(1)];
    let links = LinkMatrix::uniform(2, Link { latency_ns: 1, bytes_per_second: 1 }).unwrap();
    let refused = Placement::layers(&model, &gpus, &links, Strategy::FreeMemory).unwrap_err();
    let PlacementError::DoesNotFit { short, .. } = refused else { panic!("{refused}") };
    let missing: Vec<_> = short.iter().map(|short| (short.gpu, short.missing_bytes())).collect();
    assert_eq!(missing, [(0, 20), (1, 20)], "the fullest of them is as empty as possible");
}

/// A scheduler without a GPU uses the module alone.
#[test]
fn placement_uses_nothing_of_cuda_nor_of_other_modules() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/place");
    let mut files = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        files += 1;
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            let outside = ["crate::", "super::super", "cuda_driver", "kv_kernels"];
            let found = outside.into_iter().find(|name| line.contains(name));
            assert_eq!(found, None, "{}: {line}", path.display());
        }
    }
    assert!(files > 5, "{files}");
}
