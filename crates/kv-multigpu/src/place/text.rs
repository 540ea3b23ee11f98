//! The text form of a placement, to store it and to pass it to another process.
//!
//! The text holds the inputs of the placement and the GPU of each layer. Everything else is
//! computed again, so a text cannot contradict itself. The lines are:
//!
//! ```text
//! placement 1
//! model blocks 4096 workspace 0 tokens 1
//! gpu 01010101010101010101010101010101 free 21474836480 speed 3000000000000
//! link 0 1 latency 5000 speed 397000000000
//! layers least-cost
//! layer weights 419430400 kv 65536 output 8192 gpu 0
//! end
//! ```
//!
//! There is a `gpu` line for each GPU, a `link` line for each ordered pair, and a `layer` line for
//! each layer. `layers assigned` means the caller's assignment. The line `layers` may be replaced
//! by `heads query 64 kv 8 replication refuse`; then no layer names a GPU.

use std::fmt;
use std::str::FromStr;

use super::problem::Problem;
use super::{
    GpuCapacity, KvReplication, LayerShape, Link, LinkMatrix, ModelShape, Placement,
    PlacementError, PlacementKind, Strategy,
};

/// The first line: the kind of text, and its version.
const HEAD: &str = "placement 1";
const ASSIGNED: &str = "assigned";

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ModelShape { layers, kv_blocks, workspace_bytes, step_tokens } = &self.model;
        writeln!(f, "{HEAD}")?;
        writeln!(f, "model blocks {kv_blocks} workspace {workspace_bytes} tokens {step_tokens}")?;
        for GpuCapacity { uuid, free_bytes, memory_bytes_per_second: speed } in &self.gpus {
            let uuid = u128::from_be_bytes(*uuid);
            writeln!(f, "gpu {uuid:032x} free {free_bytes} speed {speed}")?;
        }
        for (from, to) in pairs(self.gpus.len()) {
            let Some(link) = self.links.link(from, to) else { continue };
            let Link { latency_ns, bytes_per_second } = link;
            writeln!(f, "link {from} {to} latency {latency_ns} speed {bytes_per_second}")?;
        }
        match &self.kind {
            PlacementKind::Layers { strategy, .. } => {
                writeln!(f, "layers {}", strategy.map_or(ASSIGNED, Strategy::name))?;
            }
            PlacementKind::Sharded { shards } => {
                let (query, kv) = (shards.query_heads(), shards.kv_heads());
                let replication = name_of(shards.replication());
                writeln!(f, "heads query {query} kv {kv} replication {replication}")?;
            }
        }
        for (layer, shape) in layers.iter().enumerate() {
            let LayerShape { weight_bytes, kv_block_bytes, output_token_bytes } = shape;
            write!(f, "layer weights {weight_bytes} kv {kv_block_bytes} ")?;
            write!(f, "output {output_token_bytes}")?;
            match self.gpu_of_layer(layer) {
                Some(gpu) => writeln!(f, " gpu {gpu}")?,
                None => writeln!(f)?,
            }
        }
        writeln!(f, "end")
    }
}

fn name_of(replication: KvReplication) -> &'static str {
    match replication {
        KvReplication::Refuse => "refuse",
        KvReplication::Allow => "allow",
    }
}

/// All ordered pairs of `gpus` GPUs.
fn pairs(gpus: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..gpus).flat_map(move |from| (0..gpus).map(move |to| (from, to))).filter(|(f, t)| f != t)
}

/// The lines of a text, and the position.
struct Lines<'a> {
    lines: std::iter::Peekable<std::iter::Enumerate<std::str::Lines<'a>>>,
    seen: usize,
}

impl<'a> Lines<'a> {
    /// The words at the underscores of `pattern` if the next line matches it. The line is then
    /// consumed.
    fn take(&mut self, pattern: &str) -> Option<Vec<&'a str>> {
        let &(_, line) = self.lines.peek()?;
        let (words, wanted) = (line.split(' '), pattern.split(' '));
        if words.clone().count() != wanted.clone().count() {
            return None;
        }
        let mut holes = Vec::new();
        for (word, wanted) in words.zip(wanted) {
            if wanted == "_" {
                holes.push(word);
            } else if word != wanted {
                return None;
            }
        }
        self.lines.next();
        self.seen += 1;
        Some(holes)
    }

    /// The error for the next line.
    fn unexpected(&mut self, expected: &'static str) -> PlacementError {
        let found = self.lines.peek().map_or("", |(_, line)| line).to_owned();
        PlacementError::Line { line: self.seen + 1, found, expected }
    }

    fn need(&mut self, pattern: &'static str) -> Result<Vec<&'a str>, PlacementError> {
        self.take(pattern).ok_or_else(|| self.unexpected(pattern))
    }

    /// A word of the line consumed last, as a number.
    fn number<T: FromStr>(&self, word: &str) -> Result<T, PlacementError> {
        // A number has only one spelling, so that a placement has only one text.
        let plain = word.bytes().all(|byte| byte.is_ascii_digit())
            && (word.len() == 1 || !word.starts_with('0'));
        plain.then(|| word.parse().ok()).flatten().ok_or_else(|| self.bad(word, "a number"))
    }

    fn bad(&self, found: &str, expected: &'static str) -> PlacementError {
        PlacementError::Line { line: self.seen, found: found.to_owned(), expected }
    }
}

