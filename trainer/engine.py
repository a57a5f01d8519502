"""Engine: one rank of the 3D-parallel trainer, from weights to step.

    StepBatch ─▶ its number of valid labels ─▶ schedule: F and B of all micro-batches ─▶ add tie sites
              ─▶ reduce-scatter (dp) ─▶ one world reduction: norm², loss, votes, valid labels of the next step
              ─▶ clip ─▶ AdamW ─▶ all-gather (dp)

Gradients are sums: the loss of every micro-batch is divided by the step's global number of valid labels, known before
anything is computed, so no reduction ever averages and no split of the batch changes the result. It is summed one step
ahead, in a reduction that has to be waited for anyway: a step begins without waiting for anybody.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.beat import Word
from trainer.comm import all_reduce
from trainer.device import precision
from trainer.init import draw_box
from trainer.layers.deferred import deferred_linear
from trainer.layers.factory import LayerFactory
from trainer.layers.tied import TiedParameter
from trainer.layers.vocab import Objective
from trainer.mesh.context import ParallelContext
from trainer.models.registry import build_model
from trainer.optim.adamw import AdamW
from trainer.optim.layout import DEFAULT_BUCKET_NUMEL, plan_rank_layout
from trainer.optim.optimizer import FlatOptimizer
from trainer.optim.overlap import Placed, Site, StepWatch, reduction_order
from trainer.pipeline.blocks import block_calls, blocks_of, build_stages, layer_names, zero_fields
from trainer.pipeline.choose import training_lists
from trainer.pipeline.compile import BlockCompiler, warm_up
from trainer.pipeline.engine.interpreter import Interpreter
from trainer.pipeline.engine.parts import linear_names
from trainer.pipeline.generators import forward_only
from trainer.pipeline.graph import Graph
from trainer.pipeline.partition import placement
from trainer.pipeline.schedule import Action, Lists
from trainer.pipeline.trace import trace
from trainer.pipeline.validate import validate
from trainer.spec import ParamSpec, local_box, local_shape, param_specs, specs_on_rank

if TYPE_CHECKING:
    from trainer.config.model import Config
    from trainer.data.batch import StepBatch

# As torch.nn.utils.clip_grad_norm_, so that a clipped step is the reference's step.
_CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did; the same values on every rank.

    `loss` is the cross-entropy per valid token over the global batch, without z-loss and label smoothing, `grad_norm`
    before clipping (both NaN or inf as computed when not `finite`). `skipped`: why no update was made, else None.
    `control_word`: the largest any rank brought. `next_num_valid`: Σ over dp of the `next_valid` that was brought.
    `profile_steps`: the steps to profile from the next one on, once all ranks have brought a wish for it; else 0.
    `grad_norms`: of each block, as `grad_norm`; None where they were not asked for or the step is not finite.
    `save_done`: every rank brought it.
    """

    loss: float
    grad_norm: float
    num_valid: int
    finite: bool
    skipped: str | None
    control_word: int
    next_num_valid: int
    num_pairs: int
    profile_steps: int = 0
    grad_norms: Mapping[str, float] | None = None
    save_done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """The step's one world reduction: sums of fp64 numbers."""

    square: float
    loss: float
    control_word: int
    profile_steps: int
    next_num_valid: int
    num_pairs: int
    save_done: bool


