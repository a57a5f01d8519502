"""Every rule finds what it is for, at its line, and leaves right configs alone. Cases F4 (stages) F5 D2 D4 D9 P4."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import Loaded, Severity, format_problem, load
from trainer.config.rules import RULES, divisors
from trainer.config.rules_data import DATA_RULES
from trainer.config.rules_optimizer import OPTIMIZER_RULES
from trainer.config.yaml_loader import parse_text

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
M = "model.model_config."


def messages(loaded: Loaded, severity: Severity) -> list[str]:
    return [format_problem(p) for p in loaded.problems if p.severity is severity]


def errors(*overrides: str) -> list[str]:
    return messages(load(TINY, overrides=overrides), Severity.ERROR)


def warnings(*overrides: str) -> list[str]:
    quiet = ("tokenizer.tokenizer_name_or_path=x",)
    return messages(load(TINY, overrides=(*quiet, *overrides)), Severity.WARNING)


def shape(heads: int, kv: int, *, ffn: int = 1536) -> tuple[str, ...]:
    """Overrides for a model of `heads` heads of 64."""
    return (
        f"{M}num_attention_heads={heads}", f"{M}num_key_value_heads={kv}", f"{M}hidden_size={heads * 64}",
        f"{M}intermediate_size={ffn}",
    )  # fmt: skip


def test_the_tiny_config_is_quiet() -> None:
    assert errors() == [] and warnings() == []


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "fits"),
    [
        (15, 5, 2, "1"),
        (9, 3, 2, "1, 3"),
        (15, 5, 5, "1"),
        (14, 2, 4, "1, 2"),
        (32, 8, 3, "1, 2, 4, 8"),
        (12, 3, 2, "1, 3"),
        (16, 2, 4, "1, 2"),
        (8, 1, 2, "1"),
    ],
)
def test_f5_heads_that_tp_does_not_divide(heads: int, kv: int, tp: int, fits: str) -> None:
    """Refused with heads, kv heads and tp shown, and the tp values that would do (they divide the ffn, 1536, too).

    Case F5 (SmolLM2 135M/360M).
    """
    (shown,) = errors(*shape(heads, kv), f"parallelism.tp={tp}") or [""]
    if tp == 5:  # divides the heads, but not the ffn
        assert "intermediate_size" in shown
        return
    assert f"{heads} heads and {kv} kv heads cannot be shared out over tp = {tp}" in shown
    assert shown.endswith(f"expected tp one of {fits})")


@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 8), st.integers(1, 64))
@settings(max_examples=50, deadline=None)
def test_every_tp_that_is_offered_would_do(groups: int, kv: int, tp: int, ffn: int) -> None:
    """F5 (SmolLM2 135M/360M)."""
    overrides = shape(groups * kv, kv, ffn=ffn * 4)
    found = errors(*overrides, f"parallelism.tp={tp}")
    offered = re.search(r"expected tp one of ([\d, ]+)\)", "\n".join(found))
    if offered:
        for good in offered.group(1).split(", "):
            assert errors(*overrides, f"parallelism.tp={good}") == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallelism.tp=2", f"{M}intermediate_size=129"), "not divisible by tp = 2"),
        ((f"{M}num_key_value_heads=3",), "4 heads cannot share 3 kv heads"),
        ((f"{M}hidden_size=66",), "no multiple of 4 heads"),
        ((f"{M}head_dim=15",), "must be even"),
        (("parallelism.pp=5",), "4 layers cannot fill 5 pipeline stages"),
        ((f"{M}hidden_act=relu",), "activation is not offered"),
        ((f"{M}attention_dropout=0.1",), "uses no dropout"),
        ((f"{M}dropout=0.1",), "uses no dropout"),
        ((f"{M}eos_token_id=256",), "below vocab_size = 256"),
        (("tokens.sequence_length=65",), "at most max_position_embeddings = 64"),
        (("parallelism.cp=2",), "context parallelism is not offered"),
        (("parallelism.context_parallel_size=2",), "context parallelism is not offered"),
        (("parallelism.cp=1", "parallelism.context_parallel_size=1"), "given twice"),
        (("parallelism.expert_parallel_size=2",), "expert parallelism is not offered"),
        (("optimizer.zero_stage=2",), "ZeRO-2 is not offered"),
        (("optimizer.zero_stage=3",), "ZeRO-3 is not offered"),
        (("optimizer.zero_stage=4",), "there is no such stage"),
        (("optimizer.optimizer_factory.name=sgd",), "expected one of adamW"),
        (("optimizer.optimizer_factory.name=adamw",), "upper and lower case"),
        (("optimizer.learning_rate_scheduler.min_decay_lr=1",), "higher than learning_rate"),
        (("optimizer.learning_rate_scheduler.lr_decay_starting_step=1",), "inside the warm-up"),
        (("optimizer.learning_rate_scheduler.learning_rate=0",), "greater than 0"),
        (("optimizer.learning_rate_scheduler.learning_rate=.nan",), "finite"),
        (("parallelism.dp=0",), "greater than or equal to 1"),
        (("tokens.train_steps=1e300",), "a whole number"),
        (("general.seed=-1",), "greater than or equal to 0"),
        (("checkpoints.keep_last=1",), "greater than or equal to 2"),
        ((f"{M}rope_scaling.factor=32",), "rope_type default has no such key"),
        ((f"{M}rope_interleaved=true",), "interleaved"),
        ((f"{M}model_type=qwen3", f"{M}mlp_bias=true"), "qwen3 has no such key (found true"),
        ((f"{M}model_type=qwen2", f"{M}attention_bias=true"), "none on o_proj"),
        ((f"{M}model_type=qwen2", f"{M}head_dim=32"), "found 32; expected 16, or no such key"),
        ((f"{M}moe_config.num_experts=8",), "mixtures of experts"),
        (("checkpoints.resume_checkpoint_path=/x",), "own checkpoints"),
        (("optimizer.weight_decay_exclude_named_params=[a]",), "optimizer.groups"),
    ],
)
def test_what_cannot_be_trained_is_one_error(overrides: tuple[str, ...], words: str) -> None:
    """L3: context parallelism is refused, so no loss is scaled by it."""
    (shown,) = errors(*overrides)
    assert words in shown and overrides[-1].split("=")[0].split(".")[-2] in shown


SIZES = [
    *(f"parallelism.{key}" for key in ("dp", "pp", "tp", "cp", "expert_parallel_size")),
    *(f"{M}{key}" for key in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings",
    )),
    *(f"tokens.{key}" for key in (
        "sequence_length", "train_steps", "micro_batch_size", "batch_accumulation_per_replica",
    )),
    "data.validation.num_samples",
]  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("size", [10**13, 2**53])
def test_a_size_of_the_right_type_that_nobody_means_is_refused_before_anything_counts_up_to_it(
    key: str, size: int
) -> None:
    """A billion layers kept `check` busy for ever: one tensor after the other was listed."""
    assert any(key in shown and "less than or equal to" in shown for shown in errors(f"{key}={size}"))


def test_a_validation_pass_as_long_as_the_training_is_nothing_to_say() -> None:
    loaded = load(TINY)
    assert loaded.config is not None
    trained = loaded.config.global_batch_size * loaded.config.tokens.train_steps
    folder, size = "data.validation.dataset_folder=held-out", "data.validation.num_samples"
    assert warnings(folder, f"{size}={trained}") == warnings(folder) == []
    (shown,) = warnings(folder, f"{size}={trained + 1}")
    assert f"{trained + 1:,} samples" in shown and f"{trained:,} samples in 20 steps" in shown


@pytest.mark.parametrize(("said", "mode"), [("true", "full"), ("false", "none"), ("null", "none")])
def test_nanotrons_recompute_layer_is_full_recomputation(said: str, mode: str) -> None:
    old = f"parallelism.recompute_layer={said}"
    config = load(TINY, overrides=(old,)).config
    assert config is not None and config.model.recompute == mode
    ours = load(TINY, overrides=(old, "model.recompute=selective")).config
    assert ours is not None and ours.model.recompute == "selective"
    assert any("parallelism.recompute_layer" in shown for shown in errors("parallelism.recompute_layer=often"))


@pytest.mark.parametrize(("said", "masks"), [("true", True), ("false", False), ("null", False)])
def test_nanotrons_use_doc_masking_is_document_masks(said: str, masks: bool) -> None:
    old = f"{M}_use_doc_masking={said}"
    config = load(TINY, overrides=(old,)).config
    assert config is not None and config.tokens.document_masks is masks
    ours = load(TINY, overrides=(old, "tokens.document_masks=true")).config
    assert ours is not None and ours.tokens.document_masks
    assert any("tokens.document_masks" in shown for shown in errors(f"{M}_use_doc_masking=often"))


@pytest.mark.parametrize("never", ["-1", "0", "null"])
def test_nanotrons_ways_to_say_no_validation_on_the_way(never: str) -> None:
    overrides = ("data.validation.dataset_folder=held-out", f"tokens.val_check_interval={never}")
    config = load(TINY, overrides=overrides).config
    assert config is not None and config.tokens.val_check_interval is None
    assert warnings(*overrides) == []
    assert any("greater than or equal to 1" in shown for shown in errors("tokens.val_check_interval=-2"))


def test_what_a_later_stage_holds_out_is_said_to_be_ignored(tmp_path: Path) -> None:
    tree = yaml.safe_load(TINY.read_text())
    data = tree.pop("data")
    held = {**data, "validation": {"dataset_folder": ["held-out"], "num_samples": 4}}
    later = {**data, "validation": {"dataset_folder": ["other"], "num_samples": 4}}
    stages = [{"name": str(step), "start_training_step": step, "data": each} for step, each in ((9, later), (1, held))]
    file = tmp_path / "staged.yaml"
    file.write_text(yaml.safe_dump({**tree, "data_stages": stages}))
    (shown,) = [problem for problem in load(file).problems if "first stage" in problem.message]
    assert shown.key == "data_stages.0.data.validation"


@pytest.mark.parametrize(
    "name", ["a b", 'a"b', "it's", "$(touch x)", "`id`", "a;b", "a/b", "../x", ".x", "-x", "ä", "x" * 101, "a\\nb", ""]
)
def test_run_names_are_plain(name: str) -> None:
    (shown,) = errors(f'general.run="{name}"' if '"' not in name else f"general.run='{name}'")
    assert "general.run" in shown and shown.isprintable()


def test_placeholders_in_a_run_name_are_taken_out_and_said() -> None:
    loaded = load(TINY, overrides=["general.run=tiny_llama_%date_%jobid"])
    assert loaded.config is not None and loaded.config.general.run == "tiny_llama"
    assert any("the run is named 'tiny_llama'" in shown for shown in messages(loaded, Severity.WARNING))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("general.step=7",), "decided by its checkpoints"),
        (("model.dtype=bfloat16", "optimizer.accumulate_grad_in_fp32=false"), "always accumulated in fp32"),
        (("optimizer.learning_rate_scheduler.lr_decay_steps=20",), "the decay ends at step 22, after the last step 20"),
        (("optimizer.learning_rate_scheduler.lr_warmup_steps=30",), "warm-up lasts as long as the run"),
        (("checkpoints.checkpoint_interval=20",), "costs the whole run"),
        (("checkpoints.checkpoints_path=/x",), "fixed place"),
        (("model.recompute_interval=2",), "nothing is recomputed"),
        (("optimizer.optimizer_factory.torch_adam_is_fused=no",), "always the fused one"),
        (("lighteval.batch_size=8",), "the section is ignored"),
        (("metrics_logging.log_level=1",), "logging.grad_norms_interval logs gradient norms"),
        (("profiler.first_step=19",), "steps 19 to 20 are recorded: the run has 20 steps"),
        (("profiler.first_step=21",), "nothing is recorded: the run has 20 steps"),
        (("profiler.profiler_export_path=/x",), "traces lie in profile/ of the run directory"),
        (("profiler.skip_first=3",), "the steps are profiler.first_step and num_steps"),
        (("optimizer.adam_beta1=0.8",), "optimizer_factory.adam_beta1"),
        (("data.dataset.dataset_weights=[0.5]",), "add up to 0.5"),
        (("data.validation.dataset_folder=data/tiny",), "trained on"),
        (
            ("data.validation.dataset_folder=held-out", "data.validation.num_samples=1000000"),
            "a validation pass of 1,000,000 samples is longer than the training",
        ),
        (
            ("data.validation.dataset_folder=held-out", "tokens.val_check_interval=1"),
            "20 validation passes (tokens.val_check_interval 1) of 64 samples are longer than the training",
        ),
        (("tokens.val_check_interval=5",), "nothing is held out"),
    ],
)
def test_what_is_odd_is_one_warning(overrides: tuple[str, ...], words: str) -> None:
    (shown,) = warnings(*overrides)
    assert words in shown
    assert errors(*overrides) == []


def test_p4_fewer_micro_batches_than_stages_runs_but_names_both_keys_and_the_loss() -> None:
    """P4 (torchtitan#775, nanotron#347)."""
    (shown,) = warnings("parallelism.pp=4", "tokens.batch_accumulation_per_replica=1")
    assert "tokens.batch_accumulation_per_replica" in shown and "parallelism.pp" in shown and "75%" in shown


def test_the_final_learning_rate_is_the_one_that_will_be_used() -> None:
    """Linear from 1e-3 to 1e-4 over 36 steps after 2 of warm-up: half-way at step 20."""
    (shown,) = warnings(
        "optimizer.learning_rate_scheduler.lr_decay_steps=36", "optimizer.learning_rate_scheduler.lr_decay_style=linear"
    )
    assert "stops at a learning rate of 0.00055," in shown and "expected at most 18" in shown


@pytest.mark.parametrize(
    ("folders", "weights", "words"),
    [
        ("[a, b]", "[1]", "1 weights for 2 folders"),
        ("[a]", "[0.5, 0.5]", "2 weights for 1 folders"),
        ("[a, b]", "[0, 0]", "all weights are zero"),
        ("[a, b]", "[1.5, -0.5]", "a weight is negative"),
        ("[a, b]", "[0.5, .nan]", "finite"),
        ("[a, b]", "[0.5, .inf]", "finite"),
        ("[a, b]", "[0.5, half]", "a number"),
        ("[a, b]", "[0.5, '0.5']", "without quotes"),
        ("[a, b]", "0.5", "this is a list"),
        ("[a, b]", "[]", "0 weights for 2 folders"),
    ],
)
def test_d2_weights_are_refused_with_the_list_named(folders: str, weights: str, words: str) -> None:
    shown = errors(f"data.dataset.dataset_folder={folders}", f"data.dataset.dataset_weights={weights}")
    assert any(words in line for line in shown)
    assert all("data.dataset.dataset_weights" in line for line in shown)


def test_a_zero_weight_is_legal() -> None:
    overrides = ("data.dataset.dataset_folder=[a, b]", "data.dataset.dataset_weights=[1, 0]")
    assert errors(*overrides) == [] and warnings(*overrides) == []


def test_d4_weights_off_by_a_little_are_said_once() -> None:
    weights = "data.dataset.dataset_weights=[0.5, 0.5056]"
    (shown,) = warnings("data.dataset.dataset_folder=[a, b]", weights)
    assert "the weights add up to 1.0056" in shown


def stages(*starts: int) -> str:
    """A config whose data comes in stages that start at the given steps."""
    head, _, _ = TINY.read_text().partition("data:\n")
    items = "".join(
        f"  - name: s{i}\n    start_training_step: {start}\n    data:\n      dataset:\n        dataset_folder: d{i}\n"
        for i, start in enumerate(starts)
    )
    return (
        f"{head}data_stages:\n{items}checkpoints:\n  checkpoint_interval: 5\ntokenizer: {{tokenizer_name_or_path: x}}\n"
    )


def test_f4_a_stage_list_without_a_first_stage(tmp_path: Path) -> None:
    """F4 (nanotron#166, #121)."""
    path = tmp_path / "run.yaml"
    path.write_text(stages(10, 15))
    (shown,) = messages(load(path), Severity.ERROR)
    line = path.read_text().splitlines().index("data_stages:") + 1
    assert shown.startswith(f"{path}:{line}: error: data_stages: no stage starts at step 1")
    assert "found 10, 15" in shown and "start_training_step: 1" in shown


def test_d9_stages_are_ordered_by_start_and_an_unreachable_one_is_said(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(stages(10, 1, 9000))
    loaded = load(path)
    assert loaded.config is not None
    assert [stage.name for stage in loaded.config.stages] == ["s1", "s0", "s2"]
    (shown,) = messages(loaded, Severity.WARNING)
    assert "never reached: the last step is 20" in shown
    path.write_text(stages(1, 1))
    (shown,) = messages(load(path), Severity.ERROR)
    assert "another stage starts at this step" in shown


def test_data_and_stages_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(stages(1) + "data:\n  dataset:\n    dataset_folder: x\n")
    (shown,) = messages(load(path), Severity.ERROR)
    assert "both given" in shown


def test_folders_may_be_one_name_or_a_table_of_weights(tmp_path: Path) -> None:
    one = load(TINY, overrides=["data.dataset.dataset_folder=x"]).config
    table = load(TINY, overrides=["data.dataset.dataset_folder={a: 0.8, b: 0.2}"]).config
    assert one is not None and one.stages[0].data.dataset.dataset_folder == ["x"]
    assert table is not None and table.stages[0].data.dataset.dataset_weights == [0.8, 0.2]


def test_random_tokens_and_text_of_a_hub_are_refused_by_name() -> None:
    (shown,) = errors("data.dataset=null")
    assert "random tokens are not offered" in shown
    (shown,) = errors("data.dataset={hf_dataset_or_datasets: x, text_column_name: text}")
    assert "hf_dataset_or_datasets" in shown and "prepare" in shown


def test_rules_still_judge_what_can_be_read() -> None:
    """A value that cannot be read silences the rules that need it, and no others."""
    shown = errors("parallelism.tp=two", "optimizer.zero_stage=3", f"{M}num_key_value_heads=3", "parallelism.pp=9")
    keys = sorted(line.split("error: ")[1].split(":")[0] for line in shown)
    assert keys == [f"{M}num_key_value_heads", "optimizer.zero_stage", "parallelism.pp", "parallelism.tp"]


def test_rules_are_named_once() -> None:
    names = [rule.__name__ for rule in (*RULES, *DATA_RULES, *OPTIMIZER_RULES)]
    assert len(set(names)) == len(names) > 20


def test_null_means_the_default_only_where_nanotron_writes_it() -> None:
    assert errors(f"{M}num_key_value_heads=null", "model.dtype=null", f"{M}rope_scaling=null", "profiler=null") == []
    (shown,) = errors("tokens.train_steps=null")
    assert "found nothing" in shown


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@given(st.text(max_size=60))
@settings(max_examples=50, deadline=None)
def test_no_text_makes_the_loader_raise(text: str) -> None:
    document = parse_text(text, file="f")
    assert document.problems or document.root.entries is not None
