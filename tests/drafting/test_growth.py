"""The rules of growth: each against a slow model of what it says, then what is special about each."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.growth import RULES, num_branches
from card.drafting.messages import DraftSpec
from card.tree.candidates import CandidateCache
from card.tree.logits import log_softmax, softmax
from card.tree.logits import top as best_of
from card.tree.nodes import NewNodes
from tests.drafts import assert_rows_fit_the_tree, assert_scores_are_those_of_the_model, draft_spec
from tests.examples import settings
from tests.toy import TableModel

TEXT = [3, 1, 4, 1, 5]
V = 12
NOT_LAYER = sorted(set(RULES) - {"layer", "phrases"})  # phrases grow by the rule of layers
Path = tuple[int, ...]  # tokens below the root


def toy(seed: int = 0, *, spread: float = 1.5, **settings: int) -> TableModel:
    return TableModel(seed, V, 3, spread=spread, **{"num_tree_rows": 1024, **settings})


def opened(growth: str, model: TableModel | None = None, **changes: Any) -> tuple[BeamWriter, BeamSequence]:
    writer = BeamWriter(model or toy())
    return writer, writer.open(TEXT, draft_spec(growth=growth, **{"lead": 12, "branch": 6} | changes), epoch=0)


def grow(writer: BeamWriter, beam: BeamSequence, *, num_passes: int = 1) -> list[Path]:
    """Make passes as long as there is something to do; return the paths of the nodes of the last one."""
    made = NewNodes.none()
    for _ in range(num_passes):
        if beam.frontier():
            (result,) = writer.step([(beam, beam.num_tokens_to_run())])
            assert isinstance(result, NewNodes)
            made = result
    return [path_of(beam, node) for node in made.ids]


def grow_all(writer: BeamWriter, beam: BeamSequence) -> int:
    """Make passes until there is nothing to do; return how many."""
    num_passes = 0
    while beam.frontier():
        grow(writer, beam)
        num_passes += 1
        assert num_passes < 500, "it never ends"
    return num_passes


def path_of(beam: BeamSequence, node: int) -> Path:
    return tuple(beam.cache.path_tokens(node))


def paths(beam: BeamSequence) -> set[Path]:
    return {path_of(beam, node) for node in beam.cache.alive_ids()}


def top(model: TableModel, text: list[int], count: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens after a text with their log-probabilities, best first."""
    tokens, logprobs = best_of(log_softmax(model.logits_after(text)[None]), count)
    return list(zip(tokens[0].tolist(), logprobs[0].tolist(), strict=True))


def likeliest(model: TableModel, text: list[int], length: int) -> Path:
    """Return the next tokens of greedy decoding."""
    tokens: list[int] = []
    for _ in range(length):
        tokens.append(top(model, text + tokens, 1)[0][0])
    return tuple(tokens)


# ---- each rule against a slow model ---------------------------------------------------------------------------------


