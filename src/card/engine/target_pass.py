"""One request's part of a target pass: the tokens it runs, and the decisions from their logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from card.drafting.local.protocol import Observation
from card.engine.failures import Failures
from card.engine.request import TokenDetails, alternatives_to, origins_of
from card.engine.self_draft import SelfDraft
from card.engine.sequence import Sequence, Work, paths_of
from card.errors import ModelError, TargetError
from card.models.protocol import NO_PARENT, Extension
from card.tree.logits import FloatArray, Logits, as_array, top
from card.tree.nodes import ROOT, Nodes
from card.tree.sampling import TokenLogprobs, token_logprobs
from card.tree.verify import Verdict, Verification, Verifier

MASK_WAIT_S = 0.01  # most seconds that a pass waits for masks of grammars, for all requests together


@dataclass(slots=True)
class Pass:
    """Part of one sequence in one target pass, with the decisions from its logits; it commits nothing."""

    sequence: Sequence
    extension: Extension
    offer: Nodes  # candidates; the last ones are dropped if their masks are late
    num_chain: int  # committed tokens that it runs, before the candidates
    chosen: list[int] = field(default_factory=list)  # the target's token after the root and after each candidate
    verdict: Verdict | None = None  # None: part of the prompt is left, or a mask is late
    num_kept: int = 0  # accepted candidates that became text; the text may end before the last one
    num_lenient: int = 0  # accepted candidates that are not the target's choice
    top_ids: list[list[int]] = field(default_factory=list)  # likeliest tokens of each row
    details: TokenDetails = field(default_factory=TokenDetails)

    @classmethod
    def of(cls, work: Work) -> Pass:
        """Run the committed tokens without a KV row, and the candidates below the last of them."""
        sequence, offer = work.sequence, work.offer
        first, root_row = sequence.num_rows, len(sequence.token_ids) - 1
        chain = sequence.token_ids[first:]
        if sequence.is_prefilling:
            chain = chain[: work.num_prompt_tokens]
        parents = [first + i - 1 if first + i else NO_PARENT for i in range(len(chain))]
        is_complete = first + len(chain) > root_row
        parents += [root_row if parent == ROOT else root_row + 1 + parent for parent in offer.parents]
        first_logits_idx = len(chain) - 1 if is_complete else len(chain)
        draft, scores = sequence.self_draft, None
        if draft is not None and not sequence.is_prefilling:
            scores = draft.scores_for(len(sequence.token_ids))
        token_ids = [*chain, *offer.tokens]
        extension = Extension(sequence.slot, token_ids, parents, first_logits_idx, scores=scores)
        return cls(sequence, extension, offer, len(chain))

    @property
    def is_complete(self) -> bool:
        """True if it reaches the end of the text, so that the target can choose the next token."""
        return self.extension.first_logits_idx < len(self.extension.token_ids)

    def begin_masks(self) -> None:
        """Start computing the grammar masks that `decide` needs, while the model runs."""
        masks = self.sequence.masks
        if masks is not None and self.is_complete:
            masks.begin([(), *paths_of(self.offer)])

    def settle_masks(self, seconds: float) -> float:
        """Wait for these masks for at most so long. Returns: the seconds that are left."""
        masks = self.sequence.masks
        return seconds if masks is None or not self.is_complete else masks.settle([(), *paths_of(self.offer)], seconds)

    def decide(self, logits: Logits, num_top: int, verifier: Verifier, features: FloatArray | None = None) -> None:
        """Choose the target's tokens and let the verifier compare the candidates with them.

        Args:
            logits: [1 + candidates, V] of the model; [0, V] while more of the prompt follows.
            num_top: how many of the likeliest tokens of each row the writers see.
            features: [1 + candidates, F] of the same rows; None: the verifier needs none.
        Raises: TargetError if the grammar cannot be followed or the caller's logits processor fails; ModelError for
            logits that are not numbers.
        """
        masks = self.sequence.masks
        if masks is not None and len(logits):
            num_known = masks.num_known([(), *paths_of(self.offer)])
            if not num_known:
                masks.sit_out()
                return
            self.drop_candidates(num_known - 1)
        logits = logits[: 1 + len(self.offer)]
        features = None if features is None else features[: 1 + len(self.offer)]
        self.top_ids = top(as_array(logits), num_top)[0].tolist() if num_top else []
        if len(logits):
            shaped = _shaped(self.sequence, [(), *paths_of(self.offer)], logits)
            self.chosen = _choose(self.sequence, self.offer, shaped)
            seen = Verification(self.offer, shaped, self.chosen, len(self.sequence.token_ids), features)
            self.verdict = verifier.decide(seen)
            if not verifier.is_exact:
                self.num_lenient = seen.leniently_accepted(self.verdict)
            self.details = _details(self.sequence, self.offer, self.verdict, logits)

    def try_to_decide(
        self, logits: Logits, num_top: int, verifier: Verifier, features: FloatArray | None, failures: Failures
    ) -> None:
        """Decide. If that fails, decide again without candidates, as plain decoding does.

        If that fails too, the failure is noted and there is no verdict. Raises: ModelError, a failure of the target.
        """
        while True:
            try:
                self.decide(logits, num_top, verifier, features)
            except ModelError:
                raise
            except Exception as error:
                if self.offer:
                    self.drop_candidates()
                    continue
                self.verdict = None
                failures.add(self.sequence.request.request_id, error)
            return

    def drop_candidates(self, num_left: int = 0) -> None:
        """Keep only the first so many candidates, as if no more had been offered."""
        self.offer = self.offer.leading(num_left)

    def observation(self, verdict: Verdict, features: FloatArray | None = None) -> Observation:
        """Return the writers' observation of this pass; ``features`` [1 + candidates, D] if they want them."""
        new_ids = (*(self.offer.tokens[i] for i in verdict.accepted), verdict.next_id)
        chosen = tuple(self.chosen)
        tree = self.offer.tokens, self.offer.parents
        features = None if features is None else features[: 1 + len(self.offer)]
        return Observation(new_ids, *tree, chosen, verdict.accepted, self.top_ids, features)


