"""Names that folders give the tensors of the block that drafts, and those used here: as Qwen3.5's folders do.

Source: the folders of Qwen3-Next, Qwen3.5 (`mtp.`); of DeepSeek-V3 and GLM-4.5, whose block is numbered behind the last
layer, with copies of the model's embeddings and head, which are not read; and of MiMo-7B, whose blocks are a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PREFIX = "mtp."
JOIN, TOKEN_NORM, STATE_NORM, NORM = (
    "fc.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
    "norm.weight",
)
LAYER = "layers.0."
_NUMBERED: Mapping[str, str] = {  # behind the number of the layer
    "eh_proj.weight": JOIN,
    "enorm.weight": TOKEN_NORM,
    "hnorm.weight": STATE_NORM,
    "shared_head.norm.weight": NORM,
}
_LISTED: Mapping[str, str] = {  # MiMo's
    "input_proj.weight": JOIN,
    "token_layernorm.weight": TOKEN_NORM,
    "hidden_layernorm.weight": STATE_NORM,
    "final_layernorm.weight": NORM,
}
_LAYERS, _LIST = "model.layers.", "model.mtp_layers."
_IN_LAYER = re.compile(rf"{re.escape(PREFIX)}layers\.(\d+)\.")
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True, slots=True)
class BlockNames:
    """The names of a folder's form."""

    behind: int | None = None  # number of the first block; None: it has none
    begin: str = _LAYERS  # before numbers of blocks
    own: Mapping[str, str] = field(default_factory=lambda: _NUMBERED)  # behind a number, and here

    @property
    def has_state_first(self) -> bool:
        """True if the state comes before the embedding where the two are joined."""
        return self.begin == _LIST

    def local_name(self, name: str) -> str | None:
        """Return what a tensor of a block is called here; None for one that is of no block, or not read."""
        if self.behind is None:
            return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None
        begin, _, rest = name.removeprefix(self.begin).partition(".")
        if not name.startswith(self.begin) or not begin.isdigit() or int(begin) < self.behind or rest in _COPIES:
            return None
        which = int(begin) - self.behind
        return self.own.get(rest, LAYER + rest) if which == 0 else f"layers.{which}.{rest}"

    def in_words(self, words: str) -> str:
        """Return words about a tensor with the name that the folder has for it.

        Args:
            words: with its name here, or that of a model of one layer.
        """
        if words.startswith((JOIN, TOKEN_NORM, STATE_NORM)):
            words = PREFIX + words
        words = words.replace("model.layers.", f"{PREFIX}layers.").replace("model.norm", f"{PREFIX}norm")
        if self.behind is None:
            return words
        first = self.behind
        for other, name in self.own.items():
            words = words.replace(PREFIX + name, f"{self.begin}{first}.{other}")
        return _IN_LAYER.sub(lambda number: f"{self.begin}{first + int(number[1])}.", words)


def names_of_block(names: Iterable[str], num_layers: int | None) -> BlockNames | None:
    """Return the form of a folder's block by the names of its tensors; None: it has none.

    Args:
        num_layers: of a model that runs in our own pass; None: another one, of which no numbered block is read.
    """
    known = set(names)
    if PREFIX + JOIN in known:
        return BlockNames()
    forms = (BlockNames(num_layers), BlockNames(0, _LIST, _LISTED))
    return next((one for one in forms if f"{one.begin}{one.behind}.{next(iter(one.own))}" in known), None)
