"""Counters of one request, and the figures derived from them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

from card.config import DrafterState
from card.engine.offers import DRAFTER, DRAFTER_BIT, writer_label
from card.tree.nodes import Nodes

READING_RATES = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)  # rows/s: upper bounds of a histogram


@dataclass(slots=True, kw_only=True)
class DrafterHealth:
    """State of the drafter."""

    drafter: DrafterState = "none"
    drafter_reason: str = ""  # why it is not up
    drafter_restarts: int = 0

    @property
    def drafter_state(self) -> str:
        """Its state, with the reason where there is one."""
        return f"{self.drafter}: {self.drafter_reason}" if self.drafter_reason else self.drafter


@dataclass(slots=True, kw_only=True)
class RequestStats(DrafterHealth):
    """Costs and gains of one request. Times are wall-clock seconds."""

    num_prompt_tokens: int = 0
    hidden_prompt_tokens: int = 0  # of these, positions of images, which drafters do not see
    num_new_tokens: int = 0
    queued_s: float = 0.0  # from arrival to admission
    reused_prompt_tokens: int = 0  # their KV rows came from another request
    drafter_reused_tokens: int = 0  # the same in the drafter
    prefill_s: float = 0.0  # from admission to the first token
    wall_s: float = 0.0  # from admission to the last token
    target_passes: int = 0  # verifications, without the prefill pass
    target_busy_s: float = 0.0  # inside the target's forward, prefill left out
    waited_s: float = 0.0  # target waiting for candidates, or for the drafter's turn to end
    verified_tokens: int = 0  # candidates that went through the target
    accepted_tokens: int = 0  # candidates kept
    accepted_per_depth: list[int] = field(default_factory=list)  # [d] candidates kept at depth d + 1
    offered_per_depth: list[int] = field(default_factory=list)  # [d] rounds that offered a candidate at depth d + 1
    verified_by_writer: dict[str, int] = field(default_factory=dict)  # several writers of one candidate: joined by "+"
    accepted_by_writer: dict[str, int] = field(default_factory=dict)
    drafted_chains: int = 0  # verifications, the last one left out, before which the draft model had a chain
    drafted_trees: int = 0  # the same where its candidates branched, whatever was verified of them
    is_exact: bool = True  # the text is that of plain decoding
    lenient_tokens: int = 0  # kept candidates that were not the target's own choice
    hits: int = 0  # rounds whose next token was already in the target's replica
    late_hits: int = 0  # rounds whose next token reached the replica afterwards
    misses: int = 0  # times that the drafter had to restart its tree
    drafter_passes: int = 0
    drafter_layers: int = 0  # of its tree, one a pass or more
    drafter_busy_s: float = 0.0
    drafter_dropped_nodes: int = 0  # drafted nodes that the committed text ruled out
    rolled_back_tokens: int = 0  # of these, nodes on the likeliest path, without side branches
    self_draft_passes: int = 0  # in which the target drafted a token for itself
    draft_kv_bytes: int = 0  # of KV that these passes read
    verify_kv_bytes: int = 0  # KV that the verifications of a self-drafting target read
    declined: str = ""  # why the drafter does not draft for this text; empty: it does
    schedule: str = "off"  # of the last round: beside, turns or off
    schedule_reason: str = "no drafter"
    seed: int = 0

    @classmethod
    def joined(cls, several: Iterable[RequestStats]) -> RequestStats:
        """Return the counters of several requests added up; texts are those of the last one, without a seed."""
        total = cls()
        for one in several:
            for name in (each.name for each in fields(cls)):
                before, value = getattr(total, name), getattr(one, name)
                if isinstance(value, dict):
                    value = {key: before.get(key, 0) + value.get(key, 0) for key in before | value}
                elif isinstance(value, list):
                    value = [a + b for a, b in zip_longest(before, value, fillvalue=0)]
                elif isinstance(value, bool):
                    value = before and value
                elif not isinstance(value, str):
                    value = before + value
                setattr(total, name, value)
        return total

    @property
    def speculation(self) -> str:
        """Schedule of the last round, with the reason."""
        return f"{self.schedule}: {self.schedule_reason}"

    @property
    def decode_s(self) -> float:
        """Wall time after the first token, seconds."""
        return self.wall_s - self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens after the first one, per second of decoding."""
        return (self.num_new_tokens - 1) / self.decode_s if self.decode_s > 0 and self.num_new_tokens > 1 else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens / verifications, in tokens, bonus included."""
        return 1.0 + self.accepted_tokens / self.target_passes if self.target_passes else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified candidates, in [0, 1]."""
        return self.accepted_tokens / self.verified_tokens if self.verified_tokens else 0.0

    @property
    def draft_shape(self) -> str:
        """Shape of the draft model's candidates in most verifications: chain or tree; empty if it had none."""
        if not self.drafted_chains + self.drafted_trees:
            return ""
        return "chain" if self.drafted_chains > self.drafted_trees else "tree"

    @property
    def accepted_shares(self) -> dict[str, float]:
        """Share of each writer in the accepted candidates; together they make 1, or there are none."""
        return {label: count / self.accepted_tokens for label, count in self.accepted_by_writer.items()}

    @property
    def drafted_share(self) -> float:
        """Share of the accepted candidates that the draft model proposed, alone or with other writers, in [0, 1]."""
        return sum(share for label, share in self.accepted_shares.items() if DRAFTER in label.split("+"))

    @property
    def hit_rate(self) -> float:
        """Share of verifications whose next token was a candidate already, late hits included, in [0, 1]."""
        return (self.hits + self.late_hits) / self.target_passes if self.target_passes else 0.0

    @property
    def drafter_layers_per_s(self) -> float:
        """Layers per second of drafting: the ceiling of any method with one drafter, as each brings a token at most."""
        num_layers = max(self.drafter_layers, self.drafter_passes)  # records of older versions lack the former
        return num_layers / self.drafter_busy_s if self.drafter_busy_s > 0 else 0.0

    @property
    def ceiling_share(self) -> float:
        """The drafter's tokens per second that became text, over drafter layers/s, in [0, 1]."""
        ceiling = self.drafter_layers_per_s * self.wall_s
        return self.tokens_of_drafter() / ceiling if ceiling else 0.0

    def tokens_of_drafter(self) -> int:
        """Return how many accepted candidates the drafter proposed, alone or with other writers."""
        of_others = sum(n for label, n in self.accepted_by_writer.items() if DRAFTER not in label.split("+"))
        return self.accepted_tokens - of_others if self.drafter_passes else 0

    @property
    def target_busy_share(self) -> float:
        """Share of the decoding time that the target spent in its forward passes."""
        return self.target_busy_s / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def round_overhead_ms(self) -> float:
        """Milliseconds per verification beyond the forward pass and the allowed waiting."""
        if not self.target_passes:
            return 0.0
        return 1e3 * (self.decode_s - self.target_busy_s - self.waited_s) / self.target_passes

    def count_verification(self, offer: Nodes, accepted: Sequence[int], names: Sequence[str]) -> None:
        """Add one verification of these candidates, of which the ``accepted`` ones were kept; names as in `Offers`."""
        self.target_passes += 1
        if not offer:
            return
        self.verified_tokens += len(offer)
        self.accepted_tokens += len(accepted)
        depths = (max(offer.depths, default=0), len(accepted))
        for counts, depth in zip((self.offered_per_depth, self.accepted_per_depth), depths, strict=True):
            counts.extend([0] * (depth - len(counts)))
            for d in range(depth):
                counts[d] += 1
        writers = offer.writers or (DRAFTER_BIT,) * len(offer)  # the drafter alone marks nothing
        _count(self.verified_by_writer, writers, names)
        _count(self.accepted_by_writer, [writers[idx] for idx in accepted], names)

    def count_drafts(self, num_nodes: int, depth: int) -> None:
        """Add what the draft model had drafted before a verification: so many candidates, so many layers."""
        self.drafted_chains += 0 < num_nodes == depth
        self.drafted_trees += num_nodes > depth

    def as_dict(self) -> dict[str, Any]:
        """Return counters and derived figures as plain values for JSON."""
        derived = [name for name in dir(self) if isinstance(getattr(type(self), name), property)]
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def _count(counts: dict[str, int], writers: Iterable[int], names: Sequence[str]) -> None:
    for bits, count in Counter(writers).items():
        label = writer_label(bits, names)
        counts[label] = counts.get(label, 0) + count


