//! Modules, their kernels, and launches.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_driver::guard;
use cuda_driver::reference::KernelReference;
use cuda_driver::{ErrorCode, KernelArgs, LaunchConfig};
use parking_lot::Mutex;

use crate::findings::{Finding, FindingKind};
use crate::ptx::{self, Limits, Program};
use crate::state::{Answer, Machine};
use crate::streams::Goal;
use crate::work::{Body, Launch, Work};

/// Newest PTX version that the simulated driver compiles: that of CUDA 12.8.
const PTX_VERSION_MAX: (u32, u32) = (8, 7);

pub(crate) const BLOCK_THREADS_MAX: u64 = 1024;

const BLOCK_MAX: [u32; 3] = [1024, 1024, 64];
pub(crate) const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Maximum shared memory of a block. A kernel could opt in to more, but no call of the driver trait
/// does so.
const SHARED_BYTES_MAX: u32 = 48 << 10;

/// Maximum memory for the registers and local memory of a block, in bytes.
const STATE_BYTES_MAX: u64 = 256 << 20;

#[derive(Debug)]
struct Module {
    device: u32,
    programs: Vec<Arc<Program>>,
    /// The module's variables, shared by its kernels.
    variables: Arc<Mutex<Vec<u8>>>,
}

#[derive(Debug)]
struct Function {
    module: u64,
    program: Arc<Program>,
}

/// Modules and their kernels, and how kernels are run.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    modules: BTreeMap<u64, Module>,
    functions: BTreeMap<u64, Function>,
    references: BTreeMap<&'static str, KernelReference>,
    /// Whether kernels run from their PTX even where a reference is registered.
    prefer_ptx: bool,
    limits: Limits,
    /// Instructions that kernels have run from their PTX, of all threads.
    instructions: u64,
}

impl Kernels {
    pub(crate) fn register(&mut self, references: &[KernelReference]) {
        self.references.extend(references.iter().map(|reference| (reference.name, *reference)));
    }

    pub(crate) fn prefer_ptx(&mut self, prefer: bool) {
        self.prefer_ptx = prefer;
    }

    pub(crate) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    pub(crate) fn instructions(&self) -> u64 {
        self.instructions
    }

    pub(crate) fn count_instructions(&mut self, steps: u64) {
        self.instructions += steps;
    }

    pub(crate) fn modules(&self) -> usize {
        self.modules.len()
    }

    /// Removes all modules of a device whose context ends, and returns them.
    pub(crate) fn end_device(&mut self, device: u32) -> Vec<u64> {
        let of_device = self.modules.iter().filter(|(_, module)| module.device == device);
        let ended: Vec<u64> = of_device.map(|(&handle, _)| handle).collect();
        self.modules.retain(|_, module| module.device != device);
        self.functions.retain(|_, function| self.modules.contains_key(&function.module));
        ended
    }

    fn module(&self, module: u64) -> Answer<&Module> {
        self.modules.get(&module).ok_or(ErrorCode::INVALID_HANDLE)
    }

    fn unload(&mut self, module: u64) {
        self.modules.remove(&module);
        self.functions.retain(|_, function| function.module != module);
    }

    /// The kernel of that name; its handle, if it has one.
    fn find(&self, module: u64, name: &str) -> Answer<(Arc<Program>, Option<u64>)> {
        let programs = &self.module(module)?.programs;
        let program = programs.iter().find(|program| program.name() == name);
        let program = Arc::clone(program.ok_or(ErrorCode::NOT_FOUND)?);
        let known = self.functions.iter().find(|(_, f)| Arc::ptr_eq(&f.program, &program));
        Ok((program, known.map(|(&handle, _)| handle)))
    }
}

impl Machine {
    pub(crate) fn module_load(&mut self, ptx: &str, log: &mut String) -> Answer<u64> {
        let device = self.current()?;
        check_header(ptx, self.config.compute_capability).map_err(|(code, message)| {
            log.push_str(&message);
            code
        })?;
        let code = ptx::load(ptx).map_err(|refusal| {
            log.push_str(&refusal.to_string());
            ErrorCode::INVALID_PTX
        })?;
        let handle = self.new_handle();
        let variables = Arc::new(Mutex::new(code.variables));
        let module = Module { device, programs: code.programs, variables };
        self.kernels.modules.insert(handle, module);
        Ok(handle)
    }

    /// As in driver 580, this waits for all work of the device, from every module.
    pub(crate) fn module_unload(&mut self, module: u64) -> Answer<()> {
        let device = self.kernels.module(module)?.device;
        guard!("sim.unload-waits", self.wait_to_end("cuModuleUnload", Goal::Device(device))?);
        self.note_change("cuModuleUnload", |races, _, call| races.unloaded(call, module));
        self.kernels.unload(module);
        self.health(device)
    }

