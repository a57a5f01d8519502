"""The parameter table and what is read from it: shards, stages, buckets, initial weights, all without torch ranks."""

import math
from typing import Any

import numpy as np
import pytest
from engine_world import solo_engine, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.init import draw_box, tensor_key
from trainer.mesh.topology import Topology
from trainer.mup import attention_scale, output_multiplier
from trainer.optim.layout import ALIGN, plan_layout, plan_rank_layout
from trainer.optim.norm import owned_ranges
from trainer.pipeline.partition import layer_counts
from trainer.spec import Box, InitKind, local_box, local_shape, param_specs, specs_on_rank

axis = st.sampled_from([1, 2, 4])


@given(
    dp=axis, pp=axis, tp=st.sampled_from([1, 2]), tied=st.booleans(), bucket=st.sampled_from([64, 1000, 1 << 20]),
    schedule=st.sampled_from(["1f1b", "interleaved", "zb-v"]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_every_element_is_placed_once_and_counted_once(
    dp: int, pp: int, tp: int, tied: bool, bucket: int, schedule: str
) -> None:
    """G1, G3, G4: Σ over ranks of the counted ranges' real elements = number of parameters, for every mesh,
    bucket, placement.
    """
    topology = Topology(dp=dp, pp=pp, tp=tp)
    specs = param_specs(tiny_config(dp=dp, pp=pp, tp=tp, tied=tied, layers=8, pp_engine=schedule), topology)
    by_name = {spec.name: spec for spec in specs}
    counted = dict.fromkeys(by_name, 0)
    for rank in range(topology.world_size):
        at = topology.coord(rank)
        layout = plan_rank_layout(specs, topology, rank, bucket_numel=bucket)
        slots = [slot.name for b in layout.buckets for slot in b.slots]
        assert sorted(slots) == sorted(spec.name for spec in specs_on_rank(specs, at.pp))
        for b in layout.buckets:
            assert b.numel == dp * b.shard_numel and b.shard_numel % ALIGN == 0
            assert all(slot.start % ALIGN == 0 for slot in b.slots) and b.slots[-1].stop <= b.numel
            assert len({(by_name[s.name].wd_mult, by_name[s.name].lr_mult) for s in b.slots}) == 1
            shard = slice(at.dp * b.shard_numel, (at.dp + 1) * b.shard_numel)
            for part in owned_ranges(b, by_name, shard=shard, pp_rank=at.pp, tp_rank=at.tp):
                assert shard.start <= part.start < part.stop <= shard.stop
                for slot in b.slots:
                    counted[slot.name] += max(0, min(slot.stop, part.stop) - max(slot.start, part.start))
    assert counted == {spec.name: math.prod(spec.padded_shape) for spec in specs}


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, set()),
        ({"attention_bias": True}, {f"{x}_proj.bias" for x in "qkvo"}),
        ({"mlp_bias": True}, {f"{x}_proj.bias" for x in ("gate", "up", "down")}),
        ({"model_type": "qwen2"}, {f"{x}_proj.bias" for x in "qkv"}),
        ({"model_type": "qwen3"}, {"q_norm.weight", "k_norm.weight"}),
        ({"model_type": "smollm3"}, set()),
    ],
)
def test_the_table_is_what_the_model_holds(options: dict[str, Any], more: set[str]) -> None:
    """A row that no layer uses would be drawn, saved and never trained."""
    engine = solo_engine(tiny_config(tied=False, **options))
    names = {spec.name for spec in engine.specs}
    live = {f"{block}.{name}" for block, m in engine._modules.items() for name, _ in m.named_parameters()}
    plain = {spec.name for spec in param_specs(tiny_config(tied=False), Topology())}
    assert names == live and {name.split(".", 4)[-1] for name in names - plain} == more
    assert all(spec.init.std > 0 if len(spec.shape) == 2 else spec.wd_mult == 0.0 for spec in engine.specs)
    biases = [spec for spec in engine.specs if spec.name.endswith("bias")]
    assert all(spec.init.kind is InitKind.ZEROS for spec in biases)


