//! Profiles as text, and times between measured points.

use std::time::Duration;

use cuda_sim::{Curve, Profile, Rate, SimConfigError};

fn nanos(nanos: u64) -> Duration {
    Duration::from_nanos(nanos)
}

#[test]
fn times_lie_on_straight_lines_through_the_points() {
    let curve = Curve::new(&[(200, nanos(30)), (100, nanos(10)), (1000, nanos(830))]);
    for (bytes, time) in
        [(100, 10), (150, 20), (200, 30), (600, 430), (1000, 830), (1100, 930), (60, 2), (10, 0)]
    {
        assert_eq!(curve.at(bytes), nanos(time), "{bytes} bytes");
    }
    let falling = Curve::new(&[(0, nanos(100)), (10, nanos(50))]);
    assert_eq!([falling.at(5), falling.at(20), falling.at(u64::MAX)], [75, 0, 0].map(nanos));
    assert_eq!(Curve::new(&[(5, nanos(7))]).at(1 << 40), nanos(7));
    assert_eq!(Curve::default().at(9), nanos(0));
    assert_eq!(Curve::new(&[(5, nanos(7)), (5, nanos(8))]), Curve::new(&[(5, nanos(8))]));
    let steep = Curve::new(&[(0, nanos(0)), (1, nanos(u64::MAX))]);
    assert_eq!(steep.at(u64::MAX), nanos(u64::MAX));
}

#[test]
fn what_a_profile_writes_is_read_back() {
    let pair = Profile::built_in("h200").unwrap();
    for profile in [Profile::h100(), pair.clone()] {
        assert_eq!(Profile::parse(&profile.to_string()), Ok(profile));
    }
    for name in ["Card #2", "#", "a \"b\" # c", "\\", " wide ", "two\nlines\r", "", "H100\\n"] {
        let profile = Profile { name: name.to_owned(), ..Profile::h100() };
        assert_eq!(Profile::parse(&profile.to_string()), Ok(profile), "{name:?}");
    }
    let commented = Profile::parse("name = \"Card #2\" # of four").unwrap();
    assert_eq!(commented.name, "Card #2");
    assert_eq!(Profile::parse(""), Ok(Profile::h100()));
    assert_eq!(Profile::parse("base = h200"), Ok(pair));
}

#[test]
fn units_comments_and_blanks_are_read() {
    let text = "\
# A card we do not have.
base = h100
name=L40S

htod = 25.25 GB/s   # Gen4
dtoh = 900MB/s
dtod = 0.4 TB/s
copy_engines = 2
htod_setup = 1.5us
reserve = 1_000 ns
pinned_alloc = 1 GiB: 1.5 s, 1KiB:20 us
";
    let profile = Profile::parse(text).unwrap();
    let expected = Profile {
        name: "L40S".to_owned(),
        htod: Rate::mb_per_s(25_250),
        dtoh: Rate::mb_per_s(900),
        dtod: Rate::mb_per_s(400_000),
        copy_engines: 2,
        htod_setup: nanos(1500),
        reserve: nanos(1000),
        pinned_alloc: Curve::new(&[(1 << 10, nanos(20_000)), (1 << 30, nanos(1_500_000_000))]),
        ..Profile::h100()
    };
    assert_eq!(profile, expected);
}

#[test]
fn a_fault_is_told_with_its_line() {
    for (text, message) in [
        ("htod", "line 1: expected `key = value`"),
        ("\n\nhtdo = 1 GB/s", "line 3: unknown key `htdo`"),
        ("htod = 1 GB/s\nhtod = 2 GB/s", "line 2: `htod` is given a second time"),
        ("base = a100", "line 1: `base` takes h100 or h200 and comes first, found `a100`"),
        (
            "name = X\nbase = h200",
            "line 2: `base` takes h100 or h200 and comes first, found `h200`",
        ),
        ("name =", "line 1: `name` takes a name, not ``"),
        ("name = \"open # name", "line 1: `name` takes a name, not `\"open # name`"),
        ("copy_engines = 0", "line 1: `copy_engines` takes a number from 1 to 1000000, not `0`"),
        ("reserve = 5", "line 1: `reserve` takes a time such as `1.2 us`, not `5`"),
        (
            "#\nmap = 5 us",
            "line 2: `map` takes sizes and times such as `1 MiB: 650 us, 16 MiB: 5.6 ms`, not `5 us`",
        ),
    ] {
        assert_eq!(Profile::parse(text).unwrap_err().to_string(), message);
    }
    for value in [
        "0 GB/s",
        "1 GiB",
        "-1 GB/s",
        "1.2.3 GB/s",
        ". GB/s",
        "1,5 GB/s",
        "0.0001 MB/s",
        "GB/s",
        "",
    ] {
        let error = Profile::parse(&format!("htod = {value}")).unwrap_err();
        assert!(
            matches!(error, SimConfigError::ProfileValue { line: 1, .. }),
            "{value:?}: {error}"
        );
    }
    let huge = Profile::parse("reserve = 99999999999999999999 s").unwrap_err();
    assert!(matches!(huge, SimConfigError::ProfileValue { .. }), "{huge}");
}
