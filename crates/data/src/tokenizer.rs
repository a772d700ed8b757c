//! Text to token ids and back.

use crate::error::DataError;
use std::{fmt, str::FromStr};

/// How text becomes token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Tokenizer {
    /// One token per byte of UTF-8; ids are the byte values.
    #[default]
    Bytes,
}

impl Tokenizer {
    /// Number of different ids: ids are `0..vocab()`. A model's vocabulary must be at least as large.
    pub fn vocab(self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
        }
    }

    /// The ids of a text, in order.
    pub fn encode(self, text: &str) -> Vec<i32> {
        match self {
            Tokenizer::Bytes => text.bytes().map(i32::from).collect(),
        }
    }

    /// The text of ids. What is no character (a cut one, or an id of a padded vocabulary) becomes U+FFFD,
    /// because a model may generate anything.
    pub fn decode(self, ids: &[i32]) -> String {
        match self {
            Tokenizer::Bytes => {
                // 0xFF occurs in no UTF-8 text, so an id without a byte is shown as a bad character.
                let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(0xFF)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
        }
    }
}

impl FromStr for Tokenizer {
    type Err = DataError;

    fn from_str(name: &str) -> Result<Self, DataError> {
        match name {
            "bytes" => Ok(Tokenizer::Bytes),
            other => Err(DataError::UnknownTokenizer { name: other.to_owned(), known: "bytes" }),
        }
    }
}

impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tokenizer::Bytes => f.write_str("bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_the_way_to_ids_and_back() {
        let text = "häuser, 家\n\0";
        let ids = Tokenizer::Bytes.encode(text);
        assert_eq!(ids.len(), text.len());
        assert_eq!(&ids[..3], &[0x68, 0xC3, 0xA4]);
        assert!(ids.iter().all(|&id| usize::try_from(id).is_ok_and(|id| id < Tokenizer::Bytes.vocab())));
        assert_eq!(Tokenizer::Bytes.decode(&ids), text);
    }

    #[test]
    fn ids_without_a_character_are_shown_not_dropped() {
        assert_eq!(Tokenizer::Bytes.decode(&[0x61, 300, 0x62, -1, 0xC3]), "a\u{FFFD}b\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn a_name_is_read_back_from_its_display_and_an_unknown_one_is_refused_with_the_known() {
        assert_eq!("bytes".parse::<Tokenizer>().unwrap().to_string(), "bytes");
        let error = "bpe".parse::<Tokenizer>().unwrap_err().to_string();
        assert_eq!(error, "there is no tokenizer 'bpe'; known: bytes");
    }
}
