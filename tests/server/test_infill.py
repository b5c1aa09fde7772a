"""Gaps over HTTP: `suffix` of completions and llama-server's `/infill`, from a folder and from a GGUF file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from card.api.async_llm import AsyncLLM
from card.api.llm import LLM
from card.config import SamplingParams
from card.models.loading import load_tokenizer
from tests.gguf_files import save_model, write_gguf
from tests.pair import make_tokenizer
from tests.server.running import Running, serving
from tests.waiting import until

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
OWN = ("<before>", "<behind>", "<gap>")  # that only the keys of a file name
KEYS = {"fim_pre": "<before>", "fim_suf": "<behind>", "fim_mid": "<gap>", "fim_pad": "<|fim_pad|>"}
PREFIX, SUFFIX = "the cat sat on ", " and the other cat"
KINDS = ("folder", "gguf by name", "gguf by keys", "gguf by older keys")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return one tiny model as a folder and as files that name other marks, or none."""
    place = tmp_path_factory.mktemp("marks")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in (*MARKS, *OWN)])
    save_model(place / "folder", "llama", tokenizer)
    ids = {key: tokenizer.convert_tokens_to_ids(name) for key, name in KEYS.items()}
    older = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
    named = {
        "gguf by name": {},
        "gguf by keys": {f"tokenizer.ggml.{key}_token_id": one for key, one in ids.items()},
        "gguf by older keys": {f"tokenizer.ggml.{new}_token_id": ids[key] for key, new in older.items()},
    }
    files = {
        kind: str(write_gguf(place / "folder", place / f"{kind.replace(' ', '-')}.gguf", general=keys))
        for kind, keys in named.items()
    }
    return {"folder": str(place / "folder"), **files}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def own(kind: str, models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Return a server on a model with marks; it must end up idle."""
    cache = str(tmp_path_factory.mktemp("cache"))
    llm = AsyncLLM(models[kind], dtype="float32", method="suffix", max_model_len=256, cache_dir=cache)
    with serving(llm, served_model_names=("tiny",)) as server:
        yield server
        until(server.is_idle)
    asyncio.run(llm.shutdown())


@pytest.fixture(scope="module")
def marks(kind: str, own: Running) -> list[int]:
    """Return the ids of the marks before the text, behind it, and of the gap."""
    names = OWN if "keys" in kind else MARKS[:3]
    ids = [own.service.tokenizer.convert_tokens_to_ids(name) for name in names]
    assert None not in ids
    return [one for one in ids if one is not None]


def gap(server: Running, marks: list[int], prefix: str = PREFIX, suffix: str = SUFFIX) -> list[int]:
    """Return the prompt of a gap, made by hand."""
    encode = server.service.tokenizer.encode
    return [marks[0], *encode(prefix), marks[1], *encode(suffix), marks[2]]


def fill(server: Running, **fields: Any) -> dict[str, Any]:
    """Return the answer of `/infill`."""
    asked = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 12, "temperature": 0, **fields}
    response = server.post("/infill", asked)
    assert response.status_code == 200, response.text
    return dict(response.json())


def plain(server: Running, prompt_ids: list[int], max_tokens: int = 12) -> str:
    return server.text(prompt=prompt_ids, max_tokens=max_tokens, temperature=0)


def test_a_gap_is_the_prompt_with_its_marks(own: Running, marks: list[int]) -> None:
    wanted = plain(own, gap(own, marks))
    asked = {"suffix": SUFFIX, "max_tokens": 12, "temperature": 0}
    answer = own.complete(prompt=PREFIX, **asked)
    assert answer["choices"][0]["text"] == wanted
    assert answer["usage"]["prompt_tokens"] == len(gap(own, marks))
    assert own.text(prompt=own.service.tokenizer.encode(PREFIX), **asked) == wanted
    assert fill(own)["content"] == wanted
    assert fill(own, input_prefix="the cat ", prompt="sat on ")["content"] == wanted
    assert own.text(prompt=PREFIX, **asked | {"suffix": ""}) == plain(own, own.service.tokenizer.encode(PREFIX))
    several = own.complete(prompt=[PREFIX, "one two"], **asked)["choices"]
    assert [one["text"] for one in several] == [wanted, plain(own, gap(own, marks, "one two"))]


def test_ollamas_api_fills_a_gap_too(own: Running, marks: list[int]) -> None:
    asked = {"prompt": PREFIX, "suffix": SUFFIX, "options": {"num_predict": 12, "temperature": 0}, "stream": False}
    answer = own.post("/api/generate", asked).json()
    assert answer["response"] == plain(own, gap(own, marks))
    assert answer["prompt_eval_count"] == len(gap(own, marks))
    assert "insert" in own.post("/api/show", {}).json()["capabilities"]


def test_a_gap_is_that_of_plain_decoding(own: Running, marks: list[int], kind: str, models: dict[str, str]) -> None:
    with LLM(models[kind], dtype="float32", method="vanilla", max_model_len=256) as llm:
        sampling = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
        wanted = llm.generate([gap(own, marks)], sampling)[0].outputs[0].text
    assert fill(own, n_predict=48, ignore_eos=True)["content"] == wanted


def test_the_marks_end_an_answer_and_are_no_text_of_it(own: Running, kind: str) -> None:
    ends = ["<|fim_pad|>", "<|file_sep|>", OWN[0] if "keys" in kind else MARKS[0]]
    for name in ends:
        bias = {str(own.service.tokenizer.convert_tokens_to_ids(name)): 100}
        answer = own.complete(prompt=PREFIX, suffix=SUFFIX, max_tokens=5, temperature=0, logit_bias=bias)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop"), name
        assert answer["usage"]["completion_tokens"] == 1
        told = fill(own, logit_bias=bias)
        assert (told["content"], told["stop_type"]) == ("", "eos")
    on = own.complete(prompt=PREFIX, suffix=SUFFIX, max_tokens=5, temperature=0, logit_bias=bias, ignore_eos=True)
    assert on["usage"]["completion_tokens"] == 5


def test_an_answer_of_infill_has_the_figures_of_llama_server(own: Running, marks: list[int]) -> None:
    told = fill(own)
    assert told["stop"] is True and told["stop_type"] == "limit" and told["model"] == "tiny"
    assert (told["tokens_predicted"], told["tokens_evaluated"]) == (12, len(gap(own, marks)))
    assert told["truncated"] is False and told["generation_settings"]["n_ctx"] == 256
    assert told["timings"]["predicted_n"] == 12
    assert told["timings"]["prompt_n"] + told["timings"]["cache_n"] == told["tokens_evaluated"]
    word = told["content"][2:5]
    stopped = fill(own, stop=[word])
    assert (stopped["content"], stopped["stop_type"]) == (told["content"].partition(word)[0], "word")
    few = fill(own, response_fields=["content", "timings/predicted_n", "nothing/here"])
    assert few == {"content": told["content"], "timings/predicted_n": 12}


def test_a_stream_of_infill_adds_up_to_the_answer(own: Running) -> None:
    asked = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 12, "temperature": 0, "stream": True}
    lines = [line for line in own.post("/infill", asked).text.split("\n\n") if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    whole = fill(own)
    assert "".join(one["content"] for one in events) == whole["content"]
    assert [one["stop"] for one in events] == [False] * (len(events) - 1) + [True]
    for name in ("stop_type", "tokens_predicted", "tokens_evaluated", "has_new_line", "truncated"):
        assert events[-1][name] == whole[name], name


def test_a_request_that_writes_nothing_reads_the_prompt_for_the_next(own: Running) -> None:
    prefix = "one two three four five six seven "
    nothing = fill(own, input_prefix=prefix, n_predict=0)
    assert (nothing["content"], nothing["tokens_predicted"]) == ("", 0)
    assert fill(own, input_prefix=prefix, n_predict=2)["timings"]["cache_n"] >= nothing["tokens_evaluated"] - 1


def test_other_files_come_first_and_some_are_left_out_if_they_are_too_long(own: Running) -> None:
    some = fill(own, input_extra=[{"filename": "a.py", "text": "the mat"}])
    assert some["tokens_evaluated"] > fill(own)["tokens_evaluated"] and not some["truncated"]
    long = [{"filename": "long.py", "text": "x" * 300}, {"filename": "a.py", "text": "the mat"}]
    assert fill(own, input_extra=long)["truncated"]
    assert fill(own, input_extra=long)["content"] == some["content"]
    fits = {"input_extra": [{"filename": "a.py", "text": "x" * 200}]}
    assert fill(own, **fits, n_predict=64)["truncated"] and not fill(own, **fits, n_predict=1)["truncated"]


def test_what_editors_send_beside_is_taken(own: Running) -> None:
    sent = {"samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "n_indent": 4}
    response = own.post("/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 4, **sent})
    assert response.status_code == 200
    assert response.headers["x-card-ignored"] == ", ".join(sent)


def test_infill_takes_llama_servers_penalty(own: Running) -> None:
    gap = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 12, "temperature": 0}
    wanted, got, plain = (
        own.post("/infill", gap | fields).json()["content"]
        for fields in ({"repetition_penalty": 5.0}, {"repeat_penalty": 5.0}, {})
    )
    assert got == wanted != plain


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, None),
        ("/v1/completions", {"prompt": "a", "suffix": 5}, "suffix"),
        ("/v1/completions", {"prompt": "a " * 300, "suffix": "b"}, "prompt"),
        ("/infill", {"input_prefix": "a " * 300}, "input_prefix"),
        ("/infill", {"input_suffix": "a" * 10_000}, "input_prefix"),
        ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ("/infill", {"n_predict": -3}, "n_predict"),
        ("/infill", {"repeat_penalty": 0}, "repeat_penalty"),
    ],
)
def test_a_gap_that_cannot_be_filled_is_refused(own: Running, path: str, fields: Any, param: str | None) -> None:
    response = own.post(path, fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_model_without_marks_says_what_to_do(server: Running) -> None:
    for path, fields, param in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_prefix"),
    ):
        response = server.post(path, fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
        assert "leave suffix out" in error["message"] or path == "/infill"
        assert "Qwen2.5-Coder" in error["message"] and "\n" not in error["message"]


def test_a_kept_tokenizer_has_the_marks_of_its_file(models: dict[str, str], tmp_path: Path) -> None:
    for _ in range(2):  # made, then read
        tokenizer = load_tokenizer(models["gguf by keys"], cache_dir=str(tmp_path))
        assert tokenizer.fill_marks == {
            "prefix": "<before>",
            "suffix": "<behind>",
            "middle": "<gap>",
            "pad": "<|fim_pad|>",
        }
    assert load_tokenizer(models["gguf by name"], cache_dir=str(tmp_path)).fill_marks == {}
