//! What is measured: the operations of a GPT-2 step, made on buffers of their own.

use device::{
    Error, Launch, Mode, Op, View,
    ops::{
        Accumulate, AdamW, Add, Attention, AttentionBackward, BiasGrad, Cast, CrossEntropy, Embedding, EmbeddingGrad,
        Factor, Fill, Finish, Gelu, GeluBackward, Gemm, Hyper, LayerNorm, LayerNormBackward, LayerNormGrad,
        PositionGrad, Positions, Residual, RmsNorm, SquaredNorm, StretchSums, Trans, Vocab,
    },
};

use crate::rig::{Rig, Sizes};

/// What bounds an operation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Limit {
    /// The rate of a large square product.
    Product,
    /// The rate of a large copy.
    Copy,
}

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) limit: Limit,
    pub(crate) make: fn(&Rig, &Sizes) -> Result<Op, Error>,
    /// Bytes that must move at least, where not all that is declared must: rows of a table.
    pub(crate) bytes: Option<fn(&Sizes) -> f64>,
}

/// Every declared access once, an update twice.
pub(crate) fn bytes(op: &Op) -> f64 {
    let times = |mode| if mode == Mode::Update { 2 } else { 1 };
    op.accesses.iter().map(|access| access.view.bytes() * times(access.mode)).sum::<usize>() as f64
}

pub(crate) fn flops(op: &Op) -> f64 {
    match &op.launch {
        Launch::Kernel(kernel) => kernel.flops(&op.accesses) as f64,
        _ => 0.0,
    }
}

const fn copy(name: &'static str, make: fn(&Rig, &Sizes) -> Result<Op, Error>) -> Case {
    Case { name, limit: Limit::Copy, make, bytes: None }
}

const fn product(name: &'static str, make: fn(&Rig, &Sizes) -> Result<Op, Error>) -> Case {
    Case { name, limit: Limit::Product, make, bytes: None }
}

/// The limits themselves.
pub(crate) const COPY: Case = copy("copy", |rig, _| {
    let [x, y] = [rig.f32(&[1 << 27])?, rig.f32(&[1 << 27])?];
    Cast { x: &x, y: &y }.op("bench")
});
pub(crate) const PRODUCT: Case = product("product of 8192³", |rig, _| {
    let [a, b, c] = [rig.bf16(&[8192, 8192])?, rig.bf16(&[8192, 8192])?, rig.bf16(&[8192, 8192])?];
    gemm(&a, &b, &c, Trans::Nt, WRITE)
});

