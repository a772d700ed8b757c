//! Causal self-attention between the norm and the projection back.

use std::ops::Range;

use device::{
    DType, Frame, Site, View,
    ops::{Accumulate, Attention, AttentionBackward, Finish, Turning},
};
use gtp::layers::{Linear, Region, Then};
use pgroups::Weights;

use crate::{GptConfig, ModelError, rotary::Turner};

/// softmax(q · kᵀ / √width, causal) · v with q, k, v = x · weightsᵀ, one after the other in the columns of one tensor.
///
/// Heads are independent of each other: each rank of a tensor group has its share of them.
pub(crate) struct SelfAttention {
    /// Products, each with the columns that it writes: one for all, or one each.
    products: Vec<(Linear, Range<usize>)>,
    turner: Option<Turner>,
    sizes: Sizes,
    site: Site,
}

/// Of this rank's heads.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    head_dim: usize,
    /// Columns of the queries, and of the keys; values have as many as keys.
    dims: [usize; 2],
}

impl Sizes {
    fn columns(self) -> usize {
        self.dims[0] + 2 * self.dims[1]
    }

    /// Of the scores.
    fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Query, key and value columns.
    fn split(self, qkv: &View) -> Result<[View; 3], ModelError> {
        let [q, k] = self.dims;
        Ok([qkv.columns(0..q)?, qkv.columns(q..q + k)?, qkv.columns(q + k..q + 2 * k)?])
    }

    /// What has positions: queries and keys, side by side.
    fn turned(self, qkv: &View) -> Result<View, ModelError> {
        Ok(qkv.columns(0..self.dims[0] + self.dims[1])?)
    }
}

impl SelfAttention {
    /// One product for queries, keys and values, over the heads of one of `ranks`.
    pub(crate) fn fused(config: &GptConfig, ranks: usize, qkv: Linear, site: &str) -> SelfAttention {
        let sizes = SelfAttention::sizes(config, ranks);
        SelfAttention {
            products: vec![(qkv, 0..sizes.columns())],
            turner: None,
            sizes,
            site: Site::from(site.to_owned()),
        }
    }

    /// A product each, and rotary positions.
    pub(crate) fn turned(
        config: &GptConfig,
        ranks: usize,
        [q, k, v]: [Linear; 3],
        base: usize,
        site: &str,
    ) -> SelfAttention {
        let (sizes, site) = (SelfAttention::sizes(config, ranks), Site::from(site.to_owned()));
        let [dq, dk] = sizes.dims;
        SelfAttention {
            products: vec![(q, 0..dq), (k, dq..dq + dk), (v, dq + dk..dq + 2 * dk)],
            turner: Some(Turner::new(base, config.seq_len, sizes.head_dim, site.clone())),
            sizes,
            site,
        }
    }

    fn sizes(config: &GptConfig, ranks: usize) -> Sizes {
        let dims = [config.dim / ranks, config.kv_dim() / ranks];
        Sizes { heads: config.heads / ranks, head_dim: config.head_dim(), dims }
    }

    /// `x` is what this rank has of `[batch, sequence, dim]`, the result `[batch, sequence, columns of its queries]`:
    /// what its heads have gathered, side by side.
    pub(crate) fn forward(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        x: &View,
        [batch, tokens]: [usize; 2],
    ) -> Result<View, ModelError> {
        let Sizes { heads, head_dim, dims } = self.sizes;
        let x = Region::of(w).gather(f, x)?;
        let on = f.stream().clone();
        let qkv = f.save("qkv", &[batch, tokens, self.sizes.columns()], x.dtype())?;
        for (product, columns) in &self.products {
            product.forward(&on, w, &x, &qkv.columns(columns.clone())?, Then::Nothing)?;
        }
        if let Some(turner) = &self.turner {
            turner.turn(f, &self.sizes.turned(&qkv)?, tokens, Turning::Forward)?;
        }
        let o = f.save("attended", &[batch, tokens, dims[0]], x.dtype())?;
        let lse = f.save("lse", &[batch, heads, tokens], DType::F32)?;
        let [q, k, v] = self.sizes.split(&qkv)?;
        let scale = self.sizes.scale();
        let attention = Attention { q: &q, k: &k, v: &v, o: &o, lse: &lse, head_dim, seq_len: tokens, scale };
        on.launch(attention.op(&self.site)?)?;
        Ok(o)
    }

    /// Gradient of x, `dim` wide, from that of the result. Keeps the gradient of q, k and v for the weights.
    pub(crate) fn backward_input(
        &self,
        f: &mut Frame,
        w: &mut dyn Weights,
        d_o: &View,
        dim: usize,
    ) -> Result<View, ModelError> {
        let [batch, tokens, _] = *d_o.shape() else { unreachable!("BUG: the block has made it") };
        let (qkv, o, lse) = (f.saved("qkv")?, f.saved("attended")?, f.saved("lse")?);
        let on = f.stream().clone();
        let dqkv = f.save("dqkv", qkv.shape(), qkv.dtype())?;
        let [q, k, v] = self.sizes.split(&qkv)?;
        let [dq, dk, dv] = self.sizes.split(&dqkv)?;
        let attention = AttentionBackward {
            q: &q,
            k: &k,
            v: &v,
            o: &o,
            d_o,
            lse: &lse,
            dq: &dq,
            dk: &dk,
            dv: &dv,
            head_dim: self.sizes.head_dim,
            seq_len: tokens,
            scale: self.sizes.scale(),
        };
        on.launch(attention.op(&self.site)?)?;
        if let Some(turner) = &self.turner {
            turner.turn(f, &self.sizes.turned(&dqkv)?, tokens, Turning::Backward)?;
        }
        let dx = f.temp(&[batch, tokens, dim], d_o.dtype())?;
        for (at, (product, columns)) in self.products.iter().enumerate() {
            let old = if at == 0 { Accumulate::Overwrite } else { Accumulate::Add };
            product.backward_input(&on, w, &dqkv.columns(columns.clone())?, &dx, Finish::Into(old))?;
        }
        Ok(Region::of(w).reduce(f, &dx)?)
    }

    pub(crate) fn backward_weight(&self, f: &mut Frame, w: &mut dyn Weights, x: &View) -> Result<(), ModelError> {
        let dqkv = f.saved("dqkv")?;
        // Once more, instead of keeping all rows from the forward pass on.
        let x = Region::of(w).gather(f, x)?;
        for (product, columns) in &self.products {
            product.backward_weight(f, w, &dqkv.columns(columns.clone())?, &x)?;
        }
        Ok(())
    }
}
