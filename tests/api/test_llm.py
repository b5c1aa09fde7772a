"""The Python API: what it takes, what it returns, and the same text whatever helps it along."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from card import LLM as PUBLIC_LLM
from card.api.llm import LLM, RequestOutput
from card.api.text_stream import TextStream
from card.backends.transformers.loading import load_model
from card.cli.parts.chosen_models import choose_models
from card.config import SamplingParams, SamplingRule
from card.errors import ModelError, PromptError, SettingsError, VocabularyError
from card.models.loading import load_tokenizer
from card.text.tokens import decode
from card.tree.sampling import Sampler
from tests.pair import MAX_POSITIONS, Pair, make_model, make_tokenizer
from tests.reaching_in import say_why_not_int8
from tests.shaping import slowly_shaped

PROMPT = "the cat sat"
PROMPTS = ["one two three", "the mat", "six"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, seed=0, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=0.8, seed=11)
ENDING = SamplingParams(temperature=2.0, max_tokens=400)  # nearly any token may come, end tokens too

Make = Callable[..., LLM]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def tokenizer(pair: Pair):
    return load_tokenizer(pair.target)


@pytest.fixture(scope="module")
def make(pair: Pair, tokenizer) -> Iterator[Make]:
    """Make LLMs on one loaded target, each kind of them once."""
    target, draft = load_model(pair.target, dtype="float32"), load_model(pair.draft, dtype="float32")
    made: dict[tuple[object, ...], LLM] = {}

    def make_once(method: str = "vanilla", *, is_perfect: bool = False, **settings: object) -> LLM:
        settings = {"policy": "fixed", **settings}
        key = (method, is_perfect, *sorted(settings.items()))
        if key not in made:
            drafts = None if method == "vanilla" else target if is_perfect else draft
            made[key] = LLM(target, drafts, tokenizer=tokenizer, method=method, **settings)
        return made[key]

    yield make_once
    for llm in made.values():
        llm.close()


@pytest.fixture(scope="module")
def plain(make: Make) -> Callable[..., RequestOutput]:
    """Decode plainly, the same text once."""
    return cache(lambda params, prompt=PROMPT: make().generate(prompt, params)[0])


# ---- the same text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["chain", "tree"])
@pytest.mark.parametrize("policy", ["fixed", "auto"])
@pytest.mark.parametrize(("method", "placement"), [("sps", "inline"), ("card", "inline"), ("card", "thread")])
def test_every_method_and_placement_gives_the_text_of_plain_decoding(make, plain, method, placement, verify, policy):
    llm = make(method, placement=placement, verify=verify, policy=policy)
    params = [SAMPLED, GREEDY, ENDING.replace(seed=28)]
    alone, together = llm.generate(PROMPTS[0], params[0]), llm.generate(PROMPTS[1:], params[1:])
    for prompt, one, result in zip(PROMPTS, params, [*alone, *together], strict=True):
        wanted = plain(one, prompt)
        assert result.outputs == wanted.outputs
        assert result.prompt_token_ids == wanted.prompt_token_ids
        assert (result.method, result.exact) == (method, True)
        if placement == "inline" and policy == "fixed":
            assert result.stats.drafter_passes > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verify", ["chain", "tree"])
@pytest.mark.parametrize("method", ["sps", "card"])
def test_a_perfect_drafter_is_accepted_always(make, plain, method, verify, params):
    llm = make(method, is_perfect=True, placement="inline", verify=verify, beam_width=2, min_verify_prob=0.0)
    result = llm.generate(PROMPT, params)[0]
    assert result.outputs == plain(params).outputs
    assert result.stats.acceptance_rate == 1.0 or (method, verify) == ("card", "tree")
    assert result.stats.mean_acceptance_length > 2


def test_a_thread_with_a_perfect_drafter_is_accepted_always(make, plain):
    llm = make("card", is_perfect=True, placement="thread", max_wait_s=60.0)
    result = llm.generate(PROMPT, SAMPLED)[0]
    assert result.outputs == plain(SAMPLED).outputs
    assert result.stats.accepted_tokens == result.stats.verified_tokens > 0


def test_a_draft_with_a_shorter_context_stops_helping_and_the_text_goes_on(pair, plain, tokenizer):
    draft = make_model(len(tokenizer))
    draft.config.max_position_embeddings = 24
    with LLM(pair.target, draft, dtype="float32", placement="inline", policy="fixed") as llm:
        result = llm.generate(PROMPT, GREEDY)[0]
    assert result.outputs == plain(GREEDY).outputs
    assert result.stats.accepted_tokens > 0


def test_a_draft_with_fewer_padding_rows_is_no_danger(pair, tokenizer):
    target = make_model(len(tokenizer) + 40)  # the last 40 rows have no token, but this target uses them
    params = SAMPLED.replace(temperature=3.0)
    draft = load_model(pair.draft, dtype="float32")
    wanted = LLM(target, tokenizer=tokenizer, method="vanilla").generate(PROMPT, params)[0].outputs
    assert max(wanted[0].token_ids) >= len(tokenizer)
    for placement in ("inline", "thread"):
        with LLM(target, draft, tokenizer=tokenizer, placement=placement) as llm:
            assert llm.generate(PROMPT, params)[0].outputs == wanted
            assert llm.generate(PROMPT, params)[0].outputs == wanted


# ---- prompts and results --------------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts(make):
    llm = make()
    results = llm.generate(PROMPTS, GREEDY)
    assert [result.prompt for result in results] == PROMPTS
    assert [result.outputs for result in results] == [llm.generate(prompt, GREEDY)[0].outputs for prompt in PROMPTS]
    assert len({result.request_id for result in results}) == len(PROMPTS)
    assert llm.generate([]) == []


def test_prompts_may_be_text_or_token_ids(make, tokenizer):
    llm = make()
    ids = tokenizer.encode(PROMPT)
    from_text = llm.generate(PROMPT, GREEDY)[0]
    array = np.array(ids)
    kinds = [ids, list(array), array, [np.array(one) for one in ids], torch.tensor(ids), np.array([ids])[0]]
    from_ids, *others = llm.generate(kinds, GREEDY)
    assert [one.prompt_token_ids for one in others] == [tuple(ids)] * 5
    assert {type(token_id) for one in others for token_id in one.prompt_token_ids} == {int}
    assert {from_text.outputs, from_ids.outputs, *(one.outputs for one in others)} == {from_text.outputs}
    assert from_text.prompt_token_ids == from_ids.prompt_token_ids == tuple(ids)
    assert (from_text.prompt, from_ids.prompt) == (PROMPT, None)


def test_the_text_is_that_of_the_token_ids(make, tokenizer):
    for params in (GREEDY, SAMPLED):
        output = make().generate(PROMPT, params)[0].outputs[0]
        assert output.text == decode(tokenizer, output.token_ids)
        assert (output.index, output.finish_reason, len(output.token_ids)) == (0, "length", 64)


def test_chat_uses_the_chat_template(make, pair):
    messages = [{"role": "user", "content": "hello"}]
    theirs = AutoTokenizer.from_pretrained(pair.target)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    llm = make()
    answer = llm.chat(messages, GREEDY)[0]
    assert answer.prompt_token_ids == tuple(ids)
    assert answer.outputs == llm.generate([ids], GREEDY)[0].outputs
    assert "".join(chunk.text for chunk in llm.stream(messages, GREEDY)) == answer.outputs[0].text


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "empty"),
        ([[]], "empty"),
        (["fine", ""], "empty"),
        ([[5, 100_000]], "token ids must be from 0 to .* got 100000"),
        ([[-1]], "got -1"),
        ([1, 2, 3], "list of token ids"),
        ([["a", "b"]], "list of token ids"),
        ([[1, True]], "list of token ids, got list"),
        ([np.array([True, False])], "list of token ids, got ndarray"),
        ([np.array([1.0, 2.0])], "list of token ids, got ndarray"),
        (None, "list of token ids, got NoneType"),
        ({"prompt": "the cat"}, "list of token ids, got dict.*give conversations to chat"),
        ([{"role": "user", "content": "the cat"}], "give conversations to chat"),
        ([[7] * MAX_POSITIONS], f"has {MAX_POSITIONS} tokens, but the context holds {MAX_POSITIONS}"),
        ("\udcff", "surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_one_line(make, prompt, said):
    with pytest.raises(PromptError, match=said) as raised:
        make().generate(prompt, GREEDY)
    assert "\n" not in str(raised.value)


def test_several_conversations_are_answered_in_their_order_each_with_its_parameters(make):
    llm = make()
    conversations = [[{"role": "user", "content": text}] for text in PROMPTS]
    params = [GREEDY, SAMPLED, SAMPLED.replace(seed=np.int64(12))]
    wanted = [llm.chat(one, each)[0].outputs for one, each in zip(conversations, params, strict=True)]
    assert [one.outputs for one in llm.chat(conversations, params)] == wanted
    assert [one.outputs for one in llm.chat(tuple(conversations), tuple(params))] == wanted
    same = [llm.chat(one, GREEDY)[0].outputs for one in conversations]
    assert [one.outputs for one in llm.chat(conversations, GREEDY)] == same
    assert llm.chat(conversations[0], [SAMPLED])[0].outputs == llm.chat(conversations[0], SAMPLED)[0].outputs


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "is empty"),
        ([[]], "is empty"),
        ("hello", "a list of messages"),
        ({"role": "user", "content": "hello"}, "a list of messages"),
        (["hello"], "a list of messages"),
        ([[{"role": "user", "content": "hello"}], {"role": "user", "content": "hello"}], "a list of messages"),
        (None, "a list of messages .* got None"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(make, messages, said):
    with pytest.raises(PromptError, match=said) as raised:
        make().chat(messages, GREEDY)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("num_params", [0, 1, 2, 4])
def test_another_number_of_parameters_than_of_prompts_is_refused_with_both_numbers(make, num_params):
    said = f"^got {num_params} sampling parameters for 3 prompts; give one for all, or one for each$"
    with pytest.raises(SettingsError, match=said):
        make().generate(PROMPTS, [GREEDY] * num_params)
    with pytest.raises(SettingsError, match=said):
        make().chat([[{"role": "user", "content": one}] for one in PROMPTS], [GREEDY] * num_params)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy"])
def test_parameters_that_are_none_are_refused(make, params):
    for call in (make().generate, make().stream):
        with pytest.raises(SettingsError, match=r"must be card\.SamplingParams, got"):
            call(PROMPT, params)


def test_a_typo_in_a_setting_is_told_before_anything_is_loaded():
    with pytest.raises(SettingsError, match=r"^unknown setting 'bugdet'; did you mean budget\?$"):
        LLM("no-such-model", bugdet=3)  # type: ignore[call-arg]


def test_a_stream_refuses_its_prompt_at_once(make):
    with pytest.raises(PromptError):
        make().stream("")
    with pytest.raises(PromptError):
        make().stream([{"role": "user"}])


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "placement"), [("vanilla", None), ("card", "inline"), ("card", "thread")])
def test_the_pieces_of_a_stream_are_the_text(make, plain, method, placement):
    wanted = plain(SAMPLED).outputs[0]
    chunks = list(make(method, placement=placement).stream(PROMPT, SAMPLED))
    assert "".join(chunk.text for chunk in chunks) == wanted.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == wanted.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].stats.num_new_tokens == 64


@pytest.mark.parametrize("placement", ["inline", "thread"])
def test_a_stream_closed_early_frees_its_request_and_the_next_one_is_right(make, plain, placement):
    llm = make("card", placement=placement)
    for num_chunks in (0, 1, 3):
        stream = llm.stream(PROMPT, SAMPLED)
        for _ in range(num_chunks):
            next(stream)
        stream.close()
        assert not llm.stats().num_running
        assert llm.generate(PROMPTS[0], SAMPLED)[0].outputs == plain(SAMPLED, PROMPTS[0]).outputs
    assert len(llm.host.link.worker.drafting) <= (
        0 if placement == "inline" else 1
    )  # a thread may still have to read it


def test_a_stream_tells_how_far_its_prompt_is_read(make):
    told = []
    llm = make("card", placement="inline", max_model_len=1024)
    ids = list(range(3, 20)) * 40
    list(llm.stream(ids, SAMPLED, tell_read=lambda num_read, num_all: told.append((num_read, num_all))))
    assert told and {num_all for _, num_all in told} == {len(ids)}
    assert [num_read for num_read, _ in told] == sorted(num_read for num_read, _ in told)
    assert 0 < told[-1][0] < len(ids), "nothing is told once the answer has begun"


@pytest.mark.parametrize("placement", ["inline", "thread"])
def test_two_streams_may_take_turns(make, plain, placement):
    llm = make("card", placement=placement)
    streams = [llm.stream(prompt, SAMPLED) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    while streams[0] or streams[1]:
        for idx, stream in enumerate(streams):
            chunk = next(stream, None) if stream else None
            texts[idx] += chunk.text if chunk else ""
            streams[idx] = stream if chunk else None
    assert texts == [plain(SAMPLED, prompt).outputs[0].text for prompt in PROMPTS[:2]]


def test_the_callers_thread_is_left_as_it_was(make):
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    llm = make("card", placement="inline", cores=None if core is None else (core,))

    def state() -> tuple[int, object]:
        return torch.get_num_threads(), os.sched_getaffinity(0) if core is not None else None

    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = state()
        llm.generate(PROMPT, GREEDY)
        assert state() == before
        first, second = llm.stream(PROMPT, GREEDY), llm.stream(PROMPT, SAMPLED)
        next(first)
        assert state() == before
        next(second)
        first.close()
        assert state() == before
        del second
        assert state() == before
    finally:
        torch.set_num_threads(num_threads)


# ---- where a text ends ----------------------------------------------------------------------------------------------


def crossing(make: Make, params: SamplingParams) -> tuple[str, str, int]:
    """Return the plain text, a stop string across the border of two tokens, and the number of tokens up to it."""
    chunks = list(make().stream(PROMPT, params))
    text = "".join(chunk.text for chunk in chunks)
    length = 0
    for idx, (chunk, following) in enumerate(itertools.pairwise(chunks)):
        length += len(chunk.text)
        stop = chunk.text[-1:] + following.text[:1]
        if idx > 5 and len(stop) == 2 and "\ufffd" not in stop and text.find(stop) == length - 1:
            return text, stop, idx + 2
    raise AssertionError("the tiny model writes no such text; take another seed")


@pytest.mark.parametrize(("method", "placement"), [("vanilla", None), ("card", "inline"), ("card", "thread")])
def test_a_stop_string_cuts_the_text_also_across_tokens(make, plain, method, placement):
    params = SAMPLED.replace(max_tokens=200)
    text, stop, num_tokens = crossing(make, params)
    llm = make(method, placement=placement)
    output = llm.generate(PROMPT, params.replace(stop=("never to be seen", stop)))[0].outputs[0]
    assert output.text == text[: text.index(stop)]
    assert output.finish_reason == "stop"
    assert output.token_ids == plain(params).outputs[0].token_ids[:num_tokens]
    pieces = [chunk.text for chunk in llm.stream(PROMPT, params.replace(stop=stop))]
    assert "".join(pieces) == output.text, "nothing of a stop string is shown and taken back"


def test_a_stop_string_that_never_comes_changes_nothing(make, plain):
    for stop_token_ids in ((), plain(SAMPLED).outputs[0].token_ids[20:21]):
        params = SAMPLED.replace(stop_token_ids=stop_token_ids)
        wanted = plain(params).outputs
        assert plain(params.replace(stop=("never to be seen",))).outputs == wanted


@pytest.mark.parametrize(("method", "placement"), [("vanilla", None), ("card", "inline")])
def test_any_of_several_end_tokens_ends_the_text(make, plain, method, placement):
    last_ids = set()
    params = [ENDING.replace(seed=seed) for seed in range(8)]
    results = make(method, placement=placement).generate([PROMPT] * len(params), params)
    for output, one in zip((result.outputs[0] for result in results), params, strict=True):
        assert (output.finish_reason == "stop") == (output.token_ids[-1] in (0, 1))
        assert not {0, 1} & set(output.token_ids[:-1])
        assert not output.text.endswith(">"), "special tokens are not shown"
        last_ids.add(output.token_ids[-1])
        num_more = len(output.token_ids) + 3
        longer = plain(one.replace(ignore_eos=True, max_tokens=num_more)).outputs[0]
        assert longer.token_ids[:-3] == output.token_ids
    assert {0, 1} <= last_ids


def test_stop_token_ids_count_even_if_eos_is_ignored(make, plain):
    ids = plain(SAMPLED).outputs[0].token_ids
    params = SAMPLED.replace(stop_token_ids=(ids[30],))
    for llm in (make(), make("card", placement="inline")):
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.token_ids == ids[: ids.index(ids[30]) + 1]
        assert output.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 33])
def test_max_tokens_is_kept_exactly(make, plain, max_tokens):
    params = GREEDY.replace(max_tokens=max_tokens)
    llm = make("card", is_perfect=True, placement="inline")
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output.token_ids == plain(GREEDY).outputs[0].token_ids[:max_tokens]
    assert output.finish_reason == "length"


@pytest.mark.parametrize(("method", "placement"), [("vanilla", None), ("card", "inline"), ("sps", "inline")])
def test_a_full_context_ends_the_text(make, plain, method, placement):
    llm = make(method, is_perfect=method != "vanilla", placement=placement, max_model_len=32)
    result = llm.generate(PROMPT, GREEDY)[0]
    num_new = 32 - len(result.prompt_token_ids)
    assert result.outputs[0].token_ids == plain(GREEDY).outputs[0].token_ids[:num_new]
    assert result.outputs[0].finish_reason == "length"


def test_a_seed_is_drawn_reported_and_repeats_the_text(make):
    llm = make("card", placement="inline")
    params = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True)
    first, second = llm.generate([PROMPT, PROMPT], params)
    assert first.stats.seed != second.stats.seed
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    assert llm.generate(PROMPT, params.replace(seed=first.stats.seed))[0].outputs == first.outputs


# ---- what shapes a text, and what is told of it ----------------------------------------------------------------------

SHAPED = {
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "rewards": {"presence_penalty": -1.0, "frequency_penalty": -0.2, "repetition_penalty": 0.8},
    "bias": {"logit_bias": {0: -100.0, 70: 4.0, 71: 4.0}},
    "least length": {"min_tokens": 50, "logit_bias": {0: 6.0, 1: 6.0}, "ignore_eos": False},
}


@pytest.mark.parametrize("changes", SHAPED.values(), ids=SHAPED)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_shaped_text_is_that_of_a_plain_loop_over_the_model(make, plain, tokenizer, pair, params, changes):
    unshaped, params = plain(params), params.replace(**changes)
    wanted = plainly_shaped(load_model(pair.target, dtype="float32"), tokenizer.encode(PROMPT), params)
    assert plain(params.replace(ignore_eos=True)).outputs != unshaped.outputs, "the parameters change something"
    alone = plain(params, PROMPTS[0]).outputs[0]
    tree = {"verify": "tree", "min_verify_prob": 0.0, "writers": ("beam", "suffix")}
    for llm in (make(), make("card", placement="inline", **tree), make("card", placement="thread")):
        first, other = (result.outputs[0] for result in llm.generate([PROMPT, PROMPTS[0]], params))
        assert first.token_ids == tuple(wanted)
        assert other == alone


def plainly_shaped(model, prompt_ids: list[int], params: SamplingParams) -> list[int]:
    """Return the new tokens of a loop that runs each text afresh."""
    sampler, ends = Sampler(SamplingRule.of(params.resolved()), model.config.vocab_size), frozenset({0, 1})
    new_ids: list[int] = []
    while len(new_ids) < params.max_tokens and (params.ignore_eos or not ends & set(new_ids[-1:])):
        with torch.inference_mode():
            row = model(torch.tensor([[*prompt_ids, *new_ids]])).logits[0, -1]
        held_back = frozenset() if params.ignore_eos else ends
        shaped = torch.tensor([slowly_shaped(row.tolist(), params, prompt_ids, new_ids, held_back)])
        new_ids += sampler.choose(shaped, [len(prompt_ids) + len(new_ids)])
    return new_ids


def test_a_stop_string_counts_only_behind_the_least_length(make, plain):
    text, stop, num_tokens = crossing(make, SAMPLED.replace(max_tokens=200))
    params = SAMPLED.replace(max_tokens=200, stop=(stop,))
    for llm in (make(), make("card", placement="inline")):
        outputs = [llm.generate(PROMPT, params.replace(min_tokens=num_tokens - i))[0].outputs[0] for i in (1, 0)]
        assert outputs[0].text == text[: text.index(stop)], (
            "its last character comes in the token after the least length"
        )
        assert len(outputs[1].token_ids) > num_tokens
        assert outputs[1].text.startswith(text[: text.index(stop) + 2])
    assert outputs == [plain(params.replace(min_tokens=num_tokens - i)).outputs[0] for i in (1, 0)]


@pytest.mark.parametrize(("method", "placement"), [("vanilla", None), ("card", "inline"), ("card", "thread")])
def test_logprobs_are_those_of_one_pass_over_the_whole_text(make, pair, method, placement):
    params = SAMPLED.replace(logprobs=4, presence_penalty=1.0)
    llm = make(method, placement=placement)
    output = llm.generate(PROMPT, params)[0]
    with torch.inference_mode():
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        logits = load_model(pair.target, dtype="float32")(torch.tensor([ids])).logits[0].double()
    expected = logits.log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
    for row, one in zip(expected, output.outputs[0].logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx([float(row[token]) for token, _ in one.top], abs=1e-3)
    chunks = list(llm.stream(PROMPT, params))
    assert [one.token_id for chunk in chunks for one in chunk.logprobs] == list(output.outputs[0].token_ids)
    assert all(len(chunk.origins) == len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)


def test_a_token_is_told_with_its_origin_and_the_tree_beside_it(make):
    output = (
        make("card", placement="inline", verify="tree").generate(PROMPT, SAMPLED.replace(shows_tree=True))[0].outputs[0]
    )
    assert {"beam", "", "plain"} >= set(output.origins) > {"plain"}
    assert len(output.origins) == len(output.alternatives) == len(output.token_ids)
    assert any(output.alternatives)
    bare = make().generate(PROMPT, SAMPLED)[0].outputs[0]
    assert (set(bare.origins), bare.alternatives, bare.logprobs) == ({"plain"}, (), ())


def test_a_request_that_wants_no_speculation_gets_none_beside_others_that_do(make, plain):
    llm = make("card", placement="inline", writers=("beam", "suffix"))
    alone, helped = llm.generate([PROMPT, PROMPT], [SAMPLED.replace(speculates=False), SAMPLED])
    assert alone.outputs == helped.outputs == plain(SAMPLED).outputs
    assert (alone.stats.verified_tokens, alone.stats.drafter_passes) == (0, 0)
    assert alone.stats.speculation == "off: the request turns it off"
    assert helped.stats.accepted_tokens > 0


def test_parameters_that_this_model_cannot_follow_are_refused_at_once(make, tokenizer):
    size = len(tokenizer)
    said = f"logit_bias has token {size}, but the target has tokens 0 to {size - 1}"
    for llm in (make(), make("card", placement="inline")):
        with pytest.raises(SettingsError, match=said):
            llm.stream(PROMPT, GREEDY.replace(logit_bias={3: 1.0, size: 1.0}))
        assert not llm.stats().num_running


# ---- models and settings --------------------------------------------------------------------------------------------


def test_models_may_be_folders_or_loaded(pair, plain):
    with LLM(pair.target, pair.draft, dtype="float32", placement="thread") as llm:
        assert llm.generate(PROMPT, GREEDY)[0].outputs == plain(GREEDY).outputs
        assert (llm.settings.target, llm.settings.draft) == (pair.target, pair.draft)
    loaded = LLM(load_model(pair.target, dtype="float32"))  # its tokenizer is where it came from
    assert loaded.generate(PROMPT, GREEDY)[0].outputs == plain(GREEDY).outputs
    assert PUBLIC_LLM is LLM


def test_the_method_follows_from_the_draft_as_on_the_command_line(pair):
    alone = {"target": pair.target, "draft": None, "method": None}
    with LLM(pair.target) as llm:
        assert llm.method.name == "suffix"
        assert choose_models({**alone}).method is None, "loading the target decides"
    with LLM(pair.target, pair.draft, placement="inline") as llm:
        assert llm.method.name == "card" == choose_models({**alone, "draft": pair.draft}).method


def test_a_target_alone_drafts_from_its_own_text_and_writes_that_of_plain_decoding(pair, plain):
    with LLM(pair.target, dtype="float32", policy="fixed") as llm:
        result = llm.generate(PROMPT, GREEDY)[0]
    assert result.stats.verified_tokens > 0
    assert result.outputs == plain(GREEDY).outputs


def test_an_inflated_target_writes_the_same_text_and_says_what_it_is(pair, plain):
    result = LLM(pair.target, dtype="float32", target_cost="0.2M").generate(PROMPT, GREEDY)[0]
    assert result.outputs == plain(GREEDY).outputs
    assert "inflated" in result.target_cost
    assert plain(GREEDY).target_cost is None


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"bean_width": 3}, SettingsError, r"unknown setting 'bean_width'; did you mean beam_width\?$"),
        ({"method": "magic"}, SettingsError, "unknown method 'magic'; known: .*card, "),
        ({"method": "card"}, SettingsError, "needs a draft model"),
        ({"method": "sps"}, SettingsError, "needs a draft model"),
        ({"placement": "moon"}, SettingsError, "placement must be one of"),
        ({"max_model_len": 1}, SettingsError, "max_model_len"),
        ({"max_model_len": MAX_POSITIONS + 1}, SettingsError, f"at most {MAX_POSITIONS}"),
        ({"threads": 0}, SettingsError, "threads must be from 1 to 1024, got 0"),
        ({"budget": 0}, SettingsError, "budget must be from 1 to 65536"),
        ({"target_cost": "much"}, SettingsError, "much"),
        ({"cores": (10_000,)}, SettingsError, "cores must be among"),
        ({"dtype": "float3"}, ModelError, "unknown dtype 'float3'"),
        ({"device": "toaster"}, ModelError, "device 'toaster' is not available"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_is_allowed(pair, settings, error, said):
    with pytest.raises(error, match=said):
        LLM(pair.target, **settings)


@pytest.mark.parametrize(("name", "said"), [("missing", "there is no folder"), ("not_a_model", "holds no config.json")])
def test_a_target_or_draft_that_is_no_model_is_refused(pair, name, said):
    with pytest.raises(ModelError, match=said):
        LLM(getattr(pair, name))
    with pytest.raises(ModelError, match=said):
        LLM(pair.target, getattr(pair, name))


def test_a_draft_of_another_tokenizer_is_refused_before_any_process_starts(pair):
    with pytest.raises(VocabularyError, match="share one tokenizer"):
        LLM(pair.target, pair.foreign_draft)
    with pytest.raises(VocabularyError, match="share one tokenizer"):
        LLM(pair.target, load_model(pair.foreign_draft), placement="thread")


def test_a_loaded_draft_cannot_go_into_a_process(pair):
    with pytest.raises(SettingsError, match="placement thread"):
        LLM(pair.target, make_model(len(make_tokenizer())), method="card", placement="process")


def test_sampling_parameters_out_of_range_are_refused():
    for changes in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 0}, {"stop": ("",)}, {"seed": -1}):
        with pytest.raises(SettingsError, match=next(iter(changes))):
            SamplingParams(**changes)
    with pytest.raises(SettingsError, match="unknown setting 'heat'"):
        GREEDY.replace(heat=1)


# ---- many at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "placement"), [("vanilla", None), ("sps", "inline"), ("card", "inline"), ("card", "thread")]
)
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_a_batch_gives_each_prompt_the_text_that_it_has_alone(make, plain, method, placement, num_requests):
    llm = make(method) if placement is None else make(method, placement=placement)
    prompts = [f"{'the cat sat on ' * (i % 4)}{PROMPTS[i % 3]} {i}" for i in range(num_requests)]
    params = [(GREEDY if i % 2 else SAMPLED).replace(seed=i, max_tokens=8 + i) for i in range(num_requests)]
    results = llm.generate(prompts, params)
    for result, prompt, one in zip(results, prompts, params, strict=True):
        assert result.prompt == prompt
        assert result.outputs == plain(one, prompt).outputs


def test_a_text_that_cannot_be_written_is_an_error_of_its_own_result_and_the_others_are_whole(make, plain, monkeypatch):
    take = TextStream.take

    wanted = [plain(GREEDY, PROMPTS[idx]).outputs[0].token_ids for idx in (0, 2)]
    rare_id = next(token_id for token_id in range(5, 99) if token_id not in [*wanted[0], *wanted[1]])

    def fail_at_a_rare_token(text, token_ids, *, is_end):
        if rare_id in token_ids:
            raise UnicodeError("no such character")
        return take(text, token_ids, is_end=is_end)

    monkeypatch.setattr(TextStream, "take", fail_at_a_rare_token)
    llm = make("card", placement="inline")
    params = [GREEDY, GREEDY.replace(logit_bias={rare_id: 100.0}), GREEDY]
    results = llm.generate(PROMPTS, params)
    assert [result.outputs[0].finish_reason for result in results] == ["length", "error", "length"]
    assert [results[idx].outputs[0].token_ids for idx in (0, 2)] == wanted
    assert llm.stats().num_running == 0


def test_streams_that_are_open_at_once_share_the_rounds_and_each_has_its_own_text(make, plain):
    llm = make("card", placement="inline")
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    texts = dict.fromkeys(range(len(streams)), "")
    rounds_before = llm.stats().rounds
    for chunks in itertools.zip_longest(*streams):
        for i, chunk in enumerate(chunks):
            texts[i] += chunk.text if chunk else ""
    assert list(texts.values()) == [plain(GREEDY, prompt).outputs[0].text for prompt in PROMPTS]
    assert llm.stats().rounds - rounds_before < len(PROMPTS) * GREEDY.max_tokens / 2


def test_several_threads_may_use_one_llm(make, plain):
    llm = make("card", placement="inline")
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY)[0].outputs, PROMPTS * 4))
    assert outputs == [plain(GREEDY, prompt).outputs for prompt in PROMPTS * 4]


def test_a_conversation_goes_on_from_the_rows_that_it_left(make):
    llm = make("card", placement="inline")
    first = llm.generate("one two three four five six seven", GREEDY)[0]
    ids = [*first.prompt_token_ids, *first.outputs[0].token_ids, *first.prompt_token_ids]
    second = llm.generate([ids], GREEDY)[0]
    assert second.stats.reused_prompt_tokens >= len(first.prompt_token_ids) + len(first.outputs[0].token_ids) - 1
    llm.reset_prefix_cache()
    fresh = llm.generate([ids], GREEDY)[0]
    assert fresh.stats.reused_prompt_tokens == 0
    assert second.outputs == fresh.outputs == make().generate([ids], GREEDY)[0].outputs


def test_too_little_kv_memory_for_one_request_is_refused_by_name(pair):
    with pytest.raises(SettingsError, match="max_model_len"):
        LLM(pair.target, dtype="float32", kv_cache_memory="10K")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "turns", "placement": "process"}, "turns are taken"),
        ({"schedule": "beside", "placement": "inline"}, "turns are taken"),
        ({"schedule": "turns", "method": "sps"}, "schedule is for method card"),
        ({"draft_address": "tcp://127.0.0.1:1", "placement": "inline"}, "draft_address"),
        ({"draft_keys": "somewhere"}, "draft_address"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(pair, settings, words):
    with pytest.raises(SettingsError, match=words):
        LLM(pair.target, pair.draft, **settings)


def test_one_line_says_that_a_long_text_may_need_more_memory_than_is_free(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("card.api.start.free_memory", lambda: 1000)
    with LLM(pair.target, cache=False):
        (line,) = (line for line in caplog.messages if "KV may take" in line)
    assert line.endswith("0 MiB are free; lower max_model_len or kv_cache_memory, or give more memory")


def test_a_result_of_modules_in_16_bits_does_not_say_that_it_is_exact(pair, monkeypatch):
    say_why_not_int8(monkeypatch, "this test says so")
    settings = {"cache": False, "check": False, "policy": "fixed"}
    for dtype, method, exact in (("float16", "sps", False), ("float32", "sps", True), ("float16", "vanilla", True)):
        draft = {"draft": pair.draft, "placement": "inline"} if method == "sps" else {}
        with LLM(pair.target, dtype=dtype, method=method, **draft, **settings) as llm:
            assert (llm.generate(PROMPT, GREEDY.replace(max_tokens=2))[0].exact, llm.is_exact) == (exact, exact)