pub(crate) const CASES: &[Case] = &[
    copy("layer norm", |rig, sizes| layer_norm(rig, sizes, false)),
    copy("layer norm, residual", |rig, sizes| layer_norm(rig, sizes, true)),
    copy("layer norm backward, skip", |rig, sizes| layer_norm_backward(rig, sizes, false)),
    copy("layer norm backward, skip, sums", |rig, sizes| layer_norm_backward(rig, sizes, true)),
    copy("layer norm grad", layer_norm_grad),
    copy("rms norm, residual", rms_norm),
    copy("bias grad, sums of a norm", |rig, sizes| {
        let (sums, dbias) = (rig.f32(&stretches(sizes))?, rig.f32(&[sizes.dim])?);
        BiasGrad { dy: &sums, dbias: &dbias, into: Accumulate::Add }.op("bench")
    }),
    copy("bias grad, dim", |rig, sizes| bias_grad(rig, sizes, 1)),
    copy("bias grad, 3 dim", |rig, sizes| bias_grad(rig, sizes, 3)),
    copy("bias grad, 4 dim", |rig, sizes| bias_grad(rig, sizes, 4)),
    copy("gelu", |rig, sizes| {
        let [x, y] = [wide(rig, sizes, 4)?, wide(rig, sizes, 4)?];
        Gelu { x: &x, y: &y }.op("bench")
    }),
    copy("gelu backward", |rig, sizes| {
        let [dy, x, dx] = [wide(rig, sizes, 4)?, wide(rig, sizes, 4)?, wide(rig, sizes, 4)?];
        GeluBackward { dy: &dy, x: &x, dx: &dx }.op("bench")
    }),
    copy("add", |rig, sizes| {
        let [a, b, y] = [wide(rig, sizes, 1)?, wide(rig, sizes, 1)?, wide(rig, sizes, 1)?];
        Add { a: &a, b: &b, y: &y }.op("bench")
    }),
    Case { bytes: Some(embedding_bytes), ..copy("embedding, positions", embedding) },
    Case { bytes: Some(embedding_grad_bytes), ..copy("embedding grad", embedding_grad) },
    copy("position grad", position_grad),
    copy("cross entropy", cross_entropy),
    copy("adamw, a layer's product", |rig, sizes| adamw(rig, 4 * sizes.dim * sizes.dim)),
    copy("adamw, the table", |rig, sizes| adamw(rig, sizes.vocab * sizes.dim)),
    copy("adamw, a vector", |rig, sizes| adamw(rig, sizes.dim)),
    copy("squared norm, the table", |rig, sizes| {
        let numel = sizes.vocab * sizes.dim;
        let (x, partials) = (rig.f32(&[numel])?, rig.f32(&[SquaredNorm::partials(numel)])?);
        SquaredNorm { x: &x, partials: &partials }.op("bench")
    }),
    copy("fill", |rig, sizes| Fill { y: &rig.f32(&[sizes.vocab * sizes.dim])?, value: 0.0 }.op("bench")),
    product("attention", attention),
    product("attention backward", attention_backward),
    product("qkv, bias", |rig, sizes| forward(rig, sizes, 1, 3, After::Bias)),
    product("proj, bias", |rig, sizes| forward(rig, sizes, 1, 1, After::Bias)),
    product("up, bias, gelu", |rig, sizes| forward(rig, sizes, 1, 4, After::BiasGelu)),
    product("down, bias, residual", |rig, sizes| forward(rig, sizes, 4, 1, After::BiasResidual)),
    product("qkv dx", |rig, sizes| input_grad(rig, sizes, 3, 1, After::Nothing)),
    product("proj dx", |rig, sizes| input_grad(rig, sizes, 1, 1, After::Nothing)),
    product("up dx", |rig, sizes| input_grad(rig, sizes, 4, 1, After::Nothing)),
    product("down dx, gelu'", |rig, sizes| input_grad(rig, sizes, 1, 4, After::GeluBackward)),
    product("qkv dw", |rig, sizes| weight_grad(rig, sizes, 3 * sizes.dim, 1)),
    product("proj dw", |rig, sizes| weight_grad(rig, sizes, sizes.dim, 1)),
    product("up dw", |rig, sizes| weight_grad(rig, sizes, 4 * sizes.dim, 1)),
    product("down dw", |rig, sizes| weight_grad(rig, sizes, sizes.dim, 4)),
    product("logits", |rig, sizes| {
        let (x, table) = (wide(rig, sizes, 1)?, rig.bf16(&[sizes.vocab, sizes.dim])?);
        gemm(&x, &table, &rig.bf16(&[sizes.rows(), sizes.vocab])?, Trans::Nt, WRITE)
    }),
    product("logits dx", |rig, sizes| {
        let (dlogits, table) = (rig.bf16(&[sizes.rows(), sizes.vocab])?, rig.bf16(&[sizes.vocab, sizes.dim])?);
        gemm(&dlogits, &table, &wide(rig, sizes, 1)?, Trans::Nn, WRITE)
    }),
    product("logits dw", |rig, sizes| weight_grad(rig, sizes, sizes.vocab, 1)),
];

const WRITE: Finish<'static> = Finish::Into(Accumulate::Overwrite);

fn gemm(a: &View, b: &View, c: &View, trans: Trans, finish: Finish<'_>) -> Result<Op, Error> {
    Gemm { a, b, c, trans, finish }.op("bench")
}

/// Values of all tokens, `times` as wide as the model.
fn wide(rig: &Rig, sizes: &Sizes, times: usize) -> Result<View, Error> {
    rig.bf16(&[sizes.rows(), times * sizes.dim])
}

/// What follows a product.
#[derive(Clone, Copy)]
enum After {
    Nothing,
    Bias,
    BiasGelu,
    BiasResidual,
    GeluBackward,
}

fn finished(rig: &Rig, after: After, [a, b, c]: [&View; 3], trans: Trans) -> Result<Op, Error> {
    let (bias, other) = (rig.bf16(&[c.cols()])?, rig.bf16(&[c.row_count(), c.cols()])?);
    let finish = match after {
        After::Nothing => WRITE,
        After::Bias => Finish::Bias(&bias),
        After::BiasGelu => Finish::BiasGelu { bias: &bias, pre: &other },
        After::BiasResidual => Finish::Residual { bias: Some(&bias), r: &other },
        After::GeluBackward => Finish::GeluBackward { pre: &other },
    };
    gemm(a, b, c, trans, finish)
}

/// Of a layer from `inner` to `outer` widths of the model.
fn forward(rig: &Rig, sizes: &Sizes, inner: usize, outer: usize, after: After) -> Result<Op, Error> {
    let (x, y) = (wide(rig, sizes, inner)?, wide(rig, sizes, outer)?);
    let weight = rig.bf16(&[outer * sizes.dim, inner * sizes.dim])?;
    finished(rig, after, [&x, &weight, &y], Trans::Nt)
}

