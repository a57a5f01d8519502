"""The control word: how a rank asks for a save or a drain, and how all ranks come to the same answer.

Each agent sets a word in its node's shared memory at its own moment, so at one step border some ranks have seen it
and others have not. Every rank hands its wish to the step's last reduction (MAX); what comes back is equal everywhere
and is done after that step. A wish carries the agent's sequence number, or a rank that saw the word late would ask a
second time for what was just done.
"""

from trainer.beat import BeatWriter, Word
from trainer.signals import DrainFlag

_SEQ_BITS = 20  # word and seq together stay below 2²³: exact even in an fp32 reduction


class Control:
    """This rank's view of what is asked of it."""

    def __init__(self, beats: BeatWriter, drain: DrainFlag) -> None:
        self._beats = beats
        self._drain = drain
        self._acked = 0

    def wish(self) -> int:
        """This rank's wish, to be reduced by MAX over all ranks. A drain outranks every save."""
        seq, word = self._beats.control()
        if self._drain:
            word = Word.DRAIN
        if word is Word.NONE or (word is Word.SAVE and seq <= self._acked):
            return 0
        return (word << _SEQ_BITS) | (seq % (1 << _SEQ_BITS))

    @staticmethod
    def word_of(agreed: int) -> Word:
        """The word in the agreed wish."""
        return Word(agreed >> _SEQ_BITS)

    def acknowledge(self, agreed: int) -> None:
        """Publish that the agreed wish was fulfilled."""
        self._acked = max(self._acked, agreed % (1 << _SEQ_BITS))
        self._beats.beat(control_ack=self._acked)
