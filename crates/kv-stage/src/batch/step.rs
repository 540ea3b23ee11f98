//! A step of a batch, while it is put together.

use bytemuck::NoUninit;
use cuda_driver::guard;

use super::DeviceBatch;
use super::buffers::BatchBuffers;
use super::options::padded;
use super::packet::{ArrayPart, Job, put};
use crate::error::BatchError;
use crate::{Row, StagingBuffer};

/// A step of a [`DeviceBatch`], while it is put together. Dropping it sends nothing; changes of the
/// tables stay for the next step.
#[derive(Debug)]
pub struct BatchStep<'a> {
    pub(super) batch: &'a mut DeviceBatch,
    pub(super) buffer: StagingBuffer,
    /// End of the arrays in the buffer.
    pub(super) used: u64,
}

/// What a step says of a row's recurrent states.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RowStates {
    /// The last tokens of the row in the step that may be rejected: it leaves one state more.
    pub drafts: u32,
    /// The entry with the state that the row begins with. Where its start is open, the device finds the entry instead: the
    /// row's last step had so many tokens before its drafts, and as many entries further on as tokens beyond these stand.
    pub input: u32,
}

/// Tokens of a sequence, those of the step included.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BatchLength {
    /// At least so many.
    pub least: u32,
    /// At most so many; the same unless tokens of a step before may be rejected.
    pub most: u32,
}

/// A step that was enqueued.
#[derive(Debug)]
#[non_exhaustive]
pub struct StagedBatch<'a> {
    /// The length of each sequence, for kernels that are planned on the host.
    pub lengths: &'a [BatchLength],
    /// Tokens of the step.
    pub tokens: u32,
    /// Bytes that were sent.
    pub bytes: u64,
    /// Where the batch is.
    pub buffers: &'a BatchBuffers,
}

impl<'a> BatchStep<'a> {
    /// Adds a sequence: `tokens` tokens, which begin behind at least `resolved` and at most `upper`
    /// tokens of its row. Where the two differ, the device computes where they begin, see
    /// [`DeviceBatch`](DeviceBatch#tokens-that-may-be-rejected).
    ///
    /// # Errors
    /// [`BatchError::Row`], [`BatchError::RowTwice`], [`BatchError::Sequences`], [`BatchError::Tokens`],
    /// [`BatchError::Start`], [`BatchError::End`]. The step is unchanged then.
    #[inline]
    pub fn row(
        &mut self,
        row: Row,
        resolved: u64,
        upper: u64,
        tokens: u32,
    ) -> Result<(), BatchError> {
        self.row_with_states(row, (resolved, upper), tokens, RowStates::default())
    }

    /// The same of a row with recurrent states.
    ///
    /// # Errors
    /// Like [`row`](Self::row), and [`BatchError::Drafts`].
    #[inline]
    pub fn row_with_states(
        &mut self,
        row: Row,
        (resolved, upper): (u64, u64),
        tokens: u32,
        states: RowStates,
    ) -> Result<(), BatchError> {
        let RowStates { drafts, input } = states;
        if drafts > 0 && drafts >= tokens {
            return Err(BatchError::Drafts { row, drafts, tokens });
        }
        let DeviceBatch { options, records, lengths, row_tokens, .. } = &mut *self.batch;
        let number = row.index() as u32;
        let all = u64::from(records.tokens) + u64::from(tokens);
        let end = upper.saturating_add(tokens.into());
        let is_full = records.sequences == options.sequences_max;
        let (is_long, is_outside) = (all > options.tokens_max.into(), end > *row_tokens);
        match records.has(number) {
            None => return Err(BatchError::Row { row, rows: options.rows }),
            Some(true) => return Err(BatchError::RowTwice { row }),
            Some(false) if guard!("stage.steps-hold-their-sequences", is_full, else false) => {
                return Err(BatchError::Sequences { max: options.sequences_max });
            }
            Some(false) if guard!("stage.steps-hold-their-tokens", is_long, else false) => {
                return Err(BatchError::Tokens { tokens: all, max: options.tokens_max });
            }
            Some(false) if resolved > upper => {
                return Err(BatchError::Start { row, resolved, upper });
            }
            Some(false) if guard!("stage.tokens-end-in-their-row", is_outside, else false) => {
                return Err(BatchError::End { row, end, max: *row_tokens });
            }
            Some(false) => {}
        }
        // Not above `end`, which a row has room for: all fit in 31 bits.
        let (resolved, upper) = (resolved as u32, upper as u32);
        let first_token = records.tokens;
        let unused = [0; 2];
        records.push(Job { row: number, resolved, upper, first_token, drafts, input, unused });
        lengths.push(BatchLength { least: resolved + tokens, most: upper + tokens });
        records.sequences += 1;
        records.tokens += tokens;
        Ok(())
    }

