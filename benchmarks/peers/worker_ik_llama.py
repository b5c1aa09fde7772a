"""Worker for ik_llama.cpp: its `llama-server` is asked as llama.cpp's is, with flags of its own.

It does not tell the ids of what it wrote. So texts are cut into tokens again by its own tokenizer, when the clock has
stopped: equal texts stay equal, and the times and counts of single requests are the server's.
"""

from __future__ import annotations

from typing import Any

from worker_llama_cpp import LlamaCpp
from worker_protocol import serve

_SUFFIX = "suffix:n_max=16,n_min=2"


class IkLlama(LlamaCpp):
    """Servers of ik_llama.cpp, which repack rows at the load."""

    def own_flags(self, method: str, option: dict[str, Any]) -> list[str]:
        """Return what only this server understands."""
        drafting = ["--spec-type", f"draft:n_max={option.get('draft_tokens')}"]
        flags = ["-rtr", "--webui", "none", "--log-disable"]  # else it leaves a file where it is started
        return [*flags, *{"draft": drafting, "suffix": ["--spec-type", _SUFFIX]}.get(method, [])]

    def token_ids(self, method: str, option: dict[str, Any], answer: dict[str, Any]) -> list[int]:
        """Return the tokens of an answer, cut anew."""
        asked = {"content": answer["content"], "add_special": False}
        return list(self.post(method, option, asked, "tokenize")["tokens"])


if __name__ == "__main__":
    serve(IkLlama())
