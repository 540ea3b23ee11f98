//! Files appear whole or not at all, and links stay links.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use kv_replay::json_file::{WriteError, check_files, write_atomically, write_json};

fn names_in(folder: &Path) -> Vec<OsString> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

#[test]
fn replaces_a_file_and_leaves_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    write_atomically(&path, b"old").unwrap();
    write_json(&path, &[1, 2]).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "[\n  1,\n  2\n]\n");
    assert_eq!(names_in(folder.path()), ["report.json"]);
}

#[test]
fn a_link_stays_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    fs::write(&file, "old").unwrap();
    std::os::unix::fs::symlink("file", &link).unwrap();
    write_atomically(&link, b"new").unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read_to_string(&file).unwrap(), "new");
}

#[test]
fn a_link_to_nothing_stays_a_link_and_what_it_names_is_made() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("deep")).unwrap();
    symlink("deep/second", path("first")).unwrap();
    symlink("../file", path("deep/second")).unwrap();
    check_files([], [&*path("first")]).unwrap();
    write_atomically(&path("first"), b"new").unwrap();
    for link in ["first", "deep/second"] {
        assert!(fs::symlink_metadata(path(link)).unwrap().is_symlink(), "{link}");
    }
    assert_eq!(fs::read_to_string(path("file")).unwrap(), "new");
    // A link whose target folder does not exist cannot be written to, and stays unchanged.
    symlink("absent/file", path("nowhere")).unwrap();
    symlink("circle", path("circle")).unwrap();
    for link in ["nowhere", "circle"] {
        let checked = check_files([], [&*path(link)]);
        assert!(matches!(checked, Err(WriteError::Io { .. })), "{link}");
        assert!(matches!(write_atomically(&path(link), b"x"), Err(WriteError::Io { .. })));
        assert!(fs::symlink_metadata(path(link)).unwrap().is_symlink(), "{link}");
    }
}

#[test]
fn a_file_keeps_who_may_read_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    write_atomically(&path, b"old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    write_atomically(&path, b"new").unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}
