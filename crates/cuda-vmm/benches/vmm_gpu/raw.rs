//! The bare driver calls, without any bookkeeping: the baseline.

use std::ops::Range;

use cuda_driver::{AccessDesc, AllocationProp, Device};

/// Reserved addresses and physical pages, as raw driver handles.
pub(crate) struct Raw {
    device: Device,
    base: u64,
    pages: u64,
    page_bytes: u64,
    handles: Vec<u64>,
}

impl Raw {
    pub(crate) fn reserve(device: &Device, pages: u64, page_bytes: u64) -> Self {
        let base =
            device.run(|driver| driver.mem_address_reserve(pages * page_bytes, 0, 0)).unwrap();
        Self { device: device.clone(), base, pages, page_bytes, handles: Vec::new() }
    }

    /// Creates pages up to `count`, in order.
    pub(crate) fn create_to(&mut self, count: u64) {
        let prop = AllocationProp::on(self.device.ordinal());
        while (self.handles.len() as u64) < count {
            let page_bytes = self.page_bytes;
            let handle = self.device.run(|driver| driver.mem_create(page_bytes, prop)).unwrap();
            self.handles.push(handle);
        }
    }

    /// Maps existing pages, each by separate calls.
    pub(crate) fn map(&self, pages: Range<u64>) {
        let access = [AccessDesc { device: self.device.ordinal() }];
        for page in pages {
            let address = self.base + page * self.page_bytes;
            let handle = self.handles[page as usize];
            self.device
                .run(|driver| {
                    // SAFETY: `handle` was created, and is released only when `self` is dropped.
                    unsafe { driver.mem_map(address, self.page_bytes, 0, handle) }?;
                    driver.mem_set_access(address, self.page_bytes, &access)
                })
                .unwrap();
        }
    }

    pub(crate) fn unmap(&self, pages: Range<u64>) {
        for page in pages {
            let address = self.base + page * self.page_bytes;
            self.device.run(|driver| driver.mem_unmap(address, self.page_bytes)).unwrap();
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.device
            .run(|driver| {
                driver.mem_unmap(self.base, self.pages * self.page_bytes)?;
                driver.mem_address_free(self.base, self.pages * self.page_bytes)
            })
            .unwrap();
        for &handle in &self.handles {
            // SAFETY: created by `create_to`, unmapped above, released once.
            self.device.run(|driver| unsafe { driver.mem_release(handle) }).unwrap();
        }
    }
}
