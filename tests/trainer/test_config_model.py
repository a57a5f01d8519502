"""Keys of the model and its parallel forms: cut sequences, biases, model types, z-loss; nanotron's spelling of them."""

from pathlib import Path

import pytest

from trainer.config import Severity, format_problem, load

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
M = "model.model_config."


def said(severity: Severity, *overrides: str) -> list[str]:
    loaded = load(TINY, overrides=("tokenizer.tokenizer_name_or_path=x", *overrides))
    return [format_problem(problem) for problem in loaded.problems if problem.severity is severity]


def errors(*overrides: str) -> list[str]:
    return said(Severity.ERROR, *overrides)


def warnings(*overrides: str) -> list[str]:
    return said(Severity.WARNING, *overrides)


@pytest.mark.parametrize(
    ("length", "tp", "near"), [(31, 2, "30 or 32"), (32, 3, "30 or 33"), (3, 4, "4"), (62, 4, "60 or 64")]
)
def test_a_sequence_that_tp_does_not_cut_evenly_is_refused(length: int, tp: int, near: str) -> None:
    heads = (
        f"{M}num_attention_heads=12",
        f"{M}num_key_value_heads=12",
        f"{M}hidden_size=192",
        f"{M}intermediate_size=96",
    )
    mesh = (f"parallelism.tp={tp}", f"tokens.sequence_length={length}", *heads)
    assert errors(*mesh) == []
    (text,) = errors(*mesh, "parallelism.tp_mode=REDUCE_SCATTER")
    assert "tokens.sequence_length" in text and f"cuts each sequence over tp = {tp}" in text
    assert f"found {length}" in text and f"a multiple of {tp}: {near}; or tp_mode ALL_REDUCE" in text


@pytest.mark.parametrize("keys", [("attention_bias",), ("mlp_bias",), ("attention_bias", "mlp_bias")])
def test_biases_are_quiet(keys: tuple[str, ...]) -> None:
    given = [f"{M}{key}=true" for key in keys]
    assert errors(*given) == [] and warnings(*given) == []


@pytest.mark.parametrize(("bias", "model_type"), [("true", "qwen2"), ("false", "llama")])
def test_nanotrons_qwen2_is_qwen2_where_it_has_biases(bias: str, model_type: str) -> None:
    loaded = load(TINY, overrides=[f"{M}is_qwen2_config=true", f"{M}attention_bias={bias}"])
    assert loaded.config is not None, loaded.problems
    shape = loaded.config.model.model_config
    assert (shape.model_type, shape.qkv_bias, shape.out_bias) == (model_type, bias == "true", False)


@pytest.mark.parametrize(
    ("given", "coefficient"),
    [
        ((f"{M}z_loss_enabled=true", f"{M}z_loss_coefficient=1e-5"), 1e-5),
        ((f"{M}z_loss_enabled=true",), 1e-4),
        ((f"{M}z_loss_enabled=false", f"{M}z_loss_coefficient=1e-5"), 0.0),
        ((f"{M}z_loss_enabled=true", "optimizer.z_loss_coefficient=0.5"), 0.5),
        (("optimizer.z_loss_coefficient=2e-4",), 2e-4),
        ((), 0.0),
    ],
)
def test_nanotrons_z_loss_is_the_optimizers(given: tuple[str, ...], coefficient: float) -> None:
    loaded = load(TINY, overrides=given)
    assert loaded.config is not None, loaded.problems
    assert loaded.config.optimizer.z_loss_coefficient == coefficient and warnings(*given) == []
    assert len(errors(f"{M}z_loss_enabled=maybe")) == 1


def test_sequence_parallel_is_quiet_where_it_fits() -> None:
    mesh = ("parallelism.tp=2", "parallelism.tp_mode=REDUCE_SCATTER")
    assert errors(*mesh) == [] and warnings(*mesh) == []
    config = load(TINY, overrides=mesh).config
    alone = load(TINY, overrides=["parallelism.tp_mode=REDUCE_SCATTER", "tokens.sequence_length=31"]).config
    assert config is not None and config.sequence_parallel
    assert alone is not None and not alone.sequence_parallel, "with tp = 1 there is nothing to cut"
