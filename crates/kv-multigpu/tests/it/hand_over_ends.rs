//! A boundary whose receiver is lost, or a user of whose buffers is gone.

use crate::common::machine;
use crate::common::moving::contents;
use cuda_driver::{Device, DeviceBuffer, ErrorCode, Stream};
use cuda_sim::{Pace, SimDriver};
use kv_multigpu::moves::{HandOver, MoveError, Mover, MoverConfig, Route, Side};

const BYTES: u64 = 4096;

/// A boundary from device 0 to device 1, and a stream on either side.
struct Boundary {
    sim: SimDriver,
    devices: [Device; 2],
    producer: Stream,
    consumer: Stream,
    boundary: HandOver,
}

impl Boundary {
    fn new(prefer: Route, buffers: usize) -> Self {
        let (sim, registry) = machine(2, true);
        let devices = [0, 1].map(|ordinal| registry.device(ordinal).unwrap());
        let config = MoverConfig {
            prefer,
            chunk_bytes: 1024,
            chunks: 2,
            tables: 0,
            ..MoverConfig::default()
        };
        let mover = Mover::new(&devices[0], &devices[1], config).unwrap();
        Self {
            sim,
            producer: Stream::new(&devices[0]).unwrap(),
            consumer: Stream::new(&devices[1]).unwrap(),
            boundary: HandOver::new(mover, BYTES, buffers).unwrap(),
            devices,
        }
    }
}

/// When the receiver is lost: what the sender has done with the only buffer until then.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Lost {
    BeforeSend,
    UnderCopy,
    AfterDone,
}

/// What a boundary answers whose receiver is lost.
#[track_caller]
fn assert_lost(error: &MoveError) {
    let MoveError::EndLost { end, device, first } = *error else { panic!("{error}") };
    assert_eq!((end, device, first.code), (Side::Destination, 1, ErrorCode::ILLEGAL_ADDRESS));
    let line = error.to_string();
    assert!(line.starts_with("GPU 1, the destination, is lost since cu"), "{line}");
}

#[test]
fn buffers_for_a_lost_receiver_are_not_handed_out_again_and_the_sender_goes_on() {
    for prefer in [Route::Pull, Route::Host] {
        for lost in [Lost::BeforeSend, Lost::UnderCopy, Lost::AfterDone] {
            let Boundary { sim, devices, producer, consumer, mut boundary } =
                Boundary::new(prefer, 2);
            sim.set_pace(Pace::Slowest);
            let outgoing = boundary.room(&producer).unwrap();
            producer.fill(outgoing.span(), 7).unwrap();
            if lost == Lost::BeforeSend {
                sim.lose_device(1, 0, ErrorCode::ILLEGAL_ADDRESS);
                let refused = boundary.send(outgoing, BYTES, &producer, &consumer).unwrap_err();
                assert_lost(&refused.error);
                // What the producer wrote is its own still.
                assert!(contents(&producer, refused.outgoing.span()) == [7; BYTES as usize]);
                boundary.give_back(refused.outgoing).unwrap();
            } else {
                let incoming = boundary.send(outgoing, BYTES, &producer, &consumer).unwrap();
                if lost == Lost::AfterDone {
                    boundary.done(incoming, &consumer).unwrap();
                } else {
                    drop(incoming);
                }
                sim.lose_device(1, 0, ErrorCode::ILLEGAL_ADDRESS);
                consumer.synchronize().unwrap_err();
            }
            // However often it is asked, and though one buffer was never in use.
            for _ in 0..3 {
                assert_lost(&boundary.room(&producer).unwrap_err());
            }
            assert_eq!(devices[0].poison(), None, "{prefer:?} {lost:?}");
            let other = DeviceBuffer::alloc(&devices[0], BYTES).unwrap();
            producer.fill(other.span(), 9).unwrap();
            assert!(contents(&producer, other.span()) == [9; BYTES as usize]);
            // Chunks that the sender still fills would be kept for good.
            devices[0].synchronize().unwrap();
            drop((other, boundary, producer, consumer, devices));
            let leaks = sim.check_leaks();
            assert!(leaks.is_clean(), "{prefer:?} {lost:?}: {leaks:?}");
            assert_eq!(sim.findings(), [], "{prefer:?} {lost:?}");
        }
    }
}

/// Nobody has asked the receiver for anything since it was lost. The sender learns it from its own next call,
/// and is not taken for lost itself.
#[test]
fn a_loss_that_nobody_has_seen_is_the_receivers_alone() {
    for prefer in [Route::Pull, Route::Host] {
        let Boundary { sim, devices, producer, consumer, mut boundary } = Boundary::new(prefer, 1);
        sim.set_pace(Pace::Slowest);
        let outgoing = boundary.room(&producer).unwrap();
        producer.fill(outgoing.span(), 7).unwrap();
        let incoming = boundary.send(outgoing, BYTES, &producer, &consumer).unwrap();
        boundary.done(incoming, &consumer).unwrap();
        sim.lose_device(1, 0, ErrorCode::ILLEGAL_ADDRESS);
        assert_lost(&boundary.room(&producer).unwrap_err());
        assert_eq!(devices[0].poison(), None, "{prefer:?}");
        devices[0].synchronize().unwrap();
        drop((boundary, producer, consumer, devices));
        let leaks = sim.check_leaks();
        assert!(leaks.is_clean(), "{prefer:?}: {leaks:?}");
        assert_eq!(sim.findings(), [], "{prefer:?}");
    }
}

/// A consumer's thread ends with the activations that it was given, whose readers nobody knows; so does a
/// producer's with a buffer that it fills.
#[test]
fn buffers_of_users_that_are_gone_are_passed_over_and_counted() {
    let Boundary { sim, producer, consumer, mut boundary, .. } = Boundary::new(Route::Pull, 3);
    let panics = |token: Box<dyn std::any::Any + Send>| {
        let user = std::thread::spawn(move || {
            let _token = token;
            panic!("a user of a buffer");
        });
        user.join().unwrap_err();
    };
    let outgoing = boundary.room(&producer).unwrap();
    producer.fill(outgoing.span(), 1).unwrap();
    let incoming = boundary.send(outgoing, BYTES, &producer, &consumer).unwrap();
    let gone = incoming.span();
    panics(Box::new(incoming));
    // The others go on, in turn.
    for byte in 2..6 {
        let outgoing = boundary.room(&producer).unwrap();
        producer.fill(outgoing.span(), byte).unwrap();
        let incoming = boundary.send(outgoing, BYTES, &producer, &consumer).unwrap();
        assert_ne!(incoming.span(), gone);
        assert!(contents(&consumer, incoming.span()) == [byte; BYTES as usize]);
        boundary.done(incoming, &consumer).unwrap();
    }
    panics(Box::new(boundary.room(&producer).unwrap()));
    let last = boundary.room(&producer).unwrap();
    let none = |in_use| MoveError::NoBuffer { in_use, abandoned: 2, buffers: 3 };
    assert_eq!(boundary.room(&producer).unwrap_err(), none(1));
    drop(last);
    let none = MoveError::NoBuffer { in_use: 0, abandoned: 3, buffers: 3 };
    assert_eq!(boundary.room(&producer).unwrap_err(), none);
    assert_eq!(sim.findings(), []);
}
