//! Both passes over a machine, their predictions, and the table of results.

use std::sync::Arc;

use cuda_sim::{Profile, SimConfig, SimDriver};

use super::kernels::REFERENCES;
use super::program::{GIB, Kind, Outcome, Program, Row, Scale};

/// How near a prediction is to count as right, in parts of what was measured.
const NEAR: f64 = 0.15;

/// What a machine told.
pub(crate) struct Measured {
    /// From the first pass.
    pub(crate) fitted: Profile,
    /// From the second.
    pub(crate) rows: Vec<Row>,
}

impl Program {
    /// Fits a profile, and then measures every row.
    pub(crate) fn measure(&self, base: &Profile, devices: i32) -> Outcome<Measured> {
        let _peer = self.enable_peer(devices)?;
        let fitted = self.fit(base, devices)?;
        self.device.free_retired()?;
        Ok(Measured { fitted, rows: self.rows(devices)? })
    }
}

/// A simulated machine that knows the kernels.
pub(crate) fn machine(profile: Profile, devices: i32) -> Outcome<SimDriver> {
    let sim = SimDriver::new(SimConfig {
        devices: devices as u32,
        device_bytes: 64 * GIB,
        pinned_bytes: 8 * GIB,
        profile,
        ..SimConfig::default()
    })?;
    sim.register_kernels(REFERENCES);
    Ok(sim)
}

/// The rows as a machine of that profile would have measured them.
pub(crate) fn predict(profile: &Profile, devices: i32, scale: Scale) -> Outcome<Vec<Row>> {
    // Virtual time is the same in every round.
    let program = Program::new(Arc::new(machine(profile.clone(), devices)?), scale.once())?;
    let _peer = program.enable_peer(devices)?;
    program.rows(devices)
}

/// How many predictions of a kind lie near what was measured, and of how many.
pub(crate) fn near(measured: &[Row], predicted: &[Row], kind: Kind) -> (usize, usize) {
    let of_kind = measured.iter().zip(predicted).filter(|(row, _)| row.kind == kind);
    let ratios: Vec<f64> = of_kind.map(|(row, there)| there.nanos / row.nanos).collect();
    (ratios.iter().filter(|&ratio| (ratio - 1.0).abs() <= NEAR).count(), ratios.len())
}

/// Prints a row a line, and how many predictions are near.
pub(crate) fn print(measured: Option<&[Row]>, by_base: &[Row], by_fitted: Option<&[Row]>) {
    println!(
        "| what | measured, us | GB/s | built-in profile, us | ratio | fitted profile, us | ratio | |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---|");
    let none = || "-".to_owned();
    for (index, row) in by_base.iter().enumerate() {
        let here = measured.and_then(|rows| rows.get(index));
        let fitted = by_fitted.and_then(|rows| rows.get(index));
        let ratio =
            |there: &Row| here.map_or_else(none, |h| format!("{:.2}", there.nanos / h.nanos));
        println!(
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            row.what,
            here.map_or_else(none, Row::micros),
            here.map_or_else(none, Row::rate),
            row.micros(),
            ratio(row),
            fitted.map_or_else(none, Row::micros),
            fitted.map_or_else(none, ratio),
            if row.kind == Kind::Fitted { "fitted" } else { "predicted" },
        );
    }
    let Some(measured) = measured else { return };
    println!("\nwithin {:.0} % of what was measured:", NEAR * 100.0);
    for (name, rows) in [("built-in", Some(by_base)), ("fitted", by_fitted)] {
        let Some(rows) = rows else { continue };
        let [told, predicted] =
            [Kind::Fitted, Kind::Predicted].map(|kind| near(measured, rows, kind));
        println!(
            "{name} profile: {} of {} rows marked `predicted`, {} of {} marked `fitted`",
            predicted.0, predicted.1, told.0, told.1
        );
    }
}