@pytest.mark.parametrize("use_bias", [True, False])
def test_the_table_of_starcoder2_is_what_the_model_holds(use_bias: bool) -> None:
    """Two matrices, biases of the linear layers where asked for, of the norms always; none of them decays."""
    engine = solo_engine(tiny_config(tied=False, model_type="starcoder2", use_bias=use_bias))
    names = {spec.name for spec in engine.specs}
    live = {f"{block}.{name}" for block, m in engine._modules.items() for name, _ in m.named_parameters()}
    linear = {*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.c_fc", "mlp.c_proj"}
    norms = {"input_layernorm", "post_attention_layernorm"}
    layer = {f"{x}.weight" for x in linear | norms} | {f"{x}.bias" for x in (linear | norms if use_bias else norms)}
    whole = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.norm.bias"}
    assert names == live == whole | {f"model.layers.{i}.{name}" for i in range(2) for name in layer}
    assert {spec.name for spec in engine.specs if spec.wd_mult} == {s.name for s in engine.specs if len(s.shape) == 2}
    kinds = {spec.name.rpartition(".")[2]: spec.init.kind for spec in engine.specs if len(spec.shape) == 1}
    assert kinds == {"weight": InitKind.ONES, "bias": InitKind.ZEROS}


@pytest.mark.parametrize("tp_mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_which_gradients_of_starcoder2_are_parts(tp_mode: str) -> None:
    config = tiny_config(tp=2, tied=False, model_type="starcoder2", tp_mode=tp_mode)
    specs = param_specs(config, Topology(tp=2))
    parts = {
        spec.name.removeprefix("model.layers.0.") for spec in specs if spec.tp_partial_grad and ".1." not in spec.name
    }
    norms = {
        f"{x}.{y}" for x in ("input_layernorm", "post_attention_layernorm", "model.norm") for y in ("weight", "bias")
    }
    between = {*norms, "self_attn.o_proj.bias", "mlp.c_proj.bias"}
    assert parts == (between if tp_mode == "REDUCE_SCATTER" else set())
    cut = {spec.name.removeprefix("model.layers.0.") for spec in specs if spec.shard_dim == 0 and len(spec.shape) == 1}
    assert {"mlp.c_fc.bias", "self_attn.q_proj.bias"} <= cut


@pytest.mark.parametrize("tp_mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_which_gradients_are_parts(tp_mode: str) -> None:
    """Whole tensors between the regions with sequence parallelism; one head's norms always; a cut tensor never."""
    options: dict[str, Any] = {"model_type": "qwen3", "attention_bias": True, "tp_mode": tp_mode}
    specs = param_specs(tiny_config(tp=2, tied=False, **options), Topology(tp=2))
    parts = {spec.name.removeprefix("model.").split(".", 2)[-1] for spec in specs if spec.tp_partial_grad}
    heads = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    between = {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.bias", "weight"}
    assert parts == (heads | between if tp_mode == "REDUCE_SCATTER" else heads)
    assert all(spec.shard_dim is None for spec in specs if spec.tp_partial_grad)
    assert not any(spec.tp_partial_grad for spec in param_specs(tiny_config(**options), Topology()))


def test_tp_boxes_cover_the_canonical_tensor_and_clip_padding() -> None:
    specs = {spec.name: spec for spec in param_specs(tiny_config(tp=2), Topology(tp=2))}
    embedding = specs["model.embed_tokens.weight"]
    assert embedding.shape == (67, 32) and embedding.padded_shape == (68, 32)
    assert local_shape(embedding, 2, 1) == (34, 32)
    assert local_box(embedding, 2, 0) == Box((0, 0), (34, 32)) and local_box(embedding, 2, 1) == Box((34, 0), (33, 32))
    row = specs["model.layers.0.mlp.down_proj.weight"]
    assert local_box(row, 2, 1) == Box((0, 24), (32, 24))
    assert local_box(specs["model.norm.weight"], 2, 1) == Box((0,), (32,))


def test_more_tp_ranks_than_vocabulary_shares() -> None:
    """9 rows over 8 ranks: two rows each, so ranks 5 to 7 hold padding alone."""
    spec = param_specs(tiny_config(tp=8, heads=8, kv_heads=8, vocab=9), Topology(tp=8))[0]
    boxes = [local_box(spec, 8, rank) for rank in range(8)]
    assert [box.size[0] for box in boxes] == [2, 2, 2, 2, 1, 0, 0, 0]


def test_weight_decay_groups_and_tied_stages() -> None:
    specs = param_specs(tiny_config(pp=2), Topology(pp=2))
    assert {spec.name.split(".")[-2] for spec in specs if not spec.wd_mult} == {
        "input_layernorm", "post_attention_layernorm", "norm",
    }  # fmt: skip
    assert specs[0].stages == (0, 1) == specs[0].pp_ranks and specs[0].tie_sites == 2
    assert [spec.name for spec in specs if spec.name == "lm_head.weight"] == []
    alone = param_specs(tiny_config(), Topology())[0]
    assert alone.stages == (0,) == alone.pp_ranks and alone.tie_sites == 2
    turned = param_specs(tiny_config(pp=2, layers=4, pp_engine="zb-v"), Topology(pp=2))[0]
    assert turned.stages == (0, 3) and turned.pp_ranks == (0,) and turned.tie_sites == 2


@given(layers=st.integers(1, 40), pp=st.integers(1, 8), head=st.floats(0, 6))
@settings(max_examples=50, deadline=None)
def test_layers_are_split_so_that_the_heaviest_stage_is_lightest(layers: int, pp: int, head: float) -> None:
    if layers < pp:
        with pytest.raises(ConfigError, match="num_hidden_layers"):
            layer_counts(num_layers=layers, pp=pp)
        return
    counts = layer_counts(num_layers=layers, pp=pp, head_cost=head)
    assert sum(counts) == layers and min(counts) >= 1 and len(counts) == pp
    heaviest = max((*counts[:-1], counts[-1] + head))
    if pp > 1:
        moves = [n for n in range(1, layers - pp + 2)]
        assert heaviest == min(max(-(-(layers - n) // (pp - 1)), n + head) for n in moves)


def test_what_tp_cannot_divide_is_refused_with_legal_values() -> None:
    with pytest.raises(ConfigError, match=r"num_key_value_heads is 2, .*tp = 4.*1, 2"):
        param_specs(tiny_config(tp=4), Topology(tp=4))


def test_bucket_limit_is_kept_unless_one_parameter_is_larger() -> None:
    specs = param_specs(tiny_config(), Topology())
    for bucket in plan_layout(specs, dp=1, tp=1, tp_rank=0, bucket_numel=3000).buckets:
        assert bucket.numel <= 3000 or len(bucket.slots) == 1


@pytest.mark.parametrize("tp", [1, 2])
def test_initial_weights_do_not_depend_on_the_mesh(tp: int) -> None:
    """P9, T9 (Megatron-Bridge#5843)."""
    whole = param_specs(tiny_config(), Topology())
    for spec in param_specs(tiny_config(tp=tp, pp=2), Topology(tp=tp, pp=2)):
        full = draw_box(next(s for s in whole if s.name == spec.name), Box((0,) * len(spec.shape), spec.shape), seed=7)
        for rank in range(tp):
            box = local_box(spec, tp, rank)
            cut = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
            assert np.array_equal(draw_box(spec, box, seed=7), full[cut])


def test_a_row_is_drawn_by_its_own_philox_key() -> None:
    """What the module says, word for word: no release may draw another model from the same seed."""
    spec = next(spec for spec in param_specs(tiny_config(), Topology()) if spec.name.endswith("up_proj.weight"))
    values = draw_box(spec, Box((5, 3), (2, 20)), seed=9)
    for row, drawn in zip((5, 6), values, strict=True):
        generator = np.random.Generator(np.random.Philox(key=[tensor_key(9, spec.name), row]))
        whole = generator.standard_normal(spec.shape[1], dtype=np.float32) * np.float32(spec.init.std)
        assert np.array_equal(drawn, whole[3:23])


def test_initial_statistics_and_independence() -> None:
    """P9, T9."""
    specs = {spec.name: spec for spec in param_specs(tiny_config(), Topology())}
    up, down = specs["model.layers.0.mlp.up_proj.weight"], specs["model.layers.0.mlp.down_proj.weight"]
    assert up.init.std == 0.02 and down.init.std == pytest.approx(0.02 / math.sqrt(4))
    values = draw_box(up, Box((0, 0), up.shape), seed=1)
    assert abs(values.mean()) < 0.002 and values.std() == pytest.approx(0.02, rel=0.08)
    assert not np.array_equal(values, draw_box(up, Box((0, 0), up.shape), seed=2))
    gate = specs["model.layers.0.mlp.gate_proj.weight"]
    assert not np.array_equal(values, draw_box(gate, Box((0, 0), gate.shape), seed=1))
    assert len({row.tobytes() for row in values}) == len(values)


@pytest.mark.parametrize("tied", [True, False])
def test_spectral_mup_scales(tied: bool) -> None:
    """P9, P10: (σ, factor on the rate) of each kind of tensor: hidden matrices, both uses of the vocabulary, norms."""
    specs = {spec.name: spec for spec in param_specs(tiny_config(use_mup=True, tied=tied), Topology())}
    down, up = math.sqrt(32 / 48) / math.sqrt(48), 1 / math.sqrt(32)
    wanted = {
        "model.layers.0.mlp.down_proj.weight": (down, 256 / 48),
        "model.layers.0.mlp.up_proj.weight": (up, 256 / 32),
        "model.embed_tokens.weight": (0.02, 1.0),
        "model.norm.weight": (0.0, 1.0),
    } | ({} if tied else {"lm_head.weight": (up, 256 / 32)})
    for name, (std, lr_mult) in wanted.items():
        assert (specs[name].init.std, specs[name].lr_mult) == pytest.approx((std, lr_mult)), name
    assert ("lm_head.weight" in specs) == (not tied)


@pytest.mark.parametrize(("tied", "use_mup", "wanted"), [
    (True, True, (1 / 8, 256 / 32)), (False, True, (1 / 8, 1.0)),
    (True, False, (8**-0.5, 1.0)), (False, False, (8**-0.5, 1.0)),
])  # fmt: skip
def test_mup_factors_of_the_forward_pass(tied: bool, use_mup: bool, wanted: tuple[float, float]) -> None:
    config = tiny_config(tied=tied, use_mup=use_mup)
    assert (attention_scale(config), output_multiplier(config)) == wanted
