//! Bytes that claims, not references, guard.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
};

/// Bytes repeated through memory that nobody has written, if poisoning is on: NaN as f32 and bf16, -1 as i32 and i16.
pub(crate) const POISON: u8 = 0xFF;

/// What fresh memory holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fresh {
    /// Zeros.
    Zeroed,
    /// NaN in floats and -1 in integers, so that a read before the first write shows.
    Poisoned,
}

/// An aligned block. All of it is initialised from the start, and any bit pattern is valid for every
/// [`Element`](crate::Element), so reads are defined whatever was written.
pub(crate) struct Storage {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: `Storage` hands out a bare pointer only. Whoever dereferences it holds a claim on those bytes
// (`Args::new`), so two threads never touch the same byte with a write among them.
unsafe impl Send for Storage {}
// SAFETY: as above; `&Storage` gives no more than the pointer.
unsafe impl Sync for Storage {}

impl Storage {
    /// Vector loads of any width start aligned, and no two allocations share a cache line.
    pub(crate) const ALIGN: usize = 128;

    /// Pages are touched here, once: first touch costs several times a copy and would land in the first step.
    /// `None` when there is not that much memory.
    pub(crate) fn new(bytes: usize, fresh: Fresh) -> Option<Storage> {
        let layout = Layout::from_size_align(bytes.max(1), Self::ALIGN).ok()?;
        // SAFETY: the size is not zero.
        let raw = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(raw)?;
        let fill = match fresh {
            Fresh::Zeroed => 0,
            Fresh::Poisoned => POISON,
        };
        // SAFETY: the block is `layout.size()` bytes long and nobody else has it yet.
        unsafe { base.as_ptr().write_bytes(fill, layout.size()) };
        Some(Storage { base, layout })
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; views that could reach it are gone with the last `Arc`.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}