/// Back from `outer` to `inner`.
fn input_grad(rig: &Rig, sizes: &Sizes, outer: usize, inner: usize, after: After) -> Result<Op, Error> {
    let (dy, dx) = (wide(rig, sizes, outer)?, wide(rig, sizes, inner)?);
    let weight = rig.bf16(&[outer * sizes.dim, inner * sizes.dim])?;
    finished(rig, after, [&dy, &weight, &dx], Trans::Nn)
}

/// Of `[rows, inner * dim]`, added to what is there.
fn weight_grad(rig: &Rig, sizes: &Sizes, rows: usize, inner: usize) -> Result<Op, Error> {
    let (dy, x) = (rig.bf16(&[sizes.rows(), rows])?, wide(rig, sizes, inner)?);
    let dweight = rig.f32(&[rows, inner * sizes.dim])?;
    gemm(&dy, &x, &dweight, Trans::Tn, Finish::Into(Accumulate::Add))
}

fn layer_norm(rig: &Rig, sizes: &Sizes, with_residual: bool) -> Result<Op, Error> {
    let [x, r, y, sum] = [wide(rig, sizes, 1)?, wide(rig, sizes, 1)?, wide(rig, sizes, 1)?, wide(rig, sizes, 1)?];
    let [weight, bias] = [rig.bf16(&[sizes.dim])?, rig.bf16(&[sizes.dim])?];
    let [mean, rstd] = [rig.f32(&[sizes.rows()])?, rig.f32(&[sizes.rows()])?];
    let residual = with_residual.then_some(Residual { r: &r, sum: &sum });
    LayerNorm { x: &x, residual, weight: &weight, bias: &bias, y: &y, mean: &mean, rstd: &rstd, eps: 1e-5 }.op("bench")
}

fn rms_norm(rig: &Rig, sizes: &Sizes) -> Result<Op, Error> {
    let [x, r, y, sum] = [wide(rig, sizes, 1)?, wide(rig, sizes, 1)?, wide(rig, sizes, 1)?, wide(rig, sizes, 1)?];
    let (weight, rstd) = (rig.bf16(&[sizes.dim])?, rig.f32(&[sizes.rows()])?);
    let residual = Some(Residual { r: &r, sum: &sum });
    RmsNorm { x: &x, residual, weight: &weight, y: &y, rstd: &rstd, eps: 1e-5 }.op("bench")
}

fn stretches(sizes: &Sizes) -> [usize; 2] {
    [LayerNormBackward::stretches(sizes.rows()), sizes.dim]
}

fn layer_norm_backward(rig: &Rig, sizes: &Sizes, with_sums: bool) -> Result<Op, Error> {
    let [dy, x, skip, dx] = [wide(rig, sizes, 1)?, wide(rig, sizes, 1)?, wide(rig, sizes, 1)?, wide(rig, sizes, 1)?];
    let (weight, mean) = (rig.bf16(&[sizes.dim])?, rig.f32(&[sizes.rows()])?);
    let (rstd, skip) = (rig.filled(&[sizes.rows()], 1.5)?, Some(&skip));
    let [dweight, dbias] = [rig.f32(&stretches(sizes))?, rig.f32(&stretches(sizes))?];
    let sums = with_sums.then_some(StretchSums { dweight: &dweight, dbias: &dbias });
    LayerNormBackward { dy: &dy, x: &x, weight: &weight, mean: &mean, rstd: &rstd, skip, dx: &dx, sums }.op("bench")
}

fn layer_norm_grad(rig: &Rig, sizes: &Sizes) -> Result<Op, Error> {
    let (dy, x, mean) = (wide(rig, sizes, 1)?, wide(rig, sizes, 1)?, rig.f32(&[sizes.rows()])?);
    let (rstd, [dweight, dbias]) =
        (rig.filled(&[sizes.rows()], 1.5)?, [rig.f32(&[sizes.dim])?, rig.f32(&[sizes.dim])?]);
    let (dweight, dbias, into) = (&dweight, &dbias, Accumulate::Add);
    LayerNormGrad { dy: &dy, x: &x, mean: &mean, rstd: &rstd, dweight, dbias, into }.op("bench")
}

fn bias_grad(rig: &Rig, sizes: &Sizes, times: usize) -> Result<Op, Error> {
    let (dy, dbias) = (wide(rig, sizes, times)?, rig.f32(&[times * sizes.dim])?);
    BiasGrad { dy: &dy, dbias: &dbias, into: Accumulate::Add }.op("bench")
}

/// Rows of the table that random ids name: each row is missed by one id with a chance of 1 − 1/vocab.
fn named_rows(sizes: &Sizes) -> f64 {
    let vocab = sizes.vocab as f64;
    vocab * (1.0 - (1.0 - 1.0 / vocab).powf(sizes.rows() as f64))
}