class Engine:
    """Model, schedule and optimizer of one rank. Weights are zero until `init_weights` or a checkpoint load.

    Raises ConfigError where the config cannot be laid out on the mesh of `ctx`.
    """

    def __init__(self, config: "Config", ctx: ParallelContext, *, bucket_numel: int = DEFAULT_BUCKET_NUMEL) -> None:
        self.config, self.ctx, self.topology = config, ctx, ctx.topology
        self.pp_rank, self.placement = ctx.get_pp_rank(), placement(config, ctx.topology.pp)
        self.precision = precision(config.model.dtype)
        self.specs: tuple[ParamSpec, ...] = param_specs(config, ctx.topology)
        self.bucket_numel = bucket_numel
        self.layout = plan_rank_layout(self.specs, ctx.topology, ctx.rank, bucket_numel=bucket_numel)
        factory = config.optimizer.optimizer_factory
        adamw = AdamW(beta1=factory.adam_beta1, beta2=factory.adam_beta2, eps=factory.adam_eps)
        self.zero_stage = config.optimizer.zero_stage
        self.optimizer = FlatOptimizer(
            self.specs, self.layout, ctx, precision=self.precision, zero_stage=self.zero_stage, adamw=adamw
        )
        factories = LayerFactory(
            tp=ctx.tp, dtype=self.precision.compute, linear=deferred_linear, sequence_parallel=config.sequence_parallel,
            objective=Objective(
                label_smoothing=config.optimizer.label_smoothing, z_loss=config.optimizer.z_loss_coefficient
            ),
        )  # fmt: skip
        self.model = build_model(config, factories, ctx.topology)
        self._modules = build_stages(self.model, self.placement.stages_of(self.pp_rank))
        self.compiler = BlockCompiler(ctx.device) if config.model.compile == "block" else None
        self._calls = block_calls(self.model, self._modules, config.model.recompute_of, self.compiler)
        self._extra_grads: dict[str, list[torch.Tensor]] = {}
        placed = self._place_parameters()
        self._parameters = [(p.live, p.parameter, p.address) for p in placed]
        self.watch = StepWatch(
            placed, len(self.layout.buckets), start=self.optimizer.start_reduction, sums_tp=self.optimizer.sums_tp,
            wait_weights=self.optimizer.wait_weights,
        )  # fmt: skip
        self._interpreters: dict[tuple[int, ...], Interpreter] = {}
        self._compiled: set[tuple[tuple[int, ...], bool]] = set()
        self._plans: dict[tuple[tuple[int, ...], int, bool], tuple[Action, ...]] = {}
        self._orders: dict[tuple[Action, ...], tuple[int, ...]] = {}

    @property
    def collective_seq(self) -> int:
        """Communication calls this process has made."""
        return self.ctx.collective_seq

    def init_weights(self) -> None:
        """Draw the model of `general.seed`: bitwise the same on every mesh. Moments become zero."""
        for spec in specs_on_rank(self.specs, self.pp_rank):
            tp, tp_rank = self.topology.tp, self.ctx.get_tp_rank()
            box = local_box(spec, tp, tp_rank)
            value = torch.zeros(local_shape(spec, tp, tp_rank), dtype=self.precision.master)
            if all(box.size):
                drawn = torch.from_numpy(draw_box(spec, box, seed=self.config.general.seed))
                value[tuple(slice(n) for n in box.size)] = drawn.to(value.dtype)
            self.optimizer.load_weight(spec.name, value.to(self.ctx.device))
        for (state, _), shard in self.state_shards().items():
            if state != "master":
                shard.zero_()
        self.sync_params_from_master()

    def sync_params_from_master(self) -> None:
        """Make live weights follow master, after a load. Comm: under ZeRO-1 an all-gather (dp) per bucket."""
        self.optimizer.publish()
        self.optimizer.wait_weights()

    def state_shards(self) -> Mapping[tuple[str, int], torch.Tensor]:
        """(state, bucket index) → live flat storage of master, exp_avg, exp_avg_sq that this rank holds."""
        return self.optimizer.state_shards()

    def train_step(
        self, batch: "StepBatch", *, lr: float, weight_decay: float, adam_t: int, control_word: int = 0,
        profile_steps: int = 0, num_valid: int | None = None, next_valid: int = 0, grad_norms: bool = False,
        save_done: bool = False,
    ) -> StepResult:  # fmt: skip
        """One optimizer step on this dp rank's micro-batches. `adam_t`: number of this update, from 1.

        num_valid: valid labels of the global batch, where the step before has counted them; None: they are counted
        now, which costs a wait. next_valid: valid labels in this dp rank's part of the next step's batch. control_word
        and profile_steps: what this rank was asked for. save_done: its part of a save has ended. grad_norms, the same
        on all ranks: costs 1 all-reduce more.

        Nobody updates when any rank's loss or gradient is not finite, or when no label of the step is valid. Comm:
        collective over the world.
        """
        if num_valid is None:
            num_valid = self._count_valid(batch)
        if num_valid == 0:
            zeros = self._zero(), self._zero()
            totals = self._reduce_totals(*zeros, control_word, profile_steps, save_done, next_valid, batch.num_pairs)
            return StepResult(
                loss=math.nan, grad_norm=0.0, num_valid=0, finite=True, control_word=totals.control_word,
                next_num_valid=totals.next_num_valid, num_pairs=totals.num_pairs, profile_steps=totals.profile_steps,
                save_done=totals.save_done, skipped="no valid label in the global batch",
            )  # fmt: skip
        loss = self.backward(batch, num_valid=num_valid)
        squares = self.optimizer.reduce_gradients()
        totals = self._reduce_totals(
            squares, loss, control_word, profile_steps, save_done, next_valid, batch.num_pairs
        )  # fmt: skip
        grad_norm = math.sqrt(totals.square) if totals.square >= 0 else math.nan
        finite = math.isfinite(grad_norm) and math.isfinite(totals.loss)
        by_block = all_reduce(self.optimizer.block_squares(), self.ctx.world) if grad_norms and finite else None
        if finite:
            scale = _clip_scale(grad_norm, self.config.optimizer.clip_grad)
            self.optimizer.update(lr=lr, weight_decay=weight_decay, adam_t=adam_t, scale=scale)
        return StepResult(
            loss=totals.loss, grad_norm=grad_norm, num_valid=num_valid, finite=finite, control_word=totals.control_word,
            next_num_valid=totals.next_num_valid, num_pairs=totals.num_pairs, profile_steps=totals.profile_steps,
            grad_norms=_norms(self.optimizer.blocks, by_block), save_done=totals.save_done,
            skipped=None if finite else f"loss {totals.loss} or gradient norm {grad_norm} is not finite",
        )  # fmt: skip

    def backward(self, batch: "StepBatch", *, num_valid: int) -> torch.Tensor:
        """Fill the gradient buckets with this rank's sums over its micro-batches, tie sites added.

        Their reduction over dp is under way then; `optimizer.reduce_gradients` waits for it. Returns this rank's
        Σ loss / num_valid (fp64, 0 without the last stage). Comm: p2p over pp, tp collectives, as `start_reduction`.
        """
        self.optimizer.zero_grads()
        for sites in self._extra_grads.values():
            for grad in sites:
                grad.zero_()
        _, actions = self._plan(batch, is_training=True)
        self.watch.begin(self._order(actions))
        loss = self._run(batch, num_valid=float(num_valid), is_training=True)
        self._check_gradient_storage()
        for tie in self.model.ties:
            self._sum_tie(tie)
        self.watch.end()
        return loss

    def eval_loss(self, batch: "StepBatch") -> tuple[float, int]:
        """(Σ loss over valid labels, their number) of the global batch, forward only; equal on all ranks."""
        loss = self._run(batch, num_valid=1.0, is_training=False)
        counted = float(batch.num_valid) if self._is_loss_rank else 0.0
        sums = torch.stack((self._only_once(loss), torch.tensor(counted, dtype=torch.float64, device=self.ctx.device)))
        loss_sum, num_valid = all_reduce(sums, self.ctx.world).tolist()
        return loss_sum, int(num_valid)

    def compile_blocks(self, *, evaluates: bool) -> float | None:
        """Compile what steps will run, and with `evaluates` what validation will; seconds, None where nothing is to be.

        Without it the first step does so. No weight, gradient or state of a generator is changed. Comm: tp collectives.
        """
        if self.compiler is None:
            return None
        began, tokens = time.perf_counter(), self.config.tokens
        for is_training in (True, False) if evaluates else (True,):
            self._interpreter((tokens.micro_batch_size, tokens.sequence_length), is_training=is_training)
        return time.perf_counter() - began

    def _run(self, batch: "StepBatch", *, num_valid: float, is_training: bool) -> torch.Tensor:
        interpreter, actions = self._plan(batch, is_training=is_training)
        return interpreter.run(actions, self._fields(batch, num_valid), is_training=is_training)

    def _plan(self, batch: "StepBatch", *, is_training: bool) -> tuple[Interpreter, tuple[Action, ...]]:
        """The interpreter for the batch's micro-batch shape and this rank's actions, both cached."""
        m, *shape = batch.input_ids_MBT.shape
        key = tuple(shape)
        interpreter = self._interpreter(key, is_training=is_training)
        plan = (key, m, is_training)
        if plan not in self._plans:
            self._plans[plan] = self._schedule(interpreter.graph, m, is_training=is_training)[self.pp_rank]
        return interpreter, self._plans[plan]

    def _interpreter(self, shape_BT: tuple[int, ...], *, is_training: bool) -> Interpreter:
        """The interpreter for micro-batches of this shape, cached; its blocks are compiled for what it will do."""
        if shape_BT not in self._interpreters:
            self._interpreters[shape_BT] = Interpreter(
                self._trace(shape_BT), self._modules, placement=self.placement, pp=self.ctx.pp, device=self.ctx.device,
                calls=self._calls, watch=self.watch,
            )  # fmt: skip
        if self.compiler is not None and (shape_BT, is_training) not in self._compiled:
            self._compiled.add((shape_BT, is_training))
            warm_up(
                self._interpreters[shape_BT].graph, layer_names(self.model), self._calls, self._modules,
                fields=zero_fields(shape_BT, self.ctx.device), device=self.ctx.device, is_training=is_training,
            )  # fmt: skip
        return self._interpreters[shape_BT]

    def _order(self, actions: tuple[Action, ...]) -> tuple[int, ...]:
        """The order in which the buckets are reduced, cached."""
        if actions not in self._orders:
            self._orders[actions] = reduction_order(self.watch.buckets, actions)
        return self._orders[actions]

    def _schedule(self, graph: Graph, m: int, *, is_training: bool) -> Lists:
        if not is_training:
            return validate(forward_only(self.placement, m), graph.links).lists
        return training_lists(self.config, graph.links, p=self.topology.pp, m=m)

    def _trace(self, shape_BT: tuple[int, ...]) -> Graph:
        return trace(self.model, zero_fields(shape_BT, torch.device("meta")))

    def _fields(self, batch: "StepBatch", num_valid: float) -> list[dict[str, Any]]:
        device = self.ctx.device
        tensors = {
            "input_ids": batch.input_ids_MBT.to(device, non_blocking=True),
            "labels": batch.labels_MBT.to(device, non_blocking=True),
            "position_ids": batch.position_ids_MBT.to(device, non_blocking=True).contiguous(),
        }
        return [
            {**{name: tensor[i] for name, tensor in tensors.items()}, "num_valid": num_valid}
            for i in range(batch.num_micro_batches)
        ]

    def _count_valid(self, batch: "StepBatch") -> int:
        """Valid labels of the global batch. Comm: 1 all-reduce (dp)."""
        count = torch.tensor(batch.num_valid, device=self.ctx.device)
        return int(all_reduce(count, self.ctx.dp).item())

    def _reduce_totals(
        self, square: torch.Tensor, loss: torch.Tensor, control_word: int, profile_steps: int, save_done: bool,
        next_valid: int, num_pairs: int,
    ) -> _Totals:  # fmt: skip
        """Sum norm², loss, the next step's labels and this one's pairs of attention over the world.

        Votes are counts per word, so that their MAX survives a SUM. A profile starts when all ranks know of it: the
        late ones would not record. fp64 counts labels and pairs exactly up to 2^53.
        """
        votes = [float(control_word == word) for word in (Word.SAVE, Word.DRAIN)]
        votes += [float(profile_steps > 0), float(profile_steps), float(save_done)]
        counts = [float(next_valid), float(num_pairs)] if self._is_loss_rank else [0.0, 0.0]
        local = torch.tensor([*votes, *counts], dtype=torch.float64, device=self.ctx.device)
        sums = torch.cat((torch.stack((square, self._only_once(loss))), local))
        square_sum, loss_sum, saves, drains, *rest = all_reduce(sums, self.ctx.world).tolist()
        word = Word.DRAIN if drains else Word.SAVE if saves else Word.NONE
        (profiles, profile_sum, saved, next_num_valid, pairs), world = rest, self.ctx.world.size
        return _Totals(
            square=square_sum, loss=loss_sum, control_word=word, next_num_valid=int(next_num_valid),
            num_pairs=int(pairs), profile_steps=int(profile_sum) // world if profiles == world else 0,
            save_done=saved == world,
        )  # fmt: skip

    @property
    def _is_loss_rank(self) -> bool:
        """Whether this rank speaks for its tp group about the loss."""
        return self.pp_rank == self.placement.ranks[-1] and self.ctx.get_tp_rank() == 0

    def _only_once(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._is_loss_rank else self._zero()

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.ctx.device)

    def _place_parameters(self) -> list[Placed]:
        """Give every parameter of this rank its place in the buckets; a second tie site gets a gradient of its own."""
        alias = {live: tie.name for tie in self.model.ties for _, live in tie.sites}
        stages = {block.name: block.stage for block in blocks_of(self.model)}
        placed: list[Placed] = []
        seen: set[str] = set()
        for block, module in self._modules.items():
            matrices = linear_names(module)
            for inner, meta in list(module.named_parameters()):
                live = f"{block}.{inner}"
                name = alias.get(live, live)
                weight, grad = self.optimizer.view(name)
                assert weight.shape == meta.shape, f"{live}: the model's shape {meta.shape} is not the table's"
                if name in seen:
                    grad = torch.zeros_like(grad)
                    self._extra_grads.setdefault(name, []).append(grad)
                seen.add(name)
                parameter = _set_parameter(module, inner, weight, grad)
                bucket, _ = self.layout.find(name)
                site = Site(stage=None if live in alias else stages[block], is_matrix=inner in matrices)
                placed.append(
                    Placed(live=live, parameter=parameter, address=grad.data_ptr(), block=block, bucket=bucket.index,
                           site=site)
                )  # fmt: skip
        return placed

    def _sum_tie(self, tie: TiedParameter) -> None:
        if tie.local_sites(self.pp_rank):
            _, grad = self.optimizer.view(tie.name)
            tie.sum_sites([grad, *self._extra_grads.get(tie.name, [])], pp=self.ctx.pp)
            self.watch.tied(self.layout.find(tie.name)[0].index)

    def _check_gradient_storage(self) -> None:
        """Autograd must have added in place: a replaced .grad would be missing from the bucket, silently."""
        for live, parameter, pointer in self._parameters:
            grad = parameter.grad
            assert grad is not None and grad.data_ptr() == pointer, f"{live}: .grad left its bucket"


def _set_parameter(module: nn.Module, name: str, weight: torch.Tensor, grad: torch.Tensor) -> nn.Parameter:
    """Replace the meta parameter `name` by one that lives in `weight` and accumulates into `grad`."""
    path, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(weight)
    parameter.grad_dtype = grad.dtype
    parameter.grad = grad
    setattr(module.get_submodule(path), leaf, parameter)
    return parameter


def _norms(blocks: Sequence[str], squares: torch.Tensor | None) -> dict[str, float] | None:
    """Block → norm."""
    return None if squares is None else dict(zip(blocks, squares.sqrt().tolist(), strict=True))


def _clip_scale(grad_norm: float, max_norm: float | None) -> float:
    return 1.0 if max_norm is None else min(1.0, max_norm / (grad_norm + _CLIP_EPS))
