"""The control word: how a rank asks for a save or a drain, and how all ranks come to the same answer.

Each agent sets a word in its node's shared memory at its own moment, so at one step border some ranks have seen it
and others have not. Every rank hands its wish to the step's last reduction; what comes back, the largest, is equal
everywhere and is done after that step. Agents count their requests, and every agent gets the same ones: so a rank that
has not yet seen the word that was just fulfilled counts it as the next one, and does not ask for it again.
"""

from trainer.beat import BeatWriter, Word
from trainer.signals import DrainFlag


class Control:
    """This rank's view of what is asked of it."""

    def __init__(self, beats: BeatWriter, drain: DrainFlag) -> None:
        self._beats = beats
        self._drain = drain
        self._seen_seq = 0
        self._acked = 0

    def wish(self) -> Word:
        """What this rank has been asked and has not done; a drain is never forgotten. The largest of all ranks wins."""
        seq, word = self._beats.control()
        self._seen_seq = seq
        if self._drain or word is Word.DRAIN:
            return Word.DRAIN
        return word if seq > self._acked else Word.NONE

    def acknowledge(self) -> None:
        """Publish that the agreed word was done."""
        self._acked = max(self._acked + 1, self._seen_seq)
        self._beats.beat(control_ack=self._acked)
