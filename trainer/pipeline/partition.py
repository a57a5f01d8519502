"""Which decoder layers live on which stage, and which stage on which rank, without torch.

The embedding lives on stage 0, the final norm and the head on the last. Layers are contiguous; the split minimises the
cost of the heaviest stage, where the head costs as much as its matrix is larger than a layer's matrices. With several
stages a rank (`virtual_stages`) it is the stages that are cut so, p·v of them.
"""

from typing import TYPE_CHECKING

from trainer.errors import ConfigError
from trainer.pipeline.generators import DEFAULT_STAGES, GENERATORS, placement_of
from trainer.pipeline.schedule import Placement

if TYPE_CHECKING:
    from trainer.config.model import Config, Parallelism


def is_schedule_file(pp_engine: str) -> bool:
    """Whether `parallelism.pp_engine` is the path of a schedule file rather than a name."""
    return pp_engine not in GENERATORS and ("/" in pp_engine or pp_engine.endswith((".txt", ".csv")))


def stages_per_rank(mesh: "Parallelism") -> int:
    """v: what the config says, else what the schedule is made for; 1 for a file of one's own."""
    return mesh.virtual_stages or DEFAULT_STAGES.get(mesh.pp_engine, 1)


def placement(config: "Config", pp: int) -> Placement:
    """Stage → rank on `pp` pipeline ranks."""
    mesh = config.parallelism
    if mesh.stage_placement == "v":
        return Placement.v_shape(pp)
    return placement_of(mesh.pp_engine, p=pp, v=stages_per_rank(mesh))


def stage_layers(config: "Config", num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: the user's own split where it is one for this many stages, else by cost.

    Raises ConfigError when there are fewer layers than stages.
    """
    own = config.parallelism.layers_per_stage
    if own is not None and len(own) == num_stages:
        return tuple(own)
    layers = config.model.model_config.num_hidden_layers
    return layer_counts(num_layers=layers, pp=num_stages, head_cost=head_cost(config))


def head_cost(config: "Config") -> float:
    """Parameters of the head divided by those of one decoder layer: their GEMM costs compare alike."""
    model = config.model.model_config
    attention = 2 * (model.num_attention_heads + model.kv_heads) * model.head_size
    return float(model.vocab_size / (attention + model.ffn_matrices * model.intermediate_size))


def layer_counts(*, num_layers: int, pp: int, head_cost: float = 0.0) -> tuple[int, ...]:
    """Layers per stage; `head_cost` is the head's cost in layers, borne by the last stage.

    Every stage has at least one layer. Among equally good splits the earlier stages get more layers, so that the last
    stage, which also holds logits, stays light. Raises ConfigError when there are fewer layers than stages.
    """
    if num_layers < pp:
        raise ConfigError(
            f"model.model_config.num_hidden_layers is {num_layers}, but parallelism.pp and virtual_stages make {pp} "
            f"pipeline stages: every stage needs at least one layer; make it at most {num_layers} or add layers."
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
