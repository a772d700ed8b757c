use crate::{
    View,
    ops::{
        Accumulate, Embedding, EmbeddingGrad, PositionGrad, Positions, Vocab,
        trial::{Gaps, assert_close, assert_order_free, few, random, refusal, run_checked, run_now, vector},
    },
    testing::{get, holding, put},
};

const VOCAB: usize = 11;
const SEQ: usize = 5;
const ROWS: usize = 3 * SEQ;

/// Every second id twice, one never.
fn ids() -> Vec<i32> {
    (0..ROWS).map(|i| ((i * 7 + i / 4) % (VOCAB - 1)) as i32).collect()
}

fn ids_view() -> View {
    holding("ids", &[ROWS], &ids())
}

#[test]
fn rows_of_the_table_and_of_the_positions_are_summed() {
    for &cols in few(&[1, 17, 3, 64]) {
        for gaps in Gaps::BOTH {
            let (table, positions) = (random(1, VOCAB * cols), random(2, (SEQ + 2) * cols));
            let (tv, pv) = (gaps.holding("wte", VOCAB, cols, &table), gaps.holding("wpe", SEQ + 2, cols, &positions));
            for (first, with) in [(0, false), (0, true), (2, true)] {
                let y = gaps.poisoned("y", ROWS, cols);
                let later = pv.rows(first..SEQ + 2).unwrap();
                let positions_given = with.then_some(Positions { table: &later, seq_len: SEQ });
                let vocab = Vocab::whole(VOCAB);
                let request = Embedding { ids: &ids_view(), table: &tv, vocab, positions: positions_given, y: &y };
                run_checked(&request.op("t").unwrap());
                let at = |i: usize, j: usize| {
                    let token = table[ids()[i] as usize * cols + j];
                    if with { token + positions[(first + i % SEQ) * cols + j] } else { token }
                };
                let want: Vec<f32> = (0..ROWS).flat_map(|i| (0..cols).map(move |j| at(i, j))).collect();
                assert_eq!(get::<f32>(&y), want);
            }
        }
    }
}

#[test]
fn shards_of_the_vocabulary_add_up_to_the_whole() {
    let cols = 7;
    let table = random(1, VOCAB * cols);
    let tv = Gaps::None.holding("wte", VOCAB, cols, &table);
    let dy = Gaps::Some.holding("dy", ROWS, cols, &random(3, ROWS * cols));
    let mut sums = vec![0.0; ROWS * cols];
    let mut grads = vec![];
    for part in [0..4, 4..5, 5..VOCAB] {
        let shard = tv.rows(part.clone()).unwrap();
        let vocab = Vocab { size: VOCAB, start: part.start };
        let y = Gaps::None.poisoned("y", ROWS, cols);
        run_checked(&Embedding { ids: &ids_view(), table: &shard, vocab, positions: None, y: &y }.op("t").unwrap());
        sums.iter_mut().zip(get::<f32>(&y)).for_each(|(s, y)| *s += y);
        let dtable = Gaps::None.poisoned("dwte", part.len(), cols);
        let into = Accumulate::Overwrite;
        run_checked(&EmbeddingGrad { ids: &ids_view(), dy: &dy, vocab, dtable: &dtable, into }.op("t").unwrap());
        grads.extend(get::<f32>(&dtable));
    }
    let y = Gaps::None.poisoned("y", ROWS, cols);
    let vocab = Vocab::whole(VOCAB);
    run_checked(&Embedding { ids: &ids_view(), table: &tv, vocab, positions: None, y: &y }.op("t").unwrap());
    assert_eq!(get::<f32>(&y), sums);
    let dtable = Gaps::None.poisoned("dwte", VOCAB, cols);
    let into = Accumulate::Overwrite;
    run_checked(&EmbeddingGrad { ids: &ids_view(), dy: &dy, vocab, dtable: &dtable, into }.op("t").unwrap());
    assert_eq!(get::<f32>(&dtable), grads);
}

