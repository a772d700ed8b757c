//! What the members of a joint operation do to each other's memory, as data that every driver interprets.

use std::fmt;

use crate::{Access, DType, Error, Mode, Site, View};

/// How several sources become one result.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Reduce {
    /// Their sum, in the order of the members.
    Sum,
    /// Their sum, in the order of the members, divided by how many there are.
    Avg,
    /// The greatest. NaN wins over any number.
    Max,
}

/// A joint operation over `n` members. Each member brings accesses in a fixed order; sizes are in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Exchange {
    /// Nothing moves; nobody passes before all have come.
    Barrier,
    /// Read `[k]`, write `[n·k]`: every member gets all, the first member's first.
    AllGather,
    /// Read `[n·k]`, write `[k]`: member `i` gets the reduction of everybody's part `i`.
    ReduceScatter(Reduce),
    /// Read `[k]`, write `[k]`, or one update `[k]`: everybody gets the reduction.
    AllReduce(Reduce),
    /// The root (by place in the group) reads `[k]`, the others write `[k]`.
    Broadcast {
        /// Place of the root in the group.
        root: u32,
    },
    /// Read `[n·k]`, write `[n·k]`: part `j` of member `i` becomes part `i` of member `j`.
    AllToAll,
    /// Member 0 reads `[k]`, member 1 writes `[k]`. Groups of two.
    SendRecv,
}

impl Exchange {
    /// Name as in messages and traces.
    pub const fn name(&self) -> &'static str {
        match self {
            Exchange::Barrier => "barrier",
            Exchange::AllGather => "all_gather",
            Exchange::ReduceScatter(_) => "reduce_scatter",
            Exchange::AllReduce(_) => "all_reduce",
            Exchange::Broadcast { .. } => "broadcast",
            Exchange::AllToAll => "all_to_all",
            Exchange::SendRecv => "send_recv",
        }
    }

    /// What [`Stream::joint`](crate::Stream::joint) would refuse of `member` of `n`, for whoever plans calls that
    /// meet nobody.
    ///
    /// # Errors
    /// [`Error::Shapes`], [`Error::ElementType`], [`Error::Strided`], [`Error::NoSuchRoot`] or [`Error::Setting`].
    pub fn check(self, n: u32, member: u32, site: &Site, accesses: &[Access]) -> Result<(), Error> {
        check_exchange(self, n as usize, member as usize, site, accesses).map(|_| ())
    }

    /// As [`Exchange::check`], of [`Stream::joint_all`](crate::Stream::joint_all).
    ///
    /// # Errors
    /// Those of [`Exchange::check`]; [`Error::SelfConflict`].
    pub fn check_all(exchanges: &[(Exchange, Vec<Access>)], n: u32, member: u32, site: &Site) -> Result<(), Error> {
        Request::several(exchanges, n as usize, member as usize, site).map(|_| ())
    }
}

/// What a member asks for: members of one joint operation must ask for the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Signature {
    pub(crate) exchange: Exchange,
    pub(crate) dtype: DType,
    /// Elements of the smallest part that moves.
    pub(crate) part: usize,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.exchange.name())?;
        match self.exchange {
            Exchange::ReduceScatter(r) | Exchange::AllReduce(r) => write!(f, "({r:?})")?,
            Exchange::Broadcast { root } => write!(f, "(root {root})")?,
            Exchange::Barrier => return Ok(()),
            _ => {}
        }
        write!(f, " of {} {}", self.part, self.dtype)
    }
}

/// What one call of a member asks for: an exchange, or several that happen together.
pub(crate) struct Request {
    first: Signature,
    /// Empty for most calls, so that they allocate nothing here.
    more: Vec<Further>,
}

/// A further exchange of the same call, and the first of its accesses.
struct Further {
    signature: Signature,
    from: usize,
}

impl Request {
    pub(crate) fn one(signature: Signature) -> Request {
        Request { first: signature, more: Vec::new() }
    }

    /// None for an empty list.
    pub(crate) fn several(
        exchanges: &[(Exchange, Vec<Access>)],
        n: usize,
        member: usize,
        site: &Site,
    ) -> Result<Option<Request>, Error> {
        let mut request: Option<Request> = None;
        let mut seen: Vec<&Access> = Vec::new();
        for (exchange, accesses) in exchanges {
            let signature = check_exchange(*exchange, n, member, site, accesses)?;
            let from = seen.len();
            for (second, b) in accesses.iter().enumerate() {
                // They run side by side, so one may not write what another touches.
                if let Some(first) = seen.iter().position(|a| a.conflicts(b)) {
                    let (site, label) = (site.as_str().to_owned(), b.view.label().to_owned());
                    return Err(Error::SelfConflict { op: "coalesced", site, first, second: from + second, label });
                }
            }
            seen.extend(accesses);
            match &mut request {
                None => request = Some(Request::one(signature)),
                Some(request) => request.more.push(Further { signature, from }),
            }
        }
        Ok(request)
    }

