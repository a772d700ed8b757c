//! Memory of a card, and host memory that it can reach.

use std::{collections::HashMap, ptr::NonNull, sync::Arc};

use cudarc::driver::sys;

use super::{
    CudaError,
    card::{Card, lock},
};
use crate::{Fresh, cpu::POISON};

/// The byte that fresh memory is full of.
pub(super) fn fill_byte(fresh: Fresh) -> u8 {
    match fresh {
        Fresh::Zeroed => 0,
        Fresh::Poisoned => POISON,
    }
}

/// Bytes of a card. Operations that use them keep them until the card has done with them.
pub(crate) struct DeviceMemory {
    card: Arc<Card>,
    address: u64,
    /// As asked for from the driver.
    size: usize,
}

/// Blocks that were given back, by size. They are used again, and go to the driver when memory is short or the card is
/// closed: giving one back there waits for all streams, also for those that wait for the thread that gives it back.
#[derive(Default)]
pub(crate) struct Blocks(HashMap<usize, Vec<u64>>);

impl Blocks {
    pub(super) fn take_all(&mut self) -> Vec<u64> {
        self.0.drain().flat_map(|(_, addresses)| addresses).collect()
    }

    fn take(&mut self, size: usize) -> Option<u64> {
        self.0.get_mut(&size).and_then(Vec::pop)
    }

    /// The smallest block of `size` bytes to twice as many, with its size.
    fn take_about(&mut self, size: usize) -> Option<(u64, usize)> {
        let fits = self.0.iter().filter(|(known, blocks)| (size..=2 * size).contains(*known) && !blocks.is_empty());
        let known = fits.map(|(known, _)| *known).min()?;
        self.take(known).map(|address| (address, known))
    }
}

impl DeviceMemory {
    /// `None` when the card has not that much left.
    pub(super) fn new(card: &Arc<Card>, bytes: usize, fresh: Fresh) -> Result<Option<DeviceMemory>, CudaError> {
        card.bind()?;
        let Some(size) = bytes.max(1).checked_next_multiple_of(512) else { return Ok(None) };
        let known = lock(&card.freed).take(size).map(|address| (address, size));
        DeviceMemory::known_or_new(card, known, size, fresh)
    }

    /// Of what was given back a block that may be larger, up to twice: for what is made seldom and never compared by size.
    pub(super) fn about(card: &Arc<Card>, bytes: usize, fresh: Fresh) -> Result<Option<DeviceMemory>, CudaError> {
        card.bind()?;
        let Some(size) = bytes.max(1).checked_next_multiple_of(512) else { return Ok(None) };
        let known = lock(&card.freed).take_about(size);
        DeviceMemory::known_or_new(card, known, size, fresh)
    }

    fn known_or_new(
        card: &Arc<Card>,
        known: Option<(u64, usize)>,
        size: usize,
        fresh: Fresh,
    ) -> Result<Option<DeviceMemory>, CudaError> {
        let (address, size) = match known {
            Some(known) => known,
            None => match allocate(card, size) {
                Ok(address) => (address, size),
                Err(error) if error.is_out_of_memory() => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        let memory = DeviceMemory { card: card.clone(), address, size };
        card.fill(address, fill_byte(fresh), size)?;
        Ok(Some(memory))
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Memory that is not there.
    #[cfg(all(test, feature = "gpu-tests"))]
    pub(super) fn nowhere(card: &Arc<Card>) -> DeviceMemory {
        DeviceMemory { card: card.clone(), address: 0xDEAD_BEEF_0000, size: 1 }
    }
}

fn allocate(card: &Card, size: usize) -> Result<u64, CudaError> {
    let ask = || {
        let mut address = 0;
        let _waits = card.beginnings.may_wait();
        // SAFETY: the context is current; writes one address.
        card.check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, size) }).map(|()| address)
    };
    ask().or_else(|error| {
        if !error.is_out_of_memory() || !give_back(card)? {
            return Err(error);
        }
        ask()
    })
}

/// Gives the driver all blocks that nobody uses; whether there were some. It may wait for every stream. The context is
/// current.
pub(super) fn give_back(card: &Card) -> Result<bool, CudaError> {
    let freed = lock(&card.freed).take_all();
    let _waits = card.beginnings.may_wait();
    for address in &freed {
        // SAFETY: nobody has had these blocks since they were given back.
        card.check("cuMemFree", unsafe { sys::cuMemFree_v2(*address) })?;
    }
    Ok(!freed.is_empty())
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        lock(&self.card.freed).0.entry(self.size).or_default().push(self.address);
    }
}

