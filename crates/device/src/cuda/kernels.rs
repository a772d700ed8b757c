//! Sources of kernels, and the functions in them.

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

pub(super) const SOURCES: &[Source] = &[
    Source {
        file: "elementwise.cu",
        text: include_str!("kernels/elementwise.cu"),
        functions: &["fill", "cast", "scale", "add", "axpy", "gelu", "gelu_backward"],
    },
    Source {
        file: "norm.cu",
        text: include_str!("kernels/norm.cu"),
        functions: &["layer_norm", "layer_norm_backward", "layer_norm_grad", "bias_grad"],
    },
    Source {
        file: "tokens.cu",
        text: include_str!("kernels/tokens.cu"),
        functions: &["embedding", "embedding_grad", "position_grad", "cross_entropy"],
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

    /// What follows `marker` in a source, up to `(`.
    fn defined(text: &'static str) -> BTreeSet<&'static str> {
        let marker = "extern \"C\" __global__ void ";
        text.split(marker).skip(1).map(|rest| rest.split('(').next().expect("a name").trim()).collect()
    }

    #[test]
    fn the_list_names_exactly_what_the_sources_define() {
        for source in SOURCES {
            assert_eq!(defined(source.text), source.functions.iter().copied().collect(), "{}", source.file);
        }
    }

    #[test]
    fn blocks_are_as_large_here_as_in_the_sources() {
        assert!(COMMON.contains(&format!("#define THREADS {THREADS}\n")));
    }

    #[test]
    fn sources_need_no_header() {
        let all = SOURCES.iter().map(|source| source.text).chain([COMMON]);
        assert!(all.into_iter().all(|text| !text.contains("#include")));
    }
}
