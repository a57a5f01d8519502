"""Factors of pawl's forward pass that other software has no place for, moved into weights at export.

    q·k · attention_scale      LlamaForCausalLM always applies 1/√d ▸ the rest goes into q_proj; where heads are
                               normalised after it, into that norm's weight
    hidden · output_multiplier           it has none                ▸ all of it goes into the final norm's weight

Both factors stand in front of linear maps, so the logits are the same numbers. The checkpoint keeps the weights that
are trained; a manifest without the two fields is of a model without factors.
"""

from collections.abc import Mapping
from typing import Any

from trainer.models.families import FAMILIES
from trainer.mup import standard_attention_scale
from trainer.spec import FINAL_NORM

QUERY = (".self_attn.q_proj.weight", ".self_attn.q_proj.bias")
QUERY_NORM = (".self_attn.q_norm.weight",)
LAST_NORM = (FINAL_NORM, FINAL_NORM.replace(".weight", ".bias"))


def folded_factor(name: str, model: Mapping[str, Any]) -> float:
    """What the canonical tensor `name` is multiplied by, before any cast; `model` is a manifest's model_config."""
    standard = standard_attention_scale(int(model["head_dim"]))
    if name.endswith(_query(model)):
        return float(model.get("attention_scale", standard)) / standard
    return float(model.get("output_multiplier", 1.0)) if name in LAST_NORM else 1.0


def folding_note(model: Mapping[str, Any]) -> str | None:
    """One sentence on what was folded, None where nothing was."""
    last_of_query = _query(model)[0]
    query, norm = folded_factor(last_of_query, model), folded_factor(FINAL_NORM, model)
    if query == norm == 1.0:
        return None
    return (
        f"muP is folded into the weights, so that other software computes the same logits: "
        f"{last_of_query.split('.')[2]} × {query:.6g}, {FINAL_NORM} × {norm:.6g}"
    )


def _query(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Endings of the tensors that are the last linear ones before q·k."""
    return QUERY_NORM if FAMILIES[model.get("model_type", "llama")].has_qk_norm else QUERY
