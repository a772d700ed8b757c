//! Products through cuBLASLt: for each shape an algorithm is chosen once, and then only run. What was measured is
//! adopted; else it is the library's first.

use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_void},
    ptr,
    sync::{Arc, Mutex},
};

use cudarc::cublaslt::sys;

use super::{
    CudaError,
    card::{RawStream, lock},
    choices::{Algorithm, Choice},
    numerics,
    product::{Adds, Beta, Follow, Product, ProductShape},
    workspace::Workspace,
};
use crate::{DType, ops::MatrixShape};

/// The library, opened for one card.
pub(super) struct BlasLt {
    handle: sys::cublasLtHandle_t,
    plans: Mutex<HashMap<ProductShape, Planned>>,
}

// SAFETY: the library takes one handle from any thread, also from several at a time.
unsafe impl Send for BlasLt {}
// SAFETY: as above.
unsafe impl Sync for BlasLt {}

/// What computes products of one shape.
#[derive(Clone)]
pub(super) enum Planned {
    Library(Arc<Plan>),
    /// Our kernel for compute capability 9.0, which was faster.
    Hopper,
    /// What stands behind them: the library has no algorithm, or none that is worth it.
    Otherwise,
}

/// How the library computes products of one shape.
pub(super) struct Plan {
    layouts: Arc<Layouts>,
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Bytes that the algorithm works in.
    pub(super) workspace: usize,
}

/// What an algorithm may work in, at most: as much as the library's makers advise for these cards.
pub(super) const WORKSPACE: usize = 32 << 20;

