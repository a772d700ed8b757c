//! What a card makes of the rows of the vocabulary's table.

use crate::{Config, config::DeviceKind};

/// Rows of logits begin at multiples of 16 bytes in every element type: less, and the library multiplies element by
/// element.
const NEEDED: usize = 8;
/// What tiles of products divide.
const BEST: usize = 64;

/// On a card: the setting that makes products over the vocabulary fast, where they are slow.
pub(super) fn table_rows_hint(config: &Config) -> Option<String> {
    let tp = config.layout.tp as usize;
    let (all, rows) = (config.model.vocab_rows, config.model.vocab_rows.div_ceil(tp));
    if config.device.kind != DeviceKind::Cuda || rows.is_multiple_of(NEEDED) {
        return None;
    }
    let best = all.next_multiple_of(BEST * tp);
    Some(format!(
        "{rows} rows of the table of tokens on each rank are no multiple of {NEEDED}: products over them are several \
         times slower; model.vocab_rows = {best} pads them"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(settings: &[&str]) -> Option<String> {
        let text = "[model]\nlayers = 1\ndim = 16\nheads = 2\nseq_len = 8\n[train]\nsteps = 1\nglobal_batch = 8\n[data]\npath = [\"text\"]\n";
        let config = Config::parse(text, "test".as_ref(), "".as_ref(), settings).expect("a valid configuration");
        table_rows_hint(&config)
    }

    #[test]
    fn rows_that_a_card_cannot_move_sixteen_bytes_at_a_time_are_told_with_a_number_that_it_can() {
        let text = hint(&["device.kind=cuda", "model.vocab=50257"]).unwrap();
        assert!(text.starts_with("50257 rows") && text.contains("model.vocab_rows = 50304"), "{text}");
        let text = hint(&["device.kind=cuda", "model.vocab=50304", "layout.tp=4", "model.heads=4"]);
        assert_eq!(text, None, "12576 rows on each rank");
        let text = hint(&["device.kind=cuda", "model.vocab=50264", "layout.tp=2"]).unwrap();
        assert!(text.starts_with("25132 rows") && text.contains("model.vocab_rows = 50304"), "{text}");
    }

    #[test]
    fn hosts_multiply_any_rows_alike() {
        assert_eq!(hint(&["device.kind=cpu", "model.vocab=50257"]), None);
    }
}
