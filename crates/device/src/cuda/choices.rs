//! Which algorithm products of a shape are computed by, from run to run: one file for each kind of card, driver and
//! library.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use super::{fnv, kept, product::ProductShape};

/// How products of a shape are computed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Choice {
    Algorithm(Algorithm),
    /// By our kernel for compute capability 9.0, with what follows them.
    Hopper,
    /// By what stands behind them where the library has nothing: it has no algorithm, or that is faster.
    Otherwise,
}

/// An algorithm as the library writes it down for itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Algorithm {
    pub(super) words: [u64; 8],
    /// Bytes that it works in.
    pub(super) workspace: usize,
}

/// Choices by the text of their shape.
pub(super) struct Choices {
    /// All that they depend on, in a line.
    key: String,
    path: Option<PathBuf>,
    by_shape: BTreeMap<String, Choice>,
    changed: bool,
}

/// First line of a file. What is read must be what is written: another form gets another number.
const FORM: &str = "warpweft products 2";

impl Choices {
    /// Those of earlier runs under `key`, if there is a folder. A file that cannot be read is passed over and told in the
    /// log: what was in it is measured again.
    pub(super) fn open(folder: Option<&Path>, key: String) -> Choices {
        let path = folder.map(|folder| folder.join(format!("products-{:016x}.choices", fingerprint([key.as_str()]))));
        let kept = path.as_ref().and_then(|path| match fs::read_to_string(path) {
            Ok(text) => read(&text, &key).or_else(|| {
                tracing::warn!(path = %path.display(), "cuda.pass_over_choices");
                None
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cuda.pass_over_choices");
                None
            }
        });
        Choices { key, path, by_shape: kept.unwrap_or_default(), changed: false }
    }

    pub(super) fn get(&self, shape: &ProductShape) -> Option<&Choice> {
        self.by_shape.get(&shape.to_string())
    }

    pub(super) fn set(&mut self, shape: &ProductShape, choice: Choice) {
        self.changed |= self.by_shape.insert(shape.to_string(), choice.clone()) != Some(choice);
    }

    /// Writes what is new. A folder that cannot be used costs time in the next run, nothing else.
    pub(super) fn keep(&self) {
        let Some(path) = self.path.as_ref().filter(|_| self.changed) else { return };
        if let Err(error) = kept::write(path, self.text().as_bytes()) {
            tracing::warn!(path = %path.display(), %error, "cuda.keep_choices");
        }
    }

    fn text(&self) -> String {
        let lines: Vec<String> = self.by_shape.iter().map(|(shape, choice)| format!("{shape} = {choice}\n")).collect();
        let count = lines.len();
        format!("{FORM}\n{}\n{}end of {count}\n", self.key, lines.concat())
    }

    /// Of the choices for `shapes`, in 64 bits; shapes without one count too.
    pub(super) fn fingerprint<'s>(&self, shapes: impl Iterator<Item = &'s ProductShape>) -> u64 {
        let mut lines: Vec<String> = shapes.map(|shape| format!("{shape} = {:?}\n", self.get(shape))).collect();
        lines.sort();
        lines.dedup();
        fingerprint(lines.iter().map(String::as_str).chain([self.key.as_str()]))
    }
}

/// The choices in `text`, if it is whole and was written under `key`.
fn read(text: &str, key: &str) -> Option<BTreeMap<String, Choice>> {
    let rest = text.strip_prefix(FORM)?.strip_prefix('\n')?.strip_prefix(key)?.strip_prefix('\n')?;
    let (lines, end) = rest.strip_suffix('\n')?.rsplit_once('\n').unwrap_or(("", rest.trim_end()));
    let by_shape = lines.lines().map(read_line).collect::<Option<BTreeMap<_, _>>>()?;
    (end == format!("end of {}", by_shape.len())).then_some(by_shape)
}