fn embedding_bytes(sizes: &Sizes) -> f64 {
    2.0 * sizes.dim as f64 * (named_rows(sizes) + (sizes.seq + sizes.rows()) as f64)
}

fn embedding(rig: &Rig, sizes: &Sizes) -> Result<Op, Error> {
    let (ids, vocab) = (rig.ids(sizes.rows(), sizes.vocab)?, Vocab::whole(sizes.vocab));
    let (table, y) = (rig.bf16(&[sizes.vocab, sizes.dim])?, wide(rig, sizes, 1)?);
    let positions = Some(Positions { table: &rig.bf16(&[sizes.seq, sizes.dim])?, seq_len: sizes.seq });
    Embedding { ids: &ids, table: &table, vocab, positions, y: &y }.op("bench")
}

/// Gradients once, named rows of the table there and back.
fn embedding_grad_bytes(sizes: &Sizes) -> f64 {
    sizes.dim as f64 * (2.0 * sizes.rows() as f64 + 8.0 * named_rows(sizes))
}

fn embedding_grad(rig: &Rig, sizes: &Sizes) -> Result<Op, Error> {
    let (ids, vocab) = (rig.ids(sizes.rows(), sizes.vocab)?, Vocab::whole(sizes.vocab));
    let (dtable, dy) = (rig.f32(&[sizes.vocab, sizes.dim])?, wide(rig, sizes, 1)?);
    EmbeddingGrad { ids: &ids, dy: &dy, vocab, dtable: &dtable, into: Accumulate::Add }.op("bench")
}

fn position_grad(rig: &Rig, sizes: &Sizes) -> Result<Op, Error> {
    let (dtable, dy) = (rig.f32(&[sizes.seq, sizes.dim])?, wide(rig, sizes, 1)?);
    PositionGrad { dy: &dy, seq_len: sizes.seq, dtable: &dtable, into: Accumulate::Add }.op("bench")
}

fn cross_entropy(rig: &Rig, sizes: &Sizes) -> Result<Op, Error> {
    let (logits, targets) = (rig.bf16(&[sizes.rows(), sizes.vocab])?, rig.ids(sizes.rows(), sizes.vocab)?);
    let (losses, scale) = (rig.f32(&[sizes.rows()])?, Factor::Const(1.0 / sizes.rows() as f32));
    CrossEntropy { logits: &logits, targets: &targets, losses: &losses, dlogits: &logits, scale }.op("bench")
}

fn adamw(rig: &Rig, numel: usize) -> Result<Op, Error> {
    let [grad, m, v] = [rig.f32(&[numel])?, rig.f32(&[numel])?, rig.filled(&[numel], 1e-3)?];
    let (param, rest, scalars) = (rig.bf16(&[numel])?, rig.i16(&[numel])?, rig.filled(&[Hyper::LEN], 0.1)?);
    let adamw = AdamW {
        param: &param,
        rest: Some(&rest),
        grad: &grad,
        m: &m,
        v: &v,
        scalars: &scalars,
        skip: None,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    };
    adamw.op("bench")
}

/// q, k and v side by side.
fn thirds(all: &View, dim: usize) -> Result<[View; 3], Error> {
    Ok([all.columns(0..dim)?, all.columns(dim..2 * dim)?, all.columns(2 * dim..3 * dim)?])
}

fn attention(rig: &Rig, sizes: &Sizes) -> Result<Op, Error> {
    let ([q, k, v], o) = (thirds(&wide(rig, sizes, 3)?, sizes.dim)?, wide(rig, sizes, 1)?);
    let lse = rig.f32(&[sizes.batch, sizes.heads, sizes.seq])?;
    let (head_dim, seq_len) = (sizes.dim / sizes.heads, sizes.seq);
    let scale = 1.0 / (head_dim as f32).sqrt();
    Attention { q: &q, k: &k, v: &v, o: &o, lse: &lse, head_dim, seq_len, scale }.op("bench")
}

fn attention_backward(rig: &Rig, sizes: &Sizes) -> Result<Op, Error> {
    let [q, k, v] = &thirds(&wide(rig, sizes, 3)?, sizes.dim)?;
    let [dq, dk, dv] = &thirds(&wide(rig, sizes, 3)?, sizes.dim)?;
    let (o, d_o) = (&wide(rig, sizes, 1)?, &wide(rig, sizes, 1)?);
    let lse = &rig.filled(&[sizes.batch, sizes.heads, sizes.seq], 8.0)?;
    let (head_dim, seq_len) = (sizes.dim / sizes.heads, sizes.seq);
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionBackward { q, k, v, o, d_o, lse, dq, dk, dv, head_dim, seq_len, scale }.op("bench")
}
