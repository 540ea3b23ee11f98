//! Asynchronous copies. They run as late as allowed, so that a missing wait is found.

use super::super::op::{Access, AsyncOp};
use super::block::ThreadBlock;
use super::observation::Ran;
use super::spaces::Accessor;

#[derive(Clone, Copy, Debug)]
pub(super) struct PendingCopy {
    to: Access,
    from: Access,
    destination: u64,
    origin: u64,
    bytes: u32,
    /// Number of bytes to read. The rest is filled with zeros.
    read: u32,
    /// Number of groups that the thread had committed before.
    group: u32,
}

impl ThreadBlock<'_, '_> {
    /// Executes an asynchronous instruction of a thread.
    pub(super) fn asynchronous(&mut self, thread: usize, op: AsyncOp, by: Accessor) -> Ran<()> {
        match op {
            AsyncOp::Copy { to, from, bytes, source } => {
                let read = source
                    .map_or(bytes, |register| (self.register(thread, register) as u32).min(bytes));
                let (destination, origin) =
                    (self.address_of(thread, to), self.address_of(thread, from));
                let group = self.threads[thread].groups;
                let copy = PendingCopy { to, from, destination, origin, bytes, read, group };
                self.copies.entry(thread).or_default().push(copy);
            }
            AsyncOp::Commit => self.threads[thread].groups += 1,
            AsyncOp::WaitAll => self.complete(thread, u32::MAX, by)?,
            AsyncOp::Wait { pending } => {
                let pending = self.register(thread, pending) as u32;
                let done = self.threads[thread].groups.saturating_sub(pending);
                self.complete(thread, done, by)?;
            }
        }
        Ok(())
    }

    fn address_of(&self, thread: usize, access: Access) -> u64 {
        self.register(thread, access.base).wrapping_add_signed(access.offset)
    }

    /// Runs the copies of all groups before `done`.
    pub(super) fn complete(&mut self, thread: usize, done: u32, by: Accessor) -> Ran<()> {
        let Some(copies) = self.copies.get_mut(&thread) else { return Ok(()) };
        let ready: Vec<PendingCopy> = copies.iter().copied().filter(|c| c.group < done).collect();
        copies.retain(|copy| copy.group >= done);
        for copy in ready {
            let mut data = [0; 16];
            if copy.read > 0 {
                self.read_source(&copy, by, &mut data)?;
            }
            let data = &data[..copy.bytes as usize];
            self.spaces.store(&copy.to, copy.destination, data, by)?;
        }
        Ok(())
    }

    fn read_source(&mut self, copy: &PendingCopy, by: Accessor, data: &mut [u8; 16]) -> Ran<()> {
        if copy.read == copy.bytes {
            return self.spaces.load(&copy.from, copy.origin, copy.bytes, by, data);
        }
        for offset in 0..copy.read {
            let mut byte = [0; 16];
            let address = copy.origin + u64::from(offset);
            self.spaces.load(&copy.from, address, 1, by, &mut byte)?;
            data[offset as usize] = byte[0];
        }
        Ok(())
    }
}
