//! The driver, its devices and their links.

use std::path::Path;

use cuda_driver::{
    CopyError, Device, DeviceAttribute, DeviceBuffer, Event, HostAllocFlags, PhysicalMemory,
    PinnedBuffer, Stream, Unavailable,
};

use super::Finding;
use super::host::first_line;
use kv_replay::config::RunConfig;
use kv_replay::device::{DeviceOpenError, DeviceSpec, OpenDevices, SimSizes, open};
use kv_replay::report::bytes;

/// Bytes of a copy that a link is measured with.
const LINK_BYTES: u64 = 64 << 20;

/// Number of these copies in each direction.
const LINK_COPIES: u32 = 4;

/// Rate below which a link is worth a look, in GB/s: PCIe 4.0 with 16 lanes has about 25.
const LINK_SLOW_GB_S: f64 = 10.0;

/// Compute capability that the kernels need.
const CAPABILITY_MIN: (i32, i32) = (8, 0);

pub(super) fn findings(spec: &DeviceSpec, root: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(line) = first_line(&root.join("proc/driver/nvidia/version")) {
        findings.push(Finding::fine("driver", format!("kernel module: {line}")));
    }
    let sizes = SimSizes::for_config(&RunConfig::default());
    match open(spec, sizes) {
        Ok(opened) => {
            findings.extend(driver(&opened));
            for device in &opened.devices {
                findings.extend(of_device(device, root));
            }
            findings.extend(peers(&opened.devices));
        }
        Err(error) => findings.push(not_opened(spec, &error)),
    }
    findings
}

