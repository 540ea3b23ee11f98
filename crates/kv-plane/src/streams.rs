//! The streams of a device: the engine's, and those that carry copies between the device and host memory.

use cuda_driver::{Device, DeviceError, Fence, Stream, guard};

use crate::runs::COMPUTE;

/// The streams of one device, which all groups of blocks share, and the fences after them.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) compute: Stream,
    /// Carry the copies to host memory and those back, each in the order of the decisions.
    pub(crate) transfers: [Stream; 2],
    /// Fences of completed steps, to be recorded again.
    spare: Vec<Fence>,
    /// Whether something was enqueued in each direction with no fence after it yet.
    unfenced: [bool; 2],
    /// Whether something was enqueued in each direction that the compute stream does not wait for yet.
    unawaited: [bool; 2],
}

impl Streams {
    pub(crate) fn new(compute: &Stream) -> Result<Self, DeviceError> {
        let device = compute.device();
        Ok(Self {
            compute: compute.clone(),
            transfers: [Stream::new(device)?, Stream::new(device)?],
            spare: Vec::new(),
            unfenced: [false; 2],
            unawaited: [false; 2],
        })
    }

    pub(crate) fn device(&self) -> &Device {
        self.compute.device()
    }

    pub(crate) fn lane(&self, lane: usize) -> &Stream {
        self.transfers.get(lane).unwrap_or(&self.compute)
    }

    /// Notes that copies are enqueued in a lane.
    pub(crate) fn use_lane(&mut self, lane: usize) {
        if lane != COMPUTE {
            (self.unfenced[lane], self.unawaited[lane]) = (true, true);
        }
    }

    /// Makes what is enqueued in a lane from now on wait for what was enqueued in another one so far.
    pub(crate) fn wait_for(&mut self, here: usize, there: usize) -> Result<(), DeviceError> {
        let fence = self.fence_after(there)?;
        guard!("cache.lanes-wait", fence.hold_back(self.lane(here))?);
        // A wait is for what was recorded before it, whatever is recorded later.
        self.spare.push(fence);
        Ok(())
    }

    /// Makes the engine's work wait for the copies of the directions in `needed`, and adds a fence after
    /// all copies that have none yet. Calls `ordered` with each direction that the work waits for.
    pub(crate) fn fence_copies(
        &mut self,
        needed: [bool; 2],
        fences: &mut Vec<Fence>,
        mut ordered: impl FnMut(usize),
    ) -> Result<(), DeviceError> {
        for (lane, needed) in needed.into_iter().enumerate() {
            let waits = needed && self.unawaited[lane];
            if !waits && !self.unfenced[lane] {
                continue;
            }
            let fence = self.fence_after(lane)?;
            let holds = guard!("cache.work-waits-for-copies", waits, else false);
            let held = if holds { fence.hold_back(&self.compute) } else { Ok(()) };
            fences.push(fence);
            held?;
            self.unfenced[lane] = false;
            if waits {
                self.unawaited[lane] = false;
                ordered(lane);
            }
        }
        Ok(())
    }

    /// Whether copies were enqueued in each direction that the compute stream does not wait for yet.
    pub(crate) fn unawaited(&self) -> [bool; 2] {
        self.unawaited
    }

    /// A fence after what was enqueued in a lane, by the event of a spare fence that has no other holder.
    pub(crate) fn fence_after(&mut self, lane: usize) -> Result<Fence, DeviceError> {
        let stream = self.transfers.get(lane).unwrap_or(&self.compute);
        match self.spare.pop() {
            Some(fence) => fence.renew(stream),
            None => Fence::record(stream),
        }
    }

    /// Fences that wait to be used again.
    pub(crate) fn spare_count(&self) -> usize {
        self.spare.len()
    }

    pub(crate) fn keep_spare(&mut self, fence: Fence) {
        self.spare.push(fence);
    }

    /// Waits until nothing that was enqueued runs any more, and says whether that is certain.
    pub(crate) fn come_to_rest(&self) -> bool {
        let [out, back] = &self.transfers;
        let streams = [out, back, &self.compute];
        let waited = streams.into_iter().all(|stream| stream.synchronize().is_ok());
        // A refusal may be temporary, so ask again. A lost device runs no work any more.
        waited || self.device().synchronize().is_ok() || self.device().poison().is_some()
    }
}
