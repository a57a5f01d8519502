"""`model.model_config`: the architecture, in the words of a Hugging Face config.json.

A default here is what a missing key means.
"""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.section import Depth, Length, Natural, Section, Unit, Vocabulary, Width


def _even_head_dim(given: dict[str, int]) -> int:
    """head_dim where the key is missing: hidden_size / heads (rules.py refuses a remainder)."""
    return max(1, given.get("hidden_size", 1) // given.get("num_attention_heads", 1))


class ModelConfig(Section):
    """The architecture in Hugging Face's words. Missing: kv heads = heads (no grouping), head_dim = hidden / heads."""

    model_type: Literal["llama", "qwen2", "qwen3"] = "llama"
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Depth
    num_attention_heads: Width
    num_key_value_heads: Width = Field(default_factory=lambda given: given.get("num_attention_heads", 1))
    head_dim: Width = Field(default_factory=lambda given: _even_head_dim(given))
    vocab_size: Vocabulary
    max_position_embeddings: Length = 2048
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    tie_word_embeddings: bool = False
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    bos_token_id: Natural | None = None
    eos_token_id: Natural | None = None
    pad_token_id: Natural | None = None
    attention_dropout: Unit = 0.0
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def qkv_bias(self) -> bool:
        """Whether q_proj, k_proj and v_proj have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def out_bias(self) -> bool:
        """Whether o_proj has a bias."""
        return self.attention_bias

    @property
    def qk_norm(self) -> bool:
        """Whether each head of q and k goes through a norm."""
        return self.model_type == "qwen3"

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """d."""
        return self.head_dim
