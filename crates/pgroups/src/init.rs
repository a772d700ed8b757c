//! Initial values that depend on seed, parameter name and global element index only.

use std::f64::consts::TAU;

use crate::{
    philox::{fnv1a_64, philox_4x32_10, split},
    plan_error::PlanError,
    rank::GlobalRank,
    shard_map::ShardMap,
};

/// What a run's initial values are drawn from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Seed(pub u64);

/// How a parameter's initial values are drawn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
    /// Uniform in `low..high`.
    Uniform {
        /// The lowest value.
        low: f32,
        /// Above every value, but for rounding of `low + (high - low) * u` in f32.
        high: f32,
    },
    /// The same value everywhere.
    Constant(f32),
}

/// The initial values of one parameter, at any index, in any order.
#[derive(Clone, Copy, Debug)]
pub struct InitStream {
    init: Init,
    key: [u32; 2],
    name: [u32; 2],
}

/// Elements that share a counter: one block of four words makes four values.
const LANES: u64 = 4;

impl InitStream {
    /// The stream of one parameter. The name is hashed into the counter, the seed is the key.
    #[must_use]
    pub fn new(seed: Seed, name: &str, init: Init) -> InitStream {
        InitStream { init, key: split(seed.0), name: split(fnv1a_64(name.bytes())) }
    }

    /// The value of the element at a row-major index of the global tensor.
    ///
    /// Equal bits wherever it is asked. Normal values go through the target's own `ln`, `sin` and `cos` in f64.
    #[must_use]
    pub fn value(&self, index: u64) -> f32 {
        self.block(index / LANES)[(index % LANES) as usize]
    }

    /// Fills `out` with the values from index `start` on.
    pub fn fill(&self, start: u64, out: &mut [f32]) {
        let mut index = start;
        let mut rest = out;
        while !rest.is_empty() {
            let lane = (index % LANES) as usize;
            let block = self.block(index / LANES);
            let run = rest.len().min(block.len() - lane);
            let (now, later) = rest.split_at_mut(run);
            now.copy_from_slice(&block[lane..lane + run]);
            index += run as u64;
            rest = later;
        }
    }

    /// Fills one rank's shard, row-major in its local shape: its own elements, and 0 in the padding.
    ///
    /// # Errors
    /// [`PlanError::NoShard`] if the rank holds nothing of the parameter, [`PlanError::ShardNumel`] if `out` has
    /// another number of elements than the local shape.
    pub fn fill_shard(&self, map: &ShardMap, rank: GlobalRank, out: &mut [f32]) -> Result<(), PlanError> {
        let shard = map.shard(rank).ok_or(PlanError::NoShard { rank })?;
        let wanted: usize = map.local_shape().iter().product();
        if out.len() != wanted {
            return Err(PlanError::ShardNumel { rank, got: out.len(), wanted });
        }
        out.fill(0.0);
        shard.each_run(map, |global, local| {
            self.fill(global.start, &mut out[local]);
        });
        Ok(())
    }

    fn block(&self, block: u64) -> [f32; 4] {
        if let Init::Constant(value) = self.init {
            return [value; 4];
        }
        let [high, low] = split(block);
        let counter = [low, high, self.name[1], self.name[0]];
        let words = philox_4x32_10(counter, [self.key[1], self.key[0]]);
        match self.init {
            Init::Normal { std } => {
                let [a, b] = normal_pair(words[0], words[1]);
                let [c, d] = normal_pair(words[2], words[3]);
                [a, b, c, d].map(|z| (z * f64::from(std)) as f32)
            }
            Init::Uniform { low, high } => words.map(|word| low + (high - low) * unit_f32(word)),
            Init::Constant(value) => [value; 4],
        }
    }
}

/// In `0..1`, from the 24 bits that an f32 holds exactly.
fn unit_f32(word: u32) -> f32 {
    (word >> 8) as f32 / (1u32 << 24) as f32
}

/// Two independent standard normals.
///
/// Source: Box and Muller, "A note on the generation of random normal deviates", 1958.
fn normal_pair(first: u32, second: u32) -> [f64; 2] {
    let scale = 1.0 / (u64::from(u32::MAX) + 1) as f64;
    // In (0, 1]: the logarithm of 0 would be infinite.
    let radius = (-2.0 * ((f64::from(first) + 1.0) * scale).ln()).sqrt();
    let (sin, cos) = (TAU * f64::from(second) * scale).sin_cos();
    [radius * cos, radius * sin]
}
