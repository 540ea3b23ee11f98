//! `cargo xtask kernels`: from the CUDA C++ sources to the committed PTX.

use anyhow::Result;

/// Options of `cargo xtask kernels`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compare with the committed PTX instead of writing it.
    #[arg(long)]
    check: bool,
}

/// Builds or checks the PTX of every kernel.
pub(crate) fn run(args: &Args) -> Result<()> {
    println!("kernels: check {}", args.check);
    Ok(())
}