class SlowTree:
    """The tree as a set of paths and, for each path that was run, what the draft model said: all is worked out anew."""

    def __init__(self, model: TableModel, spec: DraftSpec, text: list[int]) -> None:
        self.model, self.shape, self.max_len, self.text = model, spec.shape, spec.max_len, list(text)
        self.num_dropped = self.num_rolled_back = 0
        self.nodes: set[Path] = set()
        self.told: dict[Path, list[tuple[int, float]]] = {}

    @property
    def num_layers(self) -> int:
        limit = min(self.max_len, self.model.max_model_len)
        return min(self.shape.lead, limit - len(self.text))

    def score(self, path: Path) -> float:
        return sum(
            math.log(softmax(self.model.logits_after([*self.text, *path[:i]]))[token]) for i, token in enumerate(path)
        )

    def step(self) -> None:
        for path in self.frontier():
            self.told[path] = top(self.model, [*self.text, *path], self.shape.branch)
        self.settle()

    def commit(self, tokens: Path) -> bool:
        matched = 0
        while matched < len(tokens) and tokens[: matched + 1] in self.nodes:
            matched += 1
        before = len(self.nodes) - matched
        num_in_vain = sum(path != tokens[: len(path)] for path in self.likeliest_path() if len(path) <= len(tokens))
        if num_in_vain:
            num_in_vain += sum(len(path) > len(tokens) for path in self.likeliest_path())
        left = tokens[matched:]
        is_known = len(left) == 1 and left[0] in [token for token, _ in self.told.get(tokens[:matched], [])]
        survives = not left
        self.nodes = {path[matched:] for path in self.nodes if survives and path[:matched] == tokens} - {()}
        self.told = {path[matched:]: told for path, told in self.told.items() if survives and path[:matched] == tokens}
        self.num_dropped += before - len(self.nodes)
        self.num_rolled_back += num_in_vain
        self.text += tokens
        self.settle()
        return survives or is_known

    def settle(self) -> None:
        """Add what the rule wants of what is known until it wants nothing more."""
        while new := {path for path in self.wanted() if self.may_be(path)} - self.nodes:
            self.nodes |= new

    def may_be(self, path: Path) -> bool:
        return len(path) <= self.num_layers and self.score(path) >= self.shape.min_path_logprob

    def wanted(self) -> set[Path]:
        return getattr(self, "wanted_" + self.shape.growth.replace("-", "_"))()  # type: ignore[no-any-return]

    def frontier(self) -> list[Path]:
        ends = getattr(self, "ends_" + self.shape.growth.replace("-", "_"))()
        ends = [path for path in ends if len(path) < self.num_layers and path not in self.told]
        return sorted(ends, key=self.score, reverse=True)

    def likeliest_path(self) -> list[Path]:
        """Return the nodes from the root down that are the likeliest child of the one before."""
        found: list[Path] = []
        path: Path = ()
        while children := [child for child in self.nodes if child[:-1] == path]:
            path = max(children, key=self.score)
            found.append(path)
        return found

    def below(self, path: Path) -> list[Path]:
        """Return the children of a path that was run, nodes or not, best first."""
        return [(*path, token) for token, _ in self.told.get(path, [])]

    def roll(self, path: Path, length: int) -> list[Path]:
        """Return the path and what follows it by likeliest tokens, up to ``length`` more."""
        found = [path]
        while len(found) <= length and self.below(found[-1]) and self.below(found[-1])[0] in self.nodes:
            found.append(self.below(found[-1])[0])
        return found

    # best-first: all children of what was run; the best ends of all

    def wanted_best_first(self) -> set[Path]:
        return {child for path in self.told for child in self.below(path)}

    def ends_best_first(self) -> list[Path]:
        ends = [path for path in self.nodes | {()} if path not in self.told and len(path) < self.num_layers]
        return sorted(ends, key=self.score, reverse=True)[: self.shape.beam_width]

    # branch: a trunk to the first unsure position, then rolled branches

    def trunk_and_heads(self) -> tuple[Path, list[Path]]:
        trunk: Path = ()
        while trunk in self.told and len(trunk) < self.num_layers:
            prob = math.exp(self.told[trunk][0][1])
            if self.shape.branch_below == 1.0 or prob < self.shape.branch_below:
                count = min(self.shape.beam_width, max(1 + (prob < 1), int(self.shape.beam_width * (1 - prob))))
                return trunk, self.below(trunk)[:count]
            if self.below(trunk)[0] not in self.nodes:
                break
            trunk = self.below(trunk)[0]
        return trunk, []

    def wanted_branch(self) -> set[Path]:
        trunk, heads = self.trunk_and_heads()
        if not heads:
            return {(*trunk, token) for token, _ in self.told.get(trunk, [])[:1]}
        rolled = [self.roll(head, self.shape.num_speculative_tokens) for head in heads if head in self.nodes]
        open_ends = [path[-1] for path in rolled if len(path) <= self.shape.num_speculative_tokens]
        return {*heads, *(child for end in open_ends for child in self.below(end)[:1])}

    def ends_branch(self) -> list[Path]:
        trunk, heads = self.trunk_and_heads()
        rolled = [self.roll(head, self.shape.num_speculative_tokens) for head in heads if head in self.nodes]
        return [path[-1] for path in rolled if len(path) <= self.shape.num_speculative_tokens] if heads else [trunk]

    # fan-out: a chain, then so many children at each of its positions, all rolled

    def chain(self) -> list[Path]:
        return self.roll((), self.shape.num_speculative_tokens)

    def is_waiting_for(self, chain: list[Path]) -> bool:
        """Return whether the chain is too short, and its end can be run."""
        is_short = len(chain) <= self.shape.num_speculative_tokens
        return is_short and chain[-1] not in self.told and len(chain[-1]) < self.num_layers

    def short_branches(self, chain: list[Path]) -> list[Path]:
        heads = [path for path in self.nodes if path not in chain and path[:-1] in chain]
        rolled = [self.roll(head, self.shape.num_speculative_tokens) for head in heads]
        return [path[-1] for path in rolled if len(path) <= self.shape.num_speculative_tokens]

    def count_at(self, position: int) -> int:
        return self.shape.fan_out[position] if position < len(self.shape.fan_out) else self.shape.fan_out[-1]

    def wanted_fan_out(self) -> set[Path]:
        chain = self.chain()
        is_short = len(chain) <= self.shape.num_speculative_tokens
        following = {path for path in self.below(chain[-1])[:1] if is_short and self.may_be(path)}
        if following or self.is_waiting_for(chain):
            return following
        wanted = {child for end in self.short_branches(chain) for child in self.below(end)[:1]}
        for i, path in enumerate(chain):
            own = chain[i + 1 : i + 2]
            wanted |= set(own) | set([child for child in self.below(path) if child not in own][: self.count_at(i)])
        return wanted

    def ends_fan_out(self) -> list[Path]:
        chain = self.chain()
        if self.is_waiting_for(chain):
            return [chain[-1]]
        return self.short_branches(chain) + ([chain[-1]] if self.count_at(len(chain) - 1) else [])


