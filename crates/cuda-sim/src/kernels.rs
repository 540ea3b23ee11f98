//! Modules, their kernels, and launches.

use cuda_driver::{ErrorCode, KernelArgs, LaunchConfig};

use crate::findings::{Finding, FindingKind};
use crate::state::{Answer, State};
use crate::work::{Launch, Work};

/// Newest PTX that the simulated driver compiles: that of CUDA 12.8.
const PTX_VERSION_MAX: (u32, u32) = (8, 7);

/// Compute capability of the simulated device, as in `sm_90`.
pub(crate) const COMPUTE_CAPABILITY: (u32, u32) = (9, 0);

/// Most threads of a block.
pub(crate) const BLOCK_THREADS_MAX: u64 = 1024;

const BLOCK_MAX: [u32; 3] = [1024, 1024, 64];
pub(crate) const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Most dynamic shared memory of a block, as after opting in to all of it.
const SHARED_BYTES_MAX: u32 = 227 << 10;

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) device: u32,
    /// Names of its kernels.
    entries: Vec<String>,
}

/// A kernel of a loaded module.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) module: u64,
    name: &'static str,
}

impl State {
    pub(crate) fn module_load(&mut self, ptx: &str, log: &mut String) -> Answer<u64> {
        let device = self.current()?;
        let entries = parse_entries(ptx).map_err(|refusal| {
            log.push_str(&refusal.message);
            refusal.code
        })?;
        let handle = self.new_handle();
        self.modules.insert(handle, Module { device, entries });
        Ok(handle)
    }

    pub(crate) fn module_unload(&mut self, module: u64) -> Answer<()> {
        self.current_device()?;
        let device = self.modules.remove(&module).ok_or(ErrorCode::INVALID_HANDLE)?.device;
        self.functions.retain(|_, function| function.module != module);
        self.health(device)
    }

    pub(crate) fn module_function(&mut self, module: u64, name: &str) -> Answer<u64> {
        self.current()?;
        let found = self.modules.get(&module).ok_or(ErrorCode::INVALID_HANDLE)?;
        self.health(found.device)?;
        if !found.entries.iter().any(|entry| entry == name) {
            return Err(ErrorCode::NOT_FOUND);
        }
        let Some(reference) = self.references.get(name) else {
            let detail = "no reference of this kernel was registered".to_owned();
            self.findings.add(Finding::new(FindingKind::MissingReference, name, detail));
            return Err(ErrorCode::NOT_SUPPORTED);
        };
        let name = reference.name;
        let known = self.functions.iter().find(|(_, f)| f.module == module && f.name == name);
        if let Some((&handle, _)) = known {
            return Ok(handle);
        }
        let handle = self.new_handle();
        self.functions.insert(handle, Function { module, name });
        Ok(handle)
    }

    pub(crate) fn launch(
        &mut self,
        function: u64,
        config: &LaunchConfig,
        args: &KernelArgs,
        stream: u64,
    ) -> Answer<()> {
        let current = self.current()?;
        let (stream, device) = self.stream(stream)?;
        let function = self.functions.get(&function).ok_or(ErrorCode::INVALID_HANDLE)?;
        let module = self.modules.get(&function.module).ok_or(ErrorCode::INVALID_HANDLE)?;
        // Copies may use another context's stream; a kernel may not.
        if module.device != current || device != current {
            return Err(ErrorCode::INVALID_HANDLE);
        }
        check_geometry(config)?;
        let reference = self.references.get(function.name);
        let &reference = reference.ok_or(ErrorCode::NOT_SUPPORTED)?;
        let launch = Box::new(Launch { reference, config: *config, args: args.clone() });
        self.enqueue(stream, "cuLaunchKernel", Work::Launch(launch));
        Ok(())
    }
}

fn check_geometry(config: &LaunchConfig) -> Answer<()> {
    let fits = |size: [u32; 3], most: [u32; 3]| {
        size.iter().zip(most).all(|(&size, most)| (1..=most).contains(&size))
    };
    let threads: u64 = config.block.iter().map(|&size| u64::from(size)).product();
    if fits(config.grid, GRID_MAX)
        && fits(config.block, BLOCK_MAX)
        && threads <= BLOCK_THREADS_MAX
        && config.shared_bytes <= SHARED_BYTES_MAX
    {
        Ok(())
    } else {
        Err(ErrorCode::INVALID_VALUE)
    }
}