    pub(crate) fn name(&self) -> &'static str {
        if self.more.is_empty() { self.first.exchange.name() } else { "coalesced" }
    }

    pub(crate) fn len(&self) -> usize {
        1 + self.more.len()
    }

    /// Members may bring other numbers of accesses (in place or not), but must ask for the same exchanges.
    pub(crate) fn agrees_with(&self, other: &Request) -> bool {
        self.signatures().eq(other.signatures())
    }

    /// Exchange `i`, and its accesses out of the call's.
    pub(crate) fn part<'a>(&self, i: usize, accesses: &'a [Access]) -> (Exchange, &'a [Access]) {
        let from = if i == 0 { 0 } else { self.more[i - 1].from };
        let to = self.more.get(i).map_or(accesses.len(), |next| next.from);
        let signature = if i == 0 { self.first } else { self.more[i - 1].signature };
        (signature.exchange, &accesses[from..to])
    }

    fn signatures(&self) -> impl Iterator<Item = Signature> {
        std::iter::once(self.first).chain(self.more.iter().map(|further| further.signature))
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.first.fmt(f)?;
        self.more.iter().try_for_each(|further| write!(f, " + {}", further.signature))
    }
}

/// What `member` of `n` asks for, once its accesses fit `exchange`.
pub(crate) fn check_exchange(
    exchange: Exchange,
    n: usize,
    member: usize,
    site: &Site,
    accesses: &[Access],
) -> Result<Signature, Error> {
    let (op, site) = (exchange.name(), site.as_str());
    let ends = ends(accesses);
    let (reads, writes, bigger) = match exchange {
        Exchange::Barrier => (false, false, Bigger::Neither),
        Exchange::AllGather => (true, true, Bigger::Dest),
        Exchange::ReduceScatter(_) => (true, true, Bigger::Source),
        Exchange::AllReduce(_) => (true, true, Bigger::Neither),
        Exchange::AllToAll => (true, true, Bigger::Both),
        Exchange::Broadcast { root } => (member == root as usize, member != root as usize, Bigger::Neither),
        Exchange::SendRecv => (member == 0, member == 1, Bigger::Neither),
    };
    let want = usize::from(reads) + usize::from(writes);
    if let Exchange::Broadcast { root } = exchange
        && root as usize >= n
    {
        return Err(Error::NoSuchRoot { op, site: site.to_owned(), root, size: n });
    }
    // Parts of an in-place all-to-all would be overwritten before they are sent.
    let may_update = matches!(exchange, Exchange::AllReduce(_));
    let in_place = may_update && accesses.len() == 1 && accesses[0].mode == Mode::Update;
    let fits = in_place || (accesses.len() == want && accesses.iter().all(|a| a.mode != Mode::Update));
    let group_fits = exchange != Exchange::SendRecv || n == 2;
    if !fits || !group_fits || ends.source.is_some() != reads || ends.dest.is_some() != writes {
        return Err(Error::Setting {
            op,
            site: site.to_owned(),
            setting: "accesses",
            value: accesses.len() as f64,
            rule: "a member brings one read and/or one write as the exchange says, an all_reduce may bring one update; \
                   send_recv has two members",
        });
    }
    let Some(any) = ends.source.or(ends.dest) else {
        return Ok(Signature { exchange, dtype: DType::I32, part: 0 });
    };
    check_types(exchange, site, &ends, any)?;
    let (source, dest) = (ends.source.unwrap_or(any), ends.dest.unwrap_or(any));
    let (small, k, rule) = match bigger {
        Bigger::Source => (dest, dest.numel(), "source = group size x destination"),
        Bigger::Dest => (source, source.numel(), "destination = group size x source"),
        Bigger::Both => (source, source.numel() / n, "source = destination, and a multiple of the group size"),
        Bigger::Neither => (source, source.numel(), "source = destination"),
    };
    let fits = match bigger {
        Bigger::Source => source.numel() == n * k,
        Bigger::Dest => dest.numel() == n * k,
        Bigger::Both => source.numel() == n * k && dest.numel() == n * k,
        Bigger::Neither => dest.numel() == k,
    };
    let shapes = |rule| Error::Shapes {
        op,
        site: site.to_owned(),
        left: "source",
        left_shape: source.shape().to_vec(),
        right: "destination",
        right_shape: dest.shape().to_vec(),
        rule,
    };
    if !fits {
        return Err(shapes(rule));
    }
    if !in_place && reads && writes && source.overlaps(dest) {
        let big = if matches!(bigger, Bigger::Dest) { dest } else { source };
        let own_part = matches!(bigger, Bigger::Source | Bigger::Dest)
            && big.flat(member * k..(member + 1) * k)?.region() == small.region();
        if !own_part {
            return Err(shapes(match exchange {
                Exchange::AllToAll => {
                    "they share bytes, and parts would be overwritten before they are sent: give a destination apart"
                }
                Exchange::AllReduce(_) => "they share bytes: give one update of the same view, or a destination apart",
                _ => "in place, the small one is this member's own part of the big one",
            }));
        }
    }
    Ok(Signature { exchange, dtype: any.dtype(), part: k })
}

