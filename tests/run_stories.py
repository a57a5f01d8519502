"""Three stories of runs: nothing happens; a node is killed and a rank hangs; it crashes until it is held."""

from run_factory import Story


def clean() -> Story:
    """Sixty steps, nothing happens."""
    story = Story(run="clean")
    story.create()
    story.wait(2.0)
    story.attempt()
    story.cycle()
    story.steps(59)
    story.end()
    return story


def rough() -> Story:
    """Node 1 is killed after step 23, a rank stops after step 45, the run ends well."""
    story = Story(run="rough")
    story.create()
    story.wait(2.0)
    story.attempt()
    story.cycle()
    story.steps(22)
    story.logs.append((story.epoch, "node0", "[rank0]: loading\n" + "[rank0]: step took long\n" * 3))
    story.logs.append((story.epoch, "node1", "[rank2]: loading\n"))
    story.fault(
        incident="i1",
        cls="node_down",
        level="L2",
        node="node1",
        rank=None,
        phase="step",
        message="node1 was silent for 3 beats and its agent is gone",
        detection_s=3.5,
        exclude=("node1",),
    )
    # As the supervisor writes it: spares are all nodes that do not train.
    story.nodes, story.spares = ("node0", "node2"), ("node1",)
    story.cycle(incident="i1", level="L2")
    story.recovered(incident="i1", cls="node_down", level="L2", detection_s=3.5, lost_steps=3)
    story.steps(24)
    story.fault(
        incident="i2",
        cls="hang_local",
        level="L1",
        node="node0",
        rank=1,
        phase="step",
        message="rank 1 is stopped (state T) in phase step",
        detection_s=6.0,
        backoff_s=2.0,
    )
    story.cycle(incident="i2", level="L1")
    story.recovered(incident="i2", cls="hang_local", level="L1", detection_s=6.0, lost_steps=5, backoff_s=2.0)
    story.steps(story.train_steps - story.step)
    story.end()
    return story


def crash_loop() -> Story:
    """Every cycle dies before a checkpoint: HELD after five."""
    story = Story(run="loop", spares=())
    story.create()
    story.attempt()
    for number in range(1, 6):
        story.cycle(incident=f"i{number - 1}" if number > 1 else None, level="L1" if number > 1 else None)
        story.steps(3)
        story.fault(
            incident=f"i{number}",
            cls="unknown",
            level="L1",
            node="node0",
            rank=0,
            phase="step",
            message="rank 0 exited with code 1: RuntimeError: <b>bad</b> shape & size",
            detection_s=0.1,
            backoff_s=float(number - 1),
        )
    hint = "read attempts/0001/cycles/0005/logs, then pawl resume loop"
    reason = "five cycles without a newly committed checkpoint"
    story.event("attempt_ended", {"outcome": "held", "reason": reason, "rule": "crash-loop"})
    story.event("run_held", {"rule": "crash-loop", "reason": reason, "hint": hint})
    return story
