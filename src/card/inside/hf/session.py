"""Engines that outlive a call of `generate`, so that the next one reuses reordered weights and KV rows."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from card.assembly.build import Models, build
from card.assembly.drafters import link_here
from card.assembly.plan import Facts, Plan, kv_bytes_for, resolve
from card.config import DraftSettings
from card.drafting.draft_writers import make_writer
from card.engine.metrics import RequestStats
from card.engine.request import Request
from card.errors import WorkerError
from card.inside.hf.batch import GenerateBatch
from card.links.link import DrafterLink
from card.machine.home import Home
from card.machine.memory import whole_memory
from card.models.facts import context_limit
from card.models.protocol import sequence_bytes
from card.models.runners import plain_runner

_MOST_SESSIONS = 4  # kept between calls, one per target model
_MOST_RETAINED_BYTES = 256 << 20  # of the target's KV, kept between calls
_MOST_PACKED = 0.25  # share of the memory that a packed copy of a model on a CPU may take
_MOST_SEQUENCES = 64  # rows of a batch that run at once
_ELSEWHERE = (
    "card.hf.generate has run in the parent of this process, and a fork copies none of the threads that it computes "
    "with; load the models in each process that generates, and begin it with multiprocessing's spawn"
)


class _GenerateCall(NamedTuple):
    """The needs of a call of `generate`."""

    model: PreTrainedModel
    draft: PreTrainedModel | None
    settings: DraftSettings
    max_len: int  # of its texts
    num_rows: int  # at once


class Session:
    """An engine over a pair of models, which serves one call after another while the models are unchanged."""

    def __init__(self, call: _GenerateCall) -> None:
        model, draft, settings, max_len, num_rows = call
        self.settings = settings
        self.draft_ref = None if draft is None else weakref.ref(draft)
        self._request_ids = itertools.count()
        asked = _asked(model, draft, settings)
        method = "vanilla" if draft is None else "card"  # nothing is measured, so nothing says if copied text pays
        facts = Facts(
            has_draft=draft is not None,
            is_draft_loaded=True,
            context_limit=context_limit(model),
            longest_text=max_len,
            num_texts=num_rows,
        )
        plan = resolve(asked, facts, method=method)
        # Our own pass would not run hooks of the modules.
        own_pass = None if not _has_hooks(model) and _may_be_packed(model) else False
        target = plain_runner(
            model, max_model_len=plan.max_model_len, max_tree_rows=plan.target_tree_rows, own_pass=own_pass
        )
        self._runners = [target]
        self.link: DrafterLink | None = None
        try:
            if draft is not None:
                self.link = self._make_link(plan, draft, max_len, num_rows)
        except BaseException:
            target.release()
            raise
        self.home = Home()
        self._finalizer = weakref.finalize(self, self.home.closing(self.link.close)) if self.link else None
        self.is_lasting = all(runner.has_own_pass for runner in self._runners)
        self.fingerprints = self._fingerprints(model, draft) if self.is_lasting else ()
        facts = replace(facts, row_bytes=target.row_bytes, state_bytes=sequence_bytes(target, 0))
        self.plan = resolve(asked, facts, method=method)
        self._engine = build(self.plan, Models(target=target, link=self.link)).engine
        if self.link:
            self.link.start()

    def fits(self, call: _GenerateCall) -> bool:
        """Return whether the session can serve this call: same models, same weights, enough room."""
        model, draft, settings, max_len, num_rows = call
        same_draft = (self.draft_ref() if self.draft_ref else None) is draft
        target, *_ = self._runners
        needed = kv_bytes_for(num_rows, sequence_bytes(target, max_len + self.plan.target_tree_rows))
        has_room = self.plan.max_model_len >= max_len and (self.plan.max_kv_bytes or 0) >= needed
        is_up = self.link is None or self.link.status.state == "up"
        return (
            same_draft
            and settings == self.settings
            and has_room
            and is_up
            and not _has_hooks(model)
            and self.fingerprints == self._fingerprints(model, draft)
        )

    def run(self, requests: Sequence[Request], batch: GenerateBatch) -> list[RequestStats]:
        """Run the requests, one for each row, until the batch is complete; return their counters."""
        stats = [RequestStats() for _ in requests]
        row_of: dict[int, int] = {}
        try:
            for row, request in enumerate(requests):
                request_id = next(self._request_ids)
                self._engine.add(self._engine.check(replace(request, request_id=request_id)))
                row_of[request_id] = row
            while batch.is_running:
                for update in self._engine.step():
                    row = row_of[update.request_id]
                    if update.error is not None:
                        raise update.error
                    if update.finish_reason is not None:
                        del row_of[update.request_id]
                    stats[row] = update.stats
                    batch.append(row, update.token_ids, has_ended=update.finish_reason is not None)
                batch.advance()
                for request_id, row in list(row_of.items()):
                    if not batch.is_wanted[row]:
                        self._engine.abort(request_id)
                        del row_of[request_id]
        finally:
            for request_id in row_of:
                self._engine.abort(request_id)
        if self._engine.stats().kv_retained_bytes > _MOST_RETAINED_BYTES:
            self._engine.forget_prefixes()
        return stats

    def close(self) -> None:
        """End the drafter and release the models."""
        if self._finalizer:
            self._finalizer()
        for runner in self._runners:
            runner.release()

    def _make_link(self, plan: Plan, draft: PreTrainedModel, max_len: int, num_rows: int) -> DrafterLink:
        max_model_len = min(plan.max_model_len, context_limit(draft))
        own_pass = None if _may_be_packed(draft) else False
        runner = plain_runner(draft, max_model_len=max_model_len, max_tree_rows=plan.draft_tree_rows, own_pass=own_pass)
        self._runners.append(runner)
        kv_bytes = kv_bytes_for(num_rows, sequence_bytes(runner, max_len + plan.draft_tree_rows))
        (placement,) = plan.placements.values()
        return link_here(placement, make_writer(runner, kv_bytes, takes_turns=placement == "inline"))

    @staticmethod
    def _fingerprints(model: PreTrainedModel, draft: PreTrainedModel | None) -> tuple[object, ...]:
        return tuple(_fingerprint(one) for one in (model, draft) if one is not None)


# A lasting session has no strong reference to its models, so it is freed with the target.
_sessions: weakref.WeakKeyDictionary[PreTrainedModel, Session] = weakref.WeakKeyDictionary()


def release(model: PreTrainedModel) -> None:
    """Free engine, KV rows and reordered weights of a target model. A later call makes them again."""
    session = _sessions.pop(model, None)
    if session is not None and session.home.is_here:  # else they are the parent's
        session.close()


@contextlib.contextmanager
def borrowed_session(
    model: PreTrainedModel, draft: PreTrainedModel | None, settings: DraftSettings, requests: Sequence[Request]
) -> Iterator[Session]:
    """Lend the session of these models, a new one if the kept one does not fit; it has one user at a time.

    Raises: WorkerError in a child that was forked since the session was made.
    """
    max_len = max(len(request.prompt_ids) + request.params.max_tokens for request in requests)
    call = _GenerateCall(model, draft, settings, max_len, num_rows=min(len(requests), _MOST_SEQUENCES))
    if any(not one.home.is_here for one in _sessions.values()):
        raise WorkerError(_ELSEWHERE)
    session = _sessions.pop(model, None)
    if session is not None and not session.fits(call):
        session.close()
        session = None
    if session is None:
        session = Session(call)
    try:
        yield session
    except BaseException:
        session.close()
        raise
    if not session.is_lasting:  # its runners have installed their attention in the models
        session.close()
        return
    while len(_sessions) >= _MOST_SESSIONS:
        release(next(iter(_sessions)))
    _sessions[model] = session


@contextlib.contextmanager
def evaluating(*models: PreTrainedModel | None) -> Iterator[None]:
    """Put the models in evaluation mode inside the block; afterwards restore the mode of each module."""
    training = [module for model in models if model is not None for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _asked(model: PreTrainedModel, draft: PreTrainedModel | None, settings: DraftSettings) -> dict[str, Any]:
    """Return the settings of a session. Nothing is measured, as calls may be short and models may change in between."""
    return {
        **{field.name: getattr(settings, field.name) for field in fields(settings)},
        "device": model.device.type,
        "draft_device": None if draft is None else draft.device.type,
        "max_num_seqs": _MOST_SEQUENCES,
        "policy": "fixed",
    }


def _has_hooks(model: PreTrainedModel) -> bool:
    """Return whether the model's modules have hooks or wrapped forwards."""
    return any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


def _may_be_packed(model: PreTrainedModel) -> bool:
    """Return whether the machine has room for a packed copy of a model, which the exact pass makes."""
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return model.device.type != "cpu" or num_bytes <= _MOST_PACKED * whole_memory()


def _fingerprint(model: PreTrainedModel) -> tuple[object, ...]:
    """Return a fingerprint that changes with any weight; it costs about one reading of the weights."""
    tensors = [tensor.detach() for tensor in itertools.chain(model.parameters(), model.buffers()) if tensor.numel()]
    hashes = [torch.hash_tensor(tensor).reshape(()) for tensor in tensors] if hasattr(torch, "hash_tensor") else []
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]  # pairs of changes can cancel in a hash
    values = [torch.stack(numbers).tolist() for numbers in (hashes, sums) if numbers]
    return (*((tensor.device, tensor.dtype, tensor.shape) for tensor in tensors), *map(tuple, values))
