"""`custom_generate=card.hf.generate`: the public door of `card.inside.hf`."""

from typing import TYPE_CHECKING

from card.machine.doors import door

if TYPE_CHECKING:
    from card.inside.hf.generating import GenerateOutput, generate
    from card.inside.hf.session import release

__all__ = ["GenerateOutput", "generate", "release"]

if not TYPE_CHECKING:
    _MODULES = ("card.inside.hf.generating", "card.inside.hf.session")
    __getattr__, __dir__ = door(__name__, __all__, _MODULES, needs=("torch", "transformers"), extra="torch")
