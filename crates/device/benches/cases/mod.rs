//! Operations in the sizes of a small language model: 8 sequences of 256 tokens, 384 wide, 6 heads.

use device::{
    DType, Device, Error, Launch, MemoryKind, Op, Stream, View, bf16,
    ops::{
        Accumulate, AdamW, Add, Attention, AttentionBackward, Axpy, BiasGrad, Cast, CrossEntropy, Embedding,
        EmbeddingGrad, Factor, Fill, Finish, Gelu, GeluBackward, Gemm, Hyper, LayerNorm, LayerNormBackward,
        LayerNormGrad, PositionGrad, Positions, Residual, RmsNorm, RmsNormBackward, RmsNormGrad, Rotary, RotaryTable,
        Scale, SquaredNorm, SwiGlu, SwiGluBackward, Trans, Turning, Vocab,
    },
};

pub(crate) const BATCH: usize = 8;
pub(crate) const SEQ: usize = 256;
pub(crate) const ROWS: usize = BATCH * SEQ;
pub(crate) const DIM: usize = 384;
pub(crate) const HEADS: usize = 6;
pub(crate) const HEAD_DIM: usize = DIM / HEADS;
pub(crate) const FFN: usize = 4 * DIM;
pub(crate) const VOCAB: usize = 8192;
pub(crate) const PARAMS: usize = 1 << 21;

/// What bounds an operation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Limit {
    /// The rate of a large square product.
    Product,
    /// The rate of a copy that moves as many bytes.
    Copy,
}

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) op: Op,
    pub(crate) limit: Limit,
}

impl Case {
    /// Bytes that must move at least: every declared access once, an update twice.
    pub(crate) fn bytes(&self) -> usize {
        let times = |mode| if mode == device::Mode::Update { 2 } else { 1 };
        self.op.accesses.iter().map(|a| a.view.bytes() * times(a.mode)).sum()
    }

    pub(crate) fn flops(&self) -> u64 {
        match &self.op.launch {
            Launch::Kernel(kernel) => kernel.flops(&self.op.accesses),
            _ => 0,
        }
    }
}

/// Memory of one device with values in it.
pub(crate) struct Bench {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
}

impl Bench {
    pub(crate) fn new(device: Device) -> Result<Bench, Error> {
        let stream = device.stream("bench")?;
        Ok(Bench { device, stream })
    }

    pub(crate) fn f32(&self, dims: &[usize]) -> Result<View, Error> {
        let view = self.device.alloc("x", dims, DType::F32, MemoryKind::Other)?;
        let values = (0..view.numel()).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect();
        self.stream.upload::<f32>(&view, values)?;
        Ok(view)
    }

    pub(crate) fn bf16(&self, dims: &[usize]) -> Result<View, Error> {
        let view = self.device.alloc("x", dims, DType::Bf16, MemoryKind::Other)?;
        self.stream.upload(&view, vec![bf16::from_f32(0.5); view.numel()])?;
        Ok(view)
    }

    pub(crate) fn i16(&self, dims: &[usize]) -> Result<View, Error> {
        let view = self.device.alloc("x", dims, DType::I16, MemoryKind::Other)?;
        self.stream.upload(&view, (0..view.numel()).map(|i| (i * 7919) as i16).collect())?;
        Ok(view)
    }

    pub(crate) fn ids(&self, rows: usize, vocab: usize) -> Result<View, Error> {
        let view = self.device.alloc("ids", &[rows], DType::I32, MemoryKind::Other)?;
        self.stream.upload(&view, (0..rows).map(|i| (i * 7919 % vocab) as i32).collect())?;
        Ok(view)
    }

    pub(crate) fn run(&self, op: &Op, times: usize) -> Result<(), Error> {
        for _ in 0..times {
            self.stream.launch(op.clone())?;
        }
        self.stream.synchronize()
    }

    pub(crate) fn cases(&self) -> Result<Vec<Case>, Error> {
        let mut all = self.products()?;
        all.extend(self.attention()?);
        all.extend(self.norms()?);
        all.extend(self.activations()?);
        all.extend(self.tables()?);
        all.extend(self.flat()?);
        Ok(all)
    }

