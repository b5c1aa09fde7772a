"""`custom_generate=card.hf.generate`: the public door of `card.inside.hf`."""

from card.inside.hf.generating import GenerateOutput, generate
from card.inside.hf.session import release

__all__ = ["GenerateOutput", "generate", "release"]
