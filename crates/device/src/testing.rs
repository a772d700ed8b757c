//! Views without a device, for unit tests of kernels and regions.

use std::sync::Arc;

use crate::{Access, Allocation, Args, DType, Element, Fresh, MemoryKind, Shape, View, cpu::Storage, memory::Backing};

/// A view of fresh memory.
pub(crate) fn scratch(label: &str, dims: &[usize], dtype: DType, fresh: Fresh) -> View {
    let shape = Shape::new(dims).expect("a test's shape");
    let bytes = shape.numel() * dtype.size_bytes();
    let alloc = Allocation {
        rank: 0,
        id: 0,
        label: label.into(),
        bytes,
        kind: MemoryKind::Other,
        storage: Some(Backing::Host(Storage::new(bytes, fresh).expect("little memory"))),
        only_stream: None,
        owner: Arc::default(),
    };
    View::whole(Arc::new(alloc), shape, dtype)
}

/// A contiguous view that holds `values`.
pub(crate) fn holding<T: Element>(label: &str, dims: &[usize], values: &[T]) -> View {
    let view = scratch(label, dims, T::DTYPE, Fresh::Poisoned);
    put(&view, values);
    view
}

/// Overwrites a view, strided or not, in row-major order.
pub(crate) fn put<T: Element>(view: &View, values: &[T]) {
    assert_eq!(view.numel(), values.len());
    let access = [Access::write(view)];
    // SAFETY: the test's own memory, touched by this thread only.
    let mut args = unsafe { Args::new(&access) };
    let mut rows = args.rows_mut::<T>(0).expect("declared as written");
    for (i, row) in values.chunks_exact(view.cols().max(1)).enumerate() {
        rows.row_mut(i).copy_from_slice(row);
    }
}

/// All values of a view, strided or not, in row-major order.
pub(crate) fn get<T: Element>(view: &View) -> Vec<T> {
    let access = [Access::read(view)];
    // SAFETY: the test's own memory, touched by this thread only.
    let args = unsafe { Args::new(&access) };
    let rows = args.rows::<T>(0).expect("declared as read");
    (0..rows.len()).flat_map(|i| rows.row(i).to_vec()).collect()
}
