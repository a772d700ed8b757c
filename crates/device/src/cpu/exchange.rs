//! Moves and reduces the members' memory: block by block, so that one pass reads every source and writes every
//! destination while the block is in cache.

use std::slice;

use half::bf16;

use super::{exec::Crew, tiles::TileJob};
use crate::{DType, Element, OpError, View, exchange::Piece, exchange::Reduce};

/// Elements reduced at once: the block and its sources fit the first cache. Miri gets several of a few.
const BLOCK: usize = if cfg!(miri) { 8 } else { 1024 };

/// Elements in a piece that one worker takes: about 50 µs of copying.
const TILE: usize = if cfg!(miri) { 24 } else { 64 * 1024 };

/// Runs all pieces. The caller holds claims on every source and destination of every member.
pub(super) fn run(pieces: Vec<Piece>, crew: &dyn Crew) -> Result<(), OpError> {
    let tiles: Vec<(usize, usize, usize)> = pieces
        .iter()
        .enumerate()
        .flat_map(|(p, piece)| {
            let n = piece.sources[0].1.numel();
            (0..n.div_ceil(TILE).max(1)).map(move |t| (p, t * TILE, n.min((t + 1) * TILE)))
        })
        .collect();
    if tiles.len() <= 1 || tiles.iter().map(|t| t.2 - t.1).sum::<usize>() <= TILE {
        return tiles.iter().try_for_each(|&(p, from, to)| run_tile(&pieces[p], from, to));
    }
    crew.run(TileJob::new(tiles.len(), move |i| {
        let (p, from, to) = tiles[i];
        run_tile(&pieces[p], from, to)
    }))
}

fn run_tile(piece: &Piece, from: usize, to: usize) -> Result<(), OpError> {
    match piece.sources[0].1.dtype() {
        DType::F32 => typed::<f32>(piece, from, to),
        DType::Bf16 => typed::<bf16>(piece, from, to),
        DType::I32 => typed::<i32>(piece, from, to),
        DType::I16 => unreachable!("BUG: refused when it was submitted"),
    }
    Ok(())
}

/// First element of a contiguous view.
fn base<T: Element>(view: &View) -> *mut T {
    let storage = view.allocation().storage.as_ref().expect("BUG: an exchange ran without storage");
    // SAFETY: a view's region lies inside its allocation.
    unsafe { storage.host().add(view.region().start) }.cast()
}

fn typed<T: Number>(piece: &Piece, from: usize, to: usize) {
    let sources: Vec<*const T> = piece.sources.iter().map(|(_, v)| base::<T>(v).cast_const()).collect();
    let dests: Vec<*mut T> = piece.dests.iter().map(|(_, v)| base::<T>(v)).collect();
    let Some(reduce) = piece.reduce else {
        for dest in dests.into_iter().filter(|d| d.cast_const() != sources[0]) {
            // SAFETY: both views are claimed, `from..to` lies in both, and a destination that is not the source
            // itself does not overlap it (checked at submission).
            unsafe { dest.add(from).copy_from_nonoverlapping(sources[0].add(from), to - from) };
        }
        return;
    };
    let mut sum = [T::Sum::default(); BLOCK];
    for start in (from..to).step_by(BLOCK) {
        let len = BLOCK.min(to - start);
        let sum = &mut sum[..len];
        for (i, source) in sources.iter().enumerate() {
            // SAFETY: claimed, and in range; the reference ends before any destination of this block is written.
            let values = unsafe { slice::from_raw_parts(source.add(start), len) };
            fold::<T>(reduce, i == 0, sum, values);
        }
        finish::<T>(reduce, sources.len(), sum);
        for dest in &dests {
            // SAFETY: claimed, in range, and the only reference: sources were let go above. A destination that is a
            // source is the same view, so other blocks of it are not touched here.
            let out = unsafe { slice::from_raw_parts_mut(dest.add(start), len) };
            out.iter_mut().zip(sum.iter()).for_each(|(o, s)| *o = T::from_sum(*s));
        }
    }
}

/// The values of a piece's source, for a driver that completes members one by one.
pub(crate) fn snapshot(view: &View) -> Vec<u8> {
    // SAFETY: the caller holds the claim of the member that `view` belongs to; bytes have no invalid values.
    unsafe { slice::from_raw_parts(base_bytes(view), view.bytes()) }.to_vec()
}

fn base_bytes(view: &View) -> *const u8 {
    let storage = view.allocation().storage.as_ref().expect("BUG: an exchange ran without storage");
    // SAFETY: a view's region lies inside its allocation.
    unsafe { storage.host().add(view.region().start) }
}

