"""`card.hf.generate` against transformers' own `generate`: the same tokens, shapes and padding, in float32."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import card.hf
import card.inside.hf.session
from card.backends.transformers.loading import load_model
from card.config import DraftSettings
from card.errors import ModelError, PromptError, SettingsError, VocabularyError, WorkerError
from card.machine.home import Home
from card.models.demo import DEMO_PROBLEMS, demo_folder
from tests.pair import MAX_POSITIONS, make_model, make_tokenizer
from tests.reaching_in import sessions_of

VOCAB_SIZE = 320
PAD_ID = 0
NUM_NEW = 24


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaForCausalLM]:
    model = make_model(VOCAB_SIZE)
    yield model
    card.hf.release(model)


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    return make_model(VOCAB_SIZE, noise=0.1)


def make_batch(lengths: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    """Return random prompts of these lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    input_ids = torch.randint(2, VOCAB_SIZE, (len(lengths), longest), generator=generator)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        attention_mask[row, longest - length :] = 1
    return {"input_ids": input_ids.masked_fill(attention_mask == 0, PAD_ID), "attention_mask": attention_mask}


def theirs(model: PreTrainedModel, batch: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(**batch, **{"max_new_tokens": NUM_NEW, "do_sample": False, **options})


def ours(model: PreTrainedModel, batch: dict[str, Tensor], **options: Any) -> Any:
    return theirs(model, batch, custom_generate=card.hf.generate, **options)


ONE, EVEN, RAGGED = (7,), (6, 6, 6, 6), (3, 12, 1, 8)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_length": {"max_new_tokens": None, "max_length": 20},
    "no end": {"eos_token_id": None, "pad_token_id": None},
    "likely ends": {"eos_token_id": list(range(0, VOCAB_SIZE, 16)), "pad_token_id": 5},
    "min_new_tokens": {"eos_token_id": list(range(0, VOCAB_SIZE, 4)), "pad_token_id": 5, "min_new_tokens": 9},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[9], [17, 18], [250]]},
    "suppress and force": {
        "suppress_tokens": list(range(100, 200)),
        "begin_suppress_tokens": [3],
        "forced_eos_token_id": 1,
    },
    "sequence_bias": {"sequence_bias": [[[44], 6.0], [[45, 46], -9.0]]},
    "encoder penalties": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "decay": {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": [0, 1, 50, 51], "pad_token_id": 2},
    "watermark": {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.3, bias=3.0)},
}


@pytest.mark.parametrize(
    ("name", "lengths"),
    [(name, RAGGED) for name in OPTIONS]
    + [(name, lengths) for name in ("plain", "max_length", "likely ends") for lengths in (ONE, EVEN)],
    ids=str,
)
def test_greedy_output_is_that_of_transformers(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, name: str, lengths: tuple[int, ...]
) -> None:
    batch = make_batch(lengths)
    expected = theirs(target, batch, **OPTIONS[name])
    assert torch.equal(ours(target, batch, assistant_model=draft, **OPTIONS[name]), expected)


@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=["one", "ragged"])
def test_without_assistant_model_it_decodes_plainly(target: LlamaForCausalLM, lengths: tuple[int, ...]) -> None:
    batch = make_batch(lengths)
    done = ours(target, batch, return_dict_in_generate=True)
    assert torch.equal(done.sequences, theirs(target, batch))
    assert all(stats.verified_tokens == 0 for stats in done.stats)


