"""The trainer's sections: nanotron's keys, as strict frozen pydantic classes.

    Config                                    (ModelConfig: architecture.py; what all are made of: section.py)
    ├── general  parallelism  tokens  checkpoints  logging  profiler  tokenizer
    ├── model ── model_config, init_method
    ├── optimizer ── optimizer_factory, learning_rate_scheduler
    └── data | data_stages ── dataset, validation

Sizes of an axis are the bare axis name (dp, pp, tp, cp). A default here is what a missing key means. Facts that follow
from several keys are properties of `Config`; whether the values make sense together is judged in `rules.py`.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from trainer.config.architecture import ModelConfig
from trainer.config.section import Batch, Degree, Length, Natural, Positive, Section, Steps, Unit
from trainer.schedules import BatchSize, samples_before

# A trace holds every operator of every step: more make files that no viewer opens.
MAX_PROFILE_STEPS = 100


class General(Section):
    """Who the run is. `run` names its directory; `step: 0` is how nanotron says 'from the start'."""

    project: Annotated[str, Field(min_length=1)]
    run: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    step: Natural | None = None


class Parallelism(Section):
    """Degrees of the mesh axes; world size is their product.

    `pp_engine`: 1f1b, afab, interleaved, zb-h1, zb-v, or the path of a schedule file (has a / or ends in .txt, .csv).
    `virtual_stages`: pipeline stages a rank; missing: 2 for interleaved and zb-v, else 1.
    `stage_placement`: for a file, loop (stage s on rank s mod pp) or v (two stages a rank, down and back up).
    `layers_per_stage`: decoder layers of each of the pp · virtual_stages stages; missing: by cost.
    `tp_mode`: REDUCE_SCATTER is sequence parallelism: between tensor-parallel regions each tp rank keeps 1/tp of the
    tokens.
    `replica_check_interval`: every so many steps, and before each checkpoint, ranks compare digests of what must be
    equal on them; null: at a checkpoint, copies of tied tensors only.
    """

    dp: Degree
    pp: Degree
    tp: Degree
    cp: Degree = 1
    expert_parallel_size: Degree = 1
    pp_engine: Annotated[str, Field(min_length=1)] = "1f1b"
    virtual_stages: Positive | None = None
    stage_placement: Literal["loop", "v"] | None = None
    layers_per_stage: list[Natural] | None = None
    tp_mode: Literal["ALL_REDUCE", "REDUCE_SCATTER"] = "ALL_REDUCE"
    replica_check_interval: Positive | None = 100


class InitMethod(Section):
    """Where weights come from. `std` overrides model_config.initializer_range; `use_mup` is spectral µP.

    `path`: the folder of a checkpoint (of any run and mesh, or imported) whose weights a fresh run starts from instead
    of drawing them; its moments, step and data position are not taken over.
    """

    path: Annotated[str, Field(min_length=1)] | None = None
    std: Annotated[float, Field(gt=0)] | None = None
    use_mup: bool = False


@dataclass(config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False), frozen=True, kw_only=True)
class Model:
    """The model section. A pydantic dataclass, because BaseModel keeps the name `model_config` for itself.

    `recompute`: what backward computes again instead of keeping it (`trainer/pipeline/recompute.py`), in every
    `recompute_interval`-th decoder layer.
    `compile`: block has torch.compile make one graph of a decoder layer (`trainer/pipeline/compile.py`).
    """

    model_config: ModelConfig
    init_method: InitMethod = InitMethod()
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_interval: Positive = 1
    compile: Literal["none", "block"] = "none"

    @property
    def model_config_(self) -> ModelConfig:
        """The same section under a name that means nothing to pydantic."""
        return self.model_config

    def recompute_of(self, layer: int) -> Literal["none", "selective", "full"]:
        """What is computed again of a decoder layer, counted from 0."""
        return self.recompute if layer % self.recompute_interval == 0 else "none"


class OptimizerFactory(Section):
    """AdamW and its constants."""

    name: Literal["adamW"] = "adamW"
    adam_beta1: Unit = 0.9
    adam_beta2: Unit = 0.95
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    torch_adam_is_fused: bool = True


class LearningRateScheduler(Section):
    """Learning rate as a function of the step; steps count completed updates. Missing decay keys: see `rules.py`."""

    learning_rate: Annotated[float, Field(gt=0)]
    lr_warmup_steps: Natural = 0
    lr_warmup_style: Literal["linear", "constant"] = "linear"
    lr_decay_style: Literal["linear", "cosine", "1-sqrt", "constant"] = "linear"
    lr_decay_steps: Natural | None = None
    lr_decay_starting_step: Natural | None = None
    min_decay_lr: Annotated[float, Field(ge=0)] = 0.0


class WeightDecaySchedule(Section):
    """From optimizer.weight_decay to `end_value` in `steps` updates after `starting_step`; missing: until the end."""

    end_value: Annotated[float, Field(ge=0)]
    style: Literal["linear", "cosine"] = "linear"
    starting_step: Natural = 0
    steps: Natural | None = None


class ParameterGroup(Section):
    """Factors for the parameters whose name fits `match` (`*` and `?` stand for any letters, any one letter).

    Missing weight_decay_mult: 1 for matrices, 0 for norms and biases, as without a group.
    """

    match: Annotated[str, Field(min_length=1)]
    weight_decay_mult: Annotated[float, Field(ge=0)] | None = None
    lr_mult: Annotated[float, Field(ge=0)] = 1.0


class Optimizer(Section):
    """AdamW's settings. `clip_grad: null` means no clipping; gradients are always accumulated in at least fp32.

    `groups`: the first that fits a parameter's Hugging Face name decides.
    `z_loss_coefficient`: adds this times (log Σ exp logits)² to what is minimised, per valid label.
    `label_smoothing`: this share of each target is spread over the vocabulary. The loss that is logged has neither.
    """

    optimizer_factory: OptimizerFactory = OptimizerFactory()
    learning_rate_scheduler: LearningRateScheduler
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    weight_decay_schedule: WeightDecaySchedule | None = None
    groups: list[ParameterGroup] = []
    clip_grad: Annotated[float, Field(gt=0)] | None = 1.0
    zero_stage: Natural = 1
    accumulate_grad_in_fp32: bool = True
    z_loss_coefficient: Annotated[float, Field(ge=0)] = 0.0
    label_smoothing: Unit = 0.0


class RampedBatch(Section):
    """A step that starts at `from_samples` consumed samples or later has `global_batch_size` samples."""

    from_samples: Natural
    global_batch_size: Positive


class Tokens(Section):
    """How much is trained per step, and how long; every how many steps the held-out sets are measured besides.

    `document_masks`: attention stays inside a document, positions count from its start, and its last token has no
    label; without it a sample is read as one text.
    `batch_size_ramp`: smaller global batches at the start of the run; fewer micro-batches make them. Its last entry is
    the full batch, micro_batch_size · batch_accumulation_per_replica · dp.
    """

    sequence_length: Length
    train_steps: Steps
    micro_batch_size: Batch
    batch_accumulation_per_replica: Batch
    val_check_interval: Positive | None = None
    document_masks: bool = False
    batch_size_ramp: Annotated[list[RampedBatch], Field(min_length=1)] | None = None


class Dataset(Section):
    """Folders of token shards, and how often each is drawn (missing: as their samples are)."""

    dataset_folder: Annotated[list[str], Field(min_length=1)]
    dataset_weights: list[float] | None = None


class Validation(Section):
    """A fixed held-out set: `num_samples` samples spread evenly over these folders."""

    dataset_folder: Annotated[list[str], Field(min_length=1)]
    num_samples: Batch = 64


class Data(Section):
    """What is read. `seed` orders the samples (missing: general.seed)."""

    dataset: Dataset
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    validation: Validation | None = None


class DataStage(Section):
    """Data used from step `start_training_step` (counted from 1) until the next stage starts."""

    name: str = "stage"
    start_training_step: Positive = 1
    data: Data


class Tokenizer(Section):
    """The tokenizer whose files an export carries: a folder, or a name on a hub."""

    tokenizer_name_or_path: Annotated[str, Field(min_length=1)]


class Checkpoints(Section):
    """Cadence and retention. Inside a run directory `checkpoints_path` is ignored: its place is fixed.

    `keep_every`: checkpoints whose step is a multiple of it are never deleted (missing: none for its step).
    `upload_to`: URL (s3://…, gs://…, file:///…) that gets a copy of each, at <URL>/<run>/; a run that has none left
    here goes on from the newest copy that counts.
    `export_interval`: checkpoints whose step is a multiple of it become Hugging Face folders in exports/ of the run.
    """

    checkpoints_path: str | None = None
    checkpoint_interval: Positive = 1000
    async_save: bool = True
    keep_last: Annotated[int, Field(ge=2)] = 2
    keep_every: Positive | None = None
    upload_to: Annotated[str, Field(min_length=1)] | None = None
    export_interval: Positive | None = None


class Logging(Section):
    """What the console shows; every how many steps train.jsonl has the gradient norm of each block (missing: never)."""

    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    log_level_replica: Literal["debug", "info", "warning", "error", "critical"] = "info"
    iteration_step_info_interval: Positive = 1
    grad_norms_interval: Positive | None = None


class Profiler(Section):
    """Steps whose course is recorded, `num_steps` of them from `first_step` on, on these ranks or on all.

    The other keys say what is noted besides time, in these steps and in those that `pawl profile` asks for.
    """

    first_step: Positive = 10
    num_steps: Annotated[int, Field(ge=1, le=MAX_PROFILE_STEPS)] = 3
    ranks: list[Natural] | Literal["all"] = [0]
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False


class Config(Section):
    """Everything the trainer needs to know, read and judged. Exactly one of `data` and `data_stages` is given."""

    general: General
    parallelism: Parallelism
    model: Model
    optimizer: Optimizer
    tokens: Tokens
    data: Data | None = None
    data_stages: list[DataStage] | None = None
    tokenizer: Tokenizer | None = None
    checkpoints: Checkpoints = Checkpoints()
    logging: Logging = Logging()
    profiler: Profiler | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the mesh axes. Experts live on dp×cp and are no factor."""
        mesh = self.parallelism
        return mesh.dp * mesh.pp * mesh.tp * mesh.cp

    @property
    def sequence_parallel(self) -> bool:
        """Whether tokens are cut over tp between the tensor-parallel regions."""
        return self.parallelism.tp_mode == "REDUCE_SCATTER" and self.parallelism.tp > 1

    @property
    def num_micro_batches(self) -> int:
        """m: micro-batches per dp rank and step; with a ramp, the most there are."""
        return self.tokens.batch_accumulation_per_replica

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all dp ranks; with a ramp, the most there are."""
        return self.tokens.micro_batch_size * self.num_micro_batches * self.parallelism.dp

    @property
    def batch_sizes(self) -> tuple[BatchSize, ...]:
        """The ramp in rising order from 0; without one, the one size there is."""
        if self.tokens.batch_size_ramp is None:
            return (BatchSize(from_samples=0, samples=self.global_batch_size),)
        ramp = self.tokens.batch_size_ramp
        return tuple(BatchSize(from_samples=at.from_samples, samples=at.global_batch_size) for at in ramp)

    @property
    def train_samples(self) -> int:
        """Samples of the whole run."""
        return samples_before(self.tokens.train_steps + 1, self.batch_sizes)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all dp ranks; with a ramp, the most there are."""
        return self.global_batch_size * self.tokens.sequence_length

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype of activations and matmuls."""
        return self.model.dtype

    @property
    def stages(self) -> tuple[DataStage, ...]:
        """Data stages in the order of their start; `data:` is the one stage that starts at 1."""
        if self.data_stages is not None:
            return tuple(sorted(self.data_stages, key=lambda stage: stage.start_training_step))
        assert self.data is not None, "rules.py demands one of data and data_stages"
        return (DataStage(data=self.data),)

    @property
    def data_seed(self) -> int:
        """Seed of the first stage's sample order."""
        seed = self.stages[0].data.seed
        return self.general.seed if seed is None else seed
