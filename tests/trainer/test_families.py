"""Every model family against transformers' own class, in one process; what each has is what its table row says.

Sequences are twice as long as the original length of scaled rotary positions. Parallel layouts: the oracle's axes
`family`, `act` and `rope`.
"""

from typing import Any

import pytest
import reference
import torch
from dist.verdict import hf_config
from engine_world import logits_of, solo_engine, tiny_batch, tiny_config
from transformers import AutoModelForCausalLM

from trainer.config.architecture import ModelConfig
from trainer.config.rope import KEYS, RopeParameters
from trainer.engine import Engine
from trainer.layers.mlp import ACTIVATIONS as FUNCTIONS
from trainer.layers.rotary import Rotary
from trainer.models.families import ACTIVATIONS, FAMILIES, FAMILY_KEYS

LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 8,
          "low_freq_factor": 0.25, "high_freq_factor": 1.0}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "beta_fast": 1.0, "beta_slow": 0.05}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama 3": {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "llama, linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "hidden_act": "gelu"},
    "mistral": {"model_type": "mistral", "head_dim": 12, "hidden_act": "gelu_tanh"},
    "qwen2, yarn": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 12, "rope_theta": 1e6},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [0, 1], "hidden_act": "relu2"},
    "smollm3, yarn": {"model_type": "smollm3", "no_rope_layer_interval": 2, "rope_parameters": YARN, "tied": False},
    "starcoder2": {"model_type": "starcoder2"},
    "starcoder2 without biases": {"model_type": "starcoder2", "use_bias": False, "norm_epsilon": 1e-3,
                                  "rope_parameters": LLAMA3, "tied": False, "hidden_act": "relu2"},
}  # fmt: skip


def engine_of(options: dict[str, Any], dtype: str) -> Engine:
    """Weights with nothing at its start value: biases and norms would hide what is left out."""
    rope = options.get("rope_parameters")
    keys = {**options, "rope_parameters": rope and RopeParameters(**rope)}
    engine = solo_engine(tiny_config(dtype=dtype, initializer_range=0.2, **keys))
    generator = torch.Generator().manual_seed(5)
    for spec in engine.specs:
        weight = engine.optimizer.view(spec.name)[0]
        if weight.dim() == 1:
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype) * 0.3)
    return engine


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_are_those_of_transformers(options: dict[str, Any]) -> None:
    """C8: in fp64, also beyond the original length, with transformers' formulas lifted to fp64."""
    engine, batch = engine_of(options, "float64"), tiny_batch()
    weights = {spec.name: engine.optimizer.view(spec.name)[0].detach() for spec in engine.specs}
    theirs = reference.build(hf_config(engine.config.model.model_config_), weights, torch.float64)
    with torch.no_grad():
        wanted = torch.stack([theirs(input_ids=ids).logits for ids in batch.input_ids_MBT])
    torch.testing.assert_close(logits_of(engine, batch), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_in_fp32_are_those_of_transformers_as_it_is(options: dict[str, Any]) -> None:
    engine, batch = engine_of(options, "float32"), tiny_batch()
    weights = {spec.name: engine.optimizer.view(spec.name)[0].detach() for spec in engine.specs}
    theirs = AutoModelForCausalLM.from_config(hf_config(engine.config.model.model_config_))
    left = theirs.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}
    with torch.no_grad():
        wanted = torch.stack([theirs(input_ids=ids).logits for ids in batch.input_ids_MBT])
    torch.testing.assert_close(logits_of(engine, batch), wanted, rtol=1e-5, atol=1e-5)


REAL_ROPES: dict[str, dict[str, Any]] = {
    "Llama 2": {"rope_type": "default", "rope_theta": 10000.0},
    "Llama 3.2 1B": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "OLMo 3": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
               "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
    "Qwen2.5": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "mscale": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
               "mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("rope", REAL_ROPES.values(), ids=REAL_ROPES.keys())
def test_cosines_and_sines_are_those_of_transformers_at_every_position(rope: dict[str, Any]) -> None:
    """C7, C8: real models' settings up to 131,072 positions, bit for bit in fp32."""
    length = 131_072
    shape = ModelConfig(
        hidden_size=256, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, vocab_size=8,
        max_position_embeddings=length, rope_parameters=RopeParameters(**rope),
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(hf_config(shape)).model.rotary_emb
    positions = torch.cat((torch.arange(300), torch.arange(8000, 8400), torch.arange(length - 300, length)))[None]
    cos, sin = theirs(torch.zeros(1), positions)
    rotary = Rotary(head_dim=64, rope=shape.rope, max_positions=length, dtype=torch.float32)
    for mine, wanted in zip(rotary(positions), (cos, sin), strict=True):
        assert torch.equal(mine.squeeze(2), wanted[..., :32]) and torch.equal(wanted[..., :32], wanted[..., 32:])


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_the_check_lets_pass_is_there(act: str) -> None:
    shape = tiny_config(hidden_act=act).model.model_config_
    assert shape.activation in FUNCTIONS and set(FUNCTIONS) == set(ACTIVATIONS.values())


def test_the_table_names_keys_of_the_config() -> None:
    fields = set(ModelConfig.model_fields)
    for family in FAMILIES.values():
        said = {x for x in (family.qkv_bias, family.out_bias, family.mlp_bias, family.norm_eps) if isinstance(x, str)}
        assert said <= family.keys <= fields and set(family.defaults) <= fields
    assert set(FAMILIES) == set(ModelConfig.model_fields["model_type"].annotation.__args__)  # type: ignore[union-attr]
    assert FAMILY_KEYS.isdisjoint({"hidden_size", "rope_theta", "hidden_act", "tie_word_embeddings"})
    named = {key for keys in KEYS.values() for key in (*keys.required, *keys.optional)}
    assert named | {"rope_type", "rope_theta"} == set(RopeParameters.model_fields)


def test_a_layer_without_rotary_positions_does_not_know_the_order() -> None:
    """In a model of one such layer the last token sees a bag of words."""
    engine = engine_of({"model_type": "smollm3", "layers": 1, "no_rope_layers": [0]}, "float64")
    batch = tiny_batch(m=1, b=1)
    last = logits_of(engine, batch)[0, 0, -1].clone()
    batch.input_ids_MBT[..., :-1] = batch.input_ids_MBT[..., :-1].flip(-1)
    torch.testing.assert_close(logits_of(engine, batch)[0, 0, -1], last, rtol=1e-10, atol=1e-12)
