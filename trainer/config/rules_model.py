"""Rules about the architecture: what a family has, and whether its numbers suit each other.

What transformers' class of the model type could not hold would be lost in the export, so it is refused here.
"""

from collections.abc import Iterator
from typing import Any

from trainer.models.families import ACTIVATIONS, FAMILIES, FAMILY_KEYS

from .problems import quoted
from .rope import KEYS, OPTIONAL_KEYS, RopeParameters
from .rules import Finding, Given, Rule, divisors

M = "model.model_config."
FULL = "full_attention"


def kv_groups(c: Any, given: Given) -> Iterator[Finding]:
    heads, kv = c.model.model_config.num_attention_heads, c.model.model_config.num_key_value_heads
    if heads % kv:
        expected = f"one of {', '.join(map(str, divisors(heads)))}"
        message = f"{heads} heads cannot share {kv} kv heads evenly"
        yield Finding(key=f"{M}num_key_value_heads", message=message, found=str(kv), expected=expected)


def head_size(c: Any, given: Given) -> Iterator[Finding]:
    model = c.model.model_config
    key = f"{M}head_dim"
    if not given(key) and model.hidden_size % model.num_attention_heads:
        message = f"hidden_size {model.hidden_size} is no multiple of {model.num_attention_heads} heads"
        yield Finding(key=f"{M}hidden_size", message=message, expected="a multiple, or head_dim given")
    elif model.head_dim % 2:
        message = "rotary positions turn pairs: the head size must be even"
        yield Finding(key=key, message=message, found=str(model.head_dim), expected="an even number")


def heads_of_its_type(c: Any, given: Given) -> Iterator[Finding]:
    """Some families' configs have no head_dim."""
    model = c.model.model_config
    heads, width = model.num_attention_heads, model.hidden_size
    if not FAMILIES[model.model_type].has_head_dim and width % heads == 0 and model.head_dim != width // heads:
        message = f"the heads of {model.model_type} have hidden_size / num_attention_heads"
        found, expected = str(model.head_dim), f"{width // heads}, or no such key"
        yield Finding(key=f"{M}head_dim", message=message, found=found, expected=expected)


def keys_of_its_type(c: Any, given: Given) -> Iterator[Finding]:
    """A key that the family has not changes nothing there: refused unless it says that there is nothing."""
    model = c.model.model_config
    kind = model.model_type
    for key in sorted(FAMILY_KEYS - FAMILIES[kind].keys):
        if not given(f"{M}{key}"):
            continue
        value = getattr(model, key)
        fixed = kind == "qwen2" and key == "attention_bias"  # false would say that there are none
        if fixed or not (value is None or value is False or value == 0):
            owners = ", ".join(name for name, family in FAMILIES.items() if key in family.keys)
            message = f"{kind} has no such key" if not fixed else "qwen2 has biases on q, k and v and none on o_proj"
            found = str(value).lower() if isinstance(value, bool) else str(value)
            expected = f"no such key, or model_type one of {owners}"
            yield Finding(key=f"{M}{key}", message=message, found=found, expected=expected)


def no_sliding_window(c: Any, given: Given) -> Iterator[Finding]:
    """Switched on by use_sliding_window where the family has that key, else by a window; layer_types may do so too."""
    model = c.model.model_config
    keys, message = FAMILIES[model.model_type].keys, "sliding-window attention is not offered"
    switch = "use_sliding_window" if "use_sliding_window" in keys else "sliding_window"
    if switch in keys and getattr(model, switch):
        found, expected = str(getattr(model, switch)).lower(), "null" if switch == "sliding_window" else "false"
        yield Finding(key=f"{M}{switch}", message=message, found=found, expected=f"{expected}, or no such key")
    other = next((kind for kind in model.layer_types or () if kind != FULL), None)
    if "layer_types" in keys and other is not None:
        message = "attention other than full is not offered"
        yield Finding(key=f"{M}layer_types", message=message, found=quoted(other), expected=f"{FULL} for each layer")