    fn products(&self) -> Result<Vec<Case>, Error> {
        let x = self.f32(&[ROWS, DIM])?;
        let dx = self.f32(&[ROWS, DIM])?;
        let [h, dh, pre] = [self.f32(&[ROWS, FFN])?, self.f32(&[ROWS, FFN])?, self.f32(&[ROWS, FFN])?];
        let [qkv, dqkv] = [self.f32(&[ROWS, 3 * DIM])?, self.f32(&[ROWS, 3 * DIM])?];
        let [w_qkv, w_proj, w_up] = [self.f32(&[3 * DIM, DIM])?, self.f32(&[DIM, DIM])?, self.f32(&[FFN, DIM])?];
        let w_down = self.f32(&[DIM, FFN])?;
        let [b, b_ffn, b_qkv] = [self.f32(&[DIM])?, self.f32(&[FFN])?, self.f32(&[3 * DIM])?];
        let [wte, logits] = [self.f32(&[VOCAB, DIM])?, self.f32(&[ROWS, VOCAB])?];
        let gemm = |name, a: &View, b: &View, c: &View, trans, finish| {
            let op = Gemm { a, b, c, trans, finish }.op(name)?;
            Ok::<_, Error>(Case { name, op, limit: Limit::Product })
        };
        let (write, add) = (Finish::Into(Accumulate::Overwrite), Finish::Into(Accumulate::Add));
        let gelu = Finish::BiasGelu { bias: &b_ffn, pre: &pre };
        Ok(vec![
            gemm("gemm qkv, bias", &x, &w_qkv, &qkv, Trans::Nt, Finish::Bias(&b_qkv))?,
            gemm("gemm proj, bias", &x, &w_proj, &dx, Trans::Nt, Finish::Bias(&b))?,
            gemm("gemm up, bias, gelu", &x, &w_up, &h, Trans::Nt, gelu)?,
            gemm("gemm down, bias", &h, &w_down, &dx, Trans::Nt, Finish::Bias(&b))?,
            gemm("gemm logits", &x, &wte, &logits, Trans::Nt, write)?,
            gemm("gemm qkv dgrad", &dqkv, &w_qkv, &dx, Trans::Nn, write)?,
            gemm("gemm down dgrad, gelu'", &x, &w_down, &dh, Trans::Nn, Finish::GeluBackward { pre: &pre })?,
            gemm("gemm up dgrad", &dh, &w_up, &dx, Trans::Nn, write)?,
            gemm("gemm logits dgrad", &logits, &wte, &dx, Trans::Nn, write)?,
            gemm("gemm qkv wgrad", &dqkv, &x, &w_qkv, Trans::Tn, add)?,
            gemm("gemm proj wgrad", &dx, &x, &w_proj, Trans::Tn, add)?,
            gemm("gemm up wgrad", &dh, &x, &w_up, Trans::Tn, add)?,
            gemm("gemm down wgrad", &dx, &h, &w_down, Trans::Tn, add)?,
            gemm("gemm logits wgrad", &logits, &x, &wte, Trans::Tn, add)?,
        ])
    }

    fn attention(&self) -> Result<Vec<Case>, Error> {
        let [qkv, dqkv] = [self.f32(&[ROWS, 3 * DIM])?, self.f32(&[ROWS, 3 * DIM])?];
        let part = |view: &View, i: usize| view.columns(i * DIM..(i + 1) * DIM);
        let (q, k, v) = (part(&qkv, 0)?, part(&qkv, 1)?, part(&qkv, 2)?);
        let (dq, dk, dv) = (part(&dqkv, 0)?, part(&dqkv, 1)?, part(&dqkv, 2)?);
        let [o, d_o] = [self.f32(&[ROWS, DIM])?, self.f32(&[ROWS, DIM])?];
        let lse = self.f32(&[BATCH, HEADS, SEQ])?;
        let (q, k, v, o, lse) = (&q, &k, &v, &o, &lse);
        let (head_dim, seq_len, scale) = (HEAD_DIM, SEQ, 0.125);
        let forward = Attention { q, k, v, o, lse, head_dim, seq_len, scale }.op("attention")?;
        let (d_o, dq, dk, dv) = (&d_o, &dq, &dk, &dv);
        let backward =
            AttentionBackward { q, k, v, o, d_o, lse, dq, dk, dv, head_dim, seq_len, scale }.op("attention")?;
        Ok(vec![
            Case { name: "attention", op: forward, limit: Limit::Product },
            Case { name: "attention backward", op: backward, limit: Limit::Product },
        ])
    }

    fn norms(&self) -> Result<Vec<Case>, Error> {
        let [x, y, r, sum] = [(); 4].map(|()| self.f32(&[ROWS, DIM]));
        let (x, y, r, sum) = (&x?, &y?, &r?, &sum?);
        let (weight, bias) = (&self.f32(&[DIM])?, &self.f32(&[DIM])?);
        let (mean, rstd) = (&self.f32(&[ROWS])?, &self.f32(&[ROWS])?);
        let (residual, into, eps) = (Some(Residual { r, sum }), Accumulate::Add, 1e-5);
        let case = |name, op: Result<Op, Error>| Ok::<_, Error>(Case { name, op: op?, limit: Limit::Copy });
        let norm = LayerNorm { x, residual: None, weight, bias, y, mean, rstd, eps };
        let backward = LayerNormBackward { dy: y, x, weight, mean, rstd, skip: Some(r), dx: sum, sums: None };
        let rms = RmsNorm { x, residual: None, weight, y, rstd, eps };
        let rms_backward = RmsNormBackward { dy: y, x, weight, rstd, skip: Some(r), dx: sum, sums: None };
        Ok(vec![
            case("layer norm", norm.op("n"))?,
            case("layer norm, residual", LayerNorm { residual, ..norm }.op("n"))?,
            case("layer norm backward, skip", backward.op("n"))?,
            case(
                "layer norm grad",
                LayerNormGrad { dy: y, x, mean, rstd, dweight: weight, dbias: bias, into }.op("n"),
            )?,
            case("rms norm", rms.op("n"))?,
            case("rms norm, residual", RmsNorm { residual, ..rms }.op("n"))?,
            case("rms norm backward, skip", rms_backward.op("n"))?,
            case("rms norm grad", RmsNormGrad { dy: y, x, rstd, dweight: weight, into }.op("n"))?,
        ])
    }

