//! What `{}`, and `?` in `main`, print for an error: one line, with the numbers.

use crate::common::{PAGE, machine, take};
use cuda_driver::ErrorCode;
use cuda_vmm::EpochGate;
use cuda_vmm::limit::OverLimit;
use cuda_vmm::pages::PageError;

#[test]
fn a_refused_growth_names_the_call_and_the_answer() {
    let machine = machine();
    let pool = machine.pool(PAGE, 10, 2);
    machine.sim.fail_nth("cuMemSetAccess", 1, ErrorCode::INVALID_VALUE);
    let error = pool.grow_to(5).unwrap_err();
    let line = format!("{error:?}");
    assert!(
        line.starts_with("the pool did not grow, 2 blocks are ready: cuMemSetAccess "),
        "{line}"
    );
    assert!(line.ends_with("on GPU 0: CUDA_ERROR_INVALID_VALUE (1)"), "{line}");
    machine.sim.fail_nth("cuMemCreate", 1, ErrorCode::OUT_OF_MEMORY);
    // The pages created for the first growth are idle. This growth needs more.
    let error = pool.grow_to(8).unwrap_err();
    let line = "growth to 8 blocks with 2 ready: CUDA_ERROR_OUT_OF_MEMORY (2)";
    assert_eq!((error.to_string(), format!("{error:?}")), (line.into(), line.into()));
    assert!(pool.close(&[]).wait().unwrap().is_clean());
}

#[test]
fn a_chain_is_one_line_that_repeats_nothing() {
    let (used_bytes, limit_bytes) = (60, 50);
    let source = OverLimit { limit_bytes, used_bytes, asked_bytes: 8, revision: 1 };
    let error = PageError::OverLimit(source);
    assert_eq!(error.to_string(), "no page: a shared limit leaves no room for another");
    assert_eq!(
        format!("{error:?}"),
        "no page: a shared limit leaves no room for another: \
         8 bytes wanted with 60 of 50 in use (revision 1 of the limit)"
    );
}

#[test]
fn a_request_that_comes_back_says_why() {
    let machine = machine();
    let (pages, space) = (machine.pages(2), machine.reservation(2));
    let lease = space.gate().lease();
    space.map_range(0, take(&pages, 2)).unwrap();
    let refused = space.retire(0..2, &[]).unwrap().try_complete().unwrap_err();
    assert_eq!(
        format!("{refused:?}"),
        "the memory is not at rest: 1 leases taken before the memory was retired are still open"
    );
    let stranger = machine.pages(1).take().unwrap();
    let refused = space.map(1, stranger).unwrap_err();
    assert_eq!(
        format!("{refused:?}"),
        "none of 1 pages was mapped: page 1 is retired but not yet at rest"
    );
    machine.end(lease);
    drop(space.close(&[]).wait().unwrap());
}

#[test]
fn leases_that_are_not_covered_are_told_with_the_cause() {
    let gate = EpochGate::default();
    drop(gate.lease());
    let refused = gate.cover_dropped(|| Err(ErrorCode::OUT_OF_MEMORY)).unwrap_err();
    assert_eq!(refused.to_string(), "could not record fences for dropped leases");
    let line =
        format!("could not record fences for dropped leases: {:?}", ErrorCode::OUT_OF_MEMORY);
    assert_eq!(format!("{refused:?}"), line);
}
