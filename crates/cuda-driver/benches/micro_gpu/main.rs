//! Times of single driver calls and operations on a GPU, beside the predictions of the simulated
//! machine for the same program.
//!
//! ```text
//! cargo bench -p cuda-driver --bench micro_gpu -- [--write-profile FILE] [--device cuda|sim]
//! ```
//!
//! On a machine with a GPU of 12 GiB or more and as much host memory, the program
//! 1. fits a profile to the machine, from measurements of one thing each, prints it, and writes it to
//!    the file, which `KV_PROFILE` and `kv-replay --profile` take;
//! 2. measures every row again, by the clock;
//! 3. runs the same on simulated machines of the built-in profile and of the fitted one, by their
//!    virtual clocks, and prints both beside the measurement.
//!
//! A row is `fitted` if the profile was fitted to it, and `predicted` if the profile was fitted to
//! its parts or to other sizes. Every figure is a median. With two GPUs or more, copies between the
//! first two are measured too. The built-in profile is that of the card, or the file that
//! `KV_PROFILE` names.
//!
//! With `--device sim` a simulated machine of the built-in profile takes the place of the GPU, so that
//! all figures must agree. Without a GPU the predictions are printed alone.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod calibrate;
mod kernels;
mod program;
mod rows;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use cuda_driver::{CudaDriver, Driver};
use cuda_sim::Profile;

use program::{Outcome, Program, Scale};
use table::{Measured, machine, predict, print};

fn main() -> ExitCode {
    match Options::read().and_then(|options| compare(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("not measured to the end: {error}: {error:?}");
            ExitCode::FAILURE
        }
    }
}

#[derive(Default)]
struct Options {
    profile_file: Option<PathBuf>,
    simulated: bool,
}

impl Options {
    fn read() -> Outcome<Self> {
        let mut options = Self::default();
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} takes a value"));
            match word.as_str() {
                // What Cargo adds.
                "--bench" => {}
                "--write-profile" => options.profile_file = Some(value()?.into()),
                "--device" => {
                    options.simulated = match value()?.as_str() {
                        "sim" => true,
                        "cuda" => false,
                        other => return Err(format!("no device `{other}`, but cuda or sim").into()),
                    };
                }
                _ => return Err(format!("unknown option {word}").into()),
            }
        }
        Ok(options)
    }
}

/// Prints everything; false when there was no GPU.
fn compare(options: &Options) -> Outcome<bool> {
    let driver: Arc<dyn Driver> = if options.simulated {
        Arc::new(machine(built_in("")?, 2)?)
    } else {
        match CudaDriver::load() {
            Ok(driver) => Arc::new(driver),
            Err(reason) => {
                eprintln!("no GPU, predictions alone: {reason}");
                let predicted = predict(&built_in("")?, 2, Scale::FULL)?;
                print(None, &predicted, None);
                return Ok(false);
            }
        }
    };
    let devices = driver.device_get_count()?.min(2);
    // Virtual time is the same in every round.
    let scale = if options.simulated { Scale::FULL.once() } else { Scale::FULL };
    let program = Program::new(driver, scale)?;
    let base = built_in(&program.device.info().name)?;
    let Measured { fitted, rows } = program.measure(&base, devices)?;
    println!("{}, {devices} devices: fitted profile\n\n{fitted}", program.device.info().name);
    if let Some(path) = &options.profile_file {
        std::fs::write(path, fitted.to_string())?;
        println!("written to {}\n", path.display());
    }
    drop(program);
    let by_base = predict(&base, devices, Scale::FULL)?;
    let by_fitted = predict(&fitted, devices, Scale::FULL)?;
    print(Some(&rows), &by_base, Some(&by_fitted));
    Ok(true)
}

fn built_in(card: &str) -> Outcome<Profile> {
    if let Ok(path) = std::env::var("KV_PROFILE") {
        return Ok(Profile::parse(&std::fs::read_to_string(path)?)?);
    }
    let name = if card.contains("H200") { "h200" } else { "h100" };
    Ok(Profile::built_in(name).ok_or("no built-in profile")?)
}
