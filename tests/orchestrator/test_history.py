"""The ledger replayed: progress, what is counted since, and what a person's word resets."""

import orch_worlds as w

from orchestrator.state.counting import CheckpointEntry
from orchestrator.state.epochs import Epoch
from orchestrator.state.history import RunState, replay, with_unrecorded_checkpoints


def test_a_whole_story() -> None:
    tape = w.Tape().add("run_created", run="x", world_size=4).attempt(1)
    tape.add("attempt_submitted", attempt=1, job_id=77, pid=None)
    assert replay(tape.events).state is RunState.LAUNCHING
    tape.add("attempt_started", Epoch(1, 1, 0)).cycle(1, 1)
    assert replay(tape.events).state is RunState.STARTING
    tape.add("cycle_running", step=1, start_s=1.0, load_s=None).commit(5).incident().cycle(1, 2, w.name(5))
    history = replay(tape.events)
    assert (history.run, history.world_size, history.best_step, history.ever_stepped) == ("x", 4, 5, True)
    assert (history.cycles_without_progress, history.streak, len(history.unresolved)) == (1, 1, 1)
    assert history.last_attempt is not None and (history.last_attempt.job_id, history.last_attempt.num_cycles) == (
        "77",
        2,
    )
    assert [cycle.resume_from for cycle in history.cycles] == [None, w.name(5)]
    tape.add("run_done", step=9)
    assert replay(tape.events).state is RunState.COMPLETED


def test_progress_is_a_step_higher_than_any_before() -> None:
    tape = w.Tape().cycle(1, 1).commit(10).incident("checkpoint_invalid").add("checkpoint_quarantined", name=w.name(10))
    tape.cycle(1, 2).commit(10).incident("checkpoint_invalid")
    history = replay(tape.events)
    assert history.cycles_without_progress == 1 and len(history.unresolved) == 2
    assert history.quarantined == (w.name(10),)
    assert not replay(tape.commit(11).events).unresolved


def test_two_new_checkpoints_reset_the_pause_one_does_not() -> None:
    tape = w.Tape().cycle(1, 1).commit(1).incident().cycle(1, 2).incident().cycle(1, 3)
    assert replay(tape.commit(2).events).streak == 2
    assert replay(tape.commit(3).events).streak == 0


def test_held_stays_until_a_person_resumes_and_everything_is_counted_anew() -> None:
    tape = w.Tape().cycle(1, 1).incident().cycle(1, 2).incident()
    tape.add("run_held", rule="crash-loop", reason="why", hint="do this").add("attempt_ended", outcome="held")
    held = replay(tape.events)
    assert held.state is RunState.HELD and held.parked is not None and held.parked.rule == "crash-loop"
    resumed = replay(tape.add("resumed", by="me").events)
    assert resumed.state is RunState.STOPPED and resumed.parked is None and resumed.resumed_unix is not None
    assert (resumed.cycles_without_progress, resumed.streak, resumed.unresolved) == (0, 0, ())
    assert len(resumed.incidents) == 2


def test_a_complete_run_is_not_held_by_a_late_word() -> None:
    tape = w.Tape().add("run_done", step=9).add("run_held", rule="x", reason="", hint="")
    assert replay(tape.events).state is RunState.COMPLETED


def test_attempts_that_end_before_a_cycle_count_like_cycles() -> None:
    tape = w.Tape()
    for number in range(1, 6):
        tape.attempt(number).add("attempt_ended", attempt=number, outcome="lost", reason="", rule="attempt-lost")
    history = replay(tape.events)
    assert history.cycles_without_progress == 5 and history.streak == 5


def test_the_first_word_about_an_end_stands() -> None:
    tape = w.Tape().attempt(1).add("attempt_ended", Epoch(1, 1, 1), outcome="drained", reason="asked", rule="drained")
    tape.add("attempt_ended", attempt=1, outcome="lost", reason="gone", rule="attempt-lost")
    last = replay(tape.events).last_attempt
    assert last is not None and (last.outcome, last.rule) == ("drained", "drained")


def test_a_commit_that_the_supervisor_could_not_record_is_progress_all_the_same() -> None:
    tape = w.Tape().cycle(1, 1).commit(5).cycle(2, 1, w.name(5))
    entries = (
        CheckpointEntry(entry=w.name(5, Epoch(1, 1, 1))),
        CheckpointEntry(entry=w.name(9, Epoch(1, 1, 1))),
        CheckpointEntry(entry=w.name(20, Epoch(1, 1, 1)), defect="a file is missing"),
        CheckpointEntry(entry="30"),
    )
    events = with_unrecorded_checkpoints(tape.events, entries)
    history = replay(events)
    assert history.best_step == 9 and history.cycles_without_progress == 1
    assert with_unrecorded_checkpoints(events, entries) == events
