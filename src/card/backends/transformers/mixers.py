"""Modules of transformers' models that mix rows through a state: found by a trial pass, run from a given state."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from card.backends.transformers.states import cache_name, num_bytes
from card.errors import ModelError, in_few_words
from card.models.layer_kinds import layer_kinds
from card.models.names import OTHER_FAMILY, model_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_PARTS = (3, 3, 1)  # tokens: to fill a state, to continue from it at once, and to read the state after them
_PROBE_TOLERANCE = 1e-3  # relative to the error of a lost state; rounding makes 1e-6, a wrong scan 1e-2
_LEAST_CHUNK = 16  # rows to which a scan pads a short pass
_Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass(slots=True)
class Mixer:
    """A module that mixes rows through a state."""

    module: nn.Module
    layer: int
    signature: inspect.Signature
    rows_name: str  # name of its argument with the rows, [1, T, D]
    cache_name: str
    goes_on: bool = True  # several rows at once continue correctly from a state

    def run(
        self, forward: Callable[..., Tensor], call: inspect.BoundArguments, cache: Any, first: int, last: int
    ) -> list[Tensor]:
        """Run rows ``first`` .. last - 1 of a call from the state in ``cache``; return the results in order."""
        is_new = cache.get_conv_state(self.layer) is None
        runs = [(first, last)] if self.goes_on or is_new else [(row, row + 1) for row in range(first, last)]
        rows = call.arguments[self.rows_name]
        results = []
        for start, stop in runs:
            arguments = {**call.arguments, self.rows_name: rows[:, start:stop], self.cache_name: cache}
            of_part = inspect.BoundArguments(self.signature, OrderedDict(arguments))
            with _short_chunks(self.module, stop - start):
                results.append(forward(*of_part.args, **of_part.kwargs))
        return results


@contextlib.contextmanager
def _short_chunks(module: Any, num_rows: int) -> Iterator[None]:
    """Inside the block a scan that pads its rows to whole chunks has short chunks."""
    usual = getattr(module, "chunk_size", None)
    if not isinstance(usual, int) or num_rows >= usual:
        yield
        return
    module.chunk_size = min(usual, max(_LEAST_CHUNK, 1 << (num_rows - 1).bit_length()))
    try:
        yield
    finally:
        module.chunk_size = usual


def find_mixers(model: PreTrainedModel) -> tuple[list[Mixer], int]:
    """Return the modules with a state, and the memory of the states of one sequence.

    These modules write to the states of transformers' cache in a pass over one token. One of each kind is tested for
    running several tokens from a state. Raises: ModelError if a state is kept elsewhere.
    """
    name, kind = model_name(model), model.config.get_text_config().model_type
    advice = "choose a model of another family, such as Qwen, LFM2, Granite, Nemotron-H, Falcon-H1 or Mamba 2"
    refusal = f"{name} cannot be run: {kind} models keep their state in a place of their own; {advice}"
    kinds = layer_kinds(model.config.get_text_config())
    cache = transformers.DynamicCache(config=model.config)
    callers = _Callers(cache)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    name_of_cache = cache_name(model.forward)
    if name_of_cache is None:
        raise ModelError(refusal)
    try:
        with callers.watching(model):
            model(input_ids=token, position_ids=token, use_cache=True, **{name_of_cache: cache})
    except Exception as error:  # the code of an architecture may raise anything
        raise ModelError(
            f"{name} cannot be run, a trial pass with a state failed: {in_few_words(error)}; {advice}"
        ) from error
    calls = callers.calls
    wanted = [layer for layer in range(len(kinds)) if hasattr(cache.layers[layer], "conv_states")]
    if not wanted or sorted(calls) != wanted:
        raise ModelError(refusal)
    mixers = [_mixer(layer, *calls[layer], refusal) for layer in wanted]
    tried: dict[type[nn.Module], bool] = {}
    for mixer in mixers:
        module = type(mixer.module)
        if module not in tried:
            tried[module] = _goes_on(mixer, calls[mixer.layer][1], model)
        mixer.goes_on = tried[module]
    return mixers, sum(num_bytes(cache.layers[layer]) for layer in wanted)


class _Callers:
    """Records which modules write to the states of a cache, and their arguments."""

    def __init__(self, cache: Any) -> None:
        self.calls: dict[int, tuple[nn.Module, _Call]] = {}  # by layer
        self._stack: list[tuple[nn.Module, _Call]] = []
        for update in (cache.update_conv_state, cache.update_recurrent_state):
            setattr(cache, update.__name__, partial(self._update, update))

    def _update(self, update: Callable[..., Tensor], states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.calls[layer_idx] = self._stack[-1]
        return update(states, layer_idx, *args, **kwargs)

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._stack.append((module, (args, kwargs)))

        def leave(*_: Any) -> None:
            self._stack.pop()

        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _mixer(layer: int, module: nn.Module, call: _Call, refusal: str) -> Mixer:
    signature = inspect.signature(module.forward)
    names = list(signature.parameters)
    name_of_cache = cache_name(module.forward)
    arguments = signature.bind(*call[0], **call[1]).arguments
    others = [value for name, value in arguments.items() if name not in (names[0], name_of_cache)]
    # A tensor beside the rows would have to be divided with them.
    if name_of_cache is None or any(isinstance(value, Tensor) for value in others):
        raise ModelError(refusal)
    return Mixer(module, layer, signature, names[0], name_of_cache)


def _goes_on(mixer: Mixer, call: _Call, model: PreTrainedModel) -> bool:
    """Return whether several rows at once give the same as one by one; some scans start without the state."""
    arguments = mixer.signature.bind(*call[0], **call[1])
    shown = arguments.arguments[mixer.rows_name]
    size = (1, sum(_PROBE_PARTS), shown.shape[-1])
    rows = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(shown.device)
    arguments.arguments[mixer.rows_name] = rows
    exact = copy.deepcopy(mixer.module).float()  # so that rounding does not look like a fault

    def run(*lengths: int, skipped: int = 0) -> Tensor:
        cache, first, results = transformers.DynamicCache(config=model.config), skipped, []
        for length in lengths:
            results += mixer.run(exact.forward, arguments, cache, first, first + length)
            first += length
        if not all(isinstance(result, Tensor) and result.shape[:2] == (1, result.shape[1]) for result in results):
            raise ModelError(
                f"{model_name(model)} cannot be run: a layer with a state returns more than its rows; {OTHER_FAMILY}"
            )
        return torch.cat(results, 1)[:, _PROBE_PARTS[0] - skipped :]

    first, several, last = _PROBE_PARTS
    truth = run(first, *[1] * (several + last))
    lost = (run(several, last, skipped=first) - truth).abs().max()
    return bool((run(*_PROBE_PARTS) - truth).abs().max() <= _PROBE_TOLERANCE * lost)