#[test]
fn gradients_are_scattered_in_order_and_accumulate() {
    for &cols in few(&[1, 17, 65]) {
        for gaps in Gaps::BOTH {
            let dy = random(1, ROWS * cols);
            let dyv = gaps.holding("dy", ROWS, cols, &dy);
            let mut tokens = vec![0.0; VOCAB * cols];
            let mut positions = vec![0.0; (SEQ + 1) * cols];
            for (i, id) in ids().iter().enumerate() {
                for j in 0..cols {
                    tokens[*id as usize * cols + j] += f64::from(dy[i * cols + j]);
                    positions[i % SEQ * cols + j] += f64::from(dy[i * cols + j]);
                }
            }
            let (dt, dp) = (gaps.poisoned("dwte", VOCAB, cols), gaps.poisoned("dwpe", SEQ + 1, cols));
            let run = |into, times: f64| {
                let vocab = Vocab::whole(VOCAB);
                run_checked(&EmbeddingGrad { ids: &ids_view(), dy: &dyv, vocab, dtable: &dt, into }.op("t").unwrap());
                run_checked(&PositionGrad { dy: &dyv, seq_len: SEQ, dtable: &dp, into }.op("t").unwrap());
                assert_close(&dt, &tokens.iter().map(|x| x * times).collect::<Vec<_>>(), 1e-6);
                assert_close(&dp, &positions.iter().map(|x| x * times).collect::<Vec<_>>(), 1e-6);
            };
            run(Accumulate::Overwrite, 1.0);
            run(Accumulate::Add, 2.0);
            let keep = vector("keep", &[0.25]);
            run(Accumulate::Keep(&keep), 1.5);
            put(&keep, &[0.0]);
            put(&dt, &vec![f32::NAN; VOCAB * cols]);
            put(&dp, &vec![f32::NAN; (SEQ + 1) * cols]);
            run(Accumulate::Keep(&keep), 1.0);
        }
    }
}

#[test]
fn an_id_outside_the_vocabulary_is_told_with_its_position() {
    let cols = if cfg!(miri) { 3 } else { 256 };
    let rows = if cfg!(miri) { 40 } else { 3000 };
    let tv = Gaps::None.holding("wte", VOCAB, cols, &random(1, VOCAB * cols));
    let y = Gaps::None.poisoned("y", rows, cols);
    for bad in [-1, VOCAB as i32, i32::MIN] {
        let mut ids = vec![1; rows];
        ids[rows - 3] = bad;
        let ids = holding("ids", &[rows], &ids);
        let want = format!("id {bad} at position {} is outside the vocabulary 0..{VOCAB}", rows - 3);
        let vocab = Vocab::whole(VOCAB);
        let op = Embedding { ids: &ids, table: &tv, vocab, positions: None, y: &y }.op("t").unwrap();
        assert_eq!(run_now(&op).unwrap_err().to_string(), want);
        let into = Accumulate::Overwrite;
        let op = EmbeddingGrad { ids: &ids, dy: &y, vocab, dtable: &tv, into }.op("t").unwrap();
        assert_eq!(run_now(&op).unwrap_err().to_string(), want);
    }
}

#[test]
fn large_embeddings_are_cut_along_columns_with_the_same_bits_in_any_order() {
    if cfg!(miri) {
        return;
    }
    let (rows, cols, vocab) = (900, 1701, 50);
    let ids: Vec<i32> = (0..rows).map(|i| (i * i % vocab) as i32).collect();
    let ids = holding("ids", &[rows], &ids);
    let view = |label: &str, rows: usize, seed| Gaps::Some.holding(label, rows, cols, &random(seed, rows * cols));
    assert_order_free(|| {
        let (table, wpe, y) = (view("wte", vocab, 1), view("wpe", 300, 2), Gaps::None.poisoned("y", rows, cols));
        let positions = Some(Positions { table: &wpe, seq_len: 300 });
        let request = Embedding { ids: &ids, table: &table, vocab: Vocab::whole(vocab), positions, y: &y };
        (request.op("t").unwrap(), vec![y])
    });
    assert_order_free(|| {
        let (dy, dtable, keep) = (view("dy", rows, 1), view("dwte", vocab, 2), vector("keep", &[0.5]));
        let into = Accumulate::Keep(&keep);
        let request = EmbeddingGrad { ids: &ids, dy: &dy, vocab: Vocab::whole(vocab), dtable: &dtable, into };
        (request.op("t").unwrap(), vec![dtable])
    });
    assert_order_free(|| {
        let (dy, dtable) = (view("dy", rows, 1), view("dwpe", 300, 2));
        (PositionGrad { dy: &dy, seq_len: 300, dtable: &dtable, into: Accumulate::Add }.op("t").unwrap(), vec![dtable])
    });
}

#[test]
fn wrong_sizes_are_told_with_both_shapes() {
    let (table, y) = (Gaps::None.poisoned("wte", VOCAB, 4), Gaps::None.poisoned("y", ROWS, 5));
    let vocab = Vocab::whole(VOCAB);
    let ids = ids_view();
    let text = refusal(Embedding { ids: &ids, table: &table, vocab, positions: None, y: &y }.op("wte"));
    assert_eq!(text, "embedding@wte: table is [11, 4] and y is [15, 5]; both must have the same columns");
    let y = Gaps::None.poisoned("y", ROWS - 1, 4);
    let text = refusal(Embedding { ids: &ids, table: &table, vocab, positions: None, y: &y }.op("t"));
    assert!(text.contains("y is [14, 4] and ids is [15]"), "{text}");
    let text = refusal(PositionGrad { dy: &y, seq_len: 14, dtable: &table, into: Accumulate::Add }.op("t"));
    assert_eq!(text, "position_grad@t: seq_len is 14, the position table has fewer rows");
}
