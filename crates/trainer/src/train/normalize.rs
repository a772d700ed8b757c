//! What the gradient of each token's loss is multiplied with, so that the average over data ranks is the gradient of
//! the objective that the configuration names.

use device::{Access, DType, MemoryKind, Op, OpError, Reduce, Site, Stream, View, ops::IGNORE};
use pgroups::{Group, Rank};

use crate::{LossNormalization, TrainError};

/// One factor per microbatch, on the device.
///
/// * `mean`: 1 / (tokens that count in the microbatch · microbatches). The average over data ranks is the mean of the
///   microbatches' means, each of equal weight.
/// * `token`: data ranks / tokens that count in the global batch, over all of them. The average over data ranks is then
///   the sum over tokens divided by their number: every token has equal weight, wherever it lies.
///
/// Where nothing counts the factor is finite and multiplies zeros: nothing is divided by zero.
///
/// Source: the net factors of Megatron-LM's gradient scaling, mean and per token.
pub(super) struct TokenScale {
    kind: LossNormalization,
    /// f32 `[microbatches]`.
    factors: View,
    /// i32 `[1]`: tokens that count, of this rank, then of all.
    counted: View,
    /// Everyone who sees data of their own.
    data: Group,
    microbatches: usize,
}

impl TokenScale {
    pub(super) fn alloc(
        rank: &Rank,
        kind: LossNormalization,
        data: &Group,
        microbatches: usize,
    ) -> Result<TokenScale, TrainError> {
        let factors = rank.device.alloc("token_scale", &[microbatches], DType::F32, MemoryKind::Other)?;
        let counted = rank.device.alloc("tokens_counted", &[1], DType::I32, MemoryKind::Other)?;
        Ok(TokenScale { kind, factors, counted, data: data.clone(), microbatches })
    }

    /// Once a step, before its first microbatch; of each of this rank's microbatches, the tokens that count.
    pub(super) fn begin_step(&self, stream: &Stream, counted: &[usize]) -> Result<(), TrainError> {
        if self.kind == LossNormalization::Mean {
            let factor = |&counted: &usize| match counted {
                0 => 0.0,
                _ => (1.0 / (counted * self.microbatches) as f64) as f32,
            };
            return Ok(stream.upload(&self.factors, counted.iter().map(factor).collect())?);
        }
        let own = counted.iter().sum::<usize>();
        let own = i32::try_from(own).expect("BUG: a rank's share of a batch is in the memory of its host");
        stream.upload(&self.counted, vec![own])?;
        self.data.all_reduce(stream, &self.counted, Reduce::Sum)?;
        let ranks = f64::from(self.data.size());
        let accesses = vec![Access::read(&self.counted), Access::write(&self.factors)];
        stream.launch(Op::host("token_scale", Site::from("loss"), accesses, move |args| -> Result<(), OpError> {
            let all = f64::from(args.read::<i32>(0)?[0].max(1));
            args.write::<f32>(1)?.fill((ranks / all) as f32);
            Ok(())
        }))?;
        Ok(())
    }

    /// f32 `[1]`: of one microbatch.
    pub(super) fn factor(&self, at: usize) -> Result<View, TrainError> {
        Ok(self.factors.flat(at..at + 1)?)
    }
}

/// Targets that count.
pub(super) fn counted(targets: &[i32]) -> usize {
    targets.iter().filter(|target| **target != IGNORE).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Machine;
    use device::ops::{Factor, Scale};
    use pgroups::{Key, Layout, LayoutConfig, Needs, ProcessGroups};

    /// Averages over data ranks the scaled sums of token gradients: `tokens[rank]` are the gradients of the tokens that
    /// count, in one microbatch each.
    fn gradient(kind: LossNormalization, layout: &str, tokens: &[&[f32]]) -> Vec<f32> {
        let mut config = LayoutConfig::parse(layout).unwrap();
        config.world_size = Some(tokens.len() as u32);
        let layout = Layout::new(&config).unwrap();
        pgroups::local(&Machine::sim(1), tokens.len() as u32, |rank| -> Result<_, TrainError> {
            let groups = ProcessGroups::build(&rank, &layout, &Needs::keys([Key::DP_CP_GTP]))?;
            let data = groups.get(&Key::DP_CP_GTP, "loss")?;
            let own = tokens[rank.global.0 as usize];
            let scale = TokenScale::alloc(&rank, kind, data, 1)?;
            let stream = rank.device.stream("compute")?;
            let grad = rank.device.alloc("grad", &[1], DType::F32, MemoryKind::Grad)?;
            scale.begin_step(&stream, &[own.len()])?;
            let factor = scale.factor(0)?;
            stream.upload(&grad, vec![own.iter().sum::<f32>()])?;
            stream.launch(Scale { x: &grad, factor: Factor::Device(&factor), y: &grad }.op("backward")?)?;
            data.all_reduce(&stream, &grad, Reduce::Avg)?;
            Ok(stream.download::<f32>(&grad)?.wait()?[0])
        })
        .unwrap()
    }

    use LossNormalization::{Mean, Token};

    #[test]
    fn every_token_has_equal_weight_however_unequally_ranks_share_them() {
        // One token of gradient 6 and three of 2: 12 over 4 tokens. Means of means give (6 + 2) / 2.
        assert_eq!(gradient(Token, "dp=2", &[&[6.0], &[2.0, 2.0, 2.0]]), [3.0; 2]);
        assert_eq!(gradient(Mean, "dp=2", &[&[6.0], &[2.0, 2.0, 2.0]]), [4.0; 2]);
    }

    #[test]
    fn cutting_a_sequence_over_context_ranks_leaves_the_gradient() {
        // Four tokens, only the first counts.
        assert_eq!(gradient(Token, "dp=1", &[&[5.0]]), [5.0]);
        assert_eq!(gradient(Token, "cp=2", &[&[5.0], &[]]), [5.0; 2]);
        assert_eq!(gradient(Token, "cp=4", &[&[5.0], &[], &[], &[]]), [5.0; 4]);
    }

    #[test]
    fn weight_shard_peers_count_as_they_read_data_of_their_own() {
        let tokens: [&[f32]; 4] = [&[4.0], &[], &[1.0, 1.0], &[3.0; 5]];
        assert_eq!(gradient(Token, "gtp=2,dp=2", &tokens), [21.0 / 8.0; 4]);
    }

    #[test]
    fn a_rank_without_a_token_that_counts_contributes_zero_and_divides_by_nothing() {
        assert_eq!(gradient(Token, "dp=2", &[&[], &[2.0, 4.0]]), [3.0; 2]);
        assert_eq!(gradient(Mean, "dp=2", &[&[], &[2.0, 4.0]]), [1.5; 2]);
        assert_eq!(gradient(Token, "dp=2", &[&[], &[]]), [0.0; 2]);
        assert_eq!(gradient(Mean, "dp=2", &[&[], &[]]), [0.0; 2]);
    }

    #[test]
    fn ignored_targets_do_not_count() {
        assert_eq!(counted(&[3, IGNORE, 0, IGNORE]), 2);
    }
}
