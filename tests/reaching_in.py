"""The one place where several tests look inside an object: what is renamed there is mended here alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # processes that write to a store need not load all this
    from collections.abc import Iterable, MutableMapping
    from types import ModuleType

    from pytest import MonkeyPatch
    from transformers import PreTrainedModel

    from card.api.async_llm import AsyncLLM
    from card.api.llm import LLM
    from card.drafting.drafter import DrafterWorker
    from card.engine.engine import Engine
    from card.engine.policy.rounds import Schedule
    from card.engine.policy.tuned import TunedPolicy
    from card.engine.queue import RequestQueue
    from card.engine.replica import Replica
    from card.engine.sequence import Sequence
    from card.engine.target import TargetWorker
    from card.family.copying.store import StoreWriter
    from card.links.child import DrafterChild
    from card.links.server import DraftServer
    from card.links.zmq_link import Watch, ZmqLink
    from card.models.rows.kv_cache import KVCache
    from card.models.rows.pool import SequencePool
    from card.models.rows.records import RecordLayout
    from card.models.rows.row_tree import RowTree
    from card.models.runner import RowRunner
    from card.text.grammar import BackgroundGrammars
    from card.text.matcher import MatcherState
    from card.text.tokens import Detokenizer
    from card.tree.noise import GumbelNoise


def say_why_not_int8(monkeypatch: MonkeyPatch, reason: str | None) -> None:
    """Let models be loaded and run as on a machine where integer passes are not possible for a reason, or are."""
    for module in ("models.dtypes", "models.own.reasons", "models.runner", "backends.transformers.walking"):
        monkeypatch.setattr(f"card.{module}.why_not_int8", lambda: reason)


def llm_of(row: Any) -> LLM:
    """Return the engine behind a row of a benchmark."""
    return row._llm


def engine_of(llm: LLM) -> Engine:
    """Return the engine of a language model."""
    return llm._engine


def driver_of(llm: AsyncLLM) -> Any:
    """Return the thread that runs the engine."""
    return llm._driver


def matcher_of(state: MatcherState) -> Any:
    """Return the library's own matcher at the beginning of a grammar."""
    return state._start


def finish(grammars: BackgroundGrammars) -> None:
    """Wait until all grammars so far are compiled, or cannot be."""
    grammars._executor.shutdown()


def let_grammar_children_run(monkeypatch: MonkeyPatch, code: str) -> None:
    """Let processes that try grammars run some code before they begin."""
    import card.text.grammar_sandbox

    *python, program = card.text.grammar_sandbox._COMMAND
    monkeypatch.setattr(card.text.grammar_sandbox, "_COMMAND", (*python, program.replace("main()", f"{code}\nmain()")))


def socket_of(end: ZmqLink) -> Any:
    return end._socket


def sockets_of(server: DraftServer) -> list[Any]:
    """Return the sockets of all clients."""
    return [client.connection.messages for client in server._clients]


def workers_of(server: DraftServer) -> list[DrafterWorker]:
    """Return the workers of all sessions."""
    return [client.session.worker for client in server._clients if client.session is not None]


def team_of(runner: Any) -> Any:
    """Return the threads of a runner's own passes."""
    return runner._decoder._team


def interrupt_passes(monkeypatch: MonkeyPatch, runner: Any) -> None:
    """Let each pass of our own be interrupted when its threads have ended."""
    team = team_of(runner)
    run = team.run

    def interrupted(table: object) -> None:
        run(table)
        raise KeyboardInterrupt

    monkeypatch.setattr(team, "run", interrupted)


def space_landmarks(monkeypatch: MonkeyPatch, num_rows: int) -> None:
    """Let runners that are made now have landmarks so many rows apart."""
    from card.models.recording_runner import RecordingRunner

    layout = RecordingRunner._record_layout

    def spaced(self: RecordingRunner, max_tree_rows: int) -> RecordLayout:
        return replace(layout(self, max_tree_rows), block_rows=num_rows)

    monkeypatch.setattr(RecordingRunner, "_record_layout", spaced)


def cache_of(runner: RowRunner) -> KVCache:
    return runner._cache


def kv_of(runner: RowRunner, slot: int, num_rows: int) -> Any:
    """Return a copy of the first keys and values of a sequence, [L, 2, Hkv, num_rows, D]."""
    cache = runner._cache
    (rows,) = cache.layout.runs(cache.layout.make(num_rows * cache.layout.row_elements), num_rows)
    cache[slot].read(0, num_rows, [rows])
    return rows