impl FromStr for Placement {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<Self, PlacementError> {
        let mut lines = Lines { lines: text.lines().enumerate().peekable(), seen: 0 };
        lines.need(HEAD)?;
        let head = lines.need("model blocks _ workspace _ tokens _")?;
        let mut model = ModelShape {
            layers: Vec::new(),
            kv_blocks: lines.number(head[0])?,
            workspace_bytes: lines.number(head[1])?,
            step_tokens: lines.number(head[2])?,
        };
        let gpus = parse_gpus(&mut lines)?;
        let links = parse_links(&mut lines, gpus.len())?;
        let placement = if let Some(how) = lines.take("layers _") {
            let strategy = Strategy::ALL.into_iter().find(|strategy| strategy.name() == how[0]);
            if strategy.is_none() && how[0] != ASSIGNED {
                return Err(lines.bad(how[0], "the name of a strategy or \"assigned\""));
            }
            let mut gpu_of_layer = Vec::new();
            while let Some(words) = lines.take("layer weights _ kv _ output _ gpu _") {
                model.layers.push(parse_layer(&lines, &words)?);
                gpu_of_layer.push(lines.number(words[3])?);
            }
            let problem = Problem::new(&model, &gpus, &links)?;
            Self::assigned(&problem, strategy, gpu_of_layer)?
        } else {
            let heads = lines.need("heads query _ kv _ replication _")?;
            let (query, kv) = (lines.number(heads[0])?, lines.number(heads[1])?);
            let replication = [KvReplication::Refuse, KvReplication::Allow]
                .into_iter()
                .find(|&replication| name_of(replication) == heads[2])
                .ok_or_else(|| lines.bad(heads[2], "refuse or allow"))?;
            while let Some(words) = lines.take("layer weights _ kv _ output _") {
                model.layers.push(parse_layer(&lines, &words)?);
            }
            Self::sharded(&model, &gpus, &links, query, kv, replication)?
        };
        lines.need("end")?;
        match lines.lines.peek() {
            None => Ok(placement),
            Some(_) => Err(lines.unexpected("the end of the text")),
        }
    }
}

fn parse_gpus(lines: &mut Lines<'_>) -> Result<Vec<GpuCapacity>, PlacementError> {
    let mut gpus = Vec::new();
    while let Some(words) = lines.take("gpu _ free _ speed _") {
        let plain = words[0].len() == 32
            && words[0].bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let uuid = plain.then(|| u128::from_str_radix(words[0], 16).ok()).flatten();
        gpus.push(GpuCapacity {
            uuid: uuid.ok_or_else(|| lines.bad(words[0], "32 hexadecimal digits"))?.to_be_bytes(),
            free_bytes: lines.number(words[1])?,
            memory_bytes_per_second: lines.number(words[2])?,
        });
        if gpus.len() > super::GPUS_MAX {
            return Err(lines.unexpected("fewer GPUs"));
        }
    }
    Ok(gpus)
}

fn parse_links(lines: &mut Lines<'_>, gpus: usize) -> Result<LinkMatrix, PlacementError> {
    let mut links = Vec::new();
    for (from, to) in pairs(gpus) {
        let words = lines.need("link _ _ latency _ speed _")?;
        let (wrote_from, wrote_to): (usize, usize) =
            (lines.number(words[0])?, lines.number(words[1])?);
        if (wrote_from, wrote_to) != (from, to) {
            return Err(lines.bad(words[1], "the pairs of GPUs in their order"));
        }
        let link =
            Link { latency_ns: lines.number(words[2])?, bytes_per_second: lines.number(words[3])? };
        links.push(link);
    }
    let mut links = links.into_iter();
    let silent = Link { latency_ns: 0, bytes_per_second: 0 };
    // One for each pair, in the order in which the matrix asks.
    Ok(LinkMatrix::between(gpus, |_, _| links.next().unwrap_or(silent)))
}

fn parse_layer(lines: &Lines<'_>, words: &[&str]) -> Result<LayerShape, PlacementError> {
    Ok(LayerShape {
        weight_bytes: lines.number(words[0])?,
        kv_block_bytes: lines.number(words[1])?,
        output_token_bytes: lines.number(words[2])?,
    })
}