    /// Sets an array of the engine, by its place in [`BatchOptions::arrays`](crate::BatchOptions::arrays).
    /// An array that a step does not set holds zeros.
    ///
    /// # Errors
    /// [`BatchError::Array`], [`BatchError::ArrayBytes`], [`BatchError::ArrayTwice`]. The step is
    /// unchanged then.
    #[track_caller]
    pub fn array<T: NoUninit>(&mut self, array: usize, values: &[T]) -> Result<(), BatchError> {
        let _site = cuda_driver::site::enter();
        let DeviceBatch { options, records, .. } = &mut *self.batch;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let arrays = options.arrays.len();
        let max = *options.arrays.get(array).ok_or(BatchError::Array { array, arrays })?;
        let length = bytes.len() as u64;
        if guard!("stage.arrays-fit", length > max, else false) {
            return Err(BatchError::ArrayBytes { array, bytes: length, max });
        }
        let part = &mut records.arrays[array];
        if part.at != 0 {
            return Err(BatchError::ArrayTwice { array });
        }
        put(&mut self.buffer, self.used, bytes);
        *part = ArrayPart { at: (self.used / 4) as u32, vectors: (padded(length) / 16) as u32 };
        self.used += padded(length);
        Ok(())
    }

    /// Enqueues the step: one copy, and one launch that makes the batch.
    ///
    /// # Ordering
    /// Does not wait. The batch is valid on the batch's stream from here to the next submit there:
    /// readers enqueued on that stream in between see exactly this step. A reader on another stream
    /// waits for an event recorded after the submit, and the batch's stream waits for that reader
    /// before the next submit.
    ///
    /// # Errors
    /// [`BatchError::Submit`], [`BatchError::Device`]. Changes of the tables stay for the next step.
    #[track_caller]
    pub fn submit(self) -> Result<StagedBatch<'a>, BatchError> {
        let _site = cuda_driver::site::enter();
        self.enqueue(true)
    }

    /// Like [`submit`](Self::submit), but enqueues the copy alone: the launch is the caller's, who has
    /// captured it with [`DeviceBatch::gather`] in front of the kernels that read the batch.
    ///
    /// # Ordering
    /// The launch comes after the copy and before the next step's. Each step is launched, because
    /// changes of the tables travel once. Where the launch of a captured graph fails,
    /// [`DeviceBatch::gather`] makes up for it.
    ///
    /// # Errors
    /// [`BatchError::Submit`].
    #[track_caller]
    pub fn submit_inputs(self) -> Result<StagedBatch<'a>, BatchError> {
        let _site = cuda_driver::site::enter();
        self.enqueue(false)
    }

    fn enqueue(self, gathers: bool) -> Result<StagedBatch<'a>, BatchError> {
        let Self { batch, buffer, used } = self;
        let bytes = batch.send(buffer, used, gathers)?;
        let batch: &'a DeviceBatch = batch;
        Ok(StagedBatch {
            lengths: &batch.lengths,
            tokens: batch.records.tokens,
            bytes,
            buffers: batch.buffers(),
        })
    }
}
