"""Inside transformers' `generate` texts of one batch get the rotary embeddings of their own lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import card.hf
from tests.backends.transformers.test_long_rope import LENGTHS, LONG_ROPE, NUM_NEW, expected, long_rope_model, prompt_of


@pytest.mark.parametrize("name", LONG_ROPE)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
def test_generate_of_transformers_gets_each_row_as_if_it_were_alone(name: str, drafts: bool) -> None:
    model = copy.deepcopy(long_rope_model(name))
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": NUM_NEW,
        "custom_generate": card.hf.generate,
    }
    if drafts:
        options["assistant_model"] = copy.deepcopy(long_rope_model(name, 0.05))
    longest = max(LENGTHS)
    rows = [[0] * (longest - length) + prompt_of(length) for length in LENGTHS]
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in LENGTHS])
    together = model.generate(torch.tensor(rows), attention_mask=mask, **options)[:, longest:].tolist()
    assert together == [expected(name, length) for length in LENGTHS]
    for length in (5, 20):
        ids = torch.tensor([prompt_of(length)])
        assert model.generate(ids, **options)[0, length:].tolist() == expected(name, length)
