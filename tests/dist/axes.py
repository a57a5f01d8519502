"""What the oracle varies, as a table: a row is an option, its values, and what they set in the config. Pure.

    Case(dp=2, pp=2, tied=False) ─▶ config keys ─▶ the product's own check ─▶ Config, or why it is refused

A new option is one row of AXES; the covering arrays, the quick and the full oracle and the command line take it from
there. Sizes are nasty on purpose: a prime vocabulary (padding under tp), grouped kv heads, a feed-forward that no power
of two but tp divides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainer.config.load import own_sections
from trainer.config.model import Config
from trainer.config.problems import Problem, Severity
from trainer.config.yaml_loader import Mapping as Tree
from trainer.config.yaml_loader import Scalar, Sequence
from trainer.mesh.topology import Topology
from trainer.models.families import FAMILIES
from trainer.pipeline.generators import GENERATORS

Value = bool | int | float | str | None
Settings = Mapping[str, Any]

MAX_RANKS = 8
MODEL = "model.model_config"
SEQUENCE, SAMPLES = 16, 8
CLIP, DECAY, SEED = 0.5, 0.1, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One option. `values`: the first is what a case has that does not name it. `sets`: (value, case) → config keys.

    `rare`: further values, in pairs with all others in `make oracle` alone.
    `telling`: where the option can make a difference at all, so that `make test` spends no case elsewhere.
    """

    name: str
    values: tuple[Value, ...]
    rare: tuple[Value, ...] = ()
    sets: Callable[[Any, "Case"], Settings] = lambda value, case: {}
    telling: Callable[["Case"], bool] = lambda case: True

    @property
    def all_values(self) -> tuple[Value, ...]:
        return (*self.values, *self.rare)


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh and the options that are not at their first value, in the order of AXES. Made by `Case.of`."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    options: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, *, dp: int = 1, pp: int = 1, tp: int = 1, **options: Value) -> "Case":
        """Raises KeyError for a name that is no axis."""
        unknown = set(options) - set(BY_NAME)
        if unknown:
            raise KeyError(f"no axis {', '.join(sorted(unknown))}; there are {', '.join(BY_NAME)}")
        told = ((a.name, options[a.name]) for a in AXES if a.name in options and options[a.name] != a.values[0])
        return cls(dp, pp, tp, tuple(told))

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The inverse of `str`. Raises ValueError that says how a case is written."""
        try:
            words = dict(part.split("=", 1) for part in text.split(","))
            return cls.of(**{name: _value(name, word) for name, word in words.items()})  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{text!r} is no case ({error}); write it as dp=2,pp=1,tp=1,tied=False") from error

    def but(self, **changes: Value) -> "Case":
        """The same case with some values changed."""
        return Case.of(**{"dp": self.dp, "pp": self.pp, "tp": self.tp, **dict(self.options), **changes})  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Any:
        """The value of an axis, or a size of the mesh."""
        if name in ("dp", "pp", "tp"):
            return getattr(self, name)
        return dict(self.options).get(name, BY_NAME[name].values[0])

    def __str__(self) -> str:
        parts = (("dp", self.dp), ("pp", self.pp), ("tp", self.tp), *self.options)
        return ",".join(f"{name}={value}" for name, value in parts)

    @property
    def topology(self) -> Topology:
        return Topology(dp=self.dp, pp=self.pp, tp=self.tp)


def key(name: str) -> Callable[[Value, Case], Settings]:
    """An option that is one key of the config."""
    return lambda value, case: {name: value}


def _micro_batches(m: int, case: Case) -> Settings:
    """m micro-batches of as many samples as make a global batch of about SAMPLES."""
    size = max(1, SAMPLES // (m * case.dp))
    return {"tokens.batch_accumulation_per_replica": m, "tokens.micro_batch_size": size}


def _kv_heads(kind: str, case: Case) -> Settings:
    """`grouped`: two heads share a kv head; `all`: each has its own; `one`: all share one (refused under tp).

    Heads times their size are not the hidden size, but for families that know no other; hidden / heads is even.
    """
    heads = max(4, 2 * case.tp)
    own_size = {"head_dim": 10} if FAMILIES[case["family"]].has_head_dim else {}
    sizes = {
        "num_attention_heads": heads, "num_key_value_heads": {"grouped": heads // 2, "all": heads, "one": 1}[kind],
        "hidden_size": 2 * heads * -(-16 // heads), **own_size,
    }  # fmt: skip
    return {f"{MODEL}.{name}": size for name, size in sizes.items()}


# Each pattern takes some of what a later one fits; several groups on every stage.
GROUPS = (
    ("model.layers.1.*norm*", 2.0, 0.5), ("*norm*", 0.0, 3.0), ("*.0.mlp.*", 0.5, 0.25), ("*_proj*", 3.0, 1.0),
    ("*embed*", 0.0, 1.5),
)  # fmt: skip


def _groups(is_on: bool, case: Case) -> Settings:
    """Parameter groups by name, with factors on weight decay and rate."""
    groups = [{"match": match, "weight_decay_mult": decay, "lr_mult": rate} for match, decay, rate in GROUPS]
    return {"optimizer.groups": groups if is_on else []}


def _split(digits: str | None, case: Case) -> Settings:
    """Layers of each stage, a digit each: as many stages as the schedule has, or the case is not legal."""
    return {"parallelism.layers_per_stage": None if digits is None else [int(digit) for digit in digits]}


def _recompute(kind: str, case: Case) -> Settings:
    """`full/3`: in every third layer."""
    name, _, interval = kind.partition("/")
    return {"model.recompute": name, "model.recompute_interval": int(interval or 1)}


def _family(kind: str, case: Case) -> Settings:
    """Every second layer of smollm3 has no rotary positions, so that most stages have both kinds."""
    return {f"{MODEL}.model_type": kind, **({f"{MODEL}.no_rope_layer_interval": 2} if kind == "smollm3" else {})}


def _biases(is_on: bool, case: Case) -> Settings:
    """Biases wherever the family has them; a key that is refused where it has none, or always the same.

    But of smollm3 in the feed-forward alone: without rotary positions a bias on k adds the same to all scores of a
    query, which softmax takes out again. Its gradient is rounding noise, and Adam makes whole steps of that.
    """
    offered = {"mlp_bias", "use_bias"} | ({"attention_bias"} if case["family"] != "smollm3" else set())
    places = FAMILIES[case["family"]].keys & offered
    return {f"{MODEL}.{place}": is_on for place in places or {"attention_bias"} if is_on or place == "use_bias"}


# A sequence is twice as long as the original length; each type has fast pairs, slow ones and some between.
ROPE = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 8, "low_freq_factor": 0.25, "high_freq_factor": 1.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 1.0, "beta_slow": 0.05},
}


def _rope(kind: str, case: Case) -> Settings:
    """Scaled rotary positions."""
    if kind not in ROPE:
        return {}
    given = {"rope_type": kind, "rope_theta": 100.0, **ROPE[kind]}
    longest = int(ROPE[kind]["factor"]) * 8
    return {f"{MODEL}.rope_parameters": given, f"{MODEL}.max_position_embeddings": longest}


def _objective(kind: str, case: Case) -> Settings:
    """What is added to the cross-entropy."""
    z_loss, smoothing = 0.01 * ("z" in kind), 0.1 * ("smooth" in kind)
    return {"optimizer.z_loss_coefficient": z_loss, "optimizer.label_smoothing": smoothing}


def _has_stages(case: Case) -> bool:
    return case.pp > 1 or case["virtual"] is not None


AXES: tuple[Axis, ...] = (
    Axis(
        name="schedule", values=("1f1b", *sorted(set(GENERATORS) - {"1f1b"})), sets=key("parallelism.pp_engine"),
        telling=lambda c: c.pp > 1,
    ),
    Axis(name="virtual", values=(None,), rare=(2, 3), sets=key("parallelism.virtual_stages")),
    Axis(
        name="layers", values=(4, 5), rare=(8, 16), sets=key(f"{MODEL}.num_hidden_layers"), telling=_has_stages,
    ),
    Axis(name="split", values=(None,), rare=("31", "01211111"), sets=_split, telling=_has_stages),
    Axis(
        name="sp", values=(False, True), telling=lambda c: c.tp > 1,
        sets=lambda on, c: {"parallelism.tp_mode": "REDUCE_SCATTER" if on else "ALL_REDUCE"},
    ),
    Axis(name="recompute", values=("none", "full", "selective"), rare=("full/3",), sets=_recompute),
    # Rare: eight processes that compile on two cores take minutes.
    Axis(
        name="compile", values=(False,), rare=(True,), sets=lambda on, c: {"model.compile": "block" if on else "none"},
    ),
    Axis(
        name="family", values=("llama", "qwen3", "starcoder2", "smollm3"), rare=("qwen2", "mistral"), sets=_family,
    ),
    Axis(
        name="act", values=("silu", "gelu_tanh"), rare=("gelu", "relu2"), sets=key(f"{MODEL}.hidden_act"),
    ),
    Axis(name="rope", values=("plain", "llama3"), rare=("yarn", "linear"), sets=_rope),
    Axis(name="bias", values=(False, True), sets=_biases),
    Axis(name="objective", values=("plain", "z+smooth"), rare=("z", "smooth"), sets=_objective),
    Axis(name="masks", values=(False, True), sets=key("tokens.document_masks")),
    Axis(name="tied", values=(True, False), sets=key(f"{MODEL}.tie_word_embeddings")),
    Axis(name="zero", values=(1, 0), sets=key("optimizer.zero_stage"), telling=lambda c: c.dp > 1),
    Axis(name="m", values=(4, 1, 3), sets=_micro_batches),
    Axis(name="kv", values=("grouped", "all"), rare=("one",), sets=_kv_heads),
    # 509 rows cost as much as two layers: the last stage gets fewer of them.
    Axis(name="vocab", values=(67, 509), sets=key(f"{MODEL}.vocab_size")),
    Axis(name="clip", values=(CLIP, None), rare=(1000.0,), sets=key("optimizer.clip_grad")),
    Axis(name="mup", values=(False, True), sets=key("model.init_method.use_mup")),
    Axis(name="groups", values=(False, True), sets=_groups),
    # Elements per gradient bucket, an argument of the engine: 100 gives nearly every tensor a bucket of its own.
    Axis(name="bucket", values=(4096, 100)),
    Axis(name="dtype", values=("float64", "float32", "bfloat16"), sets=key("model.dtype")),
)  # fmt: skip
BY_NAME = {axis.name: axis for axis in AXES}

BASE: Settings = {
    "general.project": "test", "general.run": "oracle", "general.seed": SEED,
    "model.init_method.std": 0.08,
    "optimizer.learning_rate_scheduler.learning_rate": 1e-3, "optimizer.weight_decay": DECAY,
    "tokens.sequence_length": SEQUENCE, "tokens.train_steps": 10,
    "data.dataset.dataset_folder": ["unused"],
}  # fmt: skip


def settings(case: Case) -> Settings:
    """The config of a case as dotted keys."""
    mesh = {"parallelism.dp": case.dp, "parallelism.pp": case.pp, "parallelism.tp": case.tp}
    ffn = {f"{MODEL}.intermediate_size": case.tp * -(-48 // case.tp)}
    told = (axis.sets(case[axis.name], case) for axis in AXES)
    return {**BASE, **mesh, **ffn, **{name: value for part in told for name, value in part.items()}}


@cache
def checked(case: Case) -> tuple[Config | None, tuple[str, ...]]:
    """(config, none) or (None, what the product's check refuses it for)."""
    config, problems = own_sections(_tree(settings(case)))
    refusals = tuple(_text(problem) for problem in problems if problem.severity is Severity.ERROR)
    return (config, ()) if isinstance(config, Config) and not refusals else (None, refusals)


def config_of(case: Case) -> Config:
    """Raises ValueError with the check's words for a case that is not legal."""
    config, refusals = checked(case)
    if config is None:
        raise ValueError(f"{case}: {'; '.join(refusals)}")
    return config


def is_legal(case: Case) -> bool:
    """Whether the product accepts the case and the pool has ranks enough."""
    return case.topology.world_size <= MAX_RANKS and not checked(case)[1]


def is_telling(case: Case) -> bool:
    """Legal, and every option that is not at its first value can make a difference here."""
    return all(BY_NAME[name].telling(case) for name, _ in case.options) and is_legal(case)


def _value(name: str, word: str) -> Value:
    """The axis's value that reads `word`; sizes of the mesh are numbers."""
    if name in ("dp", "pp", "tp"):
        return int(word)
    if name not in BY_NAME:
        raise ValueError(f"no axis {name}; there are dp, pp, tp, {', '.join(BY_NAME)}")
    values = {str(value): value for value in BY_NAME[name].all_values}
    if word not in values:
        raise ValueError(f"{name} is one of {', '.join(values)}")
    return values[word]


def _text(problem: Problem) -> str:
    expected = f", expected {problem.expected}" if problem.expected else ""
    return f"{problem.key} {problem.message}{expected}"


def _tree(flat: Settings) -> Tree:
    """Dotted keys as the tree that the YAML reader would give."""
    root: dict[str, Any] = {}
    for name, value in flat.items():
        *path, leaf = name.split(".")
        into = root
        for part in path:
            into = into.setdefault(part, {})
        into[leaf] = value
    node = _node(root)
    assert isinstance(node, Tree)
    return node


def _node(value: Any) -> Any:
    at = {"file": "case", "line": 1}
    if isinstance(value, dict):
        return Tree(entries={name: _node(child) for name, child in value.items()}, **at)
    if isinstance(value, list):
        return Sequence(items=tuple(_node(child) for child in value), **at)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return Scalar(text=text, quoted=isinstance(value, str), **at)
