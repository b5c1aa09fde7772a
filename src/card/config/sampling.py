"""Parameters of a request: how logits become tokens, and when the text ends."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from card.config.fields import (
    Bounds,
    InRequest,
    Listed,
    Replaceable,
    check,
    declared,
    described,
    listed,
    make_plain,
    plain,
    require,
    setting,
)
from card.errors import SettingsError, named

GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "gbnf"]

MAX_CHOICES = 128  # answers to one prompt
MAX_LOGPROBS = 20  # most alternatives that a request may list for each token
_LEAST, _MOST = 1e-6, 1e30  # with much smaller or larger factors float32 rounds results to 0 or infinity
DOORS = ("completions", "responses", "anthropic", "ollama")  # of the server; chats are completions
EVERYWHERE, IN_COMPLETIONS = InRequest(doors=DOORS), InRequest(doors=("completions",))
NEUTRAL: Mapping[str, Any] = MappingProxyType(  # values that neither a request nor its model states
    {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A required form of a text from its first new token to its end.

    Attributes:
        kind: json_object, json_schema, regex, lark or gbnf.
        source: JSON of a schema, a regular expression of the whole text, or a grammar; empty for json_object.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        check(self, owner=" of a grammar")
        require(isinstance(self.source, str), "source of a grammar", "a string", self.source)
        has_source = bool(self.source.strip())
        if self.kind == "json_object":
            require(not has_source, "source of a grammar", "empty for json_object: any object will do", self.source)
        else:
            require(has_source, "source of a grammar", f"a {self.kind} that is not empty", self.source)


class LogitBias(Mapping[int, float]):
    """Amounts added to the logits of some tokens: an immutable, hashable mapping."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = dict(values)

    def __getitem__(self, token_id: int) -> float:
        return self._values[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Replaceable):
    """Rule by which the target's logits become tokens, and when a request ends. Same names as in vLLM.

    A None that is named in `NEUTRAL` takes the model's generation config, else the neutral value: greedy.
    """

    SECTION: ClassVar[str] = "Text"

    max_tokens: int | None = setting(
        None, "Most new tokens.", least=1, shown="context", is_common=True
    )  # with the end token
    temperature: float | None = setting(
        None,
        "0 takes the most likely token.",
        least=0,
        below=math.inf,
        shown="by model",
        is_common=True,
        in_request=EVERYWHERE,
    )
    top_k: int | None = setting(
        None,
        "Keep the k likeliest tokens; 0 keeps all.",
        least=0,
        allowed="0 (keep all) or more",
        in_request=InRequest(doors=DOORS, bounds=Bounds(least=-1), words="So does -1."),
    )
    top_p: float | None = setting(
        None,
        "Keep the likeliest tokens up to this mass.",
        above=0,
        most=1,
        is_common=True,
        in_request=InRequest(doors=DOORS, bounds=Bounds(least=0, most=1), words="0 keeps the likeliest alone."),
    )
    min_p: float | None = setting(
        None, "Drop tokens below this share of the best one.", least=0, below=1, in_request=EVERYWHERE
    )
    seed: int | None = setting(
        None,
        "Same seed, same text.",
        least=0,
        below=2**63,
        allowed="an integer from 0 to 2**63 - 1",
        shown="drawn",
        is_common=True,
        in_request=InRequest(doors=DOORS[:-1], bounds=Bounds(least=-(2**63), below=2**63)),
    )
    stop: Listed[str] = listed(
        (), "End before this string.", least=1, allowed="a list of strings that are not empty", is_common=True
    )
    stop_token_ids: Listed[int] = listed(
        (),
        "End tokens besides the model's own.",
        least=0,
        allowed="a list of ids of 0 or more",
        is_option=False,
    )
    min_tokens: int = setting(0, "Fewest new tokens.", least=0, in_request=IN_COMPLETIONS)
    ignore_eos: bool = setting(False, "Go on past the model's end tokens.", in_request=IN_COMPLETIONS)
    presence_penalty: float = setting(
        0.0,
        "Subtract from tokens that the answer has, -2 to 2.",
        least=-2,
        most=2,
        in_request=InRequest(doors=("completions", "ollama")),
    )
    frequency_penalty: float = setting(
        0.0, "The same for each occurrence.", least=-2, most=2, in_request=InRequest(doors=("completions", "ollama"))
    )
    repetition_penalty: float | None = setting(
        None,
        "Above 1: fewer repetitions.",
        above=0,
        below=math.inf,
        allowed="above 0, 1 changes nothing",
        in_request=InRequest(
            doors=("completions", "ollama"),
            names={"ollama": "repeat_penalty"},
            second_names={"completions": "repeat_penalty"},  # of llama.cpp's clients
        ),
    )
    logit_bias: Mapping[int, float] = setting(LogitBias({}), "Added to the logits of tokens, before any penalty.")
    grammar: Grammar | None = setting(
        None,
        "Form of the text, which ends where nothing can follow.",
        allowed="a card.Grammar or None",
        is_option=False,
    )
    n: int = setting(1, "Answers to each prompt; one for a stream.", least=1, most=MAX_CHOICES, is_option=False)
    logprobs: int | None = setting(
        None,
        "Report each token's log-probability, and those of so many of the likeliest ones.",
        least=0,
        most=MAX_LOGPROBS,
        allowed=f"None or a number of alternatives from 0 to {MAX_LOGPROBS}",
        is_option=False,
    )
    speculates: bool = setting(True, "Whether candidates are verified at all.")
    shows_tree: bool = setting(
        False, "Report the candidates that lay beside each token.", is_option=False, in_request=IN_COMPLETIONS
    )

    def __post_init__(self) -> None:
        make_plain(self)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        check(self, by=SamplingParams)
        most = math.inf if self.max_tokens is None else self.max_tokens
        allowed = "0 or more" if self.max_tokens is None else f"from 0 to {named('max_tokens')} ({most})"
        require(0 <= self.min_tokens <= most, "min_tokens", allowed, self.min_tokens)
        if self.grammar is not None and self.ignore_eos:
            raise SettingsError(
                f"{named('ignore_eos')} contradicts a required form of the text, whose end ends it; leave one out"
            )

    def resolved(self, defaults: Mapping[str, Any] = MappingProxyType({}), *, room: int = 2**31) -> ResolvedParams:
        """Return complete parameters: a None takes the value of ``defaults``, else that of `NEUTRAL`.

        A seed is drawn if there is none, and factors below a millionth become one, and those above 1e30 that.

        Args:
            defaults: from `card.models.facts.sampling_defaults`.
            room: tokens left in the context, the default of max_tokens.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        open_ones = {"max_tokens": room, **NEUTRAL, **defaults}
        values |= {name: value for name, value in open_ones.items() if values[name] is None}
        for name in ("temperature", "top_p", "repetition_penalty"):
            if values[name] > 0.0:
                values[name] = min(max(values[name], _LEAST), _MOST)
        if self.seed is None:
            values["seed"] = secrets.randbelow(2**31)
        return ResolvedParams(**values)


SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n{described(declared(SamplingParams))}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedParams(SamplingParams):
    """Complete sampling parameters, which decide about tokens. See `SamplingParams.resolved`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    max_tokens: int


