"""What the plug-in decides by itself, without vLLM: versions, settings, cores, metrics, and that it never raises."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from card.errors import SettingsError
from card.inside.vllm import proposer as plugin
from card.inside.vllm.cores import bound_cores, free_cores, usable_cores
from card.inside.vllm.proposer import CardProposer, check_version, read_settings
from card.inside.vllm.repair import expand_batch_to_tokens, is_sound
from tests.pair import Pair


def config(card: Any, *, num_tokens: int = 4, rank: int = 0, tokenizer: str = "") -> Any:
    """Return what the plug-in reads of vLLM's configuration."""
    return SimpleNamespace(
        additional_config={} if card is None else {"card": card},
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=SimpleNamespace(
            skip_tokenizer_init=not tokenizer, tokenizer=tokenizer, max_model_len=128, get_vocab_size=lambda: 320
        ),
    )


@pytest.fixture(autouse=True)
def supported_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(plugin, "repair_sampling", lambda: None)


def loaded(card: Any, **given: Any) -> CardProposer:
    proposer = CardProposer(config(card, **given))
    proposer.load_model(object())
    return proposer


def propose(proposer: CardProposer, *rows: list[int]) -> list[list[int]]:
    tokens = np.zeros((4, 128), np.int32)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
    lengths = np.array([len(text) for text in rows] + [0] * (4 - len(rows)), np.int32)
    return proposer.propose([text[-1:] for text in rows], lengths, tokens, slot_mappings=None)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.0", "1.0.0", "dev"])
def test_another_version_of_vllm_is_refused_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch):
    check_version("0.32.0")
    check_version("0.32.1+cpu")
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    with pytest.raises(SettingsError, match=rf"works with vLLM 0\.32, and this is {version}; install") as caught:
        CardProposer(config({}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("card", "num_tokens", "said"),
    [
        (None, 4, "no settings: give --additional-config"),
        ({"writers": "nobody"}, 4, "additional_config[\"card\"]: unknown writer 'nobody'"),
        ("demo-draft", 4, "settings must be a mapping"),
        ({}, 129, "num_speculative_tokens must be from 1 to 128, got 129"),
    ],
)
def test_bad_settings_are_refused_in_one_line(card: Any, num_tokens: int, said: str):
    with pytest.raises(SettingsError) as caught:
        read_settings(config(card, num_tokens=num_tokens))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_draft_of_another_tokenizer_is_refused_before_it_is_loaded(pair: Pair):
    with pytest.raises(Exception, match="share one tokenizer"):
        loaded({"draft": pair.foreign_draft}, tokenizer=pair.target)


def test_rows_that_repeat_themselves_get_candidates_and_the_figures_count_them():
    proposer = loaded({"writers": "suffix"})
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    assert propose(proposer, text, [7, 8]) == [[4, 5, 1, 2], []]
    assert proposer.proposer is not None
    propose(proposer, [*text, 4, 5, 9])
    count = REGISTRY.get_sample_value("card_plugin_proposed_tokens_total", {"writer": "suffix"})
    assert count is not None
    assert count >= 4
    proposer.proposer.close()


def test_ranks_whose_candidates_nobody_reads_draft_nothing():
    proposer = loaded({"writers": "suffix"}, rank=1)
    assert proposer.proposer is None
    assert propose(proposer, [1, 2, 1, 2, 1]) == [[]]


def test_a_fault_of_ours_ends_candidates_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    proposer = loaded({"writers": "suffix"})
    inner = proposer.proposer
    assert inner is not None

    def fail(*_: Any) -> list[list[int]]:
        raise ValueError("the prompt was: secret")

    monkeypatch.setattr(inner, "propose", fail)
    with caplog.at_level(logging.ERROR):
        assert propose(proposer, [1, 2, 1, 2, 1]) == [[]]
        assert propose(proposer, [1, 2, 1, 2, 1]) == [[]]
    assert "ValueError at " in caplog.text
    assert caplog.text.count("CARD failed") == 1
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("environment", "bound"),
    [
        ({}, set()),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[0,2]"}, {0, 2}),
        ({"OMP_PLACES": "{0,1,2}"}, {0, 1, 2}),
        ({"GOMP_CPU_AFFINITY": "0 1"}, {0, 1}),
        ({"OMP_PLACES": "cores"}, set()),
    ],
)
def test_the_drafter_gets_cores_that_vllm_computes_on_none_of(environment: dict[str, str], bound: set[int]):
    assert bound_cores(environment) == bound
    free = free_cores(environment, frozenset(range(4)), 1)
    assert free == ((3,) if bound and 3 not in bound else ())
    assert not bound & set(free_cores(environment, frozenset(range(4)), 8))


def test_values_are_expanded_by_the_numbers_of_candidates_and_a_faulty_function_is_found():
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    expanded = expand_batch_to_tokens(torch.tensor([0.5, 0.7, 0.0]), ends, 3, 0, 1)
    torch.testing.assert_close(expanded, torch.tensor([0.5, 0.5, 1.0]))
    assert expand_batch_to_tokens(torch.tensor([4], dtype=torch.int32), torch.tensor([2]), 2).dtype == torch.int32
    assert is_sound(expand_batch_to_tokens)
    assert not is_sound(lambda x, ends, num_tokens, *_: x.new_zeros(num_tokens))
    assert not is_sound(lambda x, *rest: expand_batch_to_tokens(x.long(), *rest).to(x.dtype))


def test_a_machine_has_cores():
    assert usable_cores()
