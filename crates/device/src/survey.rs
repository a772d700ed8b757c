//! What a dry program has asked for.

use std::{
    collections::HashSet,
    sync::{Mutex, MutexGuard},
};

use crate::{Op, ops::GemmShape};

/// The products of a machine's operations, on the driver that computes none of them.
#[derive(Default)]
pub(crate) struct Survey(Mutex<HashSet<GemmShape>>);

impl Survey {
    fn lock(&self) -> MutexGuard<'_, HashSet<GemmShape>> {
        self.0.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    pub(crate) fn note(&self, op: &Op) {
        if let Some(shape) = GemmShape::of(op) {
            self.lock().insert(shape);
        }
    }

    /// In an order that depends on nothing else than what they are.
    pub(crate) fn products(&self) -> Vec<GemmShape> {
        let mut products: Vec<GemmShape> = self.lock().iter().cloned().collect();
        products.sort_by_cached_key(|product| format!("{product:?}"));
        products
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        DType, Device, Machine, MemoryKind, View,
        ops::{Accumulate, Fill, Finish, Gemm, Trans},
    };

    fn matrix(device: &Device, rows: usize, cols: usize) -> View {
        device.alloc("m", &[rows, cols], DType::Bf16, MemoryKind::Other).unwrap()
    }

    fn submit(machine: &Machine, rank: u32, order: [usize; 4]) {
        let device = machine.device(rank).unwrap();
        let stream = device.stream("compute").unwrap();
        for m in order {
            let (a, b, c) = (matrix(&device, m, 8), matrix(&device, 16, 8), matrix(&device, m, 16));
            let finish = Finish::Into(Accumulate::Overwrite);
            stream.launch(Gemm { a: &a, b: &b, c: &c, trans: Trans::Nt, finish }.op("test").unwrap()).unwrap();
            stream.launch(Fill { y: &c, value: 0.0 }.op("test").unwrap()).unwrap();
        }
    }

    #[test]
    fn a_dry_program_tells_the_shapes_of_its_products_once_each_and_always_in_one_order() {
        let dry = |orders: &[[usize; 4]]| {
            let machine = Machine::dry();
            (0..).zip(orders).for_each(|(rank, order)| submit(&machine, rank, *order));
            machine.products()
        };
        let products = dry(&[[1, 2, 3, 2]]);
        assert_eq!(products.len(), 3);
        assert_eq!(dry(&[[3, 1, 1, 2]]), products);
        assert_eq!(dry(&[[3, 3, 3, 3], [2, 1, 1, 2]]), products);
    }

    #[test]
    fn rows_that_lie_otherwise_are_another_shape() {
        let machine = Machine::dry();
        let device = machine.device(0).unwrap();
        let stream = device.stream("compute").unwrap();
        let all = matrix(&device, 4, 40);
        let (b, c) = (matrix(&device, 16, 8), matrix(&device, 4, 16));
        for from in [0, 8, 16, 1] {
            let a = all.columns(from..from + 8).unwrap();
            let finish = Finish::Into(Accumulate::Overwrite);
            stream.launch(Gemm { a: &a, b: &b, c: &c, trans: Trans::Nt, finish }.op("test").unwrap()).unwrap();
        }
        // Aligned to 128, 16, 32 and 2 bytes.
        assert_eq!(machine.products().len(), 4);
    }

    #[test]
    fn machines_that_compute_list_nothing_and_have_no_choice_of_algorithms() {
        let machine = Machine::cpu(1).unwrap();
        submit(&machine, 0, [1; 4]);
        assert!(machine.products().is_empty());
        assert_eq!(machine.measure_products(&[]).unwrap(), None);
    }
}