/// Computes one destination of `piece` from snapshots of its sources: the slow twin of [`run`], element by element.
pub(crate) fn deliver(piece: &Piece, sources: &[Vec<u8>], dest: &View) {
    match dest.dtype() {
        DType::F32 => deliver_typed::<f32>(piece, sources, dest),
        DType::Bf16 => deliver_typed::<bf16>(piece, sources, dest),
        DType::I32 => deliver_typed::<i32>(piece, sources, dest),
        DType::I16 => unreachable!("BUG: refused when it was submitted"),
    }
}

fn deliver_typed<T: Number>(piece: &Piece, sources: &[Vec<u8>], dest: &View) {
    let size = size_of::<T>();
    let at = |bytes: &[u8], i: usize| T::from_bytes(&bytes[i * size..(i + 1) * size]);
    // SAFETY: the caller holds the claim of the member that `dest` belongs to.
    let out = unsafe { slice::from_raw_parts_mut(base::<T>(dest), dest.numel()) };
    for (i, out) in out.iter_mut().enumerate() {
        *out = match piece.reduce {
            None => at(&sources[0], i),
            Some(reduce) => {
                let mut sum = [T::Sum::default()];
                sources.iter().enumerate().for_each(|(s, bytes)| fold::<T>(reduce, s == 0, &mut sum, &[at(bytes, i)]));
                finish::<T>(reduce, sources.len(), &mut sum);
                T::from_sum(sum[0])
            }
        };
    }
}

/// An element that can be reduced; bf16 in f32.
trait Number: Element {
    type Sum: Copy + Default + PartialOrd;
    fn to_sum(self) -> Self::Sum;
    fn from_sum(sum: Self::Sum) -> Self;
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn divide(a: Self::Sum, n: usize) -> Self::Sum;
    fn max(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn from_bytes(bytes: &[u8]) -> Self;
}

impl Number for f32 {
    type Sum = f32;
    fn to_sum(self) -> f32 {
        self
    }
    fn from_sum(sum: f32) -> f32 {
        sum
    }
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }
    fn divide(a: f32, n: usize) -> f32 {
        a / n as f32
    }
    fn max(a: f32, b: f32) -> f32 {
        // `f32::max` would drop a NaN.
        if a.is_nan() || a > b { a } else { b }
    }
    fn from_bytes(bytes: &[u8]) -> f32 {
        f32::from_ne_bytes(bytes.try_into().expect("BUG: four bytes"))
    }
}

impl Number for bf16 {
    type Sum = f32;
    fn to_sum(self) -> f32 {
        self.to_f32()
    }
    fn from_sum(sum: f32) -> bf16 {
        bf16::from_f32(sum)
    }
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }
    fn divide(a: f32, n: usize) -> f32 {
        a / n as f32
    }
    fn max(a: f32, b: f32) -> f32 {
        <f32 as Number>::max(a, b)
    }
    fn from_bytes(bytes: &[u8]) -> bf16 {
        bf16::from_ne_bytes(bytes.try_into().expect("BUG: two bytes"))
    }
}

impl Number for i32 {
    type Sum = i32;
    fn to_sum(self) -> i32 {
        self
    }
    fn from_sum(sum: i32) -> i32 {
        sum
    }
    fn add(a: i32, b: i32) -> i32 {
        a.wrapping_add(b)
    }
    fn divide(_: i32, _: usize) -> i32 {
        unreachable!("BUG: averages of integers are refused at submission")
    }
    fn max(a: i32, b: i32) -> i32 {
        Ord::max(a, b)
    }
    fn from_bytes(bytes: &[u8]) -> i32 {
        i32::from_ne_bytes(bytes.try_into().expect("BUG: four bytes"))
    }
}

fn fold<T: Number>(reduce: Reduce, first: bool, sum: &mut [T::Sum], values: &[T]) {
    let pairs = sum.iter_mut().zip(values);
    match (first, reduce) {
        (true, _) => pairs.for_each(|(s, v)| *s = v.to_sum()),
        (false, Reduce::Sum | Reduce::Avg) => pairs.for_each(|(s, v)| *s = T::add(*s, v.to_sum())),
        (false, Reduce::Max) => pairs.for_each(|(s, v)| *s = T::max(*s, v.to_sum())),
    }
}

fn finish<T: Number>(reduce: Reduce, n: usize, sum: &mut [T::Sum]) {
    if reduce == Reduce::Avg {
        sum.iter_mut().for_each(|s| *s = T::divide(*s, n));
    }
}
