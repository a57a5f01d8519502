"""`model.model_config`: the architecture, in the words of a Hugging Face config.json.

A default here is what a missing key means. Which keys a family has, and what follows from it, stands in
`trainer/models/families.py`; whether the values suit each other is judged in `rules_model.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.rope import RopeParameters
from trainer.config.section import Depth, Length, Natural, Positive, Section, Unit, Vocabulary, Width
from trainer.models.families import ACTIVATIONS, FAMILIES, Family

ROPE_THETA = 10000.0


def _even_head_dim(given: dict[str, int]) -> int:
    """head_dim where the key is missing: hidden_size / heads (rules_model.py refuses a remainder)."""
    return max(1, given.get("hidden_size", 1) // given.get("num_attention_heads", 1))


def _by_family(given: dict[str, Any], key: str, otherwise: Any) -> Any:
    """The family's own default of a key."""
    return FAMILIES[given.get("model_type", "llama")].defaults.get(key, otherwise)


def _theta(given: dict[str, Any]) -> float:
    """rope_theta where the key is missing: what rope_parameters says."""
    rope = given.get("rope_parameters")
    return ROPE_THETA if rope is None or rope.rope_theta is None else float(rope.rope_theta)


class ModelConfig(Section):
    """The architecture in Hugging Face's words. Missing: kv heads = heads (no grouping), head_dim = hidden / heads.

    `hidden_act`: silu, gelu, gelu_tanh (also gelu_pytorch_tanh), relu2. `rope_parameters` (or rope_scaling, its older
    form): scaled rotary positions. `no_rope_layers`: a number a layer, 0 for one without rotary positions; missing:
    every `no_rope_layer_interval`-th is. Sliding windows and dropout are known by name and refused where switched on.
    `carried`: a JSON object, the keys of an imported config.json that mean nothing here; an export writes them back.
    """

    model_type: Literal["llama", "mistral", "qwen2", "qwen3", "smollm3", "starcoder2"] = "llama"
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Depth
    num_attention_heads: Width
    num_key_value_heads: Width = Field(default_factory=lambda given: given.get("num_attention_heads", 1))
    head_dim: Width = Field(default_factory=lambda given: _even_head_dim(given))
    vocab_size: Vocabulary
    max_position_embeddings: Length = 2048
    hidden_act: str = Field(default_factory=lambda given: _by_family(given, "hidden_act", "silu"))
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    rope_parameters: RopeParameters | None = None
    rope_theta: Annotated[float, Field(gt=0)] = Field(default_factory=lambda given: _theta(given))
    no_rope_layers: list[Natural] | None = None
    no_rope_layer_interval: Positive | None = Field(
        default_factory=lambda given: _by_family(given, "no_rope_layer_interval", None)
    )
    tie_word_embeddings: bool = False
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    bos_token_id: Natural | None = None
    eos_token_id: Natural | None = None
    pad_token_id: Natural | None = None
    attention_dropout: Unit = 0.0
    residual_dropout: Unit = 0.0
    embedding_dropout: Unit = 0.0
    attention_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = Field(default_factory=lambda given: _by_family(given, "use_bias", False))
    sliding_window: Positive | None = None
    use_sliding_window: bool = False
    max_window_layers: Natural | None = None
    layer_types: list[str] | None = None
    carried: str | None = None

    @property
    def family(self) -> Family:
        """The row of the model type."""
        return FAMILIES[self.model_type]

    @property
    def activation(self) -> str:
        """hidden_act in transformers' word: silu, gelu, gelu_pytorch_tanh or relu2."""
        return ACTIVATIONS[self.hidden_act]

    @property
    def norm_eps(self) -> float:
        """Epsilon of the norms, under whichever key the family has it."""
        return float(getattr(self, self.family.norm_eps))

    @property
    def qkv_bias(self) -> bool:
        """Whether q_proj, k_proj and v_proj have biases."""
        return self._says(self.family.qkv_bias)

    @property
    def out_bias(self) -> bool:
        """Whether o_proj has a bias."""
        return self._says(self.family.out_bias)

    @property
    def ffn_bias(self) -> bool:
        """Whether the feed-forward's matrices have biases."""
        return self._says(self.family.mlp_bias)

    @property
    def qk_norm(self) -> bool:
        """Whether each head of q and k goes through a norm."""
        return self.family.has_qk_norm

    @property
    def ffn_matrices(self) -> int:
        """Matrices of D·F numbers in a feed-forward: gate, up and down, or two."""
        return 3 if self.family.is_gated else 2

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """d."""
        return self.head_dim

    @property
    def rope(self) -> RopeParameters:
        """The rotary positions, rope_theta always given."""
        scaling = self.rope_parameters or RopeParameters()
        return scaling.model_copy(update={"rope_theta": self.rope_theta})

    @property
    def rope_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has rotary positions."""
        layers, every = range(self.num_hidden_layers), self.no_rope_layer_interval
        if self.no_rope_layers is not None:
            return tuple(bool(self.no_rope_layers[layer]) for layer in layers)
        return tuple(every is None or (layer + 1) % every != 0 for layer in layers)

    def _says(self, what: bool | str) -> bool:
        """A fact of the family, or the key that it is read from."""
        return bool(getattr(self, what)) if isinstance(what, str) else what
