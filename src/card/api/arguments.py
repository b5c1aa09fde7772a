"""The arguments of `LLM` and `AsyncLLM`, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from card.assembly.plan import Facts, Plan, resolve
from card.config.fields import plain, require
from card.links.child import DrafterChild
from card.links.leases import Leases
from card.models.loaded_model import LoadedModel
from card.models.names import model_name
from card.text.tokenizer import Tokenizer
from card.tree.verify import MATCH, Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_A_MODEL = "a folder, a GGUF file, the name of a model, or a loaded model"


@dataclass(frozen=True, slots=True)
class LLMArguments:
    """Models and settings as given, and further objects used during the start; see `LLM`."""

    target: str | LoadedModel
    draft: str | LoadedModel | None
    _: KW_ONLY
    settings: Mapping[str, Any]
    method: str | None = None
    tokenizer: str | Tokenizer | PreTrainedTokenizerBase | None = None  # None: the target's own
    verifier: Verifier = MATCH
    spare: DrafterChild | None = None  # a process for the drafter, started in advance
    leases: Leases | None = None  # of a pool of draft servers; never blocks; the caller closes it
    say: Callable[[str], None] = lambda _: None  # receives the current step in words, for a user who waits

    @classmethod
    def of(
        cls,
        target: str | PathLike[str] | LoadedModel,
        draft: str | PathLike[str] | LoadedModel | None,
        *,
        tokenizer: str | PathLike[str] | Tokenizer | PreTrainedTokenizerBase | None,
        **others: Any,
    ) -> LLMArguments:
        """Return the arguments with paths as their names.

        Args:
            others: further fields.
        """
        return cls(plain(target), plain(draft), tokenizer=plain(tokenizer), **others)

    def __post_init__(self) -> None:
        """Refuse an argument of another kind. Raises: SettingsError."""
        draft, tokenizer, spare = self.draft, self.tokenizer, self.spare
        has_judgement = hasattr(self.verifier, "decide") and hasattr(self.verifier, "is_exact")
        is_tokenizer = tokenizer is None or isinstance(tokenizer, str | Tokenizer) or hasattr(tokenizer, "is_fast")
        require(_is_model(self.target), "target", _A_MODEL, self.target)
        require(draft is None or _is_model(draft), "draft", f"{_A_MODEL}, or None", draft)
        require(is_tokenizer, "tokenizer", "a tokenizer, the folder or name of one, or None", tokenizer)
        require(self.method is None or isinstance(self.method, str), "method", "a name or None", self.method)
        require(has_judgement, "verifier", "one such as card.tree.verify.MATCH, the default", self.verifier)
        require(spare is None or isinstance(spare, DrafterChild), "spare", "a DrafterChild or None", spare)
        require(callable(self.say), "say", "a function that takes a text", self.say)

    @property
    def draft_name(self) -> str | None:
        """Name of the draft model; None for a loaded model, and without one."""
        return self.draft if isinstance(self.draft, str) else None

    def plan(self, facts: Facts) -> Plan:
        """Return the plan that follows from these settings and known facts. Raises: SettingsError."""
        draft = None if self.draft is None else _name(self.draft)
        return resolve({**self.settings, "target": _name(self.target), "draft": draft}, facts, method=self.method)


def _is_model(given: object) -> bool:
    return given != "" if isinstance(given, str) else hasattr(given, "config")


def _name(model: str | LoadedModel) -> str:
    return model if isinstance(model, str) else model_name(model)