fn read_line(line: &str) -> Option<(String, Choice)> {
    let (shape, choice) = line.split_once(" = ")?;
    let alone = [Choice::Hopper, Choice::Otherwise].into_iter().find(|alone| alone.to_string() == choice);
    if let Some(alone) = alone {
        return Some((shape.to_owned(), alone));
    }
    let (workspace, words) = choice.split_once(" bytes ")?;
    let words: Vec<u64> = words.split(' ').map(|word| u64::from_str_radix(word, 16).ok()).collect::<Option<_>>()?;
    let algorithm = Algorithm { words: words.try_into().ok()?, workspace: workspace.parse().ok()? };
    Some((shape.to_owned(), Choice::Algorithm(algorithm)))
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Hopper => f.write_str("hopper"),
            Choice::Otherwise => f.write_str("otherwise"),
            Choice::Algorithm(Algorithm { words, workspace }) => {
                write!(f, "{workspace} bytes")?;
                words.iter().try_for_each(|word| write!(f, " {word:016x}"))
            }
        }
    }
}

/// 64 bits that are the same in every build.
pub(super) fn fingerprint<'t>(texts: impl IntoIterator<Item = &'t str>) -> u64 {
    texts.into_iter().fold(fnv::START, |hash, text| fnv::add(hash, text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType,
        ops::{GemmFinish, GemmSpec, MatrixShape, Old, Trans},
    };

    fn shape(rows: u64) -> ProductShape {
        let matrix = |rows, cols| MatrixShape { dtype: DType::Bf16, rows, cols, pitch: cols, align: 128 };
        let at = [matrix(rows, 64), matrix(64, 32), matrix(rows, 32)];
        ProductShape::whole(&GemmSpec { trans: Trans::Nn, finish: GemmFinish::Into(Old::Overwrite) }, &at)
    }

    fn some_choices(choices: &mut Choices) -> [(ProductShape, Choice); 3] {
        let algorithm = Algorithm { words: [1, 2, 3, u64::MAX, 5, 6, 7, 0], workspace: 4096 };
        let library = Choice::Algorithm(algorithm);
        let all = [(shape(8), library), (shape(9), Choice::Hopper), (shape(11), Choice::Otherwise)];
        all.iter().for_each(|(shape, choice)| choices.set(shape, choice.clone()));
        all
    }

    #[test]
    fn kept_choices_are_those_of_the_same_card_driver_and_library_only() {
        let folder = std::env::temp_dir().join(format!("warpweft-choices-{}", std::process::id()));
        let open = |key: &str| Choices::open(Some(&folder), key.to_owned());
        let mut choices = open("card A, library 1");
        let all = some_choices(&mut choices);
        choices.keep();
        let again = open("card A, library 1");
        assert!(all.iter().all(|(shape, choice)| again.get(shape) == Some(choice)));
        assert_eq!(again.get(&shape(10)), None);
        let shapes = || all.iter().map(|(shape, _)| shape);
        assert_eq!(again.fingerprint(shapes()), choices.fingerprint(shapes().rev()), "in any order");
        let other = open("card A, library 2");
        assert_eq!(other.get(&all[0].0), None);
        assert_ne!(other.fingerprint(shapes()), again.fingerprint(shapes()));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside it");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_that_is_not_whole_is_passed_over_and_written_anew() {
        let mut choices = Choices::open(None, "key".to_owned());
        let all = some_choices(&mut choices);
        let text = choices.text();
        assert_eq!(read(&text, "key").map(|read| read.len()), Some(3));
        assert!((0..text.len()).all(|end| read(&text[..end], "key").is_none()), "cut off");
        assert!(read(&text.replace("otherwise", "other"), "key").is_none());
        assert!(read(&text.replace("0000000000000007 ", ""), "key").is_none(), "a word is missing");
        assert!(read(&text, "ke").is_none());

        let folder = std::env::temp_dir().join(format!("warpweft-choices-cut-{}", std::process::id()));
        let open = || Choices::open(Some(&folder), "key".to_owned());
        kept::write(open().path.as_ref().unwrap(), &text.as_bytes()[..text.len() / 2]).unwrap();
        let mut cut = open();
        assert_eq!(cut.get(&all[0].0), None);
        some_choices(&mut cut);
        cut.keep();
        assert_eq!(open().get(&all[0].0), Some(&all[0].1));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_of_no_choices_is_whole() {
        assert_eq!(read(&Choices::open(None, "key".to_owned()).text(), "key"), Some(BTreeMap::new()));
    }
}
