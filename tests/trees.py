"""Candidate trees for tests, and all that can be seen of one."""

from __future__ import annotations

import math
from typing import Any

from card.drafting.draft_tree import DraftTree
from card.tree.candidates import CandidateCache
from card.tree.nodes import NewNodes, Nodes

NO_FLOOR = -1e9
Row = list[tuple[int, float]]  # (token, logprob) of each child


def ids_of(cache: CandidateCache, answer: Nodes) -> list[int]:
    """Return the ids of an answer's nodes."""
    ids: list[int] = []
    for parent, token in zip(answer.parents, answer.tokens, strict=True):
        below = cache.children(ids[parent] if parent >= 0 else cache.root_id)
        ids.extend(node for node in below if cache.token(node) == token)
    return ids


def make_cache(*, max_nodes: int = 1000, lead: int = 10) -> DraftTree:
    return DraftTree(max_nodes=max_nodes, lead=lead)


def grow(cache: DraftTree, rows: dict[int, Row], *, width: int = 100, floor: float = NO_FLOOR) -> NewNodes:
    tokens = [[token for token, _ in row] for row in rows.values()]
    logprobs = [[logprob for _, logprob in row] for row in rows.values()]
    return cache.grow(list(rows), tokens, logprobs, width=width, min_path_logprob=floor)


def nodes(*entries: tuple[int, int, int, float]) -> NewNodes:
    """Return a message of (id, parent, token, logprob)."""
    return NewNodes(*(tuple(column) for column in zip(*entries, strict=True))) if entries else NewNodes.none()


def two_layers() -> DraftTree:
    """Return root 0 with nodes 1 (token 10) and 2 (token 20); below 1: 3 (11), 4 (12); below 2: 5 (21)."""
    cache = make_cache()
    grow(cache, {0: [(10, -0.5), (20, -1.0)]})
    grow(cache, {1: [(11, -0.25), (12, -2.0)], 2: [(21, -2.5)]})
    return cache


def state(cache: CandidateCache) -> dict[str, Any]:
    """Return all that can be seen of a cache."""
    alive = [cache.root_id, *cache.alive_ids()]
    return {
        "epoch": cache.epoch,
        "root_id": cache.root_id,
        "pending": cache.pending,
        "depth": cache.depth,
        "num_nodes": cache.num_nodes,
        "snapshot": cache.snapshot(),
        "parents": [cache.parent(i) for i in alive],
        "children": [cache.children(i) for i in alive],
        "depths": [cache.depth_of(i) for i in alive],
        "scores": [cache.path_logprob(i) for i in alive],
        "texts": [cache.path_tokens(i) for i in alive],
        "frontier": cache.frontier(10**6) if isinstance(cache, DraftTree) else None,
        "chain": cache.query(10**6, "chain"),
        "tree": cache.query(10**6, "tree"),
    }


GARBAGE = {  # messages that no drafter can have sent
    "fewer ids": NewNodes((9,), (0, 0), (1, 2), (-1.0, -1.0)),
    "fewer parents": NewNodes((9, 10), (0,), (1, 2), (-1.0, -1.0)),
    "fewer tokens": NewNodes((9, 10), (0, 0), (1,), (-1.0, -1.0)),
    "fewer logprobs": NewNodes((9, 10), (0, 0), (1, 2), (-1.0,)),
    "falling ids": nodes((9, 0, 1, -1.0), (8, 0, 2, -1.0)),
    "equal ids": nodes((9, 0, 1, -1.0), (9, 0, 2, -1.0)),
    "parent equals id": nodes((9, 0, 1, -1.0), (10, 10, 2, -1.0)),
    "parent above id": nodes((9, 0, 1, -1.0), (10, 11, 2, -1.0)),
    "negative parent": nodes((9, 0, 1, -1.0), (10, -1, 2, -1.0)),
    "negative token": nodes((9, 0, 1, -1.0), (10, 0, -2, -1.0)),
    "NaN": nodes((9, 0, 1, -1.0), (10, 0, 2, math.nan)),
    "above zero": nodes((9, 0, 1, -1.0), (10, 0, 2, 2e-6)),
    "minus infinity": nodes((9, 0, 1, -1.0), (10, 0, 2, -math.inf)),
}
