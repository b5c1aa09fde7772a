"""`DeviceBeamWriter`: beams whose draft steps follow each other on the device, read by the host one step behind.

While the host reads the results of one step and updates its tree, the next step already runs, on the layer that the
device chose. The host's tree decides. If it chooses another layer (a correction came, the beam was widened from the
secondary tier, a bound was met, two scores tie), the device's step is dropped and the next one starts from the host's
frontier. So the worst case is a wasted step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from card.backends.cuda.bucketed import BucketedRunner
from card.backends.cuda.device_step import BeamStep, DraftStepResult, NewestLayer, StepShape
from card.backends.cuda.graphs import FetchedTensor, bucket_of
from card.backends.cuda.static_cache import TOKEN_BUCKETS, StaticDecoder
from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.draft_shaping import FindGrammar
from card.drafting.messages import DraftSpec
from card.errors import CardError, ProtocolError
from card.tree.nodes import NewNodes
from card.tree.noise import GumbelNoise

_MAX_STEPS = 16  # recorded ones; the least recently used one is dropped
_NOISE_BUCKETS = tuple(2**i for i in range(3, 14))


@dataclass(frozen=True, slots=True)
class _Launch:
    """A started step that was not read yet."""

    beam: DeviceBeamSequence
    step: BeamStep
    fetched: FetchedTensor
    layer: list[int]  # the nodes that it runs, in the device's order

    def read(self) -> DraftStepResult:
        """Wait for the step and return its result."""
        return self.step.result(self.fetched)


class DeviceBeamSequence(BeamSequence):
    """The beam of one request, with the inputs of a step on the device."""

    reads_whole_texts = True

    def __init__(self, writer: DeviceBeamWriter, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> None:
        """Take a sequence of the writer's pool. Raises: CapacityError if it has no room."""
        super().__init__(writer, token_ids, spec, epoch=epoch)
        self._writer = writer
        self._runner = writer.model
        self.noise = GumbelNoise(spec.sampling.seed, writer.vocab_size)

    def close(self) -> None:
        """Give the sequence back; the rows of the text stay in the pool for a text that begins with it."""
        self._writer.drop(self)
        super().close()

    def discard(self) -> None:
        """Give the sequence back after a failed pass; its rows are not lent to other texts."""
        self._writer.drop(self)
        super().discard()

    def commit(self, token_ids: Sequence[int]) -> NewNodes | None:
        """As `BeamSequence.commit`; the running step is awaited first, and its nodes count.

        Returns: the nodes made by that step, then those from the secondary tier; None for a miss.
        """
        drafted = self._writer.finish(self)
        refilled = super().commit(token_ids)
        if refilled is None:
            return None
        return NewNodes.joined((drafted, refilled))

    @property
    def num_held_rows(self) -> int:
        """KV rows of the text and of expanded nodes."""
        return self._runner.num_rows(self.slot)

    def newest_layer(self, frontier: Sequence[int]) -> NewestLayer:
        """Bring the rows to the desk and return the frontier as the input of a step."""
        extension = self.extension(frontier, len(frontier))
        return NewestLayer(
            np.asarray(extension.token_ids, np.int64),
            np.asarray(self.positions(frontier), np.int64),
            self._runner.lend(self.slot, extension.parents),
            np.asarray([self.cache.path_logprob(node) for node in frontier], np.float64),
        )

    def positions(self, nodes: Sequence[int]) -> list[int]:
        """Return the absolute positions of nodes."""
        return [self.root_position + self.cache.depth_of(node) for node in nodes]

    def add_children(self, layer: Sequence[int], result: DraftStepResult) -> NewNodes:
        """Make the children of a layer that a step has run, and add its rows.

        Raises: ProtocolError if the model's scores are not finite; nothing has changed then.
        """
        parents, first_row = self.extension(layer, len(layer)).parents, self.num_held_rows
        made = self.cache.grow(
            layer,
            result.tokens[: len(layer)],
            result.logprobs[: len(layer)],
            width=self.spec.shape.beam_width,
            min_path_logprob=self.spec.shape.min_path_logprob,
        )
        self._frontier = None
        self._runner.adopt(self.slot, parents)
        self.row_of.update((node, first_row + i) for i, node in enumerate(layer))
        return made

    def can_look_ahead(self, layer: Sequence[int]) -> bool:
        """Return whether there are positions and rows for all children of ``layer``, whichever they are."""
        has_depth = max(self.cache.depth_of(node) for node in layer) + 1 < self.num_layers
        num_rows = self.num_held_rows + len(layer) + self.spec.shape.beam_width
        return has_depth and num_rows <= self._runner.capacity(self.slot)


