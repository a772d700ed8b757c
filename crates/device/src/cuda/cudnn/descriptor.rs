//! Descriptions that the library works with, each made, filled, and then only read.

use std::{ffi::c_void, ptr, sync::Arc};

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type, cudnnBackendDescriptorType_t as Kind,
    cudnnBackendHeurMode_t, cudnnDataType_t, cudnnPointwiseMode_t, cudnnReduceTensorOp_t,
};

use super::calls::{Calls, RawDescriptor, RawHandle};
use crate::cuda::CudaError;

/// A description, destroyed with its last owner.
pub(super) struct Descriptor {
    raw: RawDescriptor,
    calls: Arc<Calls>,
}

// SAFETY: a description is filled by one thread and only read afterwards; the library takes it from any.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

/// What an attribute may hold.
///
/// # Safety
/// A value is laid out as the library's type `TYPE`.
pub(super) unsafe trait Attribute {
    const TYPE: Type;
}

/// Another description.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Part(RawDescriptor);

/// An address on the card or on the host.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Address(pub(super) *mut c_void);

/// The library's handle.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Opened(pub(super) RawHandle);

macro_rules! attributes {
    ($($held:ty => $kind:ident),+ $(,)?) => {$(
        // SAFETY: the library's types of these names, numbers and pointers.
        unsafe impl Attribute for $held {
            const TYPE: Type = Type::$kind;
        }
    )+};
}
attributes! {
    Opened => CUDNN_TYPE_HANDLE,
    cudnnDataType_t => CUDNN_TYPE_DATA_TYPE,
    bool => CUDNN_TYPE_BOOLEAN,
    i64 => CUDNN_TYPE_INT64,
    Address => CUDNN_TYPE_VOID_PTR,
    cudnnBackendHeurMode_t => CUDNN_TYPE_HEUR_MODE,
    cudnnPointwiseMode_t => CUDNN_TYPE_POINTWISE_MODE,
    Part => CUDNN_TYPE_BACKEND_DESCRIPTOR,
    cudnnReduceTensorOp_t => CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
}

impl Descriptor {
    pub(super) fn new(calls: &Arc<Calls>, kind: Kind) -> Result<Descriptor, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (calls.create_descriptor)(kind as u32, &mut raw) };
        calls.check("cudnnBackendCreateDescriptor", code)?;
        Ok(Descriptor { raw, calls: calls.clone() })
    }

    /// Copies `values`; parts must outlive whatever they are parts of.
    pub(super) fn set<T: Attribute>(self, name: Name, values: &[T]) -> Result<Descriptor, CudaError> {
        let (count, first) = (values.len() as i64, values.as_ptr().cast());
        // SAFETY: the description lives; there are as many values as it is told, of the type that it is told.
        let code = unsafe { (self.calls.set_attribute)(self.raw, name as u32, T::TYPE as u32, count, first) };
        self.calls.check("cudnnBackendSetAttribute", code)?;
        Ok(self)
    }

    /// Checks it as a whole; from here on it is only read.
    pub(super) fn finalize(self) -> Result<Descriptor, CudaError> {
        // SAFETY: the description lives.
        let code = unsafe { (self.calls.finalize)(self.raw) };
        self.calls.check("cudnnBackendFinalize", code)?;
        Ok(self)
    }

    /// To be set in another one.
    pub(super) fn part(&self) -> Part {
        Part(self.raw)
    }

    pub(super) fn number(&self, name: Name) -> Result<i64, CudaError> {
        let (mut value, mut count) = (0i64, 0i64);
        // SAFETY: the description lives; there is room for the one number that is asked for.
        let code = unsafe {
            let (kind, into) = (Type::CUDNN_TYPE_INT64 as u32, ptr::from_mut(&mut value).cast());
            (self.calls.get_attribute)(self.raw, name as u32, kind, 1, &mut count, into)
        };
        self.calls.check("cudnnBackendGetAttribute", code).map(|()| value)
    }

    /// Fills descriptions that it gives out, as many as there are; the rest of `into` stays empty and goes.
    pub(super) fn fill(&self, name: Name, mut into: Vec<Descriptor>) -> Result<Vec<Descriptor>, CudaError> {
        let mut parts: Vec<Part> = into.iter().map(Descriptor::part).collect();
        let mut count = 0;
        // SAFETY: the description lives; there is room for as many handles as are asked for, and each is of one.
        let code = unsafe {
            let (kind, room) = (Type::CUDNN_TYPE_BACKEND_DESCRIPTOR as u32, parts.len() as i64);
            (self.calls.get_attribute)(self.raw, name as u32, kind, room, &mut count, parts.as_mut_ptr().cast())
        };
        self.calls.check("cudnnBackendGetAttribute", code)?;
        into.truncate(count as usize);
        Ok(into)
    }

    pub(super) fn raw(&self) -> RawDescriptor {
        self.raw
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { (self.calls.destroy_descriptor)(self.raw) };
    }
}
