//! Sources of kernels, and the functions in them.

use super::Arch;

/// A source and what it defines.
pub(super) struct Source {
    pub(super) file: &'static str,
    pub(super) text: &'static str,
    pub(super) functions: &'static [&'static str],
}

/// What every source begins with.
pub(super) const COMMON: &str = include_str!("kernels/common.cu");

/// Threads of a block, as `common.cu` has them.
pub(super) const THREADS: u32 = 256;

/// Threads of a block of `cross_entropy` and its twin, as `loss.cu` has them.
pub(super) const LOSS_THREADS: u32 = 512;

/// Threads of a block of `squared_norm`, and runs of a call of `adamw`, as `optimizer.cu` has them.
pub(super) const NORM_THREADS: u32 = 1024;
pub(super) const MOST_RUNS: usize = 64;

/// Rows of bf16 that a team has in shared memory, as `norm_backward.cu` has them.
pub(super) const STAGES: usize = 2;

/// What only cards of compute capability 9.0 have: it uses instructions that neither older nor newer ones know.
pub(super) const HOPPER: Source = Source {
    file: "hopper_product.cu",
    text: concat!(include_str!("kernels/hopper.cu"), include_str!("kernels/hopper_product.cu")),
    functions: &["gelu_nt", "slope_nn"],
};

/// Whether cards of `arch` have [`HOPPER`].
pub(super) fn is_hopper(arch: Arch) -> bool {
    arch == Arch { major: 9, minor: 0 }
}

/// The sources that cards of `arch` have, and what the compiler calls the architecture of each.
pub(super) fn sources(arch: Arch) -> impl Iterator<Item = (&'static Source, String)> {
    let every = SOURCES.iter().map(move |source| (source, arch.to_string()));
    every.chain(is_hopper(arch).then(|| (&HOPPER, format!("{arch}a"))))
}

/// What every card has.
const SOURCES: &[Source] = &[
    Source {
        file: "elementwise.cu",
        text: include_str!("kernels/elementwise.cu"),
        functions: &["fill", "cast", "scale", "add", "axpy", "gelu", "gelu_backward", "swiglu", "swiglu_backward"],
    },
    Source {
        file: "norm.cu",
        text: concat!(include_str!("kernels/team.cu"), include_str!("kernels/norm.cu")),
        functions: &["layer_norm", "layer_norm_f32", "layer_norm_bf16", "rms_norm", "rms_norm_f32", "rms_norm_bf16"],
    },
    Source {
        file: "norm_backward.cu",
        text: concat!(
            include_str!("kernels/staging.cu"),
            include_str!("kernels/team.cu"),
            include_str!("kernels/norm_backward.cu")
        ),
        functions: &[
            "layer_norm_backward",
            "layer_norm_backward_f32",
            "layer_norm_backward_bf16",
            "rms_norm_backward",
            "rms_norm_backward_f32",
            "rms_norm_backward_bf16",
        ],
    },
    Source {
        file: "columns.cu",
        text: include_str!("kernels/columns.cu"),
        functions: &[
            "column_sums",
            "column_sums_centred",
            "column_sums_scaled",
            "column_sums_of_few",
            "column_sums_of_group",
            "fold",
        ],
    },
    Source { file: "rotary.cu", text: include_str!("kernels/rotary.cu"), functions: &["rotary_table", "rotary"] },
    Source {
        file: "attention.cu",
        text: include_str!("kernels/attention.cu"),
        functions: &[
            "attention_64",
            "attention_128",
            "attention_256",
            "attention_keys_64",
            "attention_keys_128",
            "attention_keys_256",
            "attention_queries_64",
            "attention_queries_128",
            "attention_queries_256",
        ],
    },
    Source {
        file: "flash.cu",
        text: include_str!("kernels/flash.cu"),
        functions: &["flash", "flash_queries", "flash_keys"],
    },
    Source { file: "product.cu", text: include_str!("kernels/product.cu"), functions: &["product"] },
    Source {
        file: "tokens.cu",
        text: include_str!("kernels/tokens.cu"),
        functions: &["embedding", "embedding_keep", "embedding_sort", "embedding_add", "position_grad"],
    },
    Source {
        file: "loss.cu",
        text: concat!(
            include_str!("kernels/staging.cu"),
            include_str!("kernels/loss.cu"),
            include_str!("kernels/vocab.cu")
        ),
        functions: &["cross_entropy", "cross_entropy_twice", "vocab_partials", "vocab_rescale", "vocab_finish"],
    },
    Source {
        file: "optimizer.cu",
        text: include_str!("kernels/optimizer.cu"),
        functions: &["adamw", "advance_adam", "sum", "squared_norm", "clip_factor"],
    },
    Source { file: "joint.cu", text: include_str!("kernels/joint.cu"), functions: &["to_ordered", "from_ordered"] },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The functions that a source defines.
    fn defined(text: &'static str) -> BTreeSet<&'static str> {
        let name = |rest: &'static str| {
            let name = rest.split_once("void ").expect("a function").1;
            name.split('(').next().expect("its name").trim()
        };
        text.split("extern \"C\" __global__ ").skip(1).map(name).collect()
    }

    #[test]
    fn the_list_names_exactly_what_the_sources_define() {
        for source in SOURCES.iter().chain([&HOPPER]) {
            assert_eq!(defined(source.text), source.functions.iter().copied().collect(), "{}", source.file);
        }
    }

    #[test]
    fn sizes_are_here_as_in_the_sources() {
        let optimizer = SOURCES.iter().find(|source| source.file == "optimizer.cu").expect("a source").text;
        let loss = SOURCES.iter().find(|source| source.file == "loss.cu").expect("a source").text;
        assert!(loss.contains(&format!("#define LOSS_THREADS {LOSS_THREADS}\n")));
        assert!(COMMON.contains(&format!("#define THREADS {THREADS}\n")));
        let norms = SOURCES.iter().find(|source| source.file == "norm_backward.cu").expect("a source").text;
        assert!(norms.contains(&format!("#define STAGES {STAGES}\n")));
        assert!(optimizer.contains(&format!("#define NORM_THREADS {NORM_THREADS}\n")));
        assert!(optimizer.contains(&format!("#define MOST_RUNS {MOST_RUNS}\n")));
    }

    #[test]
    fn only_compute_capability_9_0_has_what_is_made_for_it() {
        let own = |major, minor| {
            let mut own = sources(Arch { major, minor }).filter(|(source, _)| source.file == "hopper_product.cu");
            (own.next().map(|(_, target)| target), own.count())
        };
        assert_eq!(own(9, 0), (Some("sm_90a".to_owned()), 0));
        assert!([(8, 0), (8, 9), (10, 0), (12, 0)].into_iter().all(|(major, minor)| own(major, minor) == (None, 0)));
        assert!(sources(Arch { major: 9, minor: 0 }).filter(|(_, target)| target == "sm_90").count() == SOURCES.len());
    }

    #[test]
    fn sources_need_no_header() {
        let all = SOURCES.iter().map(|source| source.text).chain([COMMON, HOPPER.text]);
        assert!(all.into_iter().all(|text| !text.contains("#include")));
    }
}
