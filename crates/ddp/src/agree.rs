//! Ranks compare their settings and parameters before anything large moves: a rank with others must be an error at the
//! start, not a hang or a wrong sum later.

use device::{DType, MemoryKind, Stream, View};
use pgroups::{Group, GroupRank};

use crate::{DdpError, DeclaredParam};

/// Bytes of a text that are exchanged when there is a difference to tell.
const TEXT: usize = 512;

/// The host waits until all members of `group` have compared.
///
/// # Errors
/// [`DdpError::SettingsDiffer`], else [`DdpError::ParamsDiffer`] with the first parameter in which any two differ; on
/// every member.
pub(crate) fn agree(
    group: &Group,
    stream: &Stream,
    settings: String,
    declared: &[DeclaredParam],
) -> Result<(), DdpError> {
    if group.size() < 2 || !stream.device().machine().computes() {
        return Ok(());
    }
    let mut texts = vec![settings];
    texts.extend(declared.iter().map(DeclaredParam::describe));
    let Some(first) = first_difference(group, stream, &texts)? else { return Ok(()) };
    let mine = texts.get(first).map_or("nothing", String::as_str);
    let mut bytes: Vec<i32> = mine.bytes().take(TEXT).map(i32::from).collect();
    bytes.resize(TEXT, 0);
    let told = gather(group, stream, &bytes)?;
    let tell = |place: usize| -> String {
        let bytes: Vec<u8> = told[place].iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let own = group.place().index();
    let other = (0..told.len()).find(|&place| told[place] != told[own]).unwrap_or(own);
    let (name, rank, ours, theirs) = (group.name().to_owned(), group.rank(), tell(own), tell(other));
    let other = group.member(GroupRank(other as u32)).expect("BUG: a place of this group");
    Err(match first.checked_sub(1) {
        None => DdpError::SettingsDiffer { group: name, rank, ours, other, theirs },
        Some(index) => DdpError::ParamsDiffer { group: name, index, rank, ours, other, theirs },
    })
}

/// The first text in which any two members differ; the same on all.
fn first_difference(group: &Group, stream: &Stream, texts: &[String]) -> Result<Option<usize>, DdpError> {
    let counts = gather(group, stream, &[texts.len() as i32])?;
    let longest = counts.iter().map(|count| count[0]).max().unwrap_or(0) as usize;
    let hashes = texts.iter().map(|text| fnv1a(text.as_bytes()));
    let mut words: Vec<i32> = hashes.flat_map(|hash| [hash as u32 as i32, (hash >> 32) as i32]).collect();
    words.resize(2 * longest, 0);
    let all = gather(group, stream, &words)?;
    let differs = |i: usize| all.iter().any(|words| words[2 * i..2 * i + 2] != all[0][2 * i..2 * i + 2]);
    Ok((0..longest).find(|&i| differs(i)))
}

/// Everybody's words, by place.
fn gather(group: &Group, stream: &Stream, words: &[i32]) -> Result<Vec<Vec<i32>>, DdpError> {
    let device = stream.device();
    let n = group.size() as usize;
    let alloc = |numel| -> Result<View, device::Error> {
        device.alloc("ddp.agreement", &[numel], DType::I32, MemoryKind::Other)
    };
    let (own, all) = (alloc(words.len())?, alloc(n * words.len())?);
    stream.upload(&own, words.to_vec())?;
    group.all_gather(stream, &own, &all)?;
    let all = stream.download::<i32>(&all)?.wait()?;
    Ok(all.chunks_exact(words.len()).map(<[i32]>::to_vec).collect())
}

/// Source: G. Fowler, L. C. Noll, K.-P. Vo, "The FNV non-cryptographic hash algorithm".
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_hash_has_its_published_values() {
        assert_eq!(super::fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(super::fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