def activation(c: Any, given: Given) -> Iterator[Finding]:
    name = c.model.model_config.hidden_act
    if name not in ACTIVATIONS:
        message, expected = "this activation is not offered", f"one of {', '.join(ACTIVATIONS)}"
        yield Finding(key=f"{M}hidden_act", message=message, found=quoted(name), expected=expected)


def no_dropout(c: Any, given: Given) -> Iterator[Finding]:
    model = c.model.model_config
    for key in ("attention_dropout", "residual_dropout", "embedding_dropout"):
        rate = getattr(model, key)
        if rate > 0 and key in ("attention_dropout", *FAMILIES[model.model_type].keys):
            yield Finding(
                key=f"{M}{key}", message="pretraining here uses no dropout", found=str(rate), expected="0"
            )  # fmt: skip


def layers_without_rope(c: Any, given: Given) -> Iterator[Finding]:
    """no_rope_layers: 1 (rotary positions) or 0 (none), one number a layer."""
    model, key = c.model.model_config, f"{M}no_rope_layers"
    flags, layers = model.no_rope_layers, model.num_hidden_layers
    if flags is None or "no_rope_layers" not in FAMILIES[model.model_type].keys:
        return
    if len(flags) != layers:
        message, expected = "not one number a layer", f"{layers} numbers, 1 for rotary positions and 0 for none"
        yield Finding(key=key, message=message, found=f"{len(flags)} numbers", expected=expected)
    elif other := [flag for flag in flags if flag > 1]:
        yield Finding(key=key, message="not a flag", found=str(other[0]), expected="1 (rotary positions) or 0 (none)")


def rope_of_its_type(c: Any, given: Given) -> Iterator[Finding]:
    """The keys a rope_type needs are there, others are not: transformers would ignore them."""
    rope = c.model.model_config.rope_parameters
    if not isinstance(rope, RopeParameters):
        return
    kind, where = rope.rope_type, f"{M}rope_parameters"
    known = KEYS[kind]
    said = {name for name in RopeParameters.model_fields if getattr(rope, name) is not None} - set(OPTIONAL_KEYS)
    for name in sorted(said - {*known.required, *known.optional}):
        users = ", ".join(other for other, keys in KEYS.items() if name in (*keys.required, *keys.optional))
        message, expected = f"rope_type {kind} has no such key", f"no such key, or rope_type one of {users}"
        yield Finding(key=f"{where}.{name}", message=message, found=str(getattr(rope, name)), expected=expected)
    if missing := [name for name in known.required if name not in said]:
        message = f"rope_type {kind} needs {', '.join(missing)}"
        yield Finding(key=where, message=message)


def rope_bounds(c: Any, given: Given) -> Iterator[Finding]:
    """The fast end lies above the slow one, else the formulas divide by nothing."""
    rope = c.model.model_config.rope_parameters
    if not isinstance(rope, RopeParameters):
        return
    ends = {
        "llama3": (("low_freq_factor", rope.low_freq_factor), ("high_freq_factor", rope.high_freq_factor)),
        "yarn": (("beta_slow", rope.beta_slow or 1.0), ("beta_fast", rope.beta_fast or 32.0)),
    }.get(rope.rope_type)
    if ends is None:
        return
    (_, low), (name, high) = ends
    if low is not None and high is not None and high <= low:
        message = f"not above {ends[0][0]}"
        yield Finding(key=f"{M}rope_parameters.{name}", message=message, found=f"{high:g}", expected=f"above {low:g}")


def special_tokens(c: Any, given: Given) -> Iterator[Finding]:
    model = c.model.model_config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(model, name)
        if token is not None and token >= model.vocab_size:
            expected = f"below vocab_size = {model.vocab_size}"
            yield Finding(key=f"{M}{name}", message="outside the vocabulary", found=str(token), expected=expected)


MODEL_RULES: tuple[Rule, ...] = (
    kv_groups,
    head_size,
    heads_of_its_type,
    keys_of_its_type,
    no_sliding_window,
    activation,
    no_dropout,
    layers_without_rope,
    rope_of_its_type,
    rope_bounds,
    special_tokens,
)
