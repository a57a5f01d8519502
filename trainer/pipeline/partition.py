"""Which decoder layers live on which pipeline stage, without torch.

The embedding lives on stage 0, the final norm and the head on the last. Layers are contiguous; the split minimises the
cost of the heaviest stage, where the head costs as much as its matrix is larger than a layer's matrices.
"""

from trainer.errors import ConfigError


def layer_counts(*, num_layers: int, pp: int, head_cost: float = 0.0) -> tuple[int, ...]:
    """Layers per stage; `head_cost` is the head's cost in layers, borne by the last stage.

    Every stage has at least one layer. Among equally good splits the earlier stages get more layers, so that the last
    stage, which also holds logits, stays light. Raises ConfigError when there are fewer layers than stages.
    """
    if num_layers < pp:
        raise ConfigError(
            f"model.model_config.num_hidden_layers is {num_layers} but parallelism.pp is {pp}: every pipeline stage "
            f"needs at least one layer; set pp to at most {num_layers} or add layers."
        )
    if pp == 1:
        return (num_layers,)
    choices = range(1, num_layers - pp + 2)
    last = min(choices, key=lambda n: (max(-(-(num_layers - n) // (pp - 1)), n + head_cost), n))
    return (*_even(num_layers - last, pp - 1), last)


def _even(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def stage_of_layer(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Stage index of each layer for the given counts."""
    return tuple(stage for stage, count in enumerate(counts) for _ in range(count))
