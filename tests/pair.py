"""A tiny random pair with a byte-level tokenizer on disk: real loading, real processes, milliseconds a pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from card.text.given_tokenizer import as_tokenizer
from card.text.tokenizer import Tokenizer as OwnTokenizer
from tests.tiny import tiny_llama

MAX_POSITIONS = 4096
END_TOKENS = ("<|end|>", "<|turn|>")  # ids 0 and 1, both in the model's config
_VOCAB_SIZE = 320  # 256 bytes, the end tokens and merges, so that tokens hold several characters
_FOREIGN_VOCAB_SIZE = 270
_CORPUS = ["the cat sat on the mat and the other cat sat there, too", "one two three four five six seven"] * 8
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Folders of a target, of a draft that agrees with it now and then, and of models that cannot be used."""

    target: str
    draft: str
    foreign_draft: str  # of another tokenizer
    not_a_model: str
    missing: str


def make_tokenizer(vocab_size: int = _VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer with a chat template; its ids are dense."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(END_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_TOKENS[0],
        additional_special_tokens=[END_TOKENS[1]],
        chat_template=_CHAT_TEMPLATE,
    )


def own_tokenizer(vocab_size: int = _VOCAB_SIZE) -> OwnTokenizer:
    """Return that of `make_tokenizer` as one of ours."""
    return as_tokenizer(make_tokenizer(vocab_size))


def make_model(vocab_size: int, *, noise: float = 0.0) -> LlamaForCausalLM:
    """Return the same random model each time, its weights changed by ``noise`` times their own spread."""
    return tiny_llama(
        vocab_size,
        seed=3,
        noise=noise,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=[0, 1],
    )


def save_pair(folder: Path) -> Pair:
    """Write the models and their tokenizers below ``folder``."""
    tokenizer = make_tokenizer()
    for name, noise in (("target", 0.0), ("draft", 0.1)):
        make_model(len(tokenizer), noise=noise).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    foreign = make_tokenizer(_FOREIGN_VOCAB_SIZE)
    make_model(len(foreign)).save_pretrained(folder / "foreign")
    foreign.save_pretrained(folder / "foreign")
    (folder / "not_a_model").mkdir()
    return Pair(
        target=str(folder / "target"),
        draft=str(folder / "draft"),
        foreign_draft=str(folder / "foreign"),
        not_a_model=str(folder / "not_a_model"),
        missing=str(folder / "missing"),
    )
