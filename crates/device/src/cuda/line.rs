//! What a stream was given and the card was not: everything behind a call whose members have not all come, or behind
//! a wait for something that is itself held back.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use super::card::lock;
use crate::{joint::JointCall, launch::LaunchBody, queue::Item};

/// `Idle -push-> Running -end of the line-> Idle`; `Running -must wait-> Joint | Launch | Marks -go_on-> Running`.
/// Whoever made it `Running` is alone with the stream's half on the card until the line is empty or stands.
#[derive(Default)]
pub(super) struct Line(Mutex<Held>);

#[derive(Default)]
struct Held {
    items: VecDeque<Item>,
    state: State,
}

#[derive(Clone, Default)]
pub(super) enum State {
    #[default]
    Idle,
    Running,
    /// The members of a call have not all come.
    Joint(Arc<JointCall>),
    /// Nor have those of the calls of a launch, or of a launch that it meets.
    Launch(Arc<LaunchBody>),
    /// What the first item waits for is not on its card.
    Marks,
}

impl State {
    fn stands(&self) -> bool {
        !matches!(self, State::Idle | State::Running)
    }
}

impl Line {
    /// Gives `item` back to a caller who is to run the line, beginning with it; keeps it behind others else.
    #[inline]
    pub(super) fn enter(&self, item: Item) -> Option<Item> {
        let mut held = lock(&self.0);
        if matches!(held.state, State::Idle) {
            held.state = State::Running;
            return Some(item);
        }
        held.items.push_back(item);
        None
    }

    /// True when nobody had it: the caller runs it, to its end.
    pub(super) fn take(&self) -> bool {
        let mut held = lock(&self.0);
        let idle = matches!(held.state, State::Idle);
        if idle {
            held.state = State::Running;
        }
        idle
    }

    /// The next item for whoever runs the line; none at its end.
    #[inline]
    pub(super) fn next(&self) -> Option<Item> {
        let mut held = lock(&self.0);
        let next = held.items.pop_front();
        if next.is_none() {
            held.state = State::Idle;
        }
        next
    }

    /// From now on the line stands, until somebody lets it go on. `first` goes back to its head.
    pub(super) fn stand(&self, why: State, first: Option<Item>) {
        let mut held = lock(&self.0);
        debug_assert!(matches!(held.state, State::Running), "BUG: a line stands that nobody runs");
        held.state = why;
        if let Some(first) = first {
            held.items.push_front(first);
        }
    }

    /// True when it stood and holds something: the caller runs it. Without that it is at its end.
    pub(super) fn go_on(&self) -> bool {
        let mut held = lock(&self.0);
        let (stood, ended) = (held.state.stands(), held.items.is_empty());
        if stood {
            held.state = if ended { State::Idle } else { State::Running };
        }
        stood && !ended
    }

    /// As [`Line::go_on`], of a line that stands at marks.
    pub(super) fn look_again(&self) -> bool {
        let mut held = lock(&self.0);
        let stood = matches!(held.state, State::Marks);
        if stood {
            held.state = State::Running;
        }
        stood
    }

    /// What is held back, to be counted.
    pub(super) fn held(&self) -> Vec<Item> {
        lock(&self.0).items.iter().cloned().collect()
    }

    pub(super) fn state(&self) -> State {
        lock(&self.0).state.clone()
    }

    /// All that is held back, for whoever made sure that nobody else will let the line go on. It is at its end then.
    pub(super) fn give_up(&self) -> Vec<Item> {
        let mut held = lock(&self.0);
        held.state = State::Idle;
        held.items.drain(..).collect()
    }

    /// As [`Line::give_up`], of a line that stands at marks and holds an operation; waits and records alone go on.
    pub(super) fn give_up_at_marks(&self) -> Vec<Item> {
        let mut held = lock(&self.0);
        let operation = |item: &Item| !matches!(item, Item::Record(_) | Item::Wait(_));
        if !matches!(held.state, State::Marks) || !held.items.iter().any(operation) {
            return Vec::new();
        }
        held.state = State::Idle;
        held.items.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::Mark;

    fn marks() -> [Arc<Mark>; 4] {
        std::array::from_fn(|_| Arc::new(Mark::new()))
    }

    fn is(item: Option<Item>, mark: &Arc<Mark>) -> bool {
        matches!(item, Some(Item::Record(got) | Item::Wait(got)) if Arc::ptr_eq(&got, mark))
    }

    #[test]
    fn items_keep_their_order_around_one_that_must_wait() {
        let (line, marks) = (Line::default(), marks());
        let item = |i: usize| Item::Record(marks[i].clone());
        assert!(is(line.enter(item(0)), &marks[0]), "whoever comes to an idle line runs it");
        assert!(line.enter(item(1)).is_none() && line.enter(item(2)).is_none());
        line.stand(State::Marks, Some(item(0)));
        assert!(line.enter(item(3)).is_none(), "nobody overtakes");
        assert!(line.look_again() && !line.look_again(), "one goes on with it");
        assert!(marks.iter().all(|mark| is(line.next(), mark)));
        assert!(line.next().is_none());
        assert!(is(line.enter(item(1)), &marks[1]), "idle again at its end");
        assert!(!line.take() && line.next().is_none() && line.take(), "whoever takes an idle line runs it");
        assert!(line.enter(item(2)).is_none() && is(line.next(), &marks[2]));
    }

    #[test]
    fn a_line_that_waits_for_ranks_does_not_go_on_for_a_mark() {
        let (line, marks) = (Line::default(), marks());
        assert!(line.enter(Item::Record(marks[0].clone())).is_some());
        assert!(!line.go_on(), "it runs");
        line.stand(State::Marks, None);
        assert!(!line.go_on() && matches!(line.state(), State::Idle), "nothing is left to run");
        assert!(line.take());
        line.stand(State::Marks, Some(Item::Wait(marks[1].clone())));
        assert!(line.go_on() && line.next().is_some(), "whoever lets it go on runs it");
        let never = |_: &mut crate::Args<'_>| Ok(());
        let op = crate::Op::host("op", "test", Vec::new(), never);
        let body = crate::queue::OpBody { op, stream: 0, seq: 0 };
        line.stand(State::Marks, Some(Item::Wait(marks[1].clone())));
        assert!(line.give_up_at_marks().is_empty(), "waits alone go on by themselves");
        assert!(line.enter(Item::Op(body)).is_none());
        assert_eq!(line.give_up_at_marks().len(), 2);
        assert!(matches!(line.state(), State::Idle));
    }
}
