"""ERNIE 4.5, dense: Llama whose neighbouring channels turn together."""

from card.models.architectures.architecture import Architecture

ARCHITECTURE = Architecture(
    model_class="Ernie4_5ForCausalLM",
    biases={"qkv": "use_bias", "out": "use_bias", "mlp": "use_bias"},
    turns_neighbours=True,
    gguf_name="ernie4_5",
)