def test_the_assistant_model_drafts_and_its_settings_can_be_given(
    target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    batch, settings = make_batch(RAGGED), DraftSettings(verify="tree", budget=3)
    done = ours(target, batch, assistant_model=draft, draft_settings=settings, return_dict_in_generate=True)
    assert torch.equal(done.sequences, theirs(target, batch))
    for stats in done.stats:
        assert stats.accepted_tokens > 0
        assert stats.verified_tokens <= 3 * stats.target_passes


def test_a_wrapped_callable_still_finds_the_assistant_model(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return card.hf.generate(*args, **kwargs)

    batch = make_batch(ONE)
    done = theirs(target, batch, custom_generate=wrapped, assistant_model=draft, return_dict_in_generate=True)
    assert done.stats[0].accepted_tokens > 0


def test_the_demo_pair_answers_as_in_transformers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder("target"))
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    target, draft = (load_model(name, dtype="float32") for name in ("demo-target", "demo-draft"))
    chats = [[{"role": "user", "content": problem}] for problem in DEMO_PROBLEMS[:4]]
    batch = dict(
        tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
    )
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 48, "pad_token_id": tokenizer.pad_token_id}
    expected = theirs(target, batch, **options)
    done = ours(target, batch, assistant_model=draft, return_dict_in_generate=True, **options)
    assert torch.equal(done.sequences, expected)
    assert min(stats.mean_acceptance_length for stats in done.stats) > 1.3
    card.hf.release(target)


def test_a_model_with_learned_positions_runs_through_its_modules() -> None:
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=128, n_embd=32, n_layer=2, n_head=2, eos_token_id=1, initializer_range=0.3
    )
    model = GPT2LMHeadModel(config).train(False)
    before = model.config._attn_implementation
    batch = make_batch(RAGGED)
    expected = theirs(model, batch)
    for _ in range(2):
        assert torch.equal(ours(model, batch, assistant_model=model), expected)
        assert model.config._attn_implementation == before
        assert torch.equal(theirs(model, batch), expected)


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_sampling_follows_the_global_seed_and_does_not_depend_on_the_draft(
    target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    batch = make_batch(RAGGED)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
    texts = []
    for seed, assistant in ((1, draft), (1, draft), (1, None), (2, draft)):
        torch.manual_seed(seed)
        texts.append(ours(target, batch, assistant_model=assistant, **options))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], texts[3])


def test_greedy_decoding_leaves_the_global_seed_alone(target: LlamaForCausalLM) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    ours(target, make_batch(ONE))
    assert torch.equal(torch.get_rng_state(), before)


def test_each_returned_sequence_has_noise_of_its_own(target: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    batch = make_batch((5, 5))
    done = ours(target, batch, do_sample=True, num_return_sequences=3, eos_token_id=None)
    assert done.shape == (6, 5 + NUM_NEW)
    assert len({tuple(row) for row in done[:, 5:].tolist()}) == 6
    assert torch.equal(done[:, :5], batch["input_ids"].repeat_interleave(3, 0))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 12},
        {"top_k": 0, "top_p": 0.6},
        {"top_k": 0, "min_p": 0.2, "renormalize_logits": True},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
        {"top_k": 0, "typical_p": 0.5},
        {"top_k": 20, "epsilon_cutoff": 0.03},
    ],
    ids=str,
)
def test_first_tokens_follow_the_law_that_transformers_draws_from(
    target: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    batch = make_batch((5,))
    num_drawn = 2000
    law = (
        theirs(
            target, batch, do_sample=True, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **options
        )
        .scores[0]
        .softmax(-1)[0]
    )
    torch.manual_seed(3)
    many = {"input_ids": batch["input_ids"].repeat(num_drawn, 1)}
    many["attention_mask"] = torch.ones_like(many["input_ids"])
    drawn = ours(target, many, do_sample=True, max_new_tokens=1, **options)[:, -1]
    share = torch.bincount(drawn, minlength=VOCAB_SIZE) / num_drawn
    assert share[law == 0].sum() == 0
    deviation = (law * (1 - law) / num_drawn).sqrt()
    assert ((share - law).abs() <= 5 * deviation + 1 / num_drawn).all()


# ---- processors, criteria, streamers --------------------------------------------------------------------------------


class FavourByRow(LogitsProcessor):
    """Knows its batch: each row is pushed towards other tokens, by what it has said so far."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(scores) == self.num_rows
        rows = torch.arange(self.num_rows)
        favoured = (input_ids[:, -1] * 7 + input_ids.shape[1] + 31 * rows) % VOCAB_SIZE
        return scores.index_put((rows, favoured), torch.tensor(6.0), accumulate=True)


@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=["one", "ragged"])
def test_processors_of_ones_own_see_each_position_as_in_transformers(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, lengths: tuple[int, ...]
) -> None:
    batch, processors = make_batch(lengths), LogitsProcessorList([FavourByRow(len(lengths))])
    expected = theirs(target, batch, logits_processor=processors, repetition_penalty=1.2)
    done = ours(target, batch, logits_processor=processors, repetition_penalty=1.2, assistant_model=draft)
    assert torch.equal(done, expected)
    assert not torch.equal(done, theirs(target, batch))


def test_allowed_tokens_may_depend_on_the_row(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return list(range(10 + 50 * row, 40 + 50 * row + len(ids) % 3))

    batch = make_batch(RAGGED)
    expected = theirs(target, batch, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(ours(target, batch, prefix_allowed_tokens_fn=allowed, assistant_model=draft), expected)


class StopAt(StoppingCriteria):
    """Ends a row once it has said a token of these; notes what it was shown."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self.token_ids = torch.tensor(token_ids)
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.clone())
        return torch.isin(input_ids[:, -1], self.token_ids)


