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


def kind(model_type: str, *keys: str) -> tuple[str, ...]:
    """Overrides for a family and further keys of the architecture."""
    return tuple(f"{M}{key}" for key in (f"model_type={model_type}", *keys))


LENGTHS = "original_max_position_embeddings: 32"
ENDS = "low_freq_factor: 1, high_freq_factor: 4"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (kind("mistral", "sliding_window=4096"), "sliding_window", "not offered (found 4096; expected null"),
        (kind("mistral", "attention_bias=true"), "attention_bias", "model_type one of llama, qwen3, smollm3"),
        (kind("starcoder2", "sliding_window=4096"), "sliding_window", "sliding-window attention is not offered"),
        (kind("starcoder2", "rms_norm_eps=1e-6"), "rms_norm_eps", "starcoder2 has no such key"),
        (kind("starcoder2", "attention_bias=true"), "attention_bias", "starcoder2 has no such key"),
        (kind("starcoder2", "residual_dropout=0.1"), "residual_dropout", "uses no dropout"),
        (kind("starcoder2", "embedding_dropout=0.1"), "embedding_dropout", "uses no dropout"),
        (kind("starcoder2", "head_dim=32"), "head_dim", "found 32; expected 16, or no such key"),
        (kind("llama", "norm_epsilon=1e-6"), "norm_epsilon", "llama has no such key"),
        (kind("llama", "use_bias=true"), "use_bias", "expected no such key, or model_type one of starcoder2"),
        (kind("llama", "no_rope_layers=[1,1,0,1]"), "no_rope_layers", "model_type one of smollm3"),
        (kind("qwen2", "use_sliding_window=true", "sliding_window=16"), "use_sliding_window", "expected false"),
        (kind("qwen3", "use_sliding_window=true"), "use_sliding_window", "sliding-window attention is not offered"),
        (kind("qwen3", "layer_types=[full_attention,chunked]"), "layer_types", "found 'chunked'"),
        (kind("smollm3", "no_rope_layers=[1,0]"), "no_rope_layers", "found 2 numbers; expected 4 numbers"),
        (kind("smollm3", "no_rope_layers=[1,2,1,0]"), "no_rope_layers", "found 2; expected 1 (rotary positions) or 0"),
        (kind("llama", "hidden_act=relu"), "hidden_act", "expected one of silu, gelu, gelu_tanh, gelu_pytorch_tanh"),
        (kind("llama", "rope_scaling={type: longrope, factor: 8}"), "rope_type", "default, linear, llama3, yarn"),
        (kind("llama", "rope_scaling={type: dynamic, factor: 8}"), "rope_type", "default, linear, llama3, yarn"),
        (kind("llama", "rope_scaling={factor: 8}"), "factor", "rope_type default has no such key"),
        (kind("llama", "rope_parameters={rope_type: yarn}"), "rope_parameters", "needs factor, original_max_position"),
        (kind("llama", f"rope_parameters={{rope_type: llama3, factor: 8, {LENGTHS}}}"), "rope_parameters", "low_freq"),
        (
            kind("llama", f"rope_parameters={{rope_type: llama3, factor: 8, {LENGTHS}, {ENDS}, beta_fast: 2}}"),
            "beta_fast", "rope_type llama3 has no such key (found 2.0; expected no such key, or rope_type one of yarn",
        ),
        (
            kind("llama", f"rope_parameters={{rope_type: yarn, factor: 8, {LENGTHS}, beta_slow: 40}}"),
            "beta_fast", "not above beta_slow (found 32; expected above 40)",
        ),
        (kind("llama", "rope_parameters={rope_type: linear, factor: 0.5}"), "factor", "greater than or equal to 1"),
        (kind("llama", "rope_parameters={partial_rotary_factor: 0.5}"), "partial_rotary_factor", "unknown key"),
        (
            kind("llama", "rope_scaling={type: linear, factor: 4}", "rope_parameters={rope_type: linear, factor: 8}"),
            "rope_scaling.factor", "given twice, and not alike (found 4; expected 8, or no such key)",
        ),
        (
            kind("llama", "rope_theta=500000", "rope_parameters={rope_type: default, rope_theta: 1e6}"),
            "rope_theta", "given twice, and not alike (found 500000; expected 1e6, or no such key)",
        ),
    ],
)  # fmt: skip
def test_what_a_family_has_not_is_one_error_at_its_key(overrides: tuple[str, ...], key: str, words: str) -> None:
    """C8: never ignored."""
    (text,) = errors(*overrides)
    assert f"{key}: " in text and words in text


