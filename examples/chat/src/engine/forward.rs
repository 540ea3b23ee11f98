//! The layers of a step: dense ones on the host, attention on the device that holds the layer.

use anyhow::{Context as _, ensure};
use kv_plane::{KvCache, Sequence};

use super::EngineOptions;
use super::lane::{Lane, LayerStep, PIECE_TOKENS, Piece};
use super::misuse::Misuse;
use crate::model::Model;

/// Where each layer lies, and what its device needs.
#[derive(Debug)]
pub(super) struct Layers {
    lanes: Vec<Lane>,
    /// Of each layer, its part and its place there.
    places: Vec<(usize, u32)>,
    pub(super) misuse: Misuse,
}

impl Layers {
    pub(super) fn new(
        cache: &KvCache,
        model: &Model,
        options: EngineOptions,
    ) -> anyhow::Result<Self> {
        let config = model.config();
        let heads = config.heads;
        let shape = cache.options().groups[0].shape;
        let (layers, row_bytes) = (shape.layers(), shape.row_bytes());
        ensure!(
            layers == config.layers && row_bytes == heads.kv_floats() as u64 * 4,
            "a cache of {layers} layers with rows of {row_bytes} bytes is not this model's"
        );
        let tokens_max = cache.options().step_tokens_max as usize;
        let lanes = cache.parts().iter().map(|part| Lane::new(part, heads, tokens_max));
        let lanes = lanes.collect::<anyhow::Result<Vec<_>>>()?;
        let place = |layer: u32| {
            let on = |part: &kv_plane::Part| part.layers().iter().position(|&own| own == layer);
            let found = cache
                .parts()
                .iter()
                .zip(0..)
                .find_map(|(part, index)| Some((index, on(part)? as u32)));
            found.with_context(|| format!("no device holds layer {layer}"))
        };
        let places = (0..config.layers).map(place).collect::<anyhow::Result<_>>()?;
        let misuse = Misuse::new(options.sabotage, &lanes)?;
        Ok(Self { lanes, places, misuse })
    }

    /// Runs all layers over the tokens of the staged step, and returns their hidden states.
    pub(super) fn run(
        &mut self,
        cache: &KvCache,
        model: &Model,
        (ids, positions): (&[u32], &[u64]),
        sequences: u32,
    ) -> anyhow::Result<Vec<f32>> {
        let pieces: Vec<Piece> = (0..ids.len().div_ceil(PIECE_TOKENS))
            .map(|index| {
                let first_token = index * PIECE_TOKENS;
                let tokens = PIECE_TOKENS.min(ids.len() - first_token);
                Piece { index, first_token, tokens }
            })
            .collect();
        let row = model.config().hidden;
        let mut hidden = model.embed(ids)?;
        for (layer, &(place, local)) in self.places.iter().enumerate() {
            let (part, lane) = (&cache.parts()[place], &mut self.lanes[place]);
            let step = LayerStep { part, layer: local, sequences };
            for &piece in &pieces {
                let tokens = piece.first_token..piece.first_token + piece.tokens;
                let of_piece = &hidden[tokens.start * row..tokens.end * row];
                let qkv = model.qkv(layer, of_piece, &positions[tokens])?;
                lane.send(step, piece, &qkv)?;
                self.misuse.store_early(lane, step, (piece, &qkv))?;
            }
            for &piece in &pieces {
                let attended = lane.receive(piece)?;
                let tokens = piece.first_token..piece.first_token + piece.tokens;
                let of_piece = &mut hidden[tokens.start * row..tokens.end * row];
                model.after_attention(layer, of_piece, &attended)?;
            }
        }
        self.misuse.end_step();
        for (lane, part) in self.lanes.iter().zip(cache.parts()) {
            lane.check(part)?;
        }
        Ok(hidden)
    }

    /// Tells the devices how many tokens of a sequence's last step stand, before the next batch is made.
    pub(super) fn tell_accepted(
        &self,
        cache: &KvCache,
        sequence: &Sequence,
        tokens: u32,
    ) -> anyhow::Result<()> {
        let Some(row) = sequence.row() else { return Ok(()) };
        for part in cache.parts() {
            let entry = part.batch().accepted.slice(row.index() as u64 * 4, 4)?;
            part.compute().upload(entry, &tokens.to_ne_bytes())?;
        }
        Ok(())
    }
}