fn not_opened(spec: &DeviceSpec, error: &DeviceOpenError) -> Finding {
    let to_do = match error {
        DeviceOpenError::Unavailable(Unavailable::NoLibrary) => {
            "install NVIDIA's driver; in a container, start it with the NVIDIA container toolkit (--gpus all). Without a \
             GPU everything works with --device sim"
        }
        DeviceOpenError::Unavailable(Unavailable::NoDevice) => {
            "see that nvidia-smi lists a GPU, and that CUDA_VISIBLE_DEVICES does not hide it. Without a GPU everything \
             works with --device sim"
        }
        DeviceOpenError::Unavailable(Unavailable::MissingSymbol { .. }) => {
            "update NVIDIA's driver to one of CUDA 12.8 or later"
        }
        DeviceOpenError::NoSuchDevice { .. } => {
            "name a device that is there; nvidia-smi -L lists them"
        }
        _ => {
            "see that nvidia-smi works for this user; after an Xid error in dmesg the GPU must be reset"
        }
    };
    let mut found = format!("{spec}: {error}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        found.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    Finding::problem("driver", found, to_do)
}

fn driver(opened: &OpenDevices) -> Option<Finding> {
    let version = cuda_driver::Driver::driver_get_version(&*opened.driver).ok()?;
    let (major, minor) = (version / 1000, version % 1000 / 10);
    let simulated = if opened.sim.is_some() { ", simulated" } else { "" };
    Some(Finding::fine("driver", format!("supports CUDA {major}.{minor}{simulated}")))
}

fn of_device(device: &Device, root: &Path) -> Vec<Finding> {
    const AREA: &str = "devices";
    let (ordinal, name) = (device.ordinal(), &device.info().name);
    let attribute = |attribute| device.attribute(attribute).unwrap_or(0);
    let capability = (
        attribute(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR),
        attribute(DeviceAttribute::COMPUTE_CAPABILITY_MINOR),
    );
    let (free, total) = device.memory_info().unwrap_or((0, 0));
    let mut findings = vec![Finding::fine(
        AREA,
        format!(
            "GPU {ordinal}: {name}, compute capability {}.{}, {} of {} free",
            capability.0,
            capability.1,
            bytes(free),
            bytes(total)
        ),
    )];
    if capability < CAPABILITY_MIN {
        findings.push(Finding::problem(
            AREA,
            format!(
                "GPU {ordinal} is older than compute capability {}.{}",
                CAPABILITY_MIN.0, CAPABILITY_MIN.1
            ),
            "use a newer GPU: the kernels are built for that capability and later ones",
        ));
    }
    findings.push(match attribute(DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        0 => Finding::problem(
            AREA,
            format!("GPU {ordinal} has no virtual memory management"),
            "KV memory cannot grow in place there; vGPU and some virtual machines lack it: use the whole GPU",
        ),
        _ => match PhysicalMemory::granularity(device) {
            Ok(page) => Finding::fine(
                AREA,
                format!("GPU {ordinal}: memory is mapped in pages of {}", bytes(page)),
            ),
            Err(error) => Finding::problem(
                AREA,
                format!("GPU {ordinal} does not tell its page size: {error}"),
                "see dmesg for Xid errors, and reset the GPU after one",
            ),
        },
    });
    if attribute(DeviceAttribute::ASYNC_ENGINE_COUNT) < 2 {
        findings.push(Finding::note(
            AREA,
            format!("GPU {ordinal} has fewer than two copy engines"),
            "copies to and from the host do not overlap: count both directions against one link",
        ));
    }
    if let Some(node) = numa_node(device, root) {
        findings.push(Finding::fine(AREA, format!("GPU {ordinal} is at NUMA node {node}")));
    }
    findings.push(link(device));
    findings
}

/// The NUMA node of a device; `None` if the system does not say.
fn numa_node(device: &Device, root: &Path) -> Option<u32> {
    let bus = device.info().pci_bus_id.to_lowercase();
    let line = first_line(&root.join("sys/bus/pci/devices").join(bus).join("numa_node"))?;
    // -1 where there is only one.
    line.parse().ok()
}

fn link(device: &Device) -> Finding {
    const AREA: &str = "links";
    let ordinal = device.ordinal();
    let measured = device.while_current(|| measure(device)).map_err(CopyError::from);
    match measured.and_then(|rates| rates) {
        Ok((down, up)) => {
            let how = if device.virtual_now().is_some() { "predicted" } else { "measured" };
            let found = format!(
                "GPU {ordinal}: {down:.1} GB/s to the device, {up:.1} GB/s to the host ({how}, pinned memory)"
            );
            match down.min(up) < LINK_SLOW_GB_S {
                true => Finding::note(
                    AREA,
                    found,
                    "see the link's width and generation with nvidia-smi -q -d PCIE while copies run; bind the process to \
                     the GPU's NUMA node",
                ),
                false => Finding::fine(AREA, found),
            }
        }
        Err(error) => Finding::problem(
            AREA,
            format!(
                "GPU {ordinal}: {} of pinned memory cannot be copied: {error}",
                bytes(LINK_BYTES)
            ),
            "see that host memory is free, and that the container may pin it",
        ),
    }
}

/// Gigabytes a second to the device and to the host.
fn measure(device: &Device) -> Result<(f64, f64), CopyError> {
    let stream = Stream::new(device)?;
    let pinned = PinnedBuffer::alloc(device, LINK_BYTES, HostAllocFlags::CACHED)?;
    let memory = DeviceBuffer::alloc(device, LINK_BYTES)?;
    let (begun, ended) = (Event::with_timing(device)?, Event::with_timing(device)?);
    let rate = |copy: &dyn Fn() -> Result<(), CopyError>| {
        // The first one wakes the link.
        copy()?;
        begun.record(&stream)?;
        for _ in 0..LINK_COPIES {
            copy()?;
        }
        ended.record(&stream)?;
        ended.synchronize()?;
        let ms = f64::from(ended.elapsed_ms_since(&begun)?).max(1e-6);
        Ok::<f64, CopyError>(LINK_BYTES as f64 * f64::from(LINK_COPIES) / ms / 1e6)
    };
    let down = rate(&|| stream.copy_to_device(memory.span(), &pinned, 0))?;
    let up = rate(&|| stream.copy_to_host(&pinned, 0, memory.span()))?;
    Ok((down, up))
}

fn peers(devices: &[Device]) -> Vec<Finding> {
    let mut apart = Vec::new();
    let mut pairs = 0;
    for one in devices {
        for other in devices.iter().filter(|other| other.ordinal() != one.ordinal()) {
            pairs += 1;
            if !one.can_access(other).unwrap_or(false) {
                apart.push(format!("{} to {}", one.ordinal(), other.ordinal()));
            }
        }
    }
    match (pairs, apart.is_empty()) {
        (0, _) => Vec::new(),
        (_, true) => {
            vec![Finding::fine("links", "every GPU reaches the memory of every other one")]
        }
        (_, false) => vec![Finding::note(
            "links",
            format!("without peer access: GPU {}", apart.join(", ")),
            "copies between these pass through host memory; nvidia-smi topo -p2p r says why",
        )],
    }
}