def derived_seed(seed: int, choice_idx: int) -> int:
    """Return the seed of one of several choices: the first has the request's own, the others derived ones."""
    if choice_idx == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice_idx}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def choices_of(params: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each answer to a prompt: the first has the seed that was given, the others its own."""
    if not isinstance(params, SamplingParams) or params.n == 1:
        return [params]  # the host refuses anything else
    seeds = [None if params.seed is None else derived_seed(params.seed, idx) for idx in range(params.n)]
    return [params.replace(n=1, seed=seed) for seed in seeds]


def _checked_bias(given: object) -> LogitBias:
    """Return an immutable bias. Raises: SettingsError."""
    given = {} if given is None else given
    require(isinstance(given, Mapping), "logit_bias", "a mapping of token ids to numbers", given)
    assert isinstance(given, Mapping)
    biases = {plain(token_id): plain(value) for token_id, value in given.items()}
    for token_id, value in biases.items():
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
        require(is_id, f"a token of {named('logit_bias')}", "an id of 0 or more", token_id)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and -100.0 <= value <= 100.0
        require(is_number, f"the {named('logit_bias')} of token {token_id}", "a number from -100 to 100", value)
    return LogitBias({int(token_id): float(value) for token_id, value in sorted(biases.items())})


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """The part of the sampling parameters that decides which token follows given logits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

    @classmethod
    def of(cls, params: ResolvedParams) -> SamplingRule:
        """Return the rule of a request's parameters. Raises: SettingsError if they are not complete."""
        require(isinstance(params, ResolvedParams), "params", "resolved: call resolved() first", params)
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken, without noise."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingRule:
    """The part of the sampling parameters that depends on the text before a position."""

    num_prompt_tokens: int
    end_ids: tuple[int, ...] = ()  # tokens that end the text, held back until there are min_tokens new ones
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    @classmethod
    def of(cls, params: ResolvedParams, *, num_prompt_tokens: int, end_ids: frozenset[int]) -> ShapingRule | None:
        """Return the rule of these parameters; None if they leave the logits unchanged."""
        rule = cls(
            num_prompt_tokens=num_prompt_tokens,
            end_ids=tuple(sorted(end_ids)) if params.min_tokens else (),
            min_tokens=params.min_tokens if end_ids else 0,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=tuple(params.logit_bias.items()),
            grammar=params.grammar,
        )
        return None if rule == cls(num_prompt_tokens=num_prompt_tokens) else rule

    @property
    def has_penalties(self) -> bool:
        """True if it depends on the tokens in the text."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
