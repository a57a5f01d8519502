"""The control word: all ranks do the same thing at the same border, and do it once."""

from trainer.beat import CONTROL, CONTROL_AT, BeatWriter, Word, open_beats
from trainer.control import Control
from trainer.records import Epoch
from trainer.signals import DrainFlag


class Rank:
    def __init__(self, local_rank: int) -> None:
        self.drain = DrainFlag()
        self.beats: BeatWriter = open_beats(
            None, epoch=Epoch(attempt=1, generation=1, cycle=1), rank=local_rank, local_rank=local_rank
        )
        self.control = Control(self.beats, self.drain)

    def agent_says(self, seq: int, word: Word) -> None:
        CONTROL.pack_into(self.beats._memory, CONTROL_AT, seq, word)

    @property
    def ack(self) -> int:
        return self.beats._beat.control_ack


def border(*ranks: Rank) -> Word:
    """One step border: agree on the largest, do it, acknowledge."""
    agreed = max(rank.control.wish() for rank in ranks)
    if agreed:
        for rank in ranks:
            rank.control.acknowledge()
    return agreed


def test_nothing_asked_nothing_done() -> None:
    assert border(Rank(0), Rank(1)) is Word.NONE


def test_one_rank_that_sees_the_word_is_enough_and_a_late_one_does_not_ask_again() -> None:
    early, late = Rank(0), Rank(1)
    early.agent_says(1, Word.SAVE)
    assert border(early, late) is Word.SAVE
    late.agent_says(1, Word.SAVE)
    assert border(early, late) is Word.NONE
    assert (early.ack, late.ack) == (1, 1)


def test_the_next_request_is_a_new_one() -> None:
    rank = Rank(0)
    rank.agent_says(1, Word.SAVE)
    assert border(rank) is Word.SAVE
    rank.agent_says(2, Word.SAVE)
    assert border(rank) is Word.SAVE
    assert border(rank) is Word.NONE
    assert rank.ack == 2


def test_a_drain_outranks_a_newer_save() -> None:
    saver, drainer = Rank(0), Rank(1)
    saver.agent_says(7, Word.SAVE)
    drainer.agent_says(3, Word.DRAIN)
    assert border(saver, drainer) is Word.DRAIN


def test_a_signal_drains_without_an_agent() -> None:
    rank, other = Rank(0), Rank(1)
    rank.drain.set(15, None)
    assert border(rank, other) is Word.DRAIN
    assert rank.drain.signal_name == "SIGTERM"


def test_two_requests_at_once_are_one_for_those_who_saw_both() -> None:
    first, late = Rank(0), Rank(1)
    first.agent_says(2, Word.SAVE)
    assert border(first, late) is Word.SAVE
    late.agent_says(2, Word.SAVE)
    assert border(first, late) is Word.SAVE, "one save too many is harmless"
    assert border(first, late) is Word.NONE
    for rank in (first, late):
        rank.agent_says(3, Word.SAVE)
    assert border(first, late) is Word.SAVE, "one too few would not be"