@pytest.mark.parametrize("eos", [{}, {"eos_token_id": None, "pad_token_id": None}], ids=["eos", "no eos"])
@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=["one", "ragged"])
def test_stopping_criteria_are_asked_about_every_column_as_in_transformers(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, lengths: tuple[int, ...], eos: dict[str, Any]
) -> None:
    batch = make_batch(lengths)
    stops = tuple(theirs(target, batch, **eos)[:, -NUM_NEW // 2].tolist())  # each row says one of them half way
    theirs_asked, ours_asked = StopAt(stops), StopAt(stops)
    expected = theirs(target, batch, stopping_criteria=StoppingCriteriaList([theirs_asked]), **eos)
    done = ours(target, batch, stopping_criteria=[ours_asked], assistant_model=draft, **eos)
    assert torch.equal(done, expected)
    assert expected.shape[1] < batch["input_ids"].shape[1] + NUM_NEW
    assert all(torch.equal(one, other) for one, other in zip(ours_asked.seen, theirs_asked.seen, strict=True))


def test_max_time_ends_the_text(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    class Slowly(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            time.sleep(0.01)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    batch = make_batch(ONE)
    done = ours(target, batch, max_time=0.05, stopping_criteria=[Slowly()], assistant_model=draft, eos_token_id=None)
    assert 7 < done.shape[1] < 7 + NUM_NEW


def test_stop_strings_work_as_a_criterion(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    tokenizer = make_tokenizer()
    batch = make_batch(ONE)
    text = tokenizer.decode(theirs(target, batch)[0, 7:])
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [text[10:13]])])
    expected = theirs(target, batch, stopping_criteria=criteria)
    assert torch.equal(ours(target, batch, stopping_criteria=criteria, assistant_model=draft), expected)
    assert expected.shape[1] < 7 + NUM_NEW


class Recorder(BaseStreamer):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        assert not self.has_ended
        self.given.append(value)

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=["one", "ragged"])
def test_a_streamer_gets_the_prompt_and_then_token_by_token(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, lengths: tuple[int, ...]
) -> None:
    batch, options = make_batch(lengths), OPTIONS["likely ends"]
    their_streamer, our_streamer = Recorder(), Recorder()
    theirs(target, batch, streamer=their_streamer, **options)
    ours(target, batch, streamer=our_streamer, assistant_model=draft, **options)
    assert our_streamer.has_ended
    pairs = zip(our_streamer.given, their_streamer.given, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_text_streamer_prints_one_text_and_refuses_a_batch(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    done = ours(target, make_batch(ONE), streamer=TextStreamer(tokenizer, skip_prompt=True), assistant_model=draft)
    assert capsys.readouterr().out.strip("\n") == tokenizer.decode(done[0, 7:])
    with pytest.raises(ValueError, match="batch size 1"):
        ours(target, make_batch(RAGGED), streamer=TextStreamer(tokenizer))


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"num_beams": 2, "do_sample": True}, "beam sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"past_key_values": DynamicCache()}, "a cache of one's own"),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_done_is_refused_by_name(target: LlamaForCausalLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ours(target, make_batch(ONE), **options)


def test_embeddings_instead_of_tokens_are_refused(target: LlamaForCausalLM) -> None:
    with pytest.raises(SettingsError, match="inputs_embeds"):
        target.generate(inputs_embeds=torch.zeros(1, 3, 32), custom_generate=card.hf.generate, max_new_tokens=3)


def test_positions_of_ones_own_are_refused(target: LlamaForCausalLM) -> None:
    with pytest.raises(SettingsError, match="position_ids"):
        ours(target, {**make_batch(ONE), "position_ids": torch.arange(5, 12)[None]})


def test_padding_on_the_right_is_refused(target: LlamaForCausalLM) -> None:
    batch = make_batch(RAGGED)
    flipped = {name: tensor.flip(1) for name, tensor in batch.items()}
    with pytest.raises(PromptError, match="left"):
        ours(target, flipped)


def test_an_empty_row_is_refused(target: LlamaForCausalLM) -> None:
    batch = make_batch(RAGGED)
    batch["attention_mask"][1] = 0
    with pytest.raises(PromptError, match="empty"):
        ours(target, batch)


def test_a_prompt_that_fills_the_context_is_refused(target: LlamaForCausalLM) -> None:
    with pytest.raises(PromptError, match=str(MAX_POSITIONS)):
        ours(target, make_batch((MAX_POSITIONS,)))


def test_an_assistant_of_another_vocabulary_is_refused(target: LlamaForCausalLM) -> None:
    with pytest.raises(VocabularyError, match="300"):
        ours(target, make_batch(ONE), assistant_model=make_model(300))


def test_models_that_are_not_decoders_are_refused() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(ModelError, match="encoder-decoder"):
        t5.generate(torch.ones(1, 3, dtype=torch.long), custom_generate=card.hf.generate, max_new_tokens=3)
    bert = BertLMHeadModel(
        BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    with pytest.raises(ModelError):
        bert.generate(torch.ones(1, 3, dtype=torch.long), custom_generate=card.hf.generate, max_new_tokens=3)


def test_a_text_that_fills_the_context_ends_there() -> None:
    model = make_model(VOCAB_SIZE)
    model.config.max_position_embeddings = 24
    batch = make_batch((4, 10))
    done = ours(model, batch, max_new_tokens=30, eos_token_id=None, pad_token_id=3, assistant_model=model)
    assert done.shape == (2, 10 + 20)  # the shorter prompt has room for 20 tokens, the longer for 14
    expected = theirs(make_model(VOCAB_SIZE), batch, max_new_tokens=20, eos_token_id=None, pad_token_id=3)
    assert torch.equal(done[0], expected[0])
    assert torch.equal(done[1, :24], expected[1, :24])


# ---- between calls --------------------------------------------------------------------------------------------------


def test_a_second_call_reuses_the_engine_and_the_prompt(draft: LlamaForCausalLM) -> None:
    model, batch = make_model(VOCAB_SIZE), make_batch((40,))
    first = ours(model, batch, assistant_model=draft)
    session = sessions_of(card.inside.hf.session)[model]
    again = ours(model, batch, assistant_model=draft, return_dict_in_generate=True)
    assert sessions_of(card.inside.hf.session)[model] is session
    assert again.stats[0].reused_prompt_tokens == 39
    assert torch.equal(again.sequences, first)


@pytest.mark.parametrize("assistant", ["drafted", "plain"])
def test_changed_weights_are_noticed(assistant: str) -> None:
    model, batch = make_model(VOCAB_SIZE), make_batch(RAGGED)
    draft = make_model(VOCAB_SIZE, noise=0.1) if assistant == "drafted" else None
    ours(model, batch, assistant_model=draft)
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight.mul_(-1.0)  # as an optimizer would
    assert torch.equal(ours(model, batch, assistant_model=draft), theirs(model, batch))
    weight.data.neg_()  # counts no version
    assert torch.equal(ours(model, batch, assistant_model=draft), theirs(model, batch))
    model.lm_head.weight.data[:, 3] += 0.5
    assert torch.equal(ours(model, batch, assistant_model=draft), theirs(model, batch))
    model.load_state_dict(make_model(VOCAB_SIZE, noise=0.5).state_dict())
    assert torch.equal(ours(model, batch, assistant_model=draft), theirs(model, batch))


def test_hooks_are_obeyed(draft: LlamaForCausalLM) -> None:
    model, batch = make_model(VOCAB_SIZE), make_batch(RAGGED)
    plain = ours(model, batch, assistant_model=draft)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 0.5)
    hooked = ours(model, batch, assistant_model=draft)
    assert torch.equal(hooked, theirs(model, batch))
    assert not torch.equal(hooked, plain)
    handle.remove()
    assert torch.equal(ours(model, batch, assistant_model=draft), plain)


def test_another_draft_takes_the_place_of_the_first(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    batch, expected = make_batch(RAGGED), theirs(target, make_batch(RAGGED))
    for assistant in (draft, make_model(VOCAB_SIZE, noise=1.0), None, draft):
        assert torch.equal(ours(target, batch, assistant_model=assistant), expected)


def test_larger_batches_and_longer_texts_find_room(draft: LlamaForCausalLM) -> None:
    model = make_model(VOCAB_SIZE)
    for lengths, num_new in ((ONE, 4), (RAGGED * 5, 6), ((300,), 8), (ONE, 4)):
        batch = make_batch(lengths)
        expected = theirs(model, batch, max_new_tokens=num_new)
        assert torch.equal(ours(model, batch, max_new_tokens=num_new, assistant_model=draft), expected)


def test_modes_and_attention_are_left_as_they_were(draft: LlamaForCausalLM) -> None:
    model = make_model(VOCAB_SIZE).train()
    model.lm_head.training = False
    before = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ours(model, make_batch(ONE), assistant_model=draft)
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == make_model(VOCAB_SIZE).config._attn_implementation
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_failing_criterion_ends_the_call_and_the_next_one_works(
    target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    class Broken(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            raise KeyError("broken")

    batch = make_batch(RAGGED)
    with pytest.raises(KeyError, match="broken"):
        ours(target, batch, stopping_criteria=[Broken()], assistant_model=draft)
    assert torch.equal(ours(target, batch, assistant_model=draft), theirs(target, batch))


def test_what_is_kept_goes_with_the_model_and_is_bounded(draft: LlamaForCausalLM) -> None:
    model = make_model(VOCAB_SIZE)
    ours(model, make_batch(ONE), assistant_model=draft)
    session = weakref.ref(sessions_of(card.inside.hf.session)[model])
    del model
    gc.collect()
    assert session() is None
    models = [make_model(VOCAB_SIZE) for _ in range(6)]
    for one in models:
        ours(one, make_batch(ONE), max_new_tokens=2)
    kept = [one in sessions_of(card.inside.hf.session) for one in models]
    assert kept[-1]
    assert sum(kept) <= 4
    for one in models:
        card.hf.release(one)
        card.hf.release(one)  # twice does no harm
    assert not any(one in sessions_of(card.inside.hf.session) for one in models)


def test_a_model_without_room_for_a_packed_copy_runs_through_its_modules_and_writes_the_same(
    monkeypatch: pytest.MonkeyPatch, draft: LlamaForCausalLM
) -> None:
    model, batch = make_model(VOCAB_SIZE), make_batch(RAGGED)
    monkeypatch.setattr(card.inside.hf.session, "_MOST_PACKED", 0)
    assert torch.equal(ours(model, batch, assistant_model=draft), theirs(model, batch))
    assert model not in sessions_of(card.inside.hf.session), "modules hold the model's attention: it is given back"


def test_a_forked_child_is_told_where_to_load_its_models(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(ONE)
    wanted = ours(target, batch, assistant_model=draft)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Home, "is_here", False)
        for one in (target, make_model(VOCAB_SIZE)):
            with pytest.raises(WorkerError, match=r"a fork copies none of the threads .* multiprocessing's spawn"):
                ours(one, batch)
    assert torch.equal(ours(target, batch, assistant_model=draft), wanted)