impl BlasLt {
    /// The card's context is current.
    pub(super) fn open() -> Result<BlasLt, CudaError> {
        // SAFETY: opens a library that is made to be opened this way.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::Missing { library: "libcublasLt", what_for: "CUDA's products, in the toolkit" });
        }
        let mut handle = ptr::null_mut();
        // SAFETY: the library is there; writes one handle.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut handle) })?;
        Ok(BlasLt { handle, plans: Mutex::default() })
    }

    /// What was chosen for `shape`. The card's context is current.
    pub(super) fn plan(&self, shape: &ProductShape) -> Result<Planned, CudaError> {
        let mut plans = lock(&self.plans);
        if let Some(plan) = plans.get(shape) {
            return Ok(plan.clone());
        }
        let plan = self.choose(shape)?.map_or(Planned::Otherwise, |plan| Planned::Library(Arc::new(plan)));
        plans.insert(*shape, plan.clone());
        Ok(plan)
    }

    /// The library's first: `shape` was not measured.
    fn choose(&self, shape: &ProductShape) -> Result<Option<Plan>, CudaError> {
        tracing::debug!(%shape, "cuda.take_first_algorithm");
        Ok(self.candidates(shape, 1)?.into_iter().next())
    }

    /// Up to `most` plans, in the order in which the library would take them.
    pub(super) fn candidates(&self, shape: &ProductShape, most: usize) -> Result<Vec<Plan>, CudaError> {
        let (preference, layouts) = (Preference::new(shape)?, Arc::new(Layouts::new(shape)?));
        let (mut found, mut count) = (vec![empty_result(); most], 0);
        let description = Description::new(shape, 0, 0)?;
        // SAFETY: all descriptions live; there is room for as many results as are asked for.
        let code = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.0,
                layouts.b.0,
                layouts.a.0,
                layouts.c.0,
                layouts.d.0,
                preference.0,
                most as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if is_refusal(code) {
            return Ok(Vec::new());
        }
        check("cublasLtMatmulAlgoGetHeuristic", code)?;
        let mut plans = Vec::new();
        for found in found.into_iter().take(count as usize).filter(is_usable) {
            if numerics::is_allowed(shape, &found.algo)? {
                let (algorithm, workspace) = (found.algo, found.workspaceSize);
                plans.push(Plan { layouts: layouts.clone(), algorithm, workspace });
            }
        }
        Ok(plans)
    }

    /// The plan for a choice of an earlier run; none if this library or card does not take it.
    fn restore(&self, shape: &ProductShape, algorithm: &Algorithm) -> Result<Option<Plan>, CudaError> {
        let layouts = Arc::new(Layouts::new(shape)?);
        let description = Description::new(shape, 0, 0)?;
        let (mut found, algo) = (empty_result(), sys::cublasLtMatmulAlgo_t { data: algorithm.words });
        // SAFETY: all descriptions live; writes one result. What is in the words is checked by this very call.
        let code = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                description.0,
                layouts.b.0,
                layouts.a.0,
                layouts.c.0,
                layouts.d.0,
                &algo,
                &mut found,
            )
        };
        let fits = code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= algorithm.workspace;
        let fits = fits && numerics::is_allowed(shape, &algo)?;
        Ok(fits.then_some(Plan { layouts, algorithm: algo, workspace: algorithm.workspace }))
    }

    /// Whether `algorithm` can be adopted here.
    pub(super) fn takes(&self, shape: &ProductShape, algorithm: &Algorithm) -> Result<bool, CudaError> {
        Ok(self.restore(shape, algorithm)?.is_some())
    }

    /// From here on products of `shape` are computed by `choice`.
    pub(super) fn adopt(&self, shape: &ProductShape, choice: &Choice) -> Result<(), CudaError> {
        let plan = match choice {
            Choice::Otherwise => Planned::Otherwise,
            Choice::Hopper => Planned::Hopper,
            Choice::Algorithm(algorithm) => match self.restore(shape, algorithm)? {
                Some(plan) => Planned::Library(Arc::new(plan)),
                // Not on this card: the library's own choice stays.
                None => return Ok(()),
            },
        };
        lock(&self.plans).insert(*shape, plan);
        Ok(())
    }

    /// Queues `product` in `stream`, which may be one that captures. The context is current, the workspace is as large
    /// as the plan says and used by nothing that may run at the same time.
    pub(super) fn run(
        &self,
        product: &Product,
        plan: &Plan,
        stream: RawStream,
        workspace: Option<&Workspace>,
    ) -> Result<(), CudaError> {
        let description = Description::new(&product.shape, product.bias, product.aux)?;
        let (one, zero) = (1.0f32, 0.0f32);
        let host = |value: &f32| ptr::from_ref(value).cast::<c_void>();
        let (alpha, beta) = match product.beta {
            Beta::Zero => (host(&one), host(&zero)),
            Beta::One => (host(&one), host(&one)),
            Beta::Device(beta) => {
                let workspace = workspace.expect("BUG: factors on the device without a workspace");
                (workspace.one() as *const c_void, beta as *const c_void)
            }
        };
        let scratch = workspace.filter(|_| plan.workspace > 0).map_or(0, Workspace::scratch);
        // SAFETY: the layouts describe the matrices at these addresses (`Product`), which whoever submitted the
        // operation keeps until the stream has passed it; factors on the host are read before the call returns.
        let code = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                description.0,
                alpha,
                product.b as *const c_void,
                plan.layouts.b.0,
                product.a as *const c_void,
                plan.layouts.a.0,
                beta,
                product.c as *const c_void,
                plan.layouts.c.0,
                product.d as *mut c_void,
                plan.layouts.d.0,
                &plan.algorithm,
                scratch as *mut c_void,
                plan.workspace,
                stream.0.cast(),
            )
        };
        check("cublasLtMatmul", code)
    }

    /// Gives the handle back; plans hold none of it. The card's context is current.
    pub(super) fn close(&self) {
        lock(&self.plans).clear();
        // SAFETY: made in `open`; the card that owns this calls it once, when nothing is on its way.
        let _ = unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

/// The version of the library, as it numbers itself.
pub(super) fn version() -> usize {
    // SAFETY: the library is there (`BlasLt::open` comes first); gives a number.
    unsafe { sys::cublasLtGetVersion() }
}

impl Plan {
    /// What an other run restores it from.
    pub(super) fn algorithm(&self) -> Algorithm {
        Algorithm { words: self.algorithm.data, workspace: self.workspace }
    }
}

/// The library has no algorithm for what was asked.
fn is_refusal(code: sys::cublasStatus_t) -> bool {
    matches!(code, sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED | sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE)
}

fn is_usable(found: &sys::cublasLtMatmulHeuristicResult_t) -> bool {
    found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE
}

fn empty_result() -> sys::cublasLtMatmulHeuristicResult_t {
    sys::cublasLtMatmulHeuristicResult_t {
        algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        workspaceSize: 0,
        state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        wavesCount: 0.0,
        reserved: [0; 4],
    }
}

const fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::I32 => sys::cudaDataType_t::CUDA_R_32I,
        DType::I16 => sys::cudaDataType_t::CUDA_R_16I,
    }
}

/// Of the matrices of a product, by the names that we have for them: in the library's order of columns a matrix of ours
/// is transposed, so to it the product is that of b and a.
struct Layouts {
    a: Layout,
    b: Layout,
    c: Layout,
    d: Layout,
}

