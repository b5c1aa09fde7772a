"""Settings from outside: what is right is taken, and what is wrong is refused in one line that says what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from card.errors import SettingsError
from card.inside.adapters.settings import AdapterSettings


def test_lists_may_be_texts_and_writers_follow_from_the_drafter():
    given = AdapterSettings.from_mapping({"draft": "demo-draft", "writers": "beam, suffix", "draft_cores": "2,3"})
    assert (given.writers, given.draft_cores) == (("beam", "suffix"), (2, 3))
    assert AdapterSettings.from_mapping({"draft_cores": [1], "draft": "x"}).draft_cores == (1,)
    assert AdapterSettings.from_mapping({}).writers == ("suffix", "recycling")
    assert AdapterSettings.from_mapping({"draft": "x"}).writers == ("beam", "suffix", "recycling")
    assert AdapterSettings.from_mapping({"row_cost": None}).row_cost is None
    assert AdapterSettings.from_mapping({"row_cost": 0}).row_cost == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drafft": "x"}, "unknown setting 'drafft'; did you mean draft?"),
        ({"writers": "beam"}, "one of draft and draft_address is missing"),
        ({"draft": "x", "writers": "suffix"}, "the writer beam is missing"),
        ({"draft": "x", "draft_address": "tcp://a:1"}, "two drafters"),
        ({"writers": "sufix"}, "unknown writer 'sufix'; known: beam"),
        ({"writers": "suffix,suffix"}, "each writer can be named once"),
        ({"writers": "lookahead"}, "needs trees"),
        ({"writers": "ctc"}, "needs the target's hidden states, and this engine keeps them"),
        ({"writers": ""}, "writers must be a list of names"),
        ({"writers": []}, "writers must be a list of names"),
        ({"writers": "store"}, "suffix_store"),
        ({"suffix_store": "f"}, "suffix_store"),
        ({"draft_keys": "keys"}, "give draft_address too"),
        ({"draft_cores": "1,x"}, "draft_cores must be a list of core numbers"),
        ({"draft_cores": [True]}, "draft_cores must be a list of core numbers"),
        ({"draft_cores": [-1]}, "draft_cores must be a list of core numbers"),
        ({"draft": 3}, "draft must be a text, got 3"),
        ({"draft": ""}, "draft must be a text, got ''"),
        ({"beam_width": 0}, "beam_width must be from 1 to 256, got 0"),
        ({"beam_width": True}, "beam_width must be a whole number or None, got True"),
        ({"beam_width": 1.5}, "beam_width must be a whole number or None, got 1.5"),
        ({"draft": "x", "schedule": "soon"}, "schedule must be one of beside, turns, got 'soon'"),
        ({"draft_address": "tcp://a:1", "schedule": "turns"}, "give draft, or leave schedule out"),
        ({"draft": "x", "schedule": "turns", "draft_optional": True}, "leave them out in turns"),
        ({"draft": "x", "schedule": "turns", "draft_cores": [1]}, "leave them out in turns"),
        ({"draft_kv_cache_memory": "much"}, "draft_kv_cache_memory must be a number of bytes"),
        ({"lead": None}, "lead must be a whole number, got None"),
        ({"row_cost": 2}, "row_cost must be from 0 to 1, got 2"),
        ({"draft_optional": 1}, "draft_optional must be True or False, got 1"),
        ({"drafter_timeout_s": 0}, "drafter_timeout_s must be above 0 seconds, got 0"),
        ({"metrics_port": 70000}, "metrics_port must be a port from 1 to 65535, got 70000"),
        (["draft"], "settings must be a mapping"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(given: Any, said: str):
    with pytest.raises(SettingsError) as caught:
        AdapterSettings.from_mapping(given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
