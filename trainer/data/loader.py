"""Loader: from (config, consumed samples) to the StepBatch of this rank, remembering nothing.

Sample s of a source is tokens [s·T, s·T + T + 1) of it, documents simply joined, so that every token after the first is
a label exactly once per epoch (with document masks the first of each document never is). The global batch of a step is
samples [consumed, consumed + G) of the mixture. Its j-th sample goes to micro-batch j // (dp·B), dp rank (j // B) mod
dp, row j mod B: which samples make a step depends on `consumed_samples` and G alone, never on the mesh, and a micro-
batch taken over all dp ranks is one contiguous run of samples. So a run may resume with another dp, or with other
micro-batches, and see exactly the samples it would have.

Letters: M micro-batches, B samples of a micro-batch, T sequence length, G global batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.batch import IGNORE_LABEL, StepBatch
from trainer.data.format import BadId, TokenSource, bad_id_error, first_bad_id
from trainer.data.mixture import Mixture, Stage, weight_problem
from trainer.errors import ConfigError, DataError
from trainer.schedules import BatchSize, batch_size_at, samples_before

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.mesh.topology import Topology

SCAN_BYTES = 64 << 20
"""Sources up to this size in all are read once before step 1, to find a bad id before it costs anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A data stage as the config has it. weights None: in proportion to the samples of each folder."""

    start_step: int
    folders: tuple[str, ...]
    weights: tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One source of the fixed held-out set: its folder as the config names it, and how many samples it gives."""

    folder: str
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sample: T+1 tokens, and the places > 0 in them where a document starts (none without document masks)."""

    tokens: NDArray[np.int64]
    starts: NDArray[np.int64]


NO_STARTS = np.empty(0, np.int64)


def planned_stages(config: "Config") -> tuple[PlannedStage, ...]:
    """The stages of the config in order of their first step (from 1)."""
    return tuple(
        PlannedStage(
            start_step=stage.start_training_step,
            folders=tuple(stage.data.dataset.dataset_folder),
            weights=None if stage.data.dataset.dataset_weights is None else tuple(stage.data.dataset.dataset_weights),
        )
        for stage in config.stages
    )


def all_folders(stages: Sequence[PlannedStage]) -> tuple[str, ...]:
    """Every folder of every stage once, in order of appearance: the source numbers of the run."""
    return tuple(dict.fromkeys(folder for stage in stages for folder in stage.folders))


def build_mixture(
    stages: Sequence[PlannedStage], *, num_samples: Sequence[int], batch_sizes: Sequence[BatchSize], seed: int
) -> Mixture:
    """The mixture over `all_folders(stages)`. Raises ConfigError where folders and weights do not fit together."""
    folders = all_folders(stages)
    mixed = []
    for stage in stages:
        weights = stage.weights
        if weights is None:
            weights = tuple(float(num_samples[folders.index(folder)]) for folder in stage.folders)
        problem = (
            f"{len(weights)} weights for {len(stage.folders)} folders" if len(weights) != len(stage.folders) else None
        )
        problem = problem or weight_problem(weights)
        if problem is not None:
            raise ConfigError(f"data.dataset.dataset_weights {list(weights)} for {list(stage.folders)}: {problem}.")
        by_source = [0.0] * len(folders)
        for folder, weight in zip(stage.folders, weights, strict=True):
            by_source[folders.index(folder)] += weight
        mixed.append(Stage(start=samples_before(stage.start_step, batch_sizes), weights=tuple(by_source)))
    try:
        return Mixture(num_samples=num_samples, stages=mixed, seed=seed)
    except ValueError as error:
        raise ConfigError(f"The data of this run cannot be mixed: {error} (folders: {', '.join(folders)}).") from error


class Loader:
    """Batches of one rank. Every method is a pure function of the config, the folders and its arguments."""

    def __init__(self, config: "Config", topology: "Topology", rank: int) -> None:
        """Open all folders; no token is read beyond the scan of small sources.

        Raises DataError: a folder is missing, unfinished, cut, from another tokenizer, or holds an id outside the
        vocabulary. Raises ConfigError: unusable weights.
        """
        self.dp, self.dp_rank = topology.dp, topology.coord(rank).dp
        self.sequence_length = config.tokens.sequence_length
        self.micro_batch_size = config.tokens.micro_batch_size
        self.num_micro_batches = config.num_micro_batches
        self.batch_sizes = config.batch_sizes
        self.vocab_size = config.model.model_config_.vocab_size
        stages = planned_stages(config)
        self.sources = tuple(TokenSource(Path(folder)) for folder in all_folders(stages))
        self._validation, self._validation_ids = self._open_validation(config.stages[0].data.validation)
        self.held_out = tuple(
            HeldOut(folder=str(source.folder), num_samples=len(ids))
            for source, ids in zip(self._validation, self._validation_ids, strict=True)
        )
        check_sources((*self.sources, *self._validation), vocab_size=self.vocab_size)
        self.document_masks = config.tokens.document_masks
        if self.document_masks:
            for source in (*self.sources, *self._validation):
                source.open_documents()
        self.mixture = build_mixture(
            stages,
            num_samples=[self.samples_in(source) for source in self.sources],
            batch_sizes=self.batch_sizes,
            seed=config.data_seed,
        )

    def samples_in(self, source: TokenSource) -> int:
        """Whole samples of T+1 tokens, each sharing one token with the next."""
        return max(0, (len(source) - 1) // self.sequence_length)

    def batch(self, step_index0: int, consumed_samples: int) -> StepBatch:
        """This rank's part of the batch of step `step_index0` + 1, `consumed_samples` drawn before it.

        Raises DataError naming file and offset if an id does not fit the vocabulary.
        """
        size = batch_size_at(consumed_samples, self.batch_sizes)
        places = self._places(size // (self.dp * self.micro_batch_size))
        ids = consumed_samples + places
        rows = [self._train_row(int(sample), step=step_index0 + 1) for sample in ids.reshape(-1)]
        return self._assemble(rows, ids)

    def validation_batches(self) -> Iterator[tuple[int, StepBatch]]:
        """(number of the source in `held_out`, batch) over the fixed held-out sets, one source after the other.

        The same samples on every mesh and at every call. All ranks get the same number of batches. Rows beyond the set
        of a source have sample id −1 and no valid label; sample ids count on over the sources.
        """
        per_micro_batch = self.dp * self.micro_batch_size
        done = 0
        for number, chosen in enumerate(self._validation_ids):
            end = done + len(chosen)
            for first in range(done, end, per_micro_batch * self.num_micro_batches):
                num_micro_batches = min(self.num_micro_batches, -(-(end - first) // per_micro_batch))
                ids = first + self._places(num_micro_batches)
                ids[ids >= end] = -1
                rows = [self._validation_row(number, int(sample), first=done) for sample in ids.reshape(-1)]
                yield number, self._assemble(rows, ids)
            done = end

    def _places(self, num_micro_batches: int) -> NDArray[np.int64]:
        """[M, B] places of this dp rank's rows in the global batch."""
        places = np.arange(num_micro_batches * self.dp * self.micro_batch_size)
        return places.reshape(num_micro_batches, self.dp, self.micro_batch_size)[:, self.dp_rank].copy()

    def _train_row(self, sample: int, *, step: int) -> Row:
        draw = self.mixture.sample(sample)
        return self._row(self.sources[draw.source], draw.index, what=f"sample {sample:,} of step {step:,}")

    def _validation_row(self, source: int, sample: int, *, first: int) -> Row | None:
        if sample < 0:
            return None
        index = self._validation_ids[source][sample - first]
        return self._row(self._validation[source], index, what=f"validation sample {sample:,}")

    def _row(self, source: TokenSource, index: int, *, what: str) -> Row:
        start = index * self.sequence_length
        row = source.read(start, self.sequence_length + 1)
        bad = np.flatnonzero(row >= self.vocab_size)
        if bad.size:
            file, offset = source.locate(start + int(bad[0]))
            found = BadId(file=file, offset=offset, token_id=int(row[bad[0]]))
            raise DataError(f"{bad_id_error(found, self.vocab_size)} It was met in {what}.")
        starts = source.document_starts(start, self.sequence_length + 1) if self.document_masks else NO_STARTS
        return Row(tokens=row, starts=starts)

    def _assemble(self, rows: Sequence[Row | None], ids: NDArray[np.int64]) -> StepBatch:
        length = self.sequence_length
        tokens = np.zeros((len(rows), length + 1), np.int64)
        first = np.zeros((len(rows), length + 1), np.int64)
        for place, row in enumerate(rows):
            if row is not None:
                tokens[place] = row.tokens
                first[place, row.starts] = row.starts
        labels = tokens[:, 1:].copy()
        labels[ids.reshape(-1) < 0] = IGNORE_LABEL
        labels[first[:, 1:] > 0] = IGNORE_LABEL  # what begins the next document follows from nothing in this one
        positions = np.arange(length) - np.maximum.accumulate(first[:, :-1], axis=1)
        shape = (*ids.shape, length)
        return StepBatch(
            input_ids_MBT=torch.from_numpy(tokens[:, :-1].copy()).view(shape),
            labels_MBT=torch.from_numpy(labels).view(shape),
            position_ids_MBT=torch.from_numpy(positions).view(shape),
            sample_ids=tuple(int(sample) for sample in ids.reshape(-1)),
        )

    def _open_validation(self, validation: Any) -> tuple[tuple[TokenSource, ...], tuple[tuple[int, ...], ...]]:
        if validation is None:
            return (), ()
        sources = tuple(TokenSource(Path(folder)) for folder in validation.dataset_folder)
        counts = [self.samples_in(source) for source in sources]
        return sources, spread(counts, validation.num_samples)