class DeviceBeamWriter(BeamWriter):
    """Runs the steps of a single beam on the device, and those of several beams like a `BeamWriter`.

    Some steps of a single beam also run like those of a `BeamWriter`: the first pass of a text, models without static
    passes, layers with more nodes than a recorded step has, trees that grow by another rule than ``layer``, requests
    that shape their logits, and requests of targets with fewer tokens.
    """

    model: BucketedRunner

    def __init__(
        self,
        model: BucketedRunner,
        kv_cache_bytes: int | None = None,
        *,
        looks_ahead: bool = True,
        find_grammar: FindGrammar | None = None,
    ) -> None:
        """Make a writer of ``model`` with at most ``kv_cache_bytes`` for KV rows; None: by the length of a sequence.

        Args:
            looks_ahead: start the next step before the last one is read. Leave it out if drafter and target take turns
                on one stream: the target would wait for that step.
            find_grammar: as of `BeamWriter`.
        """
        super().__init__(model, kv_cache_bytes, find_grammar=find_grammar)
        self._looks_ahead = looks_ahead
        self._steps: dict[StepShape, BeamStep] = {}  # least recently used first
        self._ahead: _Launch | None = None

    def open(self, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> DeviceBeamSequence:
        """Start the beam of a request after its text. Raises: CapacityError if there is no room."""
        return DeviceBeamSequence(self, token_ids, spec, epoch=epoch)

    def warm_up(self, spec: DraftSpec, num_rows: int) -> None:
        """Record the steps of this spec for sequences of up to ``num_rows`` rows; on CUDA each takes a moment."""
        static = self.model.static
        if static is not None and self._has_steps(spec):
            with torch.inference_mode():
                for span in sorted({static.span_of(rows) for rows in range(1, min(num_rows, self.model.max_rows) + 1)}):
                    self._step_for(static, spec, span)

    def step(self, work: Sequence[tuple[BeamSequence, int]]) -> list[NewNodes | CardError]:
        """Grow each beam by one layer below its frontier; arguments and result as of `DraftWriter.step`."""
        is_alone = len(work) == 1
        done: dict[int, NewNodes | CardError] = {}
        with torch.inference_mode():
            ahead, self._ahead = self._ahead, None
            for i, (beam, share) in enumerate(work):
                is_whole = share >= beam.num_tokens_to_run()
                if ahead is not None and beam is ahead.beam and set(beam.frontier()) == set(ahead.layer) and is_whole:
                    done[i] = self._grow(ahead, looks_ahead=is_alone and self._looks_ahead)
            if is_alone and not done:
                ((beam, share),) = work
                launch = self._launch(beam, beam.frontier()) if share >= beam.num_tokens_to_run() else None
                if launch is not None:
                    done[0] = self._grow(launch, looks_ahead=self._looks_ahead)
        rest = [i for i in range(len(work)) if i not in done]
        if rest:
            done.update(zip(rest, super().step([work[i] for i in rest]), strict=True))
        return [done[i] for i in range(len(work))]

    def finish(self, beam: DeviceBeamSequence) -> NewNodes:
        """Wait for the running step of ``beam``, if any, and return the nodes that it made."""
        if self._ahead is None or self._ahead.beam is not beam:
            return NewNodes.none()
        ahead, self._ahead = self._ahead, None
        with torch.inference_mode():
            try:
                return beam.add_children(ahead.layer, ahead.read())
            except ProtocolError:  # the next step has the same scores and reports them
                return NewNodes.none()

    def drop(self, beam: DeviceBeamSequence) -> None:
        """Drop the running step of ``beam``."""
        if self._ahead is not None and self._ahead.beam is beam:
            self._ahead = None

    def _launch(self, beam: BeamSequence, frontier: Sequence[int]) -> _Launch | None:
        """Start a step on the frontier of the host's tree; None if it must run like a `BeamWriter`'s."""
        static, spec = self.model.static, beam.spec
        if static is None or not self._has_steps(spec) or beam.cache.root_id in frontier:
            return None
        assert isinstance(beam, DeviceBeamSequence)
        num_places = _places(spec)
        first_row = beam.num_held_rows
        step = self._step_for(static, spec, static.span_of(min(first_row + 2 * num_places, static.num_rows)))
        layer = beam.newest_layer(frontier)
        step.load(layer, first_row=first_row, width=spec.shape.beam_width, floor=spec.shape.min_path_logprob)
        return self._start(beam, step, list(frontier))

    def _start(self, beam: DeviceBeamSequence, step: BeamStep, layer: list[int], num_steps_before: int = 0) -> _Launch:
        following = {position + 1 + num_steps_before for position in beam.positions(layer)}
        step.load_noise(beam.noise, beam.spec.sampling.seed, following)
        return _Launch(beam, step, step.launch(), layer)

    def _grow(self, launch: _Launch, *, looks_ahead: bool) -> NewNodes | ProtocolError:
        """Start the next step, then read this one and make its nodes."""
        beam, step, layer = launch.beam, launch.step, launch.layer
        num_rows = beam.num_held_rows + len(layer) + step.shape.num_places
        looks_ahead = looks_ahead and num_rows <= step.shape.span and beam.can_look_ahead(layer)
        ahead = self._start(beam, step, layer, 1) if looks_ahead else None
        result = launch.read()
        try:
            made = beam.add_children(layer, result)
        except ProtocolError as error:
            return error
        if ahead is not None:
            node_of = dict(zip(zip(made.parents, made.tokens, strict=True), made.ids, strict=True))
            chosen = [node_of.get((layer[place], token)) for place, token in result.chosen]
            same = [node for node in chosen if node is not None]
            if same and len(same) == len(chosen) == len(made):
                self._ahead = _Launch(beam, step, ahead.fetched, same)
        return made

    def _has_steps(self, spec: DraftSpec) -> bool:
        """Return whether recorded steps can grow a tree of this spec: they propose any token of the model."""
        has_all_tokens = spec.vocab_size is None or spec.vocab_size >= self.model.vocab_size
        is_narrow = spec.shape.beam_width <= TOKEN_BUCKETS[-1]
        return spec.shape.growth == "layer" and is_narrow and spec.shaping is None and has_all_tokens

    def _step_for(self, static: StaticDecoder, spec: DraftSpec, span: int) -> BeamStep:
        """Return the recorded step for this spec and span; it is recorded if needed."""
        rule = replace(spec.sampling, seed=0)  # steps are shared by requests of different seeds
        is_coupled = spec.shape.coupled_noise and not rule.is_greedy
        num_noise_rows = (bucket_of(spec.shape.lead + 2, _NOISE_BUCKETS) or 0) if is_coupled else 0
        shape = StepShape(_places(spec), spec.shape.branch, span, rule, num_noise_rows)
        step = self._steps.pop(shape, None)
        if step is None:
            if len(self._steps) >= _MAX_STEPS:
                static.recorder.wait()
                del self._steps[next(iter(self._steps))]
            step = BeamStep(static, shape)
        self._steps[shape] = step
        return step


def _places(spec: DraftSpec) -> int:
    num_places = bucket_of(spec.shape.beam_width, TOKEN_BUCKETS)
    assert num_places is not None
    return num_places
