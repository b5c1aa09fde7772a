"""A model that says what a test wants it to say: real weights, in which each token has one that follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from card.api.async_llm import AsyncLLM
from tests.server.running import Running, serving

# The mark of a token that is not the only one with its text; the decoder takes it out.
_MARK = "\u00a7"


@dataclass(frozen=True)
class Scripted:
    """The model; `user` messages choose what it says."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast


def scripted(scripts: Mapping[str, list[str]], template: str, special: tuple[str, ...] = ()) -> Scripted:
    """Return a model that answers a prompt which ends with the name of a script with the pieces of that script.

    Args:
        scripts: pieces by name; each piece is a token.
        template: the chat template; what it writes must end with the name of a script.
        special: pieces that are special tokens; each may occur once in all scripts.
    """
    tokens = ["<unk>", "<eos>", *scripts, *special]
    follows = {}
    for name, pieces in scripts.items():
        last = tokens.index(name)
        for piece in pieces:
            if piece not in special:
                tokens.append(f"{piece}{_MARK}{len(tokens)}{_MARK}")
            here = tokens.index(piece) if piece in special else len(tokens) - 1
            follows[last] = last = here
        follows[last] = 1
    return Scripted(chain_model(len(tokens), follows), _tokenizer(tokens, scripts, special, template))


def _tokenizer(
    tokens: list[str], scripts: Mapping[str, list[str]], special: tuple[str, ...], template: str
) -> PreTrainedTokenizerFast:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex(f"{_MARK}\\d+{_MARK}"), ""), decoders.Fuse()])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    wrapped.add_special_tokens({"additional_special_tokens": list(special)})
    wrapped.chat_template = template
    return wrapped


def chain_model(num_tokens: int, follows: Mapping[int, int], max_model_len: int = 4096) -> LlamaForCausalLM:
    """Return a Llama whose layers add nothing, so that the last token alone decides."""
    size = -(-num_tokens // 8) * 8
    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=max_model_len,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(num_tokens, size))
        model.lm_head.weight.zero_()
        for here, following in follows.items():
            model.lm_head.weight[following, here] = 10.0
    return model


def scripted_bytes(
    scripts: Mapping[str, list[str]], template: str, special: tuple[str, ...] = (), *, max_model_len: int = 4096
) -> Scripted:
    """Return a model as `scripted` does, with a tokenizer of bytes that grammars can be followed with.

    Args:
        scripts: pieces by name; no piece occurs twice.
        special: pieces that are special tokens.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<eos>", *letters]
    core = Tokenizer(models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = list(scripts)
    pieces = [piece for script in scripts.values() for piece in script]
    assert len({*names, *pieces}) == len(names) + len(pieces), "no piece occurs twice"
    added = [AddedToken(one, special=one in special, normalized=False) for one in (*names, *pieces)]
    core.add_tokens(added)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")
    wrapped.add_special_tokens({"additional_special_tokens": list(special)})
    wrapped.chat_template = template
    follows = {}
    for name, script in scripts.items():
        ids = [core.token_to_id(one) for one in (name, *script)]
        follows |= dict(zip(ids, [*ids[1:], 1], strict=True))
    return Scripted(chain_model(len(wrapped), follows, max_model_len), wrapped)


def served(model: Scripted, name: str = "scripted") -> Iterator[Running]:
    """Serve a model that writes what a script says, and end it."""
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla")
    with serving(llm, served_model_names=(name,)) as running:
        yield running
    with ThreadPoolExecutor(max_workers=1) as thread:  # a browser has a loop in this one
        thread.submit(lambda: asyncio.run(llm.shutdown())).result()