def spread(counts: Sequence[int], num_samples: int) -> tuple[tuple[int, ...], ...]:
    """The indices to take from each source: `num_samples` evenly spaced over all joined; all where there are fewer."""
    total = sum(counts)
    wanted = min(num_samples, total)
    starts = np.cumsum([0, *counts])
    chosen = [k * total // wanted for k in range(wanted)]
    sources = [int(np.searchsorted(starts, place, side="right")) - 1 for place in chosen]
    taken: list[list[int]] = [[] for _ in counts]
    for source, place in zip(sources, chosen, strict=True):
        taken[source].append(place - int(starts[source]))
    return tuple(map(tuple, taken))


def check_sources(sources: Sequence[TokenSource], *, vocab_size: int) -> None:
    """Refuse folders of different tokenizers, and ids outside the vocabulary, before step 1.

    Folders up to SCAN_BYTES in all are read whole. Of larger ones, shards that declare a fitting largest id are
    believed, and every sample is checked when it is drawn: to read terabytes first costs more than the fault.
    """
    for source in sources:
        ours, first = source.metadata.tokenizer.get("sha256"), sources[0].metadata.tokenizer.get("sha256")
        if ours != first:
            raise DataError(
                f"{source.folder} and {sources[0].folder} were prepared with different tokenizers (sha256 {ours} and "
                f"{first}): the same id would mean different text. Prepare both with one tokenizer."
            )
    small = sum(source.num_bytes for source in sources) <= SCAN_BYTES
    for source in sources:
        bad = first_bad_id(source, vocab_size, trust_declared=not small)
        if bad is not None:
            raise bad_id_error(bad, vocab_size)
