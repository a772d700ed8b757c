//! What planning costs one rank of 100,000: aim, under 10 ms for all of its own groups.

use pgroups::{Axis, GlobalRank, GroupsPlan, Init, InitStream, Key, Layout, LayoutConfig, Needs, Seed, Standard};

fn main() {
    divan::main();
}

/// Layouts of 100,000 ranks: one of many axes, one where nearly everyone is a replica.
const LAYOUTS: [&str; 2] = ["tp=8,gtp=5,cp=2,pp=10,ep=4,etp=2,egtp=5", "tp=1"];

fn layout(text: &str) -> Layout {
    let config = LayoutConfig { world_size: Some(100_000), ..LayoutConfig::parse(text).expect("a layout text") };
    Layout::new(&config).expect("a layout of 100,000 ranks")
}

/// Every standard key at once.
#[divan::bench(args = LAYOUTS)]
fn own_groups_of_every_key(bencher: divan::Bencher<'_, '_>, text: &str) {
    let layout = layout(text);
    let needs = Needs::keys(Standard::all(&layout).into_iter().map(Key::from));
    bencher.bench(|| GroupsPlan::new(&layout, &needs, GlobalRank(77_777)).expect("a plan"));
}

/// Checking the layout itself.
#[divan::bench(args = LAYOUTS)]
fn check_a_layout(text: &str) -> Layout {
    layout(text)
}

/// One rank's own group of one axis set.
#[divan::bench]
fn own_group_of_two_axes(bencher: divan::Bencher<'_, '_>) {
    let layout = layout(LAYOUTS[0]);
    let grid = layout.grid(pgroups::ParamClass::Dense);
    bencher.bench(|| grid.own_group(&[Axis::TP, Axis::CP], GlobalRank(77_777)));
}

/// Initial values, a million at a time.
#[divan::bench]
fn a_million_normal_values(bencher: divan::Bencher<'_, '_>) {
    let stream = InitStream::new(Seed(1), "wte", Init::Normal { std: 0.02 });
    let mut values = vec![0.0; 1_000_000];
    bencher.bench_local(|| stream.fill(0, divan::black_box(&mut values)));
}