    fn activations(&self) -> Result<Vec<Case>, Error> {
        let [x, y, z, dx, dy] = [(); 5].map(|()| self.f32(&[ROWS, FFN]));
        let (x, y, z, dx, dy) = (&x?, &y?, &z?, &dx?, &dy?);
        let qkv = self.f32(&[ROWS, 3 * DIM])?.columns(0..2 * DIM)?;
        let table = self.f32(&[SEQ, HEAD_DIM])?;
        self.run(&RotaryTable { table: &table, base: 10_000.0 }.op("table")?, 1)?;
        let rotary = Rotary { x: &qkv, table: &table, seq_len: SEQ, turning: Turning::Forward, y: &qkv };
        let case = |name, op: Result<Op, Error>| Ok::<_, Error>(Case { name, op: op?, limit: Limit::Copy });
        Ok(vec![
            case("gelu", Gelu { x, y }.op("a"))?,
            case("gelu backward", GeluBackward { dy, x, dx }.op("a"))?,
            case("swiglu", SwiGlu { gate: x, up: y, y: z }.op("a"))?,
            case("swiglu backward", SwiGluBackward { dy, gate: x, up: y, dgate: dx, dup: z }.op("a"))?,
            case("rotary in place", rotary.op("a"))?,
        ])
    }

    fn tables(&self) -> Result<Vec<Case>, Error> {
        let ids = &self.ids(ROWS, VOCAB)?;
        let (wte, wpe, y) = (&self.f32(&[VOCAB, DIM])?, &self.f32(&[SEQ, DIM])?, &self.f32(&[ROWS, DIM])?);
        let (logits, losses) = (&self.f32(&[ROWS, VOCAB])?, &self.f32(&[ROWS])?);
        let (small, small_ids) = (&self.f32(&[ROWS, 256])?, &self.ids(ROWS, 256)?);
        let (vocab, into) = (Vocab::whole(VOCAB), Accumulate::Add);
        let positions = Some(Positions { table: wpe, seq_len: SEQ });
        let scale = Factor::Const(1.0 / ROWS as f32);
        let entropy = |logits, targets| CrossEntropy { logits, targets, losses, dlogits: logits, scale };
        let case = |name, op: Result<Op, Error>| Ok::<_, Error>(Case { name, op: op?, limit: Limit::Copy });
        Ok(vec![
            case("embedding, positions", Embedding { ids, table: wte, vocab, positions, y }.op("e"))?,
            case("embedding grad", EmbeddingGrad { ids, dy: y, vocab, dtable: wte, into }.op("e"))?,
            case("position grad", PositionGrad { dy: y, seq_len: SEQ, dtable: wpe, into }.op("e"))?,
            case("cross entropy, 8192 ids", entropy(logits, ids).op("e"))?,
            case("cross entropy, 256 ids", entropy(small, small_ids).op("e"))?,
        ])
    }

    fn flat(&self) -> Result<Vec<Case>, Error> {
        let [param, grad, m, v] = [(); 4].map(|()| self.f32(&[PARAMS]));
        let (param, grad, m, v) = (&param?, &grad?, &m?, &v?);
        let (half, rest, scalars) = (&self.bf16(&[PARAMS])?, &self.i16(&[PARAMS])?, &self.f32(&[Hyper::LEN])?);
        self.stream.upload(scalars, vec![1e-4f32, 0.1, 0.001, 1.0])?;
        self.run(&Fill { y: v, value: 1e-3 }.op("v")?, 1)?;
        let adam = AdamW {
            param,
            rest: None,
            grad,
            m,
            v,
            scalars,
            skip: None,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
        };
        let partials = &self.f32(&[SquaredNorm::partials(PARAMS)])?;
        let (h, b) = (&self.f32(&[ROWS, FFN])?, &self.f32(&[FFN])?);
        let case = |name, op: Result<Op, Error>| Ok::<_, Error>(Case { name, op: op?, limit: Limit::Copy });
        Ok(vec![
            case("bias grad", BiasGrad { dy: h, dbias: b, into: Accumulate::Add }.op("f"))?,
            case("adamw", adam.op("f"))?,
            case("adamw, bf16 and rests", AdamW { param: half, rest: Some(rest), ..adam }.op("f"))?,
            case("squared norm", SquaredNorm { x: grad, partials }.op("f"))?,
            case("add", Add { a: param, b: grad, y: m }.op("f"))?,
            case("axpy", Axpy { alpha: Factor::Const(1e-3), x: grad, y: param }.op("f"))?,
            case("scale", Scale { x: grad, factor: Factor::Const(0.5), y: param }.op("f"))?,
            case("fill", Fill { y: param, value: 0.0 }.op("f"))?,
            case("cast f32 to bf16", Cast { x: grad, y: half }.op("f"))?,
            case("cast bf16 to f32", Cast { x: half, y: param }.op("f"))?,
        ])
    }
}