@dataclass(slots=True, kw_only=True)
class EngineStats(DrafterHealth):
    """Gauges and totals of an engine.

    Attributes:
        drafter, drafter_reason, drafter_restarts: its state, why it is not up, and how often it was replaced.
        num_running, num_waiting, num_finished, num_failed: requests.
        rounds, round_s: rounds and their time, seconds.
        target_tokens: rows that went through the target, prompts and candidates included.
        new_tokens: of texts.
        kv_used_bytes, kv_retained_bytes: KV of running requests, and KV that is kept for reuse.
        kv_offloaded_bytes, kv_moved_bytes: KV of paused requests in files, and all written to files since the start.
        num_pauses: times that a request gave its KV rows away.
        kv_open_sequences, kv_retained_sequences: sequences with KV, of running requests and kept.
        prefix_queries, prefix_hits: requests that looked for a kept beginning, and those that found one.
        prefix_reused_tokens, prefix_read_tokens: tokens that came from there, and of these, from `prefix_cache` files.
        drafter_lead: layers of candidates ahead of the text, mean of the requests of the last round.
        tree_nodes: candidates of the drafter's that the target holds for running requests.
        chains_only: whether the target keeps a recurrent state, so that it verifies chains, never trees.
        schedule, schedule_reason: of the last round: beside, turns or off.
        reading_rates, reading_rates_sum: passes that read prompts, by rows/s as in `READING_RATES`; sum of the rates.
        asked_rounds: rounds by what was asked of the drafter, as `card.engine.asked` counts them.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_failed: int = 0
    rounds: int = 0
    round_s: float = 0.0
    target_tokens: int = 0
    new_tokens: int = 0
    kv_used_bytes: int = 0
    kv_retained_bytes: int = 0
    kv_offloaded_bytes: int = 0
    kv_moved_bytes: int = 0
    num_pauses: int = 0
    kv_open_sequences: int = 0
    kv_retained_sequences: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_reused_tokens: int = 0
    prefix_read_tokens: int = 0
    drafter_lead: float = 0.0
    tree_nodes: int = 0
    chains_only: bool = False
    schedule: str = "off"
    schedule_reason: str = ""
    reading_rates: tuple[int, ...] = (0,) * (len(READING_RATES) + 1)
    reading_rates_sum: float = 0.0
    asked_rounds: Mapping[tuple[str, str, str], int] = field(default_factory=dict)

    def count_round(self, target_tokens: int, new_tokens: int, seconds: float) -> None:
        """Add one round."""
        self.rounds += 1
        self.round_s += seconds
        self.target_tokens += target_tokens
        self.new_tokens += new_tokens

    def count_reading(self, num_rows: int, seconds: float) -> None:
        """Add a pass with rows of prompts, and perhaps others."""
        rate = num_rows / seconds
        counts, idx = self.reading_rates, bisect_left(READING_RATES, rate)
        self.reading_rates = (*counts[:idx], counts[idx] + 1, *counts[idx + 1 :])
        self.reading_rates_sum += rate

    def copy(self) -> EngineStats:
        """Return the figures as they are now."""
        return replace(self)
