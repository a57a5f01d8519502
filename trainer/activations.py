"""What one micro-batch takes on one pipeline stage, in bytes, from the model's shape. Pure.

Per layer and token, in numbers: D twice for the norms' inputs, D twice for their outputs, 2 (H+K)·d for q, k, v and the
attention's output (with head norms (H+K)·d more, their inputs), d for the positions' cosines and sines where there are
any, 4 F (2 F where nothing is gated). tp divides all but the D, which are whole on every rank for the products to come;
with sequence parallelism also the norms' inputs. In at least float32: one number an RMSNorm, two a LayerNorm and one a
head, by which they are undone in backward.

From I to W a layer keeps the inputs of its linear layers and the gradients of their outputs: 4 D, 2 (H+K)·d, 3 F (2 F).

A layer that is recomputed keeps its input, under `selective` also its linear layers' products: 2 D (whole on every
rank, before they are summed over tp), (H+2K)·d and 2 F (F). While it is recomputed it is there whole, one at a time.

Dims: B micro-batch · T sequence · D hidden · F ffn · H heads · K kv heads · d head dim · V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainer.models.families import Norm
from trainer.pipeline.partition import placement, stage_layers
from trainer.pipeline.schedule import Op

if TYPE_CHECKING:
    from trainer.config import Config

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What a device's kernels and messages need besides the numbers above.

    logits_chunk: elements of the logits that exist at one time (trainer/layers/vocab.py). composes_norm: RMSNorm is
    made of several operations, and keeps its normalised input too; in bfloat16 that and its input in float32, and not
    the input as it was. widens: products of narrow factors that are summed in float32 are made of widened copies.
    copies_messages: a reduce-scatter needs memory of the bucket's size (trainer/comm.py).
    """

    logits_chunk: int
    composes_norm: bool
    widens: bool
    copies_messages: bool


ACCELERATOR = Kernels(logits_chunk=1 << 27, composes_norm=False, widens=False, copies_messages=False)
CPU = Kernels(logits_chunk=1 << 22, composes_norm=True, widens=True, copies_messages=True)


