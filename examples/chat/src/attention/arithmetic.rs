//! The arithmetic of attention, for the host: the same operations in the same order as `kernels/attention.cu`.
//!
//! The output of a row follows from its query, keys and values alone. Rust rounds each operation for itself and
//! contracts none, so both give the same bits. The plain cache of the proof and the reference of the kernel use this.

/// Keys that are taken at once, counted from token 0.
pub const TILE: usize = 64;
/// Sums of a product of query and key, which are then added in pairs.
const LANES: usize = 8;

/// e^x for x <= 0, by a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]. Below -87 it is 0.
#[must_use]
#[expect(clippy::excessive_precision, reason = "the literals of the kernel")]
pub fn exp_of(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer.
    const MAGIC: f32 = 12_582_912.0;
    if x < -87.0 {
        return 0.0;
    }
    #[expect(clippy::approx_constant, reason = "the literal of the kernel")]
    let shifted = x * 1.44269504_f32 + MAGIC;
    let n = shifted - MAGIC;
    let r = (x - n * 0.693359375_f32) - n * -2.12194440e-4_f32;
    let mut p = 1.38888889e-3_f32;
    for coefficient in [8.33333333e-3_f32, 4.16666667e-2, 1.66666667e-1, 0.5, 1.0, 1.0] {
        p = p * r + coefficient;
    }
    let exponent = shifted.to_bits().wrapping_sub(MAGIC.to_bits()).wrapping_add(127);
    p * f32::from_bits(exponent << 23)
}

/// The product of a query and a key.
fn dot(query: &[f32], key: &[f32]) -> f32 {
    let mut sum = [0.0_f32; LANES];
    for (query, key) in query.chunks_exact(LANES).zip(key.chunks_exact(LANES)) {
        for lane in 0..LANES {
            sum[lane] += query[lane] * key[lane];
        }
    }
    let a = (sum[0] + sum[4]) + (sum[2] + sum[6]);
    let b = (sum[1] + sum[5]) + (sum[3] + sum[7]);
    a + b
}

/// One query head of one token: attends to the first `context` tokens. `keys` and `values` give the part of a token's
/// row that belongs to the head, as long as `query` and `out`.
pub fn attend<'a>(
    query: &[f32],
    context: usize,
    scale: f32,
    keys: impl Fn(usize) -> &'a [f32],
    values: impl Fn(usize) -> &'a [f32],
    out: &mut [f32],
) {
    let (mut score, mut weight) = ([0.0_f32; TILE], [0.0_f32; TILE]);
    let (mut most, mut total) = (-3.0e38_f32, 0.0_f32);
    out.fill(0.0);
    for first in (0..context).step_by(TILE) {
        let count = TILE.min(context - first);
        for (k, score) in score[..count].iter_mut().enumerate() {
            *score = dot(query, keys(first + k)) * scale;
        }
        let mut now = most;
        for &score in &score[..count] {
            now = if score > now { score } else { now };
        }
        for (weight, score) in weight[..count].iter_mut().zip(&score) {
            *weight = exp_of(score - now);
        }
        let kept = exp_of(most - now);
        total *= kept;
        out.iter_mut().for_each(|sum| *sum *= kept);
        for (k, &weight) in weight[..count].iter().enumerate() {
            total += weight;
            for (sum, value) in out.iter_mut().zip(values(first + k)) {
                *sum += weight * value;
            }
        }
        most = now;
    }
    out.iter_mut().for_each(|sum| *sum /= total);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_close_to_the_exact_one() {
        for step in 0..87_000 {
            let x = -(step as f32) / 1000.0;
            let (here, exact) = (f64::from(exp_of(x)), f64::from(x).exp());
            assert!((here - exact).abs() <= exact * 3e-7, "{x}: {here} {exact}");
        }
        assert_eq!((exp_of(0.0), exp_of(-0.0), exp_of(-87.5)), (1.0, 1.0, 0.0));
    }

    #[test]
    fn a_row_is_the_softmax_of_its_context() {
        let (size, context) = (16, 150);
        let value = |seed: usize| ((seed * 7919 % 1009) as f32 - 500.0) / 300.0;
        let row = |seed| (0..size).map(|d| value(seed * 31 + d)).collect::<Vec<_>>();
        let keys: Vec<_> = (0..context).map(|j| row(j + 1)).collect();
        let values: Vec<_> = (0..context).map(|j| row(j + 1000)).collect();
        let query = row(5000);
        let mut out = vec![0.0; size];
        attend(&query, context, 0.25, |j| &keys[j], |j| &values[j], &mut out);
        let exact = |j: usize| -> f64 {
            query.iter().zip(&keys[j]).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>()
                * 0.25
        };
        let total: f64 = (0..context).map(|j| exact(j).exp()).sum();
        for (d, &out) in out.iter().enumerate() {
            let sum: f64 = (0..context).map(|j| exact(j).exp() * f64::from(values[j][d])).sum();
            assert!((f64::from(out) - sum / total).abs() < 1e-5);
        }
    }
}
