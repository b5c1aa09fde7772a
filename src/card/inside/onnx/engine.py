"""The wrapper of an engine of ONNX Runtime GenAI: turns and events in, draft tokens out.

The engine identifies its requests, so rows need no tracking. `card.inside.adapters` does all other work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from card.errors import ModelError, SettingsError, in_few_words
from card.inside.adapters import AdapterSettings, ChainProposer, make_proposer
from card.inside.adapters.drafted_text import DraftedText
from card.inside.adapters.figures import Figures
from card.inside.adapters.tracking import Followed
from card.models.loading import load_tokenizer
from card.text.fit import check_tokenizers_fit
from card.text.tokenizer import Tokenizer
from card.text.tokenizer_files import read_tokenizer
from card.tree.nodes import NO_NODES

logger = logging.getLogger(__name__)
SUPPORTED = "0.18"  # the engine's interface is experimental: every minor version may change it
_MOST_REFUSALS = 8  # consecutive ones, after which a turn gets no more drafts: its sampling allows none


class _Turn:
    """A text while the engine continues it."""

    def __init__(self, owner: Any, token_ids: list[int], text: DraftedText) -> None:
        self.owner = weakref.ref(owner)  # the engine drops a request when its owner is freed
        self.token_ids = token_ids
        self.text = text
        self.new_ids: list[int] = []  # those that the proposer lacks
        self.is_over = False
        self.num_refusals = 0

    @property
    def wants_drafts(self) -> bool:
        return not self.is_over and self.num_refusals < _MOST_REFUSALS and self.owner() is not None

    @property
    def is_running(self) -> bool:
        """True also while the proposer lacks its last tokens."""
        return bool(self.new_ids) if self.is_over else self.wants_drafts


class SpeculativeEngine:
    """An engine of ONNX Runtime GenAI 0.18 that verifies CARD's candidates.

    `begin_turn` and `run` replace the methods of `Request` and `Engine`; use those for everything else. Proposals never
    decide the text. A fault in here, or a slow or lost drafter, costs only candidates.
    """

    def __init__(self, engine: Any, model_path: str | Path, **settings: Any) -> None:
        """Wrap an `onnxruntime_genai.Engine` and start the drafter.

        Args:
            engine: of a model with dynamic batching.
            model_path: the model's folder, with ``genai_config.json`` and the tokenizer.
            settings: fields of `AdapterSettings`, such as ``draft`` and ``writers``.
        Raises: SettingsError for settings that cannot be followed, an engine that verifies no drafts, or another
            version of ONNX Runtime GenAI; ModelError if the tokenizer cannot be read; VocabularyError if the draft
            model has another; WorkerError if the drafter does not come up.
        """
        self._flags = genai().EngineEventFlags
        self._engine = engine
        parsed = AdapterSettings.from_mapping(settings)
        if parsed.metrics_port is not None:
            raise SettingsError("metrics_port is for vLLM; here `figures` has the counters")
        most = engine.max_draft_tokens_per_proposal()
        if most == 0:
            raise SettingsError(
                "this engine verifies no draft tokens; build the model with use_paged_attention=true, which needs CUDA "
                "or WebGPU"
            )
        folder = Path(model_path)
        if not (folder / "genai_config.json").is_file():
            raise SettingsError(f"{folder} holds no genai_config.json; give the folder that the engine's model is from")
        model = json.loads((folder / "genai_config.json").read_text("utf-8"))["model"]
        vocab_size = model["vocab_size"]
        tokenizer = _tokenizer(folder)
        if parsed.draft is not None and tokenizer is not None:
            check_tokenizers_fit(tokenizer, load_tokenizer(parsed.draft), vocab_size, vocab_size)
        self._turns: weakref.WeakKeyDictionary[Any, _Turn] = weakref.WeakKeyDictionary()  # the last of each request
        self._rows: list[_Turn] = []
        self._begun: list[_Turn] = []
        self._proposer: ChainProposer | None = make_proposer(
            parsed,
            vocab_size=vocab_size,
            max_model_len=model["context_length"],
            num_speculative_tokens=most,
            tokenizer=tokenizer,
        )
        self._figures = self._proposer.figures

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def figures(self) -> Figures:
        """Counts of what was proposed and accepted so far."""
        return self._figures

    @property
    def proposer(self) -> ChainProposer | None:
        """The proposer; None when closed and after a fault."""
        return self._proposer

    def begin_turn(self, request: Any, tokens: Sequence[int], turn_options: Any = None) -> int:
        """Call ``request.begin_turn(tokens, turn_options)``, and draft for the turn. Returns: its id."""
        turn_id: int = request.begin_turn(np.asarray(tokens, np.int32), turn_options)
        if self._proposer is not None:
            with self._harmless():
                before = self._turns.get(request)
                token_ids = [*(before.token_ids if before else ()), *map(int, tokens)]
                turn = _Turn(request, token_ids, self._proposer.begin(np.array(token_ids, np.int32)))
                self._turns[request] = turn
                self._begun.append(turn)
        return turn_id

    def run(self, buffer: Any) -> Any:
        """Call ``engine.run(buffer)``, and propose draft tokens for the next run. Returns: the events."""
        events = self._engine.run(buffer)
        if self._proposer is not None:
            with self._harmless():
                self._take(events)
                self._propose(self._proposer)
        return events

    def close(self) -> None:
        """End the drafter; the engine continues without candidates. May be called twice."""
        if self._proposer is not None:
            for turn in (*self._rows, *self._begun):
                turn.text.close()
            self._rows, self._begun = [], []
            self._proposer.close()
            self._proposer = None

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Inside the block a fault of ours ends only the candidates."""
        try:
            yield
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]  # without the error's text, which may quote a prompt
            what = f"{type(error).__name__} at {at.filename}:{at.lineno}"
            logger.error("CARD failed with %s and proposes nothing any more; please report it", what)
            self.close()

    def _take(self, events: Any) -> None:
        ends = self._flags.TURN_FINISHED | self._flags.FAILED
        for event in events:
            turn = self._turns.get(event.request) if event.request is not None else None
            if turn is not None and event.flags & self._flags.TOKEN:
                turn.token_ids.append(int(event.token))
                turn.new_ids.append(int(event.token))
            if turn is not None and event.flags & ends:
                turn.is_over = True

    def _propose(self, proposer: ChainProposer) -> None:
        """Pass new tokens to the proposer, also of turns that have ended, and hand over the next chains."""
        begun = [turn.text for turn in self._begun if turn.is_running]
        left = [turn.text for turn in self._rows if not turn.is_running]
        self._rows = [turn for turn in (*self._rows, *self._begun) if turn.is_running]
        self._begun = []
        step = Followed[DraftedText]([turn.text for turn in self._rows], begun=begun, left=left, forgotten=left)
        chains = proposer.propose_for(step, [turn.new_ids for turn in self._rows])
        for turn, chain in zip(self._rows, chains, strict=True):
            if turn.new_ids and turn.wants_drafts:
                _hand_over(turn, chain)
            turn.new_ids = []


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in a folder of the model builder, which has no ``config.json``; None if there is none."""
    try:
        return read_tokenizer(folder)
    except Exception as error:  # a damaged tokenizer raises many types
        raise ModelError(f"the tokenizer of {folder} cannot be read: {in_few_words(error)}") from error


def _hand_over(turn: _Turn, chain: list[int]) -> None:
    """Give a turn its draft tokens; an empty chain withdraws unverified ones."""
    request = turn.owner()
    if request is None:
        return
    try:
        request.set_draft_tokens(np.array(chain, np.int32))
        if chain:  # an empty chain is never refused
            turn.num_refusals = 0
    except RuntimeError:  # its sampling allows none, its session has no room, or it was preempted
        turn.text.chain = NO_NODES
        turn.num_refusals += 1


def genai() -> Any:
    """Return the package `onnxruntime_genai`. Raises: SettingsError if it is missing, or another version."""
    hint = f"install onnxruntime-genai=={SUPPORTED}.* (or onnxruntime-genai-cuda, or another build of it)"
    try:
        import onnxruntime_genai
    except ImportError as error:
        raise SettingsError(f"card.onnx needs ONNX Runtime GenAI; {hint}") from error
    version = str(onnxruntime_genai.__version__)
    if not version.startswith(f"{SUPPORTED}."):
        raise SettingsError(f"card.onnx works with ONNX Runtime GenAI {SUPPORTED}, and this is {version}; {hint}")
    return onnxruntime_genai