/// Why PTX was not loaded.
#[derive(Debug)]
struct Refusal {
    code: ErrorCode,
    message: String,
}

/// Names of the kernels in `ptx`, once its header is one that the device can run.
fn parse_entries(ptx: &str) -> Result<Vec<String>, Refusal> {
    let refuse = |code, message: &str| Err(Refusal { code, message: message.to_owned() });
    if ptx.contains('\0') {
        return refuse(ErrorCode::INVALID_IMAGE, "the PTX has a zero byte inside");
    }
    let text = without_comments(ptx);
    let after = |directive: &str| {
        let mut words = text.split_ascii_whitespace();
        words.find(|word| *word == directive).and_then(|_| words.next())
    };
    let Some(version) = after(".version").and_then(parse_version) else {
        return refuse(ErrorCode::INVALID_PTX, "the PTX has no .version directive");
    };
    if version > PTX_VERSION_MAX {
        let message = format!("PTX {}.{} is newer than this driver", version.0, version.1);
        return refuse(ErrorCode::UNSUPPORTED_PTX_VERSION, &message);
    }
    let Some(target) = after(".target").and_then(parse_target) else {
        return refuse(
            ErrorCode::INVALID_PTX,
            "the PTX has no .target directive for an sm_ device",
        );
    };
    if target > COMPUTE_CAPABILITY.0 * 10 + COMPUTE_CAPABILITY.1 {
        let message = format!("PTX for sm_{target} does not run on this device");
        return refuse(ErrorCode::INVALID_PTX, &message);
    }
    let mut words = text.split_ascii_whitespace();
    let mut entries = Vec::new();
    while words.any(|word| word == ".entry") {
        let name = words.next().and_then(|word| word.split('(').next());
        match name.filter(|name| !name.is_empty()) {
            Some(name) => entries.push(name.to_owned()),
            None => return refuse(ErrorCode::INVALID_PTX, "an .entry directive has no name"),
        }
    }
    Ok(entries)
}

fn parse_version(word: &str) -> Option<(u32, u32)> {
    let (major, minor) = word.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// 90 of `sm_90`, `sm_90a` and `sm_90,debug`.
fn parse_target(word: &str) -> Option<u32> {
    let digits = word.strip_prefix("sm_")?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

fn without_comments(ptx: &str) -> String {
    let mut text = String::with_capacity(ptx.len());
    let mut rest = ptx;
    while let Some(start) = rest.find('/') {
        let (before, comment) = rest.split_at(start);
        text.push_str(before);
        let (end, skipped) = match comment.get(..2) {
            Some("//") => (comment.find('\n'), 0),
            Some("/*") => (comment.find("*/"), 2),
            _ => (Some(1), 0),
        };
        text.push(' ');
        rest = end.and_then(|end| comment.get(end + skipped..)).unwrap_or("");
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

    #[test]
    fn entries_are_found_between_comments() {
        let ptx = format!(
            "// .entry no1(\n{HEADER}/* .entry no2( \n*/\n.visible .entry first(\n.param .u64 p\n) {{ }}\n\
             .entry second\n(\n) {{ ret; }} .func helper() {{}}"
        );
        assert_eq!(parse_entries(&ptx).unwrap(), ["first", "second"]);
    }

    #[test]
    fn headers_are_checked() {
        let code = |ptx: &str| parse_entries(ptx).unwrap_err().code;
        assert_eq!(code(""), ErrorCode::INVALID_PTX);
        assert_eq!(code(".version 8.0"), ErrorCode::INVALID_PTX);
        assert_eq!(code(".version 9.0\n.target sm_90"), ErrorCode::UNSUPPORTED_PTX_VERSION);
        assert_eq!(code(".version 8.0\n.target sm_100"), ErrorCode::INVALID_PTX);
        assert_eq!(code("\0"), ErrorCode::INVALID_IMAGE);
        assert_eq!(code(".version 8.0 .target sm_90 .entry"), ErrorCode::INVALID_PTX);
        assert!(parse_entries(".version 8.0\n.target sm_90a, debug").unwrap().is_empty());
    }
}
