//! A hidden layer over two, then three ranks: its columns are cut, so the first product needs no exchange and the second
//! one sum.
//!
//! Run: `cargo run -p gtp --example 01_column_and_row`

use device::{DType, Frame, Machine, MemoryKind};
use gtp::layers::{LayerError, Linear, Region, RowLinear, Then};
use pgroups::{
    Axis, Init, Key, Layout, LayoutConfig, Needs, ParamClass, ParamSet, ParamSpec, ParamTypes, Pass, Placement,
    ProcessGroups, Rank, Seed, Sequence, TensorParallel, Turn, Whole, local,
};

const DIM: usize = 4;
const HIDDEN: usize = 12;
const ROWS: usize = 6;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let machine = Machine::cpu(2)?;
    for ranks in [1, 2, 3] {
        for sequence in [Sequence::Whole, Sequence::Split] {
            let parts = local(&machine, ranks, |rank| hidden_layer(&rank, sequence))?;
            for (rank, part) in parts.iter().enumerate() {
                let head: Vec<String> = part.iter().take(4).map(|v| format!("{v:+.4}")).collect();
                println!(
                    "{ranks} ranks, {sequence:?}: rank {rank} has {} rows, first {}",
                    part.len() / DIM,
                    head.join(" ")
                );
            }
        }
    }
    Ok(())
}

/// What a rank has of gelu(x · w1ᵀ + b1) · w2ᵀ.
fn hidden_layer(rank: &Rank, sequence: Sequence) -> Result<Vec<f32>, LayerError> {
    let layout = Layout::new(&LayoutConfig { tp: rank.world_size, ..LayoutConfig::default() })
        .map_err(pgroups::PgError::from)?;
    let groups = ProcessGroups::build(rank, &layout, &Needs::keys([Key::TP]))?;
    let tensor = TensorParallel::new(groups.get(&Key::TP, "the example")?.clone(), sequence);

    // The first weight and its bias are cut by rows, the second weight by columns; values do not depend on the cut.
    let spec = |name: &str, placement, std| ParamSpec {
        name: name.into(),
        class: ParamClass::Dense,
        placement,
        init: Init::Normal { std },
    };
    let specs = [
        spec("w1", Placement::whole([HIDDEN, DIM]).cut(0, Axis::TP, 0), 1.0),
        spec("b1", Placement::whole([HIDDEN]).cut(0, Axis::TP, 0), 0.1),
        spec("w2", Placement::whole([DIM, HIDDEN]).cut(1, Axis::TP, 0), 1.0),
    ];
    let set = ParamSet::allocate(rank, &layout, &specs, ParamTypes::default())?;
    let on = rank.device.stream("compute")?;
    set.fill(&on, Seed(1))?;
    let [w1, b1, w2] = set.params() else { unreachable!("BUG: three were asked for") };
    let (first, second) = (Linear::new(w1, Some(b1), "first"), RowLinear::new(w2, None, "second"));

    let mut w = Whole::new(Turn::eager(Pass::Forward)).over(&tensor);
    let region = Region::of(&w);
    let own = region.own_rows(ROWS)?;
    let start = if own < ROWS { region.place() * own } else { 0 };
    let x = rank.device.alloc("x", &[own, DIM], DType::F32, MemoryKind::Other)?;
    on.upload(&x, (start * DIM..(start + own) * DIM).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<f32>>())?;

    let mut f = Frame::unplanned(&on, "forward");
    let columns = HIDDEN / region.size() as usize;
    let all = region.gather(&mut f, &x)?;
    let (pre, active) = (f.temp(&[ROWS, columns], DType::F32)?, f.temp(&[ROWS, columns], DType::F32)?);
    first.forward(&on, &mut w, &all, &active, Then::Gelu { pre: &pre })?;
    let y = second.forward(&mut f, &mut w, &active, &[ROWS, DIM], None)?;
    Ok(on.download(&y)?.wait()?)
}
