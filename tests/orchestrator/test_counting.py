"""Which checkpoints count: complete, of a known launch, and never undone by a later one."""

import orch_worlds as w
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.state.counting import CheckpointEntry, CycleFence, count, counts, fences_of, resume_step, survives
from orchestrator.state.epochs import PLAIN_EPOCH, Epoch
from orchestrator.state.rundir import CheckpointName

E1, E2, E3 = Epoch(1, 1, 1), Epoch(1, 1, 2), Epoch(2, 1, 1)
quick = settings(max_examples=50, deadline=None)


def entry(step: int, epoch: Epoch = E1, **more: object) -> CheckpointEntry:
    return CheckpointEntry(entry=w.name(step, epoch), **more)  # type: ignore[arg-type]


def steps(entries: list[CheckpointEntry], cycles: list[tuple[Epoch, str | None]]) -> list[int]:
    return [checkpoint.step for checkpoint in counts(entries, fences_of(cycles))]


def test_the_zombie_of_the_picture_does_not_count() -> None:
    entries = [entry(100), entry(200), entry(300), entry(250, E2)]
    assert steps(entries, [(E1, None), (E2, w.name(200))]) == [250, 200, 100]


def test_a_launch_from_the_beginning_undoes_everything_before_it() -> None:
    assert steps([entry(100), entry(10, E2)], [(E1, None), (E2, None)]) == [10]


def test_r1_only_complete_checkpoints_of_this_run_are_chosen_and_the_rest_is_reported() -> None:
    """torchtitan#315, #4191: a half-written folder, a stray number or a file were taken for the newest checkpoint.

    Case R1.
    """
    entries = [
        entry(20),
        CheckpointEntry(entry="30"),
        CheckpointEntry(entry="9999"),
        CheckpointEntry(entry="tmp-40"),
        CheckpointEntry(entry="50"),
        CheckpointEntry(entry=f".{w.name(30)}.partial"),
        entry(40, defect="manifest.json: no such file, or not readable"),
        entry(60, run="another"),
        entry(70, Epoch(9, 1, 1)),
    ]
    found = count(entries, fences_of([(E1, None)]), run="mine")
    assert [checkpoint.step for checkpoint in found.counted] == [20]
    assert {report.entry for report in found.reported} == {e.entry for e in entries[1:]}
    why = {report.entry: report.why for report in found.reported}
    assert "another" in why[w.name(60)] and "a0009g01c0001" in why[w.name(70, Epoch(9, 1, 1))]


def test_r1_a_folder_with_a_higher_step_of_another_run_takes_no_slot() -> None:
    """R1 (torchtitan#315, #4191)."""
    assert steps([entry(5000, Epoch(7, 1, 1)), entry(10)], [(E1, None)]) == [10]


def test_one_per_step_counts() -> None:
    found = count([entry(100), entry(100, E2)], fences_of([(E1, None), (E2, w.name(100))]))
    assert [checkpoint.name for checkpoint in found.counted] == [w.name(100, E2)]
    assert [report.entry for report in found.reported] == [w.name(100)]


def test_a_launch_without_cycle_file_counts_until_another_goes_back_before_it() -> None:
    plain = entry(100, PLAIN_EPOCH)
    assert steps([plain], []) == [100]
    assert steps([plain], [(E1, w.name(100, PLAIN_EPOCH))]) == [100]
    assert steps([plain], [(E1, None)]) == []


def test_an_unknown_resume_point_undoes_what_is_before_and_is_said() -> None:
    found = count(
        [entry(100), entry(200, E3)],
        (
            CycleFence(epoch=E1, resume_step=0),
            CycleFence(epoch=E2, resume_step=None),
            CycleFence(epoch=E3, resume_step=0),
        ),
    )
    assert [checkpoint.step for checkpoint in found.counted] == [200] and found.undecided == (E2,)
    assert resume_step("nonsense") is None and resume_step(None) == 0 and resume_step(w.name(7)) == 7


fences_seen = st.lists(
    st.builds(CycleFence, epoch=w.epochs, resume_step=st.none() | st.integers(0, 9)),
    max_size=6,
    unique_by=lambda f: f.epoch,
).map(lambda fences: tuple(sorted(fences, key=lambda f: f.epoch)))


@quick
@given(w.entries_seen, fences_seen)
def test_a_stale_epoch_never_counts(entries: tuple[CheckpointEntry, ...], fences: tuple[CycleFence, ...]) -> None:
    found = count(entries, fences)
    for checkpoint in found.counted:
        for fence in fences:
            assert fence.epoch <= checkpoint.epoch or (fence.resume_step or -1) >= checkpoint.step
    numbers = [checkpoint.step for checkpoint in found.counted]
    assert numbers == sorted(set(numbers), reverse=True)


@quick
@given(w.entries_seen, fences_seen)
def test_every_entry_either_counts_or_is_reported(
    entries: tuple[CheckpointEntry, ...], fences: tuple[CycleFence, ...]
) -> None:
    found = count(entries, fences)
    named = sorted([c.name for c in found.counted] + [report.entry for report in found.reported])
    assert named == sorted(entry.entry for entry in entries)
    assert all(CheckpointName.parse(c.name) is not None for c in found.counted)


@quick
@given(st.integers(1, 9), w.epochs, fences_seen, st.builds(CycleFence, epoch=w.epochs, resume_step=st.integers(0, 9)))
def test_another_launch_never_brings_a_checkpoint_back(
    step: int, epoch: Epoch, fences: tuple[CycleFence, ...], more: CycleFence
) -> None:
    if survives(epoch, step, (*fences, more)):
        assert survives(epoch, step, fences)
