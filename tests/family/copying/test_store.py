"""The store keeps texts whole, bounded and apart, whoever writes to it or dies at it, and finds what a search finds."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sqlite3
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.api.llm import LLM
from card.config import EngineSettings, SamplingParams
from card.drafting.local import find_writer
from card.drafting.local.lookup import chance_per_count
from card.drafting.local.suffix import best_first
from card.errors import SettingsError
from card.family.copying.store import ContextIndex, StoreWriter
from card.family.copying.text_database import Tokens
from card.text.fit import tokenizer_fingerprint
from tests.examples import settings as hypothesis_settings
from tests.family.copying.storing import VOCAB_SIZE, opened, put_out, store_texts, store_texts_forever
from tests.local_writing import assert_well_formed, play
from tests.pair import Pair
from tests.reaching_in import flush

MAX_MATCH = 32
MAX_PLACES = 32
small_texts = st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=6)
ends = st.lists(st.integers(0, 2), max_size=40)


def as_tokens(texts: Sequence[Sequence[int]]) -> list[Tokens]:
    return [np.array(text, np.uint32) for text in texts]


def followed(writer: StoreWriter, end: Sequence[int], budget: int = 8) -> tuple[int, ...]:
    """Return what is proposed to a request with the prompt ``end``."""
    return writer.open(end).propose((), budget).tokens


def stored_in(path: Path) -> list[list[int]]:
    """Return all texts of a file, whatever their key, oldest first."""
    db = sqlite3.connect(path)
    try:
        rows = db.execute("SELECT token_ids FROM texts ORDER BY id").fetchall()
    finally:
        db.close()
    return [np.frombuffer(blob, "<u4").tolist() for (blob,) in rows]


def places_of(texts: Sequence[Sequence[int]], end: Sequence[int]) -> list[tuple[int, int]]:
    """Return (text, idx) of every token that follows ``end`` within a text, comparing lists."""
    n = len(end)
    return [
        (text_idx, i + n)
        for text_idx, text in enumerate(texts)
        for i in range(len(text) - n)
        if list(text[i : i + n]) == list(end)
    ]


def longest_match(texts: Sequence[Sequence[int]], end: Sequence[int]) -> int:
    return next((n for n in range(min(MAX_MATCH, len(end)), 0, -1) if places_of(texts, end[-n:])), 0)


@given(texts=small_texts, end=ends)
def test_the_index_finds_the_longest_match_within_a_text_and_its_places(texts: list[list[int]], end: list[int]) -> None:
    index = ContextIndex(as_tokens(texts))
    length, places = index.find(end)
    assert length == longest_match(texts, end)
    if length:
        num_places = len(places_of(texts, end[-length:]))
        assert len(set(places)) == len(places) == -(-num_places // -(-num_places // MAX_PLACES))


@given(texts=small_texts, end=ends, budget=st.integers(0, 30))
def test_each_candidate_weighs_its_share_of_what_followed_at_those_places(
    texts: list[list[int]], end: list[int], budget: int
) -> None:
    index = ContextIndex(as_tokens(texts))
    length, places = index.find(end)
    if not length:
        return
    proposal = best_first((length, places), index.followers, budget)
    assert_well_formed(proposal, budget)
    assert all(path_logprob >= math.log(0.0199) for path_logprob in proposal.path_logprobs)  # others are left
    match = end[-length:]
    if len(places_of(texts, match)) > MAX_PLACES:
        return  # then only some of the places are followed
    paths: list[list[int]] = []
    for token, parent, path_logprob in zip(proposal.tokens, proposal.parents, proposal.path_logprobs, strict=True):
        context = paths[parent] if parent >= 0 else match
        is_root = parent < 0
        # A path that ends with its text counts as followed by something else.
        total = len(places_of([[*text, 9] for text in texts], context)) if not is_root else len(places_of(texts, match))
        counts = Counter(texts[text_idx][idx] for text_idx, idx in places_of(texts, context))
        chance = math.exp(path_logprob - (0.0 if is_root else proposal.path_logprobs[parent]))
        expected = counts[token] * chance_per_count(len(context), total, novelty=7.0)
        assert chance == pytest.approx(expected)
        paths.append([*context, token])


@pytest.mark.parametrize("texts_per_follower", [1, 2])
def test_paths_that_many_others_make_unlikely_are_left_out(texts_per_follower: int) -> None:
    texts = [[1, 2, 10 + i // texts_per_follower, 100 + i, 5] for i in range(28)]
    index = ContextIndex(as_tokens(texts))
    proposal = best_first(index.find([1, 2]), index.followers, 100)
    assert sorted(proposal.tokens) == list(range(10, 10 + 28 // texts_per_follower))


@given(seed=st.integers(0, 2**31), num_tokens=st.integers(0, 400), vocab_size=st.sampled_from([1, 2, 50]))
def test_the_longest_match_is_found_in_longer_texts_too(seed: int, num_tokens: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, vocab_size, num_tokens // 2).tolist() for _ in range(2)]
    end = [*texts[0][: num_tokens // 4], *rng.integers(0, vocab_size, 2).tolist()]
    index = ContextIndex(as_tokens(texts))
    for length in (0, 1, 5, len(end) - 2, len(end)):
        assert index.find(end[:length])[0] == longest_match(texts, end[:length])


def test_no_match_and_no_candidate_crosses_from_one_text_to_the_next(tmp_path: Path) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3, 4])
        put_out(writer, [5, 6, 7, 8])
        flush(writer)
        assert followed(writer, [2, 3]) == (4,)
        assert followed(writer, [3, 4]) == ()
        assert followed(writer, [4, 5]) == ()
        assert followed(writer, [3, 4, 5, 6]) == (7, 8)


def test_what_one_writer_stored_another_finds_after_it(tmp_path: Path) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3, 4, 5])
    with opened(tmp_path / "texts") as writer:
        assert followed(writer, [1, 2]) == (3, 4, 5)


def test_a_text_is_found_in_the_same_writer_as_soon_as_it_is_indexed(tmp_path: Path) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3, 4, 5])
        flush(writer)
        assert followed(writer, [1, 2]) == (3, 4, 5)


def test_the_longer_match_counts_whether_it_is_new_or_old(tmp_path: Path) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3, 4])
        put_out(writer, [7, 2, 3, 5])
    with opened(tmp_path / "texts", most=10_000) as writer:
        put_out(writer, [8, 2, 3, 6])
        flush(writer)
        assert followed(writer, [1, 2, 3]) == (4,)
        assert followed(writer, [8, 2, 3]) == (6,)


def test_a_folder_may_be_named_instead_of_a_file(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        put_out(writer, [1, 2, 3, 4])
    with opened(tmp_path) as writer:
        assert followed(writer, [1, 2]) == (3, 4)


def test_prompts_are_not_stored(tmp_path: Path) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3], prompt_ids=list(range(500, 600)))
    assert stored_in(tmp_path / "texts") == [[1, 2, 3]]


def test_a_text_too_short_to_be_followed_is_not_stored(tmp_path: Path) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [])
        put_out(writer, [1, 2])
    assert stored_in(tmp_path / "texts") == []


def test_an_engine_stores_under_the_fingerprint_of_its_tokenizer(pair: Pair, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=9, ignore_eos=True)
    store: dict[str, Any] = {"writers": ("store",), "suffix_store": str(tmp_path / "texts")}
    with LLM(pair.target, method="lookup", dtype="float32", policy="fixed", **store) as llm:
        (output,) = llm.generate("a b c", params)
        own = tokenizer_fingerprint(llm.host.tokenizer)
        vocab_size = llm.host.runner.vocab_size
    text = output.outputs[0].token_ids
    for tokenizer, num_tokens in ((own, len(text)), ("another", 0)):
        with opened(tmp_path / "texts", vocab_size=vocab_size, tokenizer=tokenizer) as writer:
            assert sum(index.num_tokens for index in writer.indexes) == num_tokens


OTHER_OWNERS = ({"key": "b"}, {"tokenizer": "of equal size"}, {"vocab_size": VOCAB_SIZE + 1})


@pytest.mark.parametrize("changes", OTHER_OWNERS)
def test_keys_tokenizers_and_vocabularies_do_not_see_each_other(tmp_path: Path, changes: dict[str, Any]) -> None:
    mine: dict[str, Any] = {"key": "a", "tokenizer": "mine", "vocab_size": VOCAB_SIZE}
    with opened(tmp_path / "texts", **mine) as writer:
        put_out(writer, [1, 2, 3, 4])
    with opened(tmp_path / "texts", **mine | changes) as writer:
        assert followed(writer, [1, 2]) == ()
    with opened(tmp_path / "texts", **mine) as writer:
        assert followed(writer, [1, 2]) == (3, 4)


@pytest.mark.parametrize("changes", OTHER_OWNERS)
def test_one_owner_does_not_push_out_the_texts_of_another(tmp_path: Path, changes: dict[str, Any]) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3, 4])
    with opened(tmp_path / "texts", most=10, **changes) as writer:
        for start in range(10):
            put_out(writer, range(10 * start, 10 * start + 10))
    assert stored_in(tmp_path / "texts") == [[1, 2, 3, 4], list(range(90, 100))]


@given(lengths=st.lists(st.integers(3, 12), max_size=12), most=st.integers(3, 40))
@hypothesis_settings(max_examples=20)
def test_the_newest_texts_that_fit_are_kept_on_disk_and_in_memory(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], most: int
) -> None:
    path = tmp_path_factory.mktemp("store") / "texts"
    texts = [list(range(20 * i, 20 * i + length)) for i, length in enumerate(lengths)]
    with opened(path, most=most) as writer:
        for text in texts:
            put_out(writer, text)
            flush(writer)
            assert sum(index.num_tokens for index in writer.indexes) <= most + most // 16
    kept: list[list[int]] = []
    for text in reversed(texts):
        if sum(map(len, kept)) + len(text[-most:]) > most:
            break
        kept.insert(0, text[-most:])
    assert stored_in(path) == kept


def test_a_smaller_bound_than_last_time_holds_from_the_start(tmp_path: Path) -> None:
    with opened(tmp_path / "texts") as writer:
        for start in range(0, 50, 10):
            put_out(writer, range(start, start + 10))
    with opened(tmp_path / "texts", most=25) as writer:
        assert sum(index.num_tokens for index in writer.indexes) == 20
    assert stored_in(tmp_path / "texts") == [list(range(30, 40)), list(range(40, 50))]


def test_only_the_end_of_a_text_beyond_the_bound_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "texts", most=10) as writer:
        put_out(writer, range(100))
    assert stored_in(tmp_path / "texts") == [list(range(90, 100))]


def test_texts_that_another_writer_stores_meanwhile_are_taken_in_with_the_next_large_index(tmp_path: Path) -> None:
    with opened(tmp_path / "texts", most=1600) as writer:
        with opened(tmp_path / "texts", most=1600) as other:
            put_out(other, [1, 2, 3, 4])
        assert followed(writer, [1, 2]) == ()
        put_out(writer, range(100, 250))  # more than a sixteenth of the bound
        flush(writer)
        assert followed(writer, [1, 2]) == (3, 4)
        assert followed(writer, [100, 101], budget=2) == (102, 103)
        put_out(writer, range(300, 310))  # goes into a small index again, alone
        flush(writer)
        assert [index.num_tokens for index in writer.indexes] == [10, 154]


def test_a_request_like_an_earlier_one_is_mostly_accepted(tmp_path: Path) -> None:
    answer = [(7 * i * i + i) % 97 for i in range(96)]
    with opened(tmp_path / "texts") as writer:
        put_out(writer, answer)
        flush(writer)
        sequence = writer.open([99])
        played = play(sequence, [99], lambda text: answer[(len(text) - 1) % 96], num_new=96)
        assert sum(accepted for _, accepted in played.rounds) > 80
        assert len(played.rounds) < 12


@given(seed=st.integers(0, 2**31))
@hypothesis_settings(max_examples=10)
def test_the_text_is_the_one_of_plain_decoding(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    def target(text: Sequence[int]) -> int:
        return hash((seed, *text[-2:])) % 5

    prompt = [seed % 5]
    plain = list(prompt)
    while len(plain) < 61:
        plain.append(target(plain))
    with opened(tmp_path_factory.mktemp("store") / "texts") as writer:
        for _ in range(2):
            sequence = writer.open(prompt)
            played = play(sequence, prompt, target, num_new=60)
            sequence.close()
            flush(writer)
            assert played.token_ids[:61] == plain


def test_without_a_file_it_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match=r"set suffix_store to its path"):
        StoreWriter(EngineSettings(), VOCAB_SIZE)


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("my notes\n" * 200)
    with (
        pytest.raises(SettingsError, match=r"suffix_store .*notes: file is not a database"),
        opened(tmp_path / "notes"),
    ):
        pass
    assert (tmp_path / "notes").read_text() == "my notes\n" * 200


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "other")
    db.execute("CREATE TABLE texts (mine)")
    db.close()
    before = (tmp_path / "other").read_bytes()
    with pytest.raises(SettingsError, match="another program or version"), opened(tmp_path / "other"):
        pass
    assert (tmp_path / "other").read_bytes() == before


def test_a_file_from_before_tokenizers_were_told_apart_is_refused_and_left_alone(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "old")
    db.execute(f"PRAGMA application_id={0x43415244}")
    db.execute("PRAGMA user_version=1")
    db.execute("CREATE TABLE texts (id, key, vocab_size, num_tokens, token_ids)")
    db.close()
    before = (tmp_path / "old").read_bytes()
    with pytest.raises(SettingsError, match="another program or version; name a file"), opened(tmp_path / "old"):
        pass
    assert (tmp_path / "old").read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE texts SET token_ids = x'010203'",
        "UPDATE texts SET num_tokens = 17",
        "UPDATE texts SET token_ids = 'text'",
        "UPDATE texts SET token_ids = x'00000000000000000000000001000001'",
    ],
)
def test_a_file_with_damaged_texts_is_refused(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3, 4])
    db = sqlite3.connect(tmp_path / "texts")
    with db:
        db.execute(damage)
    db.close()
    with pytest.raises(SettingsError, match="delete the file or name another one"), opened(tmp_path / "texts"):
        pass


def test_a_file_with_overwritten_pages_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, range(900))
    with (tmp_path / "texts").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8192)
    with pytest.raises(SettingsError, match=r"suffix_store cannot be (used|read)"), opened(tmp_path / "texts"):
        pass


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="in a folder that can be written"), opened(tmp_path / "no" / "texts"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "texts"):
        pass
    (tmp_path / "texts").chmod(0o400)
    with pytest.raises(SettingsError, match="in a folder that can be written"), opened(tmp_path / "texts"):
        pass


def test_a_file_that_another_process_keeps_locked_is_refused_in_time(tmp_path: Path) -> None:
    with opened(tmp_path / "texts"):
        pass
    db = sqlite3.connect(tmp_path / "texts")
    db.execute("BEGIN IMMEDIATE")
    with pytest.raises(SettingsError, match="locked"), opened(tmp_path / "texts", timeout_s=0.1):
        pass
    db.close()


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3, 4])
        flush(writer)
        modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {0o600}


def test_a_file_that_others_could_read_is_closed_to_them_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "texts") as other:  # goes on using the file, so that there are two beside it
        put_out(other, [1, 2, 3, 4])
        flush(other)
        files = list(tmp_path.iterdir())
        assert len(files) == 3
        for file, mode in zip(files, (0o644, 0o666, 0o660), strict=True):
            file.chmod(mode)
        caplog.clear()
        with opened(tmp_path / "texts"):
            assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
            assert [record.getMessage() for record in caplog.records if "could be read by others" in record.message]
            assert len(caplog.records) == 3
        caplog.clear()
        with opened(tmp_path / "texts"):
            assert not caplog.records


def test_the_file_of_another_program_keeps_its_mode(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "notes")
    db.execute("CREATE TABLE notes (id INTEGER)")
    db.close()
    (tmp_path / "notes").chmod(0o644)
    with pytest.raises(SettingsError, match="another program"), opened(tmp_path / "notes"):
        pass
    assert stat.S_IMODE((tmp_path / "notes").stat().st_mode) == 0o644


def wait_until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_lock_that_lasts_is_logged_once_and_the_writer_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3, 4])
    with opened(tmp_path / "texts", timeout_s=0.1) as writer:
        db = sqlite3.connect(tmp_path / "texts")
        db.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            put_out(writer, [5, 6, 7, 8])
            flush(writer)
        db.close()
        assert followed(writer, [1, 2]) == (3, 4)
        put_out(writer, [5, 6, 7, 8])
        flush(writer)
    assert [text for text in warnings_in(caplog) if "locked" in text] == warnings_in(caplog)
    assert len(warnings_in(caplog)) == 1
    assert stored_in(tmp_path / "texts") == [[1, 2, 3, 4]]


def test_a_full_disk_is_logged_once_and_the_writer_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "texts") as writer:
        put_out(writer, [1, 2, 3, 4])
        flush(writer)
        writer._database._db.execute("PRAGMA max_page_count = 1")  # no page more than there are
        put_out(writer, [i % VOCAB_SIZE for i in range(20_000)])
        flush(writer)
        put_out(writer, [5, 6, 7, 8])
        flush(writer)
        assert followed(writer, [1, 2]) == (3, 4)
    assert len(warnings_in(caplog)) == 1
    assert "full" in warnings_in(caplog)[0]
    assert stored_in(tmp_path / "texts") == [[1, 2, 3, 4]]


def test_closing_stores_what_waits_and_may_be_done_twice(tmp_path: Path) -> None:
    with opened(tmp_path / "texts", timeout_s=60.0) as writer:
        db = sqlite3.connect(tmp_path / "texts")
        db.execute("BEGIN IMMEDIATE")
        put_out(writer, [1, 2, 3])
        wait_until(lambda: not writer._waiting)  # the thread has taken it and waits for the lock
        put_out(writer, [4, 5, 6])
        closing = threading.Thread(target=writer.close)
        closing.start()
        wait_until(lambda: writer._is_closing)
        put_out(writer, [7, 8, 9])  # too late: it is dropped
        db.close()
        closing.join(60)
        writer.close()
    assert stored_in(tmp_path / "texts") == [[1, 2, 3], [4, 5, 6]]


def test_processes_that_make_one_file_and_write_to_it_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=store_texts, args=(tmp_path / "texts", first, 100, barrier))
        for first in (1000, 2000, 3000)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    numbers = sorted(text[0] for text in stored_in(tmp_path / "texts"))
    assert numbers == [first + i for first in (1000, 2000, 3000) for i in range(100)]


def test_a_process_killed_while_writing_leaves_whole_texts_and_a_usable_file(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=store_texts_forever, args=(tmp_path / "texts",))
    process.start()
    with opened(tmp_path / "texts", timeout_s=60.0) as writer:
        wait_until(lambda: len(stored_in(tmp_path / "texts")) >= 1000)
        process.kill()
        process.join(60)
        put_out(writer, [7, 7, 7, 8])
        flush(writer)
    *texts, last = stored_in(tmp_path / "texts")
    assert len(texts) >= 1000
    assert all(text == list(range(text[0], text[0] + 40)) for text in texts)
    assert last == [7, 7, 7, 8]
    with opened(tmp_path / "texts") as writer:
        assert followed(writer, [7, 7, 7], budget=1) == (8,)


def test_it_is_found_by_its_name() -> None:
    assert find_writer("store") is StoreWriter