impl Layouts {
    fn new(shape: &ProductShape) -> Result<Layouts, CudaError> {
        let [a, b, c, d] = [&shape.a, &shape.b, &shape.c, &shape.d].map(Layout::new);
        Ok(Layouts { a: a?, b: b?, c: c?, d: d? })
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

// SAFETY: a description that is only read after it was made.
unsafe impl Send for Layout {}
// SAFETY: as above.
unsafe impl Sync for Layout {}

impl Layout {
    fn new(m: &MatrixShape) -> Result<Layout, CudaError> {
        let mut layout = ptr::null_mut();
        // SAFETY: writes one handle.
        let code =
            unsafe { sys::cublasLtMatrixLayoutCreate(&mut layout, data_type(m.dtype), m.cols, m.rows, m.pitch as i64) };
        check("cublasLtMatrixLayoutCreate", code).map(|()| Layout(layout))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// What is computed, apart from sizes.
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new(shape: &ProductShape, bias: u64, aux: u64) -> Result<Description, CudaError> {
        use sys::{cublasLtEpilogue_t as E, cublasLtMatmulDescAttributes_t as Set};
        let mut raw = ptr::null_mut();
        // No TF32: sums and factors of f32 are f32.
        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F);
        // SAFETY: writes one handle.
        check("cublasLtMatmulDescCreate", unsafe { sys::cublasLtMatmulDescCreate(&mut raw, compute, scale) })?;
        let own = Description(raw);
        // 0 is as stored, 1 transposed.
        own.set(Set::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(shape.trans.b()))?;
        own.set(Set::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(shape.trans.a()))?;
        if shape.adds == Adds::PartOfC {
            let mode = sys::cublasLtPointerMode_t::CUBLASLT_POINTER_MODE_DEVICE;
            own.set(Set::CUBLASLT_MATMUL_DESC_POINTER_MODE, mode as i32)?;
        }
        let (epilogue, bias_type, pitch) = match shape.follow {
            Follow::Nothing => (E::CUBLASLT_EPILOGUE_DEFAULT, None, None),
            Follow::Bias(dtype) => (E::CUBLASLT_EPILOGUE_BIAS, Some(dtype), None),
            Follow::BiasGelu(dtype, aux) => (E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS, Some(dtype), Some(aux.pitch)),
            Follow::GeluSlope(aux) => (E::CUBLASLT_EPILOGUE_DGELU, None, Some(aux.pitch)),
        };
        own.set(Set::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32)?;
        if let Some(dtype) = bias_type {
            own.set(Set::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(dtype) as i32)?;
            own.set(Set::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        if let Some(pitch) = pitch {
            own.set(Set::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, pitch as i64)?;
            own.set(Set::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux)?;
        }
        Ok(own)
    }

    fn set<T>(&self, which: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<(), CudaError> {
        // SAFETY: the description lives; each attribute is given a value of its type, which is copied.
        let code =
            unsafe { sys::cublasLtMatmulDescSetAttribute(self.0, which, ptr::from_ref(&value).cast(), size_of::<T>()) };
        check("cublasLtMatmulDescSetAttribute", code)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(shape: &ProductShape) -> Result<Preference, CudaError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Set;
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cublasLtMatmulPreferenceCreate", unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) })?;
        let own = Preference(raw);
        own.set(Set::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE)?;
        // Parts of a sum, if it is cut, are added in f32 and in order: results do not depend on who comes first.
        let reduction = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        own.set(Set::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction as u32)?;
        own.set(Set::CUBLASLT_MATMUL_PREF_IMPL_MASK, numerics::allowed(shape))?;
        own.set(Set::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, shape.b.align)?;
        own.set(Set::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, shape.a.align)?;
        own.set(Set::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape.c.align)?;
        own.set(Set::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, shape.d.align)?;
        Ok(own)
    }

    fn set<T>(&self, which: sys::cublasLtMatmulPreferenceAttributes_t, value: T) -> Result<(), CudaError> {
        // SAFETY: the preference lives; each attribute is given a value of its type, which is copied.
        let code = unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(self.0, which, ptr::from_ref(&value).cast(), size_of::<T>())
        };
        check("cublasLtMatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

pub(super) fn check(call: &'static str, code: sys::cublasStatus_t) -> Result<(), CudaError> {
    if code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    let text = |get: unsafe fn(sys::cublasStatus_t) -> *const c_char| {
        // SAFETY: `get` gives a text that lives as long as the library, or null.
        unsafe {
            let text = get(code);
            if text.is_null() { "unknown".to_owned() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        }
    };
    let (name, text) = (text(sys::cublasLtGetStatusName), text(sys::cublasLtGetStatusString));
    Err(CudaError::Call { call, code: code as u32, name, text })
}