/// Which end is as large as all members' parts together.
#[derive(Clone, Copy)]
enum Bigger {
    Source,
    Dest,
    Both,
    Neither,
}

fn check_types(exchange: Exchange, site: &str, ends: &Ends<'_>, any: &View) -> Result<(), Error> {
    let op = exchange.name();
    for view in [ends.source, ends.dest].into_iter().flatten() {
        if !view.is_contiguous() {
            return Err(Error::Strided { label: view.label().to_owned(), shape: view.shape().to_vec() });
        }
        if view.dtype() != any.dtype() {
            let (have, need) = (view.dtype(), any.dtype());
            return Err(Error::ElementType { op, site: site.to_owned(), tensor: "destination", have, need });
        }
    }
    if any.dtype() == DType::I16 {
        // NCCL has none.
        let (have, need) = (DType::I16, DType::I32);
        return Err(Error::ElementType { op, site: site.to_owned(), tensor: "source", have, need });
    }
    let averages = matches!(exchange, Exchange::AllReduce(Reduce::Avg) | Exchange::ReduceScatter(Reduce::Avg));
    if averages && any.dtype() == DType::I32 {
        let (have, need) = (DType::I32, DType::F32);
        return Err(Error::ElementType { op, site: site.to_owned(), tensor: "source", have, need });
    }
    Ok(())
}

/// Sources and destinations of one part, each with the member it belongs to. The result is written to every
/// destination. A destination may be the very view of a source, never overlap one otherwise.
#[derive(Clone)]
pub(crate) struct Piece {
    /// `None` copies the only source.
    pub(crate) reduce: Option<Reduce>,
    pub(crate) sources: Vec<(usize, View)>,
    pub(crate) dests: Vec<(usize, View)>,
}

/// What a member reads and what it writes; an in-place member gives the same view for both.
struct Ends<'a> {
    source: Option<&'a View>,
    dest: Option<&'a View>,
}

fn ends(accesses: &[Access]) -> Ends<'_> {
    let mut ends = Ends { source: None, dest: None };
    for access in accesses {
        if access.mode != Mode::Write {
            ends.source = Some(&access.view);
        }
        if access.mode.writes() {
            ends.dest = Some(&access.view);
        }
    }
    ends
}

/// The pieces of an exchange over `members`, whose sizes were checked when they were submitted.
pub(crate) fn pieces(exchange: Exchange, members: &[&[Access]]) -> Vec<Piece> {
    let n = members.len();
    let ends: Vec<Ends<'_>> = members.iter().map(|a| ends(a)).collect();
    let source = |m: usize| ends[m].source.expect("BUG: exchange without a source").clone();
    let dest = |m: usize| ends[m].dest.expect("BUG: exchange without a destination").clone();
    let part = |view: &View, i: usize| {
        let k = view.numel() / n;
        view.flat(i * k..(i + 1) * k).expect("BUG: parts were checked at submission")
    };
    match exchange {
        Exchange::Barrier => Vec::new(),
        Exchange::AllGather => (0..n)
            .map(|i| Piece {
                reduce: None,
                sources: vec![(i, source(i))],
                dests: (0..n).map(|m| (m, part(&dest(m), i))).collect(),
            })
            .collect(),
        Exchange::ReduceScatter(reduce) => (0..n)
            .map(|i| Piece {
                reduce: Some(reduce),
                sources: (0..n).map(|m| (m, part(&source(m), i))).collect(),
                dests: vec![(i, dest(i))],
            })
            .collect(),
        Exchange::AllReduce(reduce) => vec![Piece {
            reduce: Some(reduce),
            sources: (0..n).map(|m| (m, source(m))).collect(),
            dests: (0..n).map(|m| (m, dest(m))).collect(),
        }],
        Exchange::Broadcast { root } => {
            let root = root as usize;
            let others = (0..n).filter(|m| *m != root);
            vec![Piece {
                reduce: None,
                sources: vec![(root, source(root))],
                dests: others.map(|m| (m, dest(m))).collect(),
            }]
        }
        Exchange::AllToAll => (0..n * n)
            .map(|ij| {
                let (i, j) = (ij / n, ij % n);
                Piece { reduce: None, sources: vec![(i, part(&source(i), j))], dests: vec![(j, part(&dest(j), i))] }
            })
            .collect(),
        Exchange::SendRecv => {
            vec![Piece { reduce: None, sources: vec![(0, source(0))], dests: vec![(1, dest(1))] }]
        }
    }
}
