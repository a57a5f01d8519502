"""Parameter groups: what each parameter gets, by name (trap G7: groups lost when parameters are flattened)."""

import math

import pytest
import torch
from engine_world import solo_engine, tiny_batch, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.model import ParameterGroup
from trainer.mesh.topology import Topology
from trainer.optim.groups import group_of, useless
from trainer.optim.layout import plan_rank_layout
from trainer.spec import param_specs, parameter_names

LAYER = {
    "input_layernorm": (0.0, 1.0),
    "self_attn.q_proj": (1.0, 1.0),
    "self_attn.k_proj": (1.0, 1.0),
    "self_attn.v_proj": (1.0, 1.0),
    "self_attn.o_proj": (1.0, 1.0),
    "post_attention_layernorm": (0.0, 1.0),
    "mlp.gate_proj": (1.0, 1.0),
    "mlp.up_proj": (1.0, 1.0),
    "mlp.down_proj": (1.0, 1.0),
}
PLAIN = {
    "model.embed_tokens.weight": (1.0, 1.0),
    **{f"model.layers.{layer}.{name}.weight": pair for layer in (0, 1) for name, pair in LAYER.items()},
    "model.norm.weight": (0.0, 1.0),
    "lm_head.weight": (1.0, 1.0),
}
GROUPS = (
    ParameterGroup(match="model.layers.0.*norm.weight", lr_mult=0.5),
    ParameterGroup(match="*norm*", weight_decay_mult=0.25),
    ParameterGroup(match="*embed*", weight_decay_mult=0.0, lr_mult=2.0),
    ParameterGroup(match="model.layers.1.mlp.*", lr_mult=0.1),
)


def table(**changes: object) -> dict[str, tuple[float, float]]:
    """name → (factor on weight decay, factor on the rate)."""
    specs = param_specs(tiny_config(tied=False, **changes), Topology())  # type: ignore[arg-type]
    return {spec.name: (spec.wd_mult, spec.lr_mult) for spec in specs}


def test_g7_without_groups_matrices_decay_and_norms_do_not() -> None:
    """G7 (Fast-LLM#545)."""
    assert table() == PLAIN


def test_g7_the_first_pattern_that_fits_decides() -> None:
    changed = {
        "model.embed_tokens.weight": (0.0, 2.0),
        "model.layers.0.input_layernorm.weight": (0.0, 0.5),
        "model.layers.0.post_attention_layernorm.weight": (0.0, 0.5),
        "model.layers.1.input_layernorm.weight": (0.25, 1.0),
        "model.layers.1.post_attention_layernorm.weight": (0.25, 1.0),
        "model.layers.1.mlp.gate_proj.weight": (1.0, 0.1),
        "model.layers.1.mlp.up_proj.weight": (1.0, 0.1),
        "model.layers.1.mlp.down_proj.weight": (1.0, 0.1),
        "model.norm.weight": (0.25, 1.0),
    }
    assert table(groups=GROUPS) == {**PLAIN, **changed}


def test_g7_a_group_multiplies_the_rate_of_mup() -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    assert table(use_mup=True)[name] == (1.0, 256 / 48)
    assert table(use_mup=True, groups=GROUPS)[name] == (1.0, 256 / 48 * 0.1)


axis = st.sampled_from([1, 2])
mult = st.sampled_from([0.0, 0.5, 1.0])
pattern = st.sampled_from(
    ["*", "*norm*", "*.0.*", "*proj*", "lm_head*", "*q_proj.weight", "model.*", "*.layers.1.?lp.*"]
)


@given(
    dp=axis,
    pp=axis,
    tp=axis,
    entries=st.lists(st.tuples(pattern, mult, mult), max_size=4),
    bucket=st.sampled_from([64, 4096]),
)
@settings(max_examples=40, deadline=None)
def test_g7_flattened_each_parameter_keeps_its_factors_on_every_rank(
    dp: int, pp: int, tp: int, entries: list[tuple[str, float, float]], bucket: int
) -> None:
    """G7."""
    groups = tuple(ParameterGroup(match=m, weight_decay_mult=wd, lr_mult=lr) for m, wd, lr in entries)
    expected = table(groups=groups)
    topology = Topology(dp=dp, pp=pp, tp=tp)
    specs = param_specs(tiny_config(dp=dp, pp=pp, tp=tp, tied=False, groups=groups), topology)
    seen = {}
    for rank in range(topology.world_size):
        for at in plan_rank_layout(specs, topology, rank, bucket_numel=bucket).buckets:
            seen.update({slot.name: (at.wd_mult, at.lr_mult) for slot in at.slots})
    assert seen == expected


@given(entries=st.lists(pattern, max_size=5))
@settings(max_examples=50, deadline=None)
def test_a_group_is_useless_exactly_when_it_decides_about_nothing(entries: list[str]) -> None:
    names = parameter_names(tiny_config(tied=True))
    groups = [ParameterGroup(match=match) for match in entries]
    found = useless(groups, names)
    for index, group in enumerate(groups):
        decides = any(group_of(name, groups) is group for name in names)
        assert decides != (index in found)
        if index in found:
            assert found[index] == any(group_of(name, [group]) for name in names)


def test_names_are_those_of_the_table_on_every_mesh() -> None:
    for tied in (True, False):
        config = tiny_config(pp=2, tp=2, tied=tied, layers=4, pp_engine="interleaved")
        assert parameter_names(config) == tuple(s.name for s in param_specs(config, Topology(pp=2, tp=2)))


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_an_update_moves_each_parameter_by_its_own_rate_and_decay(zero_stage: int) -> None:
    """From the same gradients: rate 0 stands still, and decay is w · lr · wd on top of the step without decay."""
    groups = (
        ParameterGroup(match="*.0.*", lr_mult=0.0),
        ParameterGroup(match="*norm*", weight_decay_mult=2.0, lr_mult=0.5),
    )
    with_decay, without = (solo_engine(tiny_config(groups=groups, zero_stage=zero_stage)) for _ in range(2))
    before = {spec.name: with_decay.optimizer.view(spec.name)[0].clone() for spec in with_decay.specs}
    for engine, decay in ((with_decay, 0.1), (without, 0.0)):
        assert engine.train_step(tiny_batch(), lr=0.01, weight_decay=decay, adam_t=1).finite
    for spec in with_decay.specs:
        value, plain = (engine.optimizer.view(spec.name)[0] for engine in (with_decay, without))
        assert torch.equal(value, before[spec.name]) == (".0." in spec.name)
        shrunk = before[spec.name] * (0.01 * spec.lr_mult) * (0.1 * spec.wd_mult)
        torch.testing.assert_close(plain - value, shrunk, rtol=1e-2, atol=1e-6)
        assert math.isfinite(float(value.sum()))
