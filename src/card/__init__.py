"""CARD: faster LLM generation by parallel speculative decoding, with the target's output unchanged.

``import card`` loads nothing else: a public name is imported from its module when it is first used.
"""

import os
from importlib import import_module

TYPE_CHECKING = False  # for type checkers it is true; the module typing takes a while
if TYPE_CHECKING:
    from card import hf
    from card.api.async_llm import AsyncLLM
    from card.api.llm import LLM
    from card.api.outputs import CompletionOutput, RequestOutput, StreamChunk
    from card.config import DraftSettings, Grammar, SamplingParams
    from card.config.keywords import LLMSettings
    from card.engine.metrics import EngineStats, RequestStats
    from card.errors import CardError
    from card.text.parts.pieces import CallArguments, CallBegun, Content, Thoughts
    from card.tree.sampling import TokenLogprobs

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CallArguments",
    "CallBegun",
    "CardError",
    "CompletionOutput",
    "Content",
    "DraftSettings",
    "EngineStats",
    "Grammar",
    "LLMSettings",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "StreamChunk",
    "Thoughts",
    "TokenLogprobs",
    "__version__",
    "hf",
]

MODULE_OF = {
    "AsyncLLM": "card.api.async_llm",
    "CallArguments": "card.text.parts.pieces",
    "CallBegun": "card.text.parts.pieces",
    "CardError": "card.errors",
    "CompletionOutput": "card.api.outputs",
    "Content": "card.text.parts.pieces",
    "DraftSettings": "card.config.drafting",
    "EngineStats": "card.engine.metrics",
    "Grammar": "card.config.sampling",
    "LLM": "card.api.llm",
    "LLMSettings": "card.config.keywords",
    "RequestOutput": "card.api.outputs",
    "RequestStats": "card.engine.metrics",
    "SamplingParams": "card.config.sampling",
    "StreamChunk": "card.api.outputs",
    "Thoughts": "card.text.parts.pieces",
    "TokenLogprobs": "card.tree.sampling",
}

ON_WINDOWS = (
    "CARD runs on Linux and macOS; on Windows use it in the Linux of WSL: https://learn.microsoft.com/windows/wsl"
)

if not TYPE_CHECKING:  # a type checker that saw this would take any name for a public one

    def __getattr__(name: str) -> object:
        """Return a public name, importing its module. Raises: AttributeError if ``name`` is not public."""
        if name == "hf":  # the one package that is public as such
            return import_module("card.hf")
        if name not in MODULE_OF:
            raise AttributeError(f"module 'card' has no attribute {name!r}; public names: {', '.join(__all__)}")
        if os.name == "nt":
            raise ImportError(ON_WINDOWS)
        return getattr(import_module(MODULE_OF[name]), name)


def __dir__() -> list[str]:
    """Return the public names, those not imported yet included."""
    return sorted(__all__)