specs = st.fixed_dictionaries(
    {
        "growth": st.sampled_from(NOT_LAYER),
        "beam_width": st.integers(1, 7),
        "branch": st.integers(1, 6),
        "lead": st.integers(1, 9),
        "min_path_logprob": st.sampled_from([-1e9, -1e9, -6.0, -2.0]),
        "branch_below": st.sampled_from([0.0, 0.2, 0.35, 0.5, 1.0]),
        "fan_out": st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
        "num_speculative_tokens": st.integers(1, 4),
        "max_len": st.sampled_from([8, 14, 1000]),
    }
)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**31), changes=specs)
def test_tree_and_frontier_are_those_of_a_slow_model_after_any_passes_and_commits(
    seed: int, changes: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    model = toy(seed % 50)
    writer, beam = opened(model=model, **changes)
    slow = SlowTree(model, beam.spec, TEXT)
    for _ in range(rng.randint(1, 6)):
        for _ in range(rng.randint(0, 7)):
            assert [path_of(beam, node) for node in beam.frontier()] == slow.frontier()
            if beam.frontier():
                grow(writer, beam)
                slow.step()
            assert paths(beam) == slow.nodes
        room = beam.spec.max_len - len(beam.token_ids) - 1
        tokens = rng.choice([*sorted(slow.nodes), ()])[: rng.randint(1, 4)]
        tokens += tuple(rng.choices(range(V), k=rng.choice([0, 0, 0, 1, 1, 2])))
        tokens = tokens[:room]
        if not tokens:
            continue
        epoch = beam.cache.epoch
        is_hit = slow.commit(tokens)
        assert (beam.commit(tokens) is not None) == is_hit
        assert beam.cache.epoch == epoch + (not is_hit)
        assert paths(beam) == slow.nodes
        assert beam.num_dropped == slow.num_dropped
        assert beam.num_rolled_back == slow.num_rolled_back
        assert_rows_fit_the_tree(model, beam)
        assert_scores_are_those_of_the_model(model, beam)


@settings(max_examples=75)
@given(seed=st.integers(0, 2**31), changes=specs, max_nodes=st.integers(1, 40), num_tree_rows=st.integers(0, 40))
def test_bounds_hold_and_there_is_something_to_do_until_one_of_them_is_met(
    seed: int, changes: dict[str, Any], max_nodes: int, num_tree_rows: int
) -> None:
    rng = random.Random(seed)
    model = toy(seed % 50, max_model_len=32, num_tree_rows=num_tree_rows)
    writer, beam = opened(model=model, max_nodes=max_nodes, **changes | {"min_path_logprob": -1e9})
    for _ in range(5):
        while num_tokens := beam.num_tokens_to_run():
            writer.step([(beam, rng.randint(1, num_tokens))])  # passes cut short among them
            assert beam.cache.num_nodes <= max_nodes
            assert beam.cache.depth <= beam.spec.shape.lead
            assert model.num_rows(beam.slot) <= model.capacity(beam.slot)
            assert_rows_fit_the_tree(model, beam)
        cache = beam.cache
        ends = [node for node in cache.alive_ids() if not cache.is_expanded(node)]
        is_out_of_rows = model.num_rows(beam.slot) == model.capacity(beam.slot)
        is_deep = all(cache.depth_of(node) >= beam.num_layers for node in ends)
        least = {"best-first": math.inf, "branch": 1, "fan-out": beam.spec.shape.num_speculative_tokens}
        is_done = cache.depth >= least[beam.spec.shape.growth]
        assert is_out_of_rows or is_deep or is_done or cache.num_nodes == max_nodes
        if len(beam.token_ids) + 2 >= min(beam.spec.max_len, 32):
            break
        beam.commit([rng.choice([cache.token(node) for node in cache.children(cache.root_id)] or [0])])


@pytest.mark.parametrize("growth", sorted(RULES))
def test_a_replica_that_gets_every_layer_equals_the_tree(growth: str) -> None:
    model = toy(4)
    writer, beam = opened(growth, model)
    replica = CandidateCache(max_nodes=1000)
    for _ in range(10):
        for _ in range(4):
            if beam.frontier():
                (made,) = writer.step([(beam, beam.num_tokens_to_run())])
                assert isinstance(made, NewNodes)
                assert replica.extend(0, made) == len(made)
        tokens = [beam.cache.token(beam.cache.children(beam.cache.root_id)[0])]
        replica.advance(tokens)
        widened = beam.commit(tokens)
        assert widened is not None
        assert replica.extend(0, widened) == len(widened)
        assert replica.snapshot() == beam.cache.snapshot()


# ---- best-first -----------------------------------------------------------------------------------------------------


def test_best_first_goes_deep_where_it_is_likely_and_stays_shallow_where_it_is_not() -> None:
    model = toy(1, spread=3.0)
    writer, beam = opened("best-first", model, beam_width=2, branch=3, lead=50)
    grow(writer, beam, num_passes=15)
    depth_below = {path: max(len(p) for p in paths(beam) if p[:1] == path) for path in paths(beam) if len(path) == 1}
    ranked = sorted(depth_below, key=lambda path: -beam.cache.path_logprob(beam.cache.walk(path)[0]))
    assert len(ranked) == 3
    assert depth_below[ranked[0]] > 6
    assert depth_below[ranked[-1]] < 4
    expanded = [node for node in beam.cache.alive_ids() if beam.cache.is_expanded(node)]
    assert all(len(beam.cache.children(node)) == 3 for node in expanded), "all children are nodes"


def test_best_first_stops_when_the_tree_is_full_and_goes_on_when_it_is_pruned() -> None:
    writer, beam = opened("best-first", beam_width=3, branch=4, max_nodes=10, lead=40)
    grow_all(writer, beam)
    assert beam.cache.num_nodes == 10
    assert not all(beam.cache.is_expanded(node) for node in beam.cache.alive_ids()), "no pass is made in vain"
    beam.commit([beam.cache.token(beam.cache.children(beam.cache.root_id)[0])])
    assert beam.frontier()


def test_best_first_takes_up_what_was_too_unlikely_once_the_root_is_closer() -> None:
    model = toy(2)
    writer, beam = opened("best-first", model, beam_width=2, branch=6, min_path_logprob=-3.0)
    grow_all(writer, beam)
    assert all(beam.cache.path_logprob(node) >= -3.0 for node in beam.cache.alive_ids())
    before = {path[1:] for path in paths(beam) if len(path) > 1}
    widened = beam.commit(likeliest(model, TEXT, 1))
    assert widened is not None
    assert {path_of(beam, node) for node in widened.ids}.isdisjoint(before)
    assert len(widened) > 0


# ---- branch ---------------------------------------------------------------------------------------------------------


def probabilities(model: TableModel, text: list[int], length: int) -> list[float]:
    """Return the probability of each of the next tokens of greedy decoding."""
    tokens = likeliest(model, text, length)
    return [math.exp(top(model, [*text, *tokens[:i]], 1)[0][1]) for i in range(length)]


@pytest.mark.parametrize(
    ("prob", "most", "count"),
    [(0.0, 6, 6), (0.39, 6, 3), (0.5, 6, 3), (0.51, 6, 2), (0.9, 6, 2), (1.0, 6, 1), (0.0, 1, 1)],
)
def test_the_less_likely_the_token_the_more_branches_and_one_that_is_unsure_is_never_alone(
    prob: float, most: int, count: int
) -> None:
    assert num_branches(prob, most) == count


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
@pytest.mark.parametrize("branch_below", [0.25, 0.4, 0.6])
def test_branches_begin_at_the_first_unsure_token_and_all_grow_in_each_pass(seed: int, branch_below: float) -> None:
    model = toy(seed)
    writer, beam = opened("branch", model, beam_width=5, branch_below=branch_below, num_speculative_tokens=3, lead=30)
    probs = probabilities(model, TEXT, 30)
    depth = next(i for i, prob in enumerate(probs) if prob < branch_below)
    trunk = likeliest(model, TEXT, depth)
    for i in range(depth):
        assert grow(writer, beam) == [trunk[: i + 1]], "one sure token a pass"
    count = max(2, math.floor(5 * (1 - probs[depth])))
    heads = [(*trunk, token) for token, _ in top(model, [*TEXT, *trunk], count)]
    assert grow(writer, beam) == heads
    for i in range(3):
        grown = grow(writer, beam)
        assert set(grown) == {head + likeliest(model, [*TEXT, *head], i + 1) for head in heads}
    assert beam.frontier() == []
    assert len(paths(beam)) == depth + 4 * count, "no other branch point"


def test_where_all_is_unsure_branches_begin_at_once_and_where_nothing_is_the_trunk_goes_on_to_the_lead() -> None:
    model = toy()
    writer, beam = opened("branch", model, branch_below=1.0, num_speculative_tokens=2)
    assert grow(writer, beam) == [(token,) for token, _ in top(model, TEXT, len(paths(beam)))]
    assert beam.cache.depth == 1
    grow_all(writer, beam)
    assert beam.cache.depth == 3
    writer, beam = opened("branch", model, branch_below=0.0, lead=9)
    grow_all(writer, beam)
    assert paths(beam) == {likeliest(model, TEXT, i) for i in range(1, 10)}


def test_a_certain_token_is_a_branch_point_of_one_branch_where_all_is_unsure() -> None:
    model = toy(0, spread=400.0)  # a softmax of 1.0
    writer, beam = opened("branch", model, branch_below=1.0, num_speculative_tokens=2)
    grow_all(writer, beam)
    assert paths(beam) == {likeliest(model, TEXT, i) for i in (1, 2, 3)}


def test_the_branch_that_is_hit_is_the_trunk_and_branches_anew_without_a_pass() -> None:
    model = toy(3)
    writer, beam = opened("branch", model, beam_width=5, branch_below=0.6, num_speculative_tokens=4, lead=30)
    grow_all(writer, beam)
    forks = [node for node in [beam.cache.root_id, *beam.cache.alive_ids()] if len(beam.cache.children(node)) > 1]
    assert len(forks) == 1
    second = beam.cache.children(forks[0])[1]
    hit = path_of(beam, second)
    num_passes = model.num_forward_passes
    revived = beam.commit(hit)
    assert revived is not None
    assert model.num_forward_passes == num_passes
    text = [*TEXT, *hit]
    chain, probs = likeliest(model, text, 4), probabilities(model, text, 4)
    depth = next(i for i, prob in enumerate(probs) if prob < 0.6)
    count = max(2, math.floor(5 * (1 - probs[depth])))
    assert count > 1
    heads = [(*chain[:depth], token) for token, _ in top(model, [*text, *chain[:depth]], count)]
    assert paths(beam) == {chain[: i + 1] for i in range(4)} | set(heads)
    assert {path_of(beam, node) for node in revived.ids} == set(heads[1:])


def test_fewer_branches_grow_on_once_less_are_wanted() -> None:
    writer, beam = opened("branch", toy(spread=0.5), beam_width=6, branch_below=1.0)
    heads = grow(writer, beam)
    prob = math.exp(beam.cache.likeliest(beam.cache.root_id))
    assert len(heads) == num_branches(prob, 6) > num_branches(prob, 3) > 1
    beam.reshape(beam_width=3)
    assert [path_of(beam, node) for node in beam.frontier()] == heads[: num_branches(prob, 3)]


def test_a_hint_moves_the_branch_point_with_the_next_commit() -> None:
    model = toy(5)
    writer, beam = opened("branch", model, beam_width=4, branch_below=0.0, num_speculative_tokens=2, lead=6)
    grow_all(writer, beam)
    beam.reshape(branch_below=1.0)
    beam.commit(likeliest(model, TEXT, 1))
    prob = math.exp(beam.cache.likeliest(beam.cache.root_id))
    assert len(beam.cache.children(beam.cache.root_id)) == num_branches(prob, 4) > 1
    beam.reshape()
    assert beam.spec.shape.branch_below == 1.0


# ---- fan-out --------------------------------------------------------------------------------------------------------


def test_fan_out_drafts_a_chain_first_and_then_branches_off_each_of_its_positions() -> None:
    model = toy(2)
    writer, beam = opened("fan-out", model, fan_out=(2, 0, 3), num_speculative_tokens=3)
    chain = likeliest(model, TEXT, 3)
    for i in range(2):
        assert grow(writer, beam) == [chain[: i + 1]]
    forks = {
        position: [(*chain[:position], token) for token, _ in top(model, [*TEXT, *chain[:position]], count + 1)[1:]]
        for position, count in ((0, 2), (2, 3))
    }
    assert grow(writer, beam) == [chain, *forks[0], *forks[2]], "the forks cost no pass"
    ends = [(*chain, token) for token, _ in top(model, [*TEXT, *chain], 3)]
    rolled = {head + likeliest(model, [*TEXT, *head], 1) for head in forks[0] + forks[2]}
    assert set(grow(writer, beam)) == {*ends, *rolled}, "all branches in the pass that expands the end of the chain"
    assert grow_all(writer, beam) == 3, "the branches at the end have begun a pass later"
    heads = [*forks[0], *forks[2], *ends]
    branches = {head + likeliest(model, [*TEXT, *head], i) for head in heads for i in range(4)}
    assert paths(beam) == {chain[: i + 1] for i in range(3)} | branches
    assert_scores_are_those_of_the_model(model, beam)


def test_the_last_fan_out_goes_on_for_all_further_positions() -> None:
    writer, beam = opened("fan-out", fan_out=(3, 1), num_speculative_tokens=4, lead=30)
    grow_all(writer, beam)
    node, counts = beam.cache.root_id, []
    for _ in range(5):
        counts.append(len(beam.cache.children(node)))
        node = beam.cache.children(node)[0]
    assert counts == [4, 2, 2, 2, 1]


def test_after_a_hit_the_next_chain_is_there_and_branches_without_a_pass() -> None:
    model = toy(2)
    writer, beam = opened("fan-out", model, fan_out=(2,), num_speculative_tokens=3)
    grow_all(writer, beam)
    accepted = likeliest(model, TEXT, 1)
    own = top(model, [*TEXT, *accepted], 3)[2][0]  # not the chain's
    num_passes = model.num_forward_passes
    forked = beam.commit((*accepted, own))
    assert forked is not None
    assert model.num_forward_passes == num_passes
    text = [*TEXT, *accepted, own]
    chain = likeliest(model, text, 3)
    assert tuple(beam.cache.query(3, "chain").tokens) == chain
    assert {path_of(beam, node) for node in forked.ids} == {
        (*chain[:i], token) for i in range(3) for token, _ in top(model, [*text, *chain[:i]], 3)[1:]
    }
    assert paths(beam) == {chain[: i + 1] for i in range(3)} | {path_of(beam, node) for node in forked.ids}


def test_a_short_branch_that_is_hit_is_completed_before_it_branches() -> None:
    model = toy(2)
    writer, beam = opened("fan-out", model, fan_out=(2,), num_speculative_tokens=4)
    grow(writer, beam, num_passes=5)
    fork = beam.cache.children(beam.cache.root_id)[1]
    beam.commit(path_of(beam, fork))
    assert beam.cache.depth == 1
    for depth in (2, 3):
        assert len(grow(writer, beam)) == 1
        assert beam.cache.depth == depth == len(paths(beam))
    assert len(grow(writer, beam)) == 1 + 4 * 2


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("growth", NOT_LAYER)
def test_where_rows_are_short_the_likeliest_ends_are_run(growth: str) -> None:
    model = toy(0, spread=0.5, max_model_len=64, num_tree_rows=0)
    writer = BeamWriter(model)
    paths_of = {"branch_below": 1.0, "fan_out": (4,), "num_speculative_tokens": 6}
    spec = draft_spec(growth=growth, branch=6, beam_width=6, lead=20, max_len=64, **paths_of)
    beam = writer.open([i % V for i in range(50)], spec, epoch=0)
    num_cut = 0
    while frontier := beam.frontier():
        whole = RULES[growth].frontier(beam.growing)
        assert frontier == whole[: len(frontier)]
        num_cut += len(frontier) < len(whole)
        grow(writer, beam)
    assert num_cut == 1
    assert model.num_rows(beam.slot) == model.capacity(beam.slot)
    assert_rows_fit_the_tree(model, beam)
