//! Kernels from source, through NVRTC, kept in a folder between runs.

use std::{
    collections::BTreeMap,
    ffi::{CString, c_char},
    fmt, fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    num::NonZero,
    path::{Path, PathBuf},
    ptr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use cudarc::nvrtc::sys;

use super::{
    CudaError,
    card::lock,
    kept,
    kernels::{self, COMMON, Source},
};

/// Compute capability that kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash)]
pub struct Arch {
    /// Before the point: 9 of 9.0.
    pub major: u32,
    /// Behind the point: 0 of 9.0.
    pub minor: u32,
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

/// A source that has been compiled.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Compiled {
    /// Name of the source.
    pub file: &'static str,
    /// The functions in it.
    pub functions: &'static [&'static str],
    /// The object file.
    pub image: Vec<u8>,
}

/// Compiles all kernels that cards of `arch` have. Needs the compiler (libnvrtc) and no card.
///
/// # Errors
/// [`CudaError::Missing`] without the compiler, [`CudaError::Compile`] with its log.
pub fn compile_kernels(arch: Arch) -> Result<Vec<Compiled>, CudaError> {
    open()?;
    side_by_side(kernels::sources(arch).collect(), |(source, target)| {
        let image = compile(source, target)?;
        Ok(Compiled { file: source.file, functions: source.functions, image })
    })
}

/// What `make` makes of each, in their order; on as many threads as the host has processors. With failures, the first one.
pub(super) fn side_by_side<S: Sync, T: Send>(
    sources: Vec<S>,
    make: impl Fn(&S) -> Result<T, CudaError> + Sync,
) -> Result<Vec<T>, CudaError> {
    let (next, made) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(source) = sources.get(at) else { return };
            let one = make(source);
            lock(&made).insert(at, one);
        }
    };
    thread::scope(|scope| {
        let others = thread::available_parallelism().map_or(1, NonZero::get).min(sources.len()).saturating_sub(1);
        // What cannot be started leaves its work to those that run.
        let threads = (0..others).map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok());
        let started: Vec<_> = threads.collect();
        work();
        drop(started);
    });
    made.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// Opens the compiler, or says that it is missing.
pub(super) fn open() -> Result<(), CudaError> {
    // SAFETY: opens a library that is made to be opened this way.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(CudaError::Missing { library: "libnvrtc", what_for: "CUDA's run-time compiler, in the toolkit" })
}

fn options(target: &str) -> [String; 3] {
    // Contracted multiply-adds would differ between versions of the compiler; those that are meant are written out.
    [format!("--gpu-architecture={target}"), "--std=c++17".to_owned(), "--fmad=false".to_owned()]
}