/// Host memory that the card reaches, in blocks of powers of two.
#[derive(Default)]
pub(crate) struct Pinned {
    /// What the driver gave.
    slabs: Vec<Slab>,
    /// By size: blocks that nobody uses.
    free: HashMap<usize, Vec<Slab>>,
}

#[derive(Clone, Copy)]
struct Slab {
    host: NonNull<u8>,
    card: u64,
}

// SAFETY: a pair of addresses; whoever holds the block is alone with its bytes (`PinnedBlock`).
unsafe impl Send for Slab {}

impl Pinned {
    const SMALLEST: usize = 4 << 10;
    /// Smaller blocks are cut out of one of these, because the driver takes long for each.
    const SLAB: usize = 4 << 20;

    pub(super) fn take_all(&mut self) -> Vec<NonNull<u8>> {
        self.free.clear();
        self.slabs.drain(..).map(|slab| slab.host).collect()
    }

    fn take(&mut self, card: &Card, size: usize) -> Result<Slab, CudaError> {
        if let Some(block) = self.free.get_mut(&size).and_then(Vec::pop) {
            return Ok(block);
        }
        let slab = allocate_pinned(card, size.max(Self::SLAB))?;
        self.slabs.push(slab);
        let blocks = (0..Self::SLAB / size).skip(1).map(|i| Slab {
            // SAFETY: inside the slab, which holds that many blocks.
            host: unsafe { slab.host.add(i * size) },
            card: slab.card + (i * size) as u64,
        });
        self.free.entry(size).or_default().extend(blocks);
        Ok(slab)
    }
}

fn allocate_pinned(card: &Card, size: usize) -> Result<Slab, CudaError> {
    let (mut host, mut address) = (std::ptr::null_mut(), 0);
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    let _waits = card.beginnings.may_wait();
    // SAFETY: the context is current; each call writes one address.
    unsafe {
        card.check("cuMemHostAlloc", sys::cuMemHostAlloc(&mut host, size, flags))?;
        card.check("cuMemHostGetDevicePointer", sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0))?;
        // Whatever is in it, its bytes are defined from here on.
        host.cast::<u8>().write_bytes(POISON, size);
    }
    let host = NonNull::new(host.cast()).expect("BUG: the driver gave no memory and no error");
    Ok(Slab { host, card: address })
}

/// A piece of pinned memory of one's own. Whoever drops it must know that the card has done with it.
pub(super) struct PinnedBlock {
    owner: Arc<Card>,
    block: Slab,
    size: usize,
}

// SAFETY: the block is a piece of memory, and `&PinnedBlock` gives no more than its addresses.
unsafe impl Sync for PinnedBlock {}

impl PinnedBlock {
    /// The context is current.
    pub(super) fn new(card: &Arc<Card>, bytes: usize) -> Result<PinnedBlock, CudaError> {
        let size = bytes.max(Pinned::SMALLEST).next_power_of_two();
        let block = lock(&card.pinned).take(card, size)?;
        Ok(PinnedBlock { owner: card.clone(), block, size })
    }

    /// The first byte. Aligned to 4 KiB.
    pub(super) fn host(&self) -> NonNull<u8> {
        self.block.host
    }

    /// Its address on the card.
    pub(super) fn card(&self) -> u64 {
        self.block.card
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        lock(&self.owner.pinned).free.entry(self.size).or_default().push(self.block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_about_a_size_is_the_smallest_that_holds_it_and_no_more_than_twice_as_large() {
        let mut blocks = Blocks::default();
        for (size, address) in [(1024, 1), (4096, 2), (2048, 3), (2048, 4)] {
            blocks.0.entry(size).or_default().push(address);
        }
        assert_eq!(blocks.take_about(1536), Some((4, 2048)));
        assert_eq!(blocks.take_about(1536), Some((3, 2048)));
        assert_eq!(blocks.take_about(1536), None);
        assert_eq!(blocks.take_about(2048), Some((2, 4096)));
        assert_eq!(blocks.take(1024), Some(1));
        assert_eq!(blocks.take_all(), []);
    }
}