    pub(crate) fn module_function(&mut self, module: u64, name: &str) -> Answer<u64> {
        self.health(self.kernels.module(module)?.device)?;
        if name.is_empty() {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let (program, known) = self.kernels.find(module, name)?;
        if let Some(handle) = known {
            return Ok(handle);
        }
        let handle = self.new_handle();
        self.kernels.functions.insert(handle, Function { module, program });
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
        let (stream, device) = self.stream_or_capture(stream)?;
        // A copy may use another context's stream, a kernel may not.
        if device != current {
            return Err(ErrorCode::INVALID_HANDLE);
        }
        let launch = self.prepare(device, function, config, args)?;
        match self.streams.capture_mut(stream) {
            Some(capture) => capture.take(launch),
            None => {
                self.enqueue(stream, "cuLaunchKernel", Work::Launch(Box::new(launch)));
            }
        }
        Ok(())
    }

    /// Checks a launch on `device` and copies its arguments.
    pub(crate) fn prepare(
        &mut self,
        device: u32,
        function: u64,
        config: &LaunchConfig,
        args: &KernelArgs,
    ) -> Answer<Launch> {
        let kernels = &self.kernels;
        let function = kernels.functions.get(&function).ok_or(ErrorCode::INVALID_HANDLE)?;
        let module = kernels.module(function.module)?;
        if module.device != device {
            return Err(ErrorCode::INVALID_HANDLE);
        }
        check_geometry(config)?;
        let (program, handle) = (Arc::clone(&function.program), function.module);
        let reference = kernels.references.get(program.name()).filter(|_| !kernels.prefer_ptx);
        let body = match reference {
            Some(&reference) => Body::Reference(reference),
            None => {
                let variables = Arc::clone(&module.variables);
                self.check_launch(device, &program, config, args)?;
                Body::Ptx(program, variables)
            }
        };
        Ok(Launch { body, module: handle, config: *config, args: args.clone() })
    }

    /// Refuses a launch that does not match the kernel's declaration.
    fn check_launch(
        &mut self,
        device: u32,
        program: &Program,
        config: &LaunchConfig,
        args: &KernelArgs,
    ) -> Answer<()> {
        let is_large = program.state_bytes(config) > STATE_BYTES_MAX;
        if guard!("sim.state-bounded", is_large, else false) {
            return Err(ErrorCode::LAUNCH_OUT_OF_RESOURCES);
        }
        let shared = u64::from(program.shared_bytes()) + u64::from(config.shared_bytes);
        let refusal = if shared > SHARED_BYTES_MAX.into() {
            Some(format!(
                "{shared} bytes of shared memory, but at most {SHARED_BYTES_MAX} are allowed"
            ))
        } else {
            program.check(config, args).err()
        };
        let Some(detail) = refusal else { return Ok(()) };
        let finding = Finding::new(FindingKind::InvalidLaunch, program.name(), detail);
        self.findings.add(Finding { device: Some(device), ..finding });
        Err(ErrorCode::INVALID_VALUE)
    }
}

fn check_geometry(config: &LaunchConfig) -> Answer<()> {
    let fits = |size: [u32; 3], most: [u32; 3]| {
        size.iter().zip(most).all(|(&size, most)| (1..=most).contains(&size))
    };
    let threads: u64 = config.block.iter().fold(1, |all, &size| all.saturating_mul(size.into()));
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

/// Checks that the device can run PTX with this header; says what for the log if it cannot.
fn check_header(ptx: &str, capability: (u32, u32)) -> Result<(), (ErrorCode, String)> {
    let refuse = |code, message: &str| Err((code, message.to_owned()));
    if ptx.starts_with('\x7f') || ptx.trim().is_empty() {
        return refuse(ErrorCode::INVALID_IMAGE, "the text is not PTX");
    }
    if ptx.contains('\0') {
        return refuse(ErrorCode::INVALID_IMAGE, "the PTX contains a zero byte");
    }
    let text = without_comments(ptx);
    let after = |directive: &str| {
        let mut words = text.split_ascii_whitespace();
        words.find(|word| *word == directive).and_then(|_| words.next())
    };
    let Some(version) = after(".version").and_then(parse_version) else {
        return refuse(ErrorCode::INVALID_IMAGE, "the PTX has no .version directive");
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
    if target > capability.0 * 10 + capability.1 {
        let message = format!("PTX for sm_{target} does not run on this device");
        return refuse(ErrorCode::INVALID_PTX, &message);
    }
    Ok(())
}

fn parse_version(word: &str) -> Option<(u32, u32)> {
    let (major, minor) = word.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Parses the number 90 from `sm_90`, `sm_90a` or `sm_90,debug`.
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
