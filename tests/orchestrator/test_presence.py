"""A run directory is gone only when the file system says so clearly, several times in a row, over some seconds."""

import errno
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.state.presence import GONE_LOOKS, GONE_S, Presence, Vanishing, look_for
from orchestrator.state.rundir import RunPaths, make_attempt, make_layout


@pytest.fixture
def paths(tmp_path):
    found = RunPaths(tmp_path / "run")
    make_layout(found)
    make_attempt(found, 1)
    found.claim(1).write_text("{}")
    return found


def test_removed_moved_and_replaced_are_gone(paths):
    assert look_for(paths, 1) is Presence.HERE
    paths.root.rename(paths.root.with_name("elsewhere"))
    assert look_for(paths, 1) is Presence.GONE
    make_layout(paths)
    assert look_for(paths, 1) is Presence.GONE, "another run directory under the same name"
    make_attempt(paths, 1)
    assert look_for(paths, 1) is Presence.GONE, "another attempt 1 under the same name"
    shutil.rmtree(paths.root)
    assert look_for(paths, 1) is Presence.GONE


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ENOTCONN, errno.ELOOP]
)
def test_a_file_system_in_trouble_is_unknown(paths, monkeypatch, number):
    def fails(*_args, **_more):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "stat", fails)
    assert look_for(paths, 1) is Presence.UNKNOWN


@given(st.lists(st.tuples(st.sampled_from(Presence), st.floats(0.0, 10.0)), max_size=30))
def test_the_verdict_needs_looks_in_a_row_over_some_seconds(looks):
    vanishing, now, row = Vanishing(), 0.0, []
    for presence, pause_s in looks:
        now += pause_s
        row = [*row, now] if presence is Presence.GONE else []
        assert vanishing.note(presence, now) == (len(row) >= GONE_LOOKS and row[-1] - row[0] >= GONE_S)