class Need(NamedTuple):
    """Bytes of the layers, and of the loss."""

    activations: int
    logits: int = 0

    def plus(self, other: "Need", times: int = 1) -> "Need":
        return Need(self.activations + times * other.activations, self.logits + times * other.logits)

    @property
    def total(self) -> int:
        return self.activations + self.logits


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeed:
    """One micro-batch on one stage.

    kept: from F to B or I. pending: from I to W. The others are the most that is there beyond what was there before
    the action: in F, in I, in B, in W. message: what travels to the next stage.
    """

    message: int

    kept: Need
    pending: Need
    forward: Need
    input: tuple[Need, ...]
    backward: tuple[Need, ...]
    weight: Need

    def during(self, op: Op) -> tuple[Need, ...]:
        """The moments of an action that may be the fullest."""
        return {Op.F: (self.forward,), Op.I: self.input, Op.B: self.backward}.get(op, (self.weight,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bytes:
    """Per token on one tp rank, in bytes: hidden, its part between the tensor-parallel regions, q with k, v and the
    attention's output, ffn (of one of `matrices`: gate, up and down, or two).
    `norm`: what an RMSNorm over n numbers keeps beyond its input and output.
    """

    width: int
    wide: int
    hidden: int
    between: int
    heads: int
    projected: int
    ffn: int
    matrices: int
    rotary: int
    mask: int
    head_norms: int
    statistics: int
    composes_norm: bool

    @property
    def is_narrow(self) -> bool:
        """Whether gradients and statistics are wider than activations."""
        return self.width < self.wide

    def norm(self, size: int) -> int:
        """`size` bytes go through the norm."""
        return size // self.width * (2 * self.wide - self.width) if self.composes_norm else 0

    def layer(self, has_rope: bool) -> int:
        """Of a layer of which nothing is recomputed."""
        norms = 2 * self.norm(self.between) + self.norm(self.head_norms) + self.head_norms
        ffn, rotary = 2 * (self.matrices - 1) * self.ffn, self.rotary if has_rope else 0
        return 2 * (self.between + self.hidden) + self.heads + ffn + rotary + self.statistics + norms

    @property
    def pending(self) -> int:
        return 4 * self.hidden + self.heads + self.matrices * self.ffn

    def kept(self, recompute: str, has_rope: bool) -> int:
        """Of a layer, from forward to backward."""
        if recompute == "none":
            return self.layer(has_rope)
        products = 2 * self.hidden + self.projected + (self.matrices - 1) * self.ffn
        return self.between + (products if recompute == "selective" else 0)


def _bytes(config: "Config", kernels: Kernels) -> _Bytes:
    model, tp = config.model.model_config, config.parallelism.tp
    width = DTYPE_BYTES[config.compute_dtype]
    wide = max(4, width)
    heads, kv_heads, size = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    head_norms = (heads + kv_heads) // tp if model.qk_norm else 0
    a_norm = 2 if model.family.norm is Norm.LAYER else 1
    return _Bytes(
        width=width, wide=wide, hidden=model.hidden_size * width,
        between=model.hidden_size // (tp if config.sequence_parallel else 1) * width,
        heads=2 * (heads + kv_heads) * size // tp * width, projected=(heads + 2 * kv_heads) * size // tp * width,
        ffn=model.intermediate_size // tp * width, matrices=model.ffn_matrices, rotary=size * width,
        mask=config.tokens.sequence_length * width if config.tokens.document_masks else 0,
        head_norms=head_norms * size * width, statistics=wide * (2 * a_norm + heads // tp + head_norms),
        composes_norm=kernels.composes_norm and model.family.norm is Norm.RMS,
    )  # fmt: skip


def stage_needs(config: "Config", *, kernels: Kernels, micro_batch_size: int) -> tuple[StageNeed, ...]:
    """What a micro-batch of that size takes on each stage."""
    sizes = _bytes(config, kernels)
    tokens = micro_batch_size * config.tokens.sequence_length // config.parallelism.cp
    counts = stage_layers(config, placement(config, config.parallelism.pp).num_stages)
    recompute = [config.model.recompute_of(layer) for layer in range(sum(counts))]
    layers = [
        _Layer(recompute=mode, kept=sizes.kept(mode, has_rope), whole=sizes.layer(has_rope))
        for mode, has_rope in zip(recompute, config.model.model_config.rope_layers, strict=True)
    ]
    first = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(
        _stage(config, kernels, sizes, tokens, layers[start : start + count], is_first=stage == 0,
               is_last=stage == len(counts) - 1)
        for stage, (start, count) in enumerate(zip(first, counts, strict=True))
    )  # fmt: skip


class _Layer(NamedTuple):
    """Bytes per token from forward to backward, and while backward is at it."""

    recompute: str
    kept: int
    whole: int


def _stage(
    config: "Config", kernels: Kernels, sizes: _Bytes, tokens: int, layers: Sequence[_Layer], *, is_first: bool,
    is_last: bool,
) -> StageNeed:  # fmt: skip
    last_norm = sizes.between + sizes.norm(sizes.between) if is_last else 0
    loss, loss_kept = _loss(config, kernels, sizes, tokens) if is_last else (0, 0)
    kept = Need(tokens * (sum(layer.kept for layer in layers) + last_norm + (sizes.mask if layers else 0)), loss_kept)
    pending = Need(tokens * sizes.pending * len(layers))
    # While F runs the outputs of all blocks are there; afterwards only as what the next block keeps.
    plain = sum(layer.recompute == "none" for layer in layers)
    outputs = tokens * sizes.between * plain if sizes.composes_norm and sizes.is_narrow else 0
    normed = tokens * (sizes.hidden + (sizes.between if config.sequence_parallel else 0)) if is_last else 0
    # In backward the loss' gradients go first, then what the last norm keeps.
    gone = Need(-tokens * last_norm, -loss_kept)
    behind = sizes.between + (sizes.hidden if config.sequence_parallel else 0) + sizes.matrices * sizes.ffn
    in_b, in_i = (
        gone.plus(Need(tokens * (behind + _deepest(layers, pending)))) if layers else Need(0)
        for pending in (0, sizes.pending)
    )
    embedding = Need(_embedding_gradient(config, sizes) if is_first else 0)
    matrices = _weight_gradient(config, kernels, sizes, tokens) if layers else 0
    one = Need(tokens * sizes.pending if layers else 0)
    return StageNeed(
        message=tokens * sizes.between, kept=kept, pending=pending, forward=kept.plus(Need(normed + outputs, loss)),
        input=(in_i, embedding.plus(pending).plus(kept, -1)),
        backward=(in_b, embedding.plus(one).plus(kept, -1), one.plus(kept, -1).plus(Need(matrices))),
        weight=Need(matrices),
    )  # fmt: skip


def _deepest(layers: Sequence[_Layer], pending: int) -> int:
    """The most of all layers that backward passes, beyond what they kept: the one it is at is whole, those behind it
    are gone but for `pending`."""
    passed, most = 0, 0
    for layer in reversed(layers):
        most = max(most, passed + layer.whole - layer.kept)
        passed += pending - layer.kept
    return most


def _loss(config: "Config", kernels: Kernels, sizes: _Bytes, tokens: int) -> tuple[int, int]:
    """(a chunk of logits and what is made of it, what is kept to backward: gradients of hidden states and head).

    The chunk is there in the statistics dtype and once more in the compute dtype.
    """
    model = config.model.model_config
    vocab = -(-model.vocab_size // config.parallelism.tp)
    chunk = min(tokens, max(1, kernels.logits_chunk // vocab))
    logits = chunk * vocab * (sizes.wide + (sizes.width if sizes.is_narrow else 0))
    if sizes.is_narrow:
        logits += vocab * model.hidden_size * sizes.wide
        logits += chunk * (vocab + model.hidden_size) * sizes.wide if kernels.widens else 0
    return logits, tokens * sizes.hidden + vocab * model.hidden_size * sizes.wide


def _embedding_gradient(config: "Config", sizes: _Bytes) -> int:
    """The embedding's gradient is dense, and cast where gradients are wider."""
    model = config.model.model_config
    rows = -(-model.vocab_size // config.parallelism.tp)
    return rows * model.hidden_size * (sizes.width + (sizes.wide if sizes.is_narrow else 0))


def _weight_gradient(config: "Config", kernels: Kernels, sizes: _Bytes, tokens: int) -> int:
    """Products that cannot be added in place: those of narrow factors, summed in float32."""
    if not sizes.is_narrow:
        return 0
    hidden, ffn = config.model.model_config.hidden_size, sizes.ffn // sizes.width
    widened = tokens * (hidden + ffn) if kernels.widens else 0
    return (hidden * ffn + widened) * sizes.wide
