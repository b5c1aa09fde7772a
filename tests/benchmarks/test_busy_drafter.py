"""A drafter that is kept busy drafts on and on, at the width that it was told, and says when it did."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from card.assembly.drafters import DraftSource
from card.assembly.plan import Facts, resolve
from card.models.loading import load_tokenizer
from tests.pair import Pair


@pytest.fixture
def module(bench: dict[str, ModuleType]) -> Any:
    return bench["busy_drafter"]


@pytest.fixture(scope="module")
def busy(bench: dict[str, ModuleType], pair: Pair) -> Iterator[Any]:
    """A drafter in a thread: what it says is what one in a process would."""
    tokenizer = load_tokenizer(pair.target)
    module: Any = bench["busy_drafter"]
    asked = {**module.BUSY, "dtype": "float32", "placement": "thread", "max_model_len": 512}
    source = DraftSource(model=pair.draft, vocab_size=len(tokenizer), tokenizer=tokenizer)
    drafter = module.BusyDrafter(resolve(asked, Facts(has_draft=True)), source, [5, 6, 7, 8])
    yield drafter
    drafter.close()


@pytest.mark.parametrize("width", [1, 4])
def test_it_drafts_until_it_is_told_to_rest_again_and_again(busy: Any, width: int) -> None:
    for num_passes in (2, 9):
        busy.begin(width)
        drafted = busy.end(num_passes=num_passes)
        assert drafted.answer_s > 0
        assert len(drafted.began) >= num_passes
        assert drafted.began == sorted(drafted.began)
        assert len(drafted.message_s) > len(drafted.began) and min(drafted.message_s) > 0
        assert len(drafted.periods()) == len(drafted.began) - 1


def test_it_ends_by_itself_where_more_is_asked_for_than_its_lead_allows(
    busy: Any, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 1.0)
    busy.begin(1)
    assert 0 < len(busy.end(num_passes=10_000).began) <= module.BUSY_DRAFT.lead


def test_periods_are_those_that_lie_within_a_span_whole(module: Any) -> None:
    drafted = module.Drafted(0.0, began=[1.0, 2.0, 4.0, 7.0])
    assert drafted.periods() == [1.0, 2.0, 3.0]
    assert drafted.periods(module.Span(1.5, 7.0)) == [2.0, 3.0]
    assert drafted.periods(module.Span(2.0, 6.9)) == [2.0]
    assert module.Drafted(0.0).periods() == []


def test_nothing_is_ever_faster_beside_another(module: Any) -> None:
    assert module.times_slower([3.0, 3.0], [1.0, 3.0]) == 1.5
    for busy_s, alone_s in itertools.product(([], [1.0]), ([], [2.0])):
        assert module.times_slower(busy_s, alone_s) == 1.0
