//! A weight matrix, as the file has it, applied to rows on the CPU.

use std::io::{Read, Seek};

use anyhow::Context as _;
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Module as _, Tensor};

/// A weight matrix.
///
/// A row's result depends on the row alone. `QMatMul` quantizes each row for itself and takes a product for each element,
/// but chooses another product for a single row of some types; those are never given one row. For weights of floats it
/// takes a matrix product whose order of sums follows from its size; those are given row by row.
#[derive(Debug)]
pub(super) struct Linear {
    weight: QMatMul,
    inputs: usize,
    rows: Rows,
}

/// How many rows are given at once.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rows {
    Any,
    One,
    /// One row is given twice.
    TwoAtLeast,
}

impl Linear {
    /// Reads the weights `name`.
    pub(super) fn read<R: Read + Seek>(
        content: &Content,
        reader: &mut R,
        name: &str,
    ) -> anyhow::Result<Self> {
        let tensor = content.tensor(reader, name, &Device::Cpu);
        Self::new(tensor.with_context(|| format!("the file has no {name}"))?)
    }

    fn new(tensor: QTensor) -> anyhow::Result<Self> {
        let rows = match tensor.dtype() {
            GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16 => Rows::One,
            GgmlDType::Q6K => Rows::TwoAtLeast,
            _ => Rows::Any,
        };
        let (_, inputs) = tensor.shape().dims2()?;
        Ok(Self { weight: QMatMul::from_qtensor(tensor)?, inputs, rows })
    }

    /// The product of each row with the weights, one row after another.
    pub(super) fn apply(&self, rows: &[f32]) -> anyhow::Result<Vec<f32>> {
        let count = rows.len() / self.inputs;
        match self.rows {
            Rows::One if count > 1 => {
                let each = rows.chunks_exact(self.inputs).map(|row| self.product(row, 1));
                Ok(each.collect::<anyhow::Result<Vec<_>>>()?.concat())
            }
            Rows::TwoAtLeast if count == 1 => {
                let mut twice = self.product(&[rows, rows].concat(), 2)?;
                twice.truncate(twice.len() / 2);
                Ok(twice)
            }
            _ => self.product(rows, count),
        }
    }

    fn product(&self, rows: &[f32], count: usize) -> anyhow::Result<Vec<f32>> {
        let rows = Tensor::from_slice(rows, (count, self.inputs), &Device::Cpu)?;
        Ok(self.weight.forward(&rows)?.flatten_all()?.to_vec1()?)
    }

    /// The rows of the weights at `ids`, one after another.
    pub(super) fn rows_at(&self, ids: &[u32]) -> anyhow::Result<Vec<f32>> {
        let ids = Tensor::from_slice(ids, ids.len(), &Device::Cpu)?;
        Ok(self.weight.embedding(&ids)?.flatten_all()?.to_vec1()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the type of the weights, a row alone gives the bits that it gives among others.
    #[test]
    fn a_rows_result_depends_on_no_other_row() {
        let value = |seed: usize| ((seed * 7919 % 2003) as f32 - 1000.0) / 700.0;
        let (outputs, inputs) = (70, 512);
        let weights: Vec<f32> = (0..outputs * inputs).map(value).collect();
        let weights = Tensor::from_slice(&weights, (outputs, inputs), &Device::Cpu).unwrap();
        let rows: Vec<f32> = (0..19 * inputs).map(|at| value(at + 11)).collect();
        use GgmlDType::{F16, F32, Q4_0, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0};
        for dtype in [F32, F16, Q4_0, Q4_1, Q5_1, Q8_0, Q4K, Q5K, Q6K] {
            let linear = Linear::new(QTensor::quantize(&weights, dtype).unwrap()).unwrap();
            for together in [1, 2, 3, 19] {
                let batches = rows.chunks(together * inputs);
                let found: Vec<f32> =
                    batches.flat_map(|batch| linear.apply(batch).unwrap()).collect();
                let alone: Vec<f32> =
                    rows.chunks(inputs).flat_map(|row| linear.apply(row).unwrap()).collect();
                let bits = |floats: &[f32]| floats.iter().map(|f| f.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&alone), "{dtype:?}, {together} together");
            }
        }
    }
}
