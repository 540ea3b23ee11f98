//! Trials that need what is not part of the project: a browser, a viewer of traces, public traces.

mod browser;
mod oracle;
mod samples;

fn main() {
    let args = libtest_mimic::Arguments::from_args();
    let trials = browser::trials().into_iter().chain(oracle::trials()).chain(samples::trials());
    libtest_mimic::run(&args, trials.collect()).exit();
}