def set_kv(runner: RowRunner, slot: int, rows: Any) -> None:
    """Write such rows in place of those that are there."""
    runner._cache[slot].write(0, rows.shape[3], [rows])


def open_slots(runner: RowRunner) -> list[int]:
    return list(runner._cache._slots)


def spoil_new_memory(monkeypatch: MonkeyPatch) -> None:
    """Let memory of exact passes' rows be full of NaN when the system gives it."""
    import card.models.rows.kv_layout as module

    make = module.paged_zeros

    def spoilt(num_elements: int, dtype: Any) -> Any:
        room = make(num_elements, dtype)
        room.view("int8")[...] = -1
        return room

    monkeypatch.setattr(module, "paged_zeros", spoilt)


def spoil_free_memory(runner: RowRunner) -> None:
    """Fill what the rows of closed sequences have left with NaN."""
    for buffers in runner._cache._free._by_size.values():
        for buffer in buffers:
            buffer.view("int8")[...] = -1
    layout = runner._cache.layout
    block_bytes = (layout.block_rows or 0) * layout.row_elements * layout.dtype.itemsize
    for slab in runner._cache._blocks._slabs:
        room = slab.buffer.view("int8")[: slab.num_blocks * block_bytes]
        room.reshape(slab.num_blocks, block_bytes)[slab.unused] = -1


def decoder_of(runner: RowRunner) -> Any:
    return runner._decoder


def layer_tables_of(runner: RowRunner) -> Any:
    """Return the tables [layers, entries] that machine code reads."""
    return runner._decoder._layers.tables


def num_ancestors(tree: RowTree) -> int:
    """Return the size of the matrix of who sees whom."""
    return tree._ancestors.size


def retained_slot(pool: SequencePool, num_tokens: int) -> int:
    """Return the slot of a retained text of so many tokens."""
    return next(entry.slot for entry in pool._retained.values() if len(entry.text) == num_tokens)


def running(worker: TargetWorker) -> Iterable[Sequence]:
    return worker._running.values()


def has_lost_a_layer(replica: Replica) -> bool:
    return replica._lost_a_layer


def expected_of_drafter(replica: Replica) -> dict[str, int]:
    """Return the sequence number and the epoch that the next snapshot from the drafter may have."""
    return {"seq": replica._next_seq, "epoch": replica._epochs_seen + 1}


def watch_of(link: ZmqLink) -> Watch:
    return link._watch


def child_pid(spare: DrafterChild) -> int:
    """Return the process id of a drafter that was started ahead of need."""
    assert spare._process is not None
    return spare._process.pid


def sessions_of(module: ModuleType) -> MutableMapping[PreTrainedModel, Any]:
    """Return what is kept between calls of `card.hf.generate`."""
    return module._sessions


def num_kept(noise: GumbelNoise) -> int:
    """Return how many rows of noise are kept."""
    return len(noise._rows)


def num_pending_tokens(detokenizer: Detokenizer) -> int:
    return len(detokenizer._window)


def force_schedule(policy: TunedPolicy, schedule: Schedule) -> None:
    policy._modes.schedule = schedule
    policy._follow()


def flush(writer: StoreWriter) -> None:
    """Wait until all texts so far are stored and indexed, or cannot be."""
    writer._thread.submit(bool).result(60)


def queue_of(engine: Engine) -> RequestQueue:
    """Return who waits, runs and is paused in an engine."""
    return engine._queue


def pool_of(engine: Engine) -> SequencePool:
    """Return the KV memory of an engine's target."""
    return engine._worker.pool


def listen(engine: Engine) -> None:
    """Let an engine hear what its drafter has said and answer it, until both are silent."""
    for _ in range(4):
        engine._drafter.listen()


def worker_of(engine: Engine) -> TargetWorker:
    """Return the worker that runs an engine's target."""
    return engine._worker


def policy_of(engine: Engine) -> Any:
    """Return the policy that decides an engine's rounds."""
    return engine._policy


def fill_buffers(runner: RowRunner) -> None:
    """Fill with NaN what passes compute in, but not what machine code only reads."""
    decoder: Any = runner._decoder
    for name, part in decoder._buffers.parts.items():
        if name not in ("norm", "input_norm", "token_inputs"):
            part.view("int8")[...] = -1


def buffer_bytes_of(runner: RowRunner) -> dict[str, int]:
    """Return the sizes of the buffers of a runner's exact passes, by their names in the table of a pass."""
    decoder: Any = runner._decoder
    return {name: int(part.nbytes) for name, part in decoder._buffers.parts.items()}