@pytest.mark.parametrize(
    "overrides",
    [
        kind("mistral", "sliding_window=null"),
        kind("qwen2", "sliding_window=4096", "use_sliding_window=false", "max_window_layers=28"),
        kind("qwen3", f"layer_types=[{','.join(['full_attention'] * 4)}]", "attention_bias=true"),
        kind("smollm3", "max_window_layers=28", "use_sliding_window=false", "sliding_window=null"),
        kind("starcoder2", "use_bias=false", "norm_epsilon=1e-6", "residual_dropout=0.0", "hidden_act=gelu"),
        kind("llama", "rope_scaling=null", "rope_parameters=null", "use_sliding_window=false", "mlp_bias=true"),
        kind("llama", "rope_parameters={rope_type: default, rope_theta: 1000000, partial_rotary_factor: 1.0}"),
    ],
)
def test_what_changes_nothing_is_quiet(overrides: tuple[str, ...]) -> None:
    assert errors(*overrides) == [] and warnings(*overrides) == []


@pytest.mark.parametrize("theta", ["1000000", "1e6", "1000000.0"])
@pytest.mark.parametrize(
    "keys",
    [
        ("rope_theta={theta}", "rope_scaling={{type: yarn, factor: 4, original_max_position_embeddings: 32}}"),
        ("rope_theta={theta}", "rope_scaling={{rope_type: yarn, factor: 4, original_max_position_embeddings: 32}}"),
        ("rope_parameters={{rope_type: yarn, rope_theta: {theta}, factor: 4, original_max_position_embeddings: 32}}",),
        (
            "rope_parameters={{rope_type: yarn, rope_theta: {theta}, factor: 4.0}}", "rope_theta=1e6",
            "rope_scaling={{type: yarn, factor: 4, original_max_position_embeddings: 32, beta_fast: null}}",
        ),
    ],
)  # fmt: skip
def test_both_spellings_of_rotary_positions_are_one_config(keys: tuple[str, ...], theta: str) -> None:
    """C7: rope_theta as a whole number or not, in either form."""
    loaded = load(TINY, overrides=[f"{M}{key.format(theta=theta)}" for key in keys])
    assert loaded.config is not None, loaded.problems
    shape = loaded.config.model.model_config_
    said = shape.rope.model_dump(exclude_none=True)
    assert said == {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
    assert shape.rope_theta == 1e6


def test_a_family_has_defaults_of_its_own() -> None:
    shapes = {}
    for name in ("llama", "starcoder2", "smollm3"):
        config = load(TINY, overrides=kind(name)).config
        assert config is not None
        shapes[name] = config.model.model_config_
    star, smol, llama = shapes["starcoder2"], shapes["smollm3"], shapes["llama"]
    assert (star.activation, star.qkv_bias, star.out_bias, star.ffn_bias) == ("gelu_pytorch_tanh", True, True, True)
    assert (llama.activation, llama.qkv_bias, llama.out_bias, llama.ffn_bias) == ("silu", False, False, False)
    assert smol.rope_layers == (True, True, True, False) and all(llama.rope_layers) and all(star.rope_layers)


def test_nanotrons_layers_without_rotary_positions_are_smollm3() -> None:
    overrides = (f"{M}no_rope_layer=2", f"{M}is_qwen2_config=true", f"{M}sliding_window_size=null")
    loaded = load(TINY, overrides=overrides)
    assert loaded.config is not None and warnings(*overrides) == [], loaded.problems
    shape = loaded.config.model.model_config_
    assert shape.model_type == "smollm3" and shape.rope_layers == (True, False, True, False)
    (text,) = errors(f"{M}no_rope_layer=2", f"{M}model_type=llama")
    assert "only smollm3 has layers without rotary positions" in text


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