fn compile(source: &Source, target: &str) -> Result<Vec<u8>, CudaError> {
    let text = CString::new(format!("{COMMON}{}", source.text)).expect("BUG: a source with NUL");
    let name = CString::new(source.file).expect("BUG: a name with NUL");
    let options = options(target).map(|option| CString::new(option).expect("BUG: an option with NUL"));
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let program = Program::new(&text, &name)?;
    // SAFETY: the program lives; the options live until the call returns.
    let code = unsafe { sys::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) };
    let failed = |log: String| CudaError::Compile { file: source.file, arch: target.to_owned(), log };
    if code != sys::nvrtcResult::NVRTC_SUCCESS {
        let log = program.bytes(sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog);
        let log = log.map(|log| String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned());
        return Err(failed(log.unwrap_or_else(|code| format!("{code:?}, and no log"))));
    }
    let image = program.bytes(sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN);
    image.map_err(|code| failed(format!("no object file: {code:?}")))
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn new(text: &CString, name: &CString) -> Result<Program, CudaError> {
        let mut program = ptr::null_mut();
        // SAFETY: the library is there (`open`); both texts are copied before the call returns.
        let code =
            unsafe { sys::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null()) };
        match code {
            sys::nvrtcResult::NVRTC_SUCCESS => Ok(Program(program)),
            code => Err(CudaError::Call {
                call: "nvrtcCreateProgram",
                code: code as u32,
                name: format!("{code:?}"),
                text: "the compiler takes no source".to_owned(),
            }),
        }
    }

    /// What a pair of functions tells: first how long it is, then what.
    fn bytes(
        &self,
        size: unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
        get: unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
    ) -> Result<Vec<u8>, sys::nvrtcResult> {
        let mut count = 0;
        // SAFETY: the program lives; writes one number.
        let code = unsafe { size(self.0, &mut count) };
        if code != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(code);
        }
        let mut bytes = vec![0u8; count];
        // SAFETY: there is room for as many bytes as it said.
        match unsafe { get(self.0, bytes.as_mut_ptr().cast()) } {
            sys::nvrtcResult::NVRTC_SUCCESS => Ok(bytes),
            code => Err(code),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// Object files of earlier runs.
pub(super) struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    pub(super) fn new(folder: Option<PathBuf>) -> Cache {
        Cache { folder }
    }

    /// The object file of `source` for `target`. A folder that cannot be used costs time, nothing else; it is told in the log.
    pub(super) fn compiled(&self, source: &Source, target: &str) -> Result<Vec<u8>, CudaError> {
        let Some(folder) = &self.folder else { return compile(source, target) };
        let key = key(source, target);
        let mut hash = DefaultHasher::new();
        key.hash(&mut hash);
        let path = folder.join(format!("{}-{target}-{:016x}.kernel", source.file, hash.finish()));
        if let Some(image) = fs::read(&path).ok().and_then(|file| entry(&file, &key).map(<[u8]>::to_vec)) {
            return Ok(image);
        }
        let image = compile(source, target)?;
        if let Err(error) = keep(&path, &key, &image) {
            tracing::warn!(path = %path.display(), %error, "cuda.keep_kernel");
        }
        Ok(image)
    }
}

/// All that an object file depends on.
fn key(source: &Source, target: &str) -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there (`open`); writes two numbers. Without an answer the version is 0.0.
    let _ = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    format!("nvrtc {major}.{minor}\n{}\n{COMMON}{}", options(target).join(" "), source.text)
}

/// The object file in `file`, if it was made from `key`.
fn entry<'f>(file: &'f [u8], key: &str) -> Option<&'f [u8]> {
    let (length, rest) = file.split_first_chunk::<8>()?;
    let (kept, image) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    (kept == key.as_bytes() && !image.is_empty()).then_some(image)
}

fn keep(path: &Path, key: &str, image: &[u8]) -> io::Result<()> {
    let mut file = (key.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(key.as_bytes());
    file.extend_from_slice(image);
    kept::write(path, &file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_side_by_side_keeps_its_order_and_fails_with_the_first_failure() {
        let wide: Vec<usize> = (0..100).collect();
        let made = side_by_side(wide.clone(), |at| {
            thread::sleep(std::time::Duration::from_micros(100 - *at as u64));
            Ok(at * 2)
        });
        assert_eq!(made, Ok((0..100).map(|at| at * 2).collect()));
        let failure = |at| CudaError::NoCard { asked: at, have: 0 };
        let failed = side_by_side(wide, |at| if at % 40 == 30 { Err(failure(*at as u32)) } else { Ok(()) });
        assert_eq!(failed, Err(failure(30)));
        assert_eq!(side_by_side(Vec::<u8>::new(), |_| Ok(())), Ok(Vec::new()));
    }

    #[test]
    fn a_kept_object_file_is_used_for_the_same_source_only() {
        let folder = std::env::temp_dir().join(format!("warpweft-kernels-{}", std::process::id()));
        let path = folder.join("a.kernel");
        keep(&path, "source 1", &[1, 2, 3]).unwrap();
        let file = fs::read(&path).unwrap();
        assert_eq!(entry(&file, "source 1"), Some(&[1u8, 2, 3][..]));
        assert_eq!(entry(&file, "source 2"), None);
        // Cut off by a full disk.
        assert!((0..file.len() - 2).all(|end| entry(&file[..end.min(15)], "source 1").is_none()));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside it");
        fs::remove_dir_all(&folder).unwrap();
    }
}
