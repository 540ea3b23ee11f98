//! Trials that need what is not part of the project: a browser, a viewer of traces, a public trace.

mod browser;
mod oracle;

fn main() {
    let args = libtest_mimic::Arguments::from_args();
    let trials = browser::trials().into_iter().chain(oracle::trials());
    libtest_mimic::run(&args, trials.collect()).exit();
}
