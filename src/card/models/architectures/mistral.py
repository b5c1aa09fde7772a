"""Mistral."""

from card.models.architectures.architecture import Architecture

ARCHITECTURE = Architecture(model_class="MistralForCausalLM", has_windows=True)