@dataclass(slots=True)
class DraftPass:
    """Part of one sequence in a target pass that drafts for itself: a token, and candidates below it."""

    sequence: Sequence
    draft: SelfDraft
    extension: Extension
    candidates: Nodes
    accepted: list[int] = field(default_factory=list)  # candidates whose rows stay, from the top down

    @classmethod
    def of(cls, work: Work) -> DraftPass:
        """Run the newest token, drafted or not, and its candidates, over the chosen rows."""
        sequence, draft = work.sequence, work.sequence.self_draft
        assert draft is not None, "the request does not draft for itself"
        candidates = draft.candidates(sequence.deepest)
        extension = draft.extension(sequence.slot, sequence.token_ids[-1], sequence.num_rows, candidates)
        return cls(sequence, draft, extension, candidates)

    def take(self, logits: Logits) -> None:
        """Add the tokens that the target would choose by these logits [1 + candidates, V], up to the first miss.

        Raises: TargetError if the caller's logits processor fails; ModelError for logits that are not numbers.
        """
        sequence, drafted, masks = self.sequence, self.draft.token_ids, self.sequence.masks
        array, node = as_array(logits), ROOT
        below = {edge: i for i, edge in enumerate(zip(self.candidates.parents, self.candidates.tokens, strict=True))}
        while masks is None or masks.has_now(tuple(drafted), MASK_WAIT_S):
            row = array[node + 1 : node + 2]
            shaped = _shaped(sequence, [tuple(drafted)], row)
            (token_id,) = sequence.sampler.choose(shaped, [len(sequence.token_ids) + len(drafted)])
            self.draft.take(token_id, row[0])
            if node != ROOT:
                self.accepted.append(node)
            child = below.get((node, token_id))
            if child is None or token_id in sequence.request.end_ids:
                break
            node = child

    def kept_rows(self) -> tuple[int, list[int]]:
        """Return how many first rows stay, and which ones behind them; the newest token has none.

        These are the rows of the text and of the draft.
        """
        num_rows = self.sequence.num_rows + len(self.draft.token_ids) - len(self.accepted)
        return num_rows, [num_rows + idx for idx in self.accepted]


def _shaped(sequence: Sequence, paths: list[tuple[int, ...]], logits: Logits) -> Logits:
    """Return logits [P, V] after P paths, shaped by penalties, grammar and the caller's processor."""
    processor, shaping = sequence.request.logits_processor, sequence.shaping
    if shaping is not None:
        logits = shaping.apply(logits, paths)
    if processor is not None:
        array = np.array(as_array(logits))  # which it may write to
        texts = [np.array([[*sequence.token_ids, *path]], np.int64) for path in paths]
        try:
            processed = [np.asarray(processor(ids, array[i : i + 1]), array.dtype) for i, ids in enumerate(texts)]
        except Exception as error:  # it is the caller's code
            raise TargetError(f"the logits processor failed with {type(error).__name__}: {error}") from error
        logits = np.concatenate(processed)
    return logits


def _choose(sequence: Sequence, offer: Nodes, logits: Logits) -> list[int]:
    """Return the target's token after the root and after each candidate."""
    after_root = len(sequence.token_ids)
    positions = [after_root, *(after_root + depth for depth in offer.depths)]  # of the tokens that the rows predict
    return sequence.sampler.choose(logits, positions)


def _details(sequence: Sequence, offer: Nodes, verdict: Verdict, logits: Logits) -> TokenDetails:
    """Return the details of a verdict's tokens. ``logits`` are the model's own, [1 + candidates, V]."""
    params, names = sequence.request.params, sequence.offers.names
    logprobs: tuple[TokenLogprobs, ...] = ()
    if params.logprobs is not None:
        rows = [0, *(1 + idx for idx in verdict.accepted)]
        new_ids = [*(offer.tokens[idx] for idx in verdict.accepted), verdict.next_id]
        logprobs = token_logprobs(as_array(logits)[rows], new_ids, params.logprobs)
    alternatives = alternatives_to(offer, verdict, names) if params.shows_tree else ()
    return TokenDetails(origins_of(offer, verdict, names), logprobs, alternatives)
