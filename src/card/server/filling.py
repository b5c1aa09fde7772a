"""Gaps that an answer fills: their prompts, and where answers end."""

from __future__ import annotations

from collections.abc import Sequence

from card.config import SamplingParams
from card.server.errors import bad_request, too_long
from card.server.service import LONG_CHARS, Service
from card.text.infill import FilledPrompt, Infill, OtherFile

_NO_MARKS = (
    "the model's tokenizer has no marks for a gap, so it cannot fill one in; leave {} out, or serve a model that was "
    "trained for it, such as Qwen2.5-Coder"
)


async def filled(
    service: Service,
    prefix: str | Sequence[int],
    suffix: str,
    others: Sequence[OtherFile] = (),
    *,
    room: int = 0,
    param: str = "suffix",
) -> FilledPrompt:
    """Return the prompt of a gap, made beside the event loop.

    Args:
        others, room: as in `Infill.prompt`.
        param: the field of the request that asks for it.
    Raises: ApiError 400 for a model without marks and for a prompt that does not fit; PromptError.
    """
    maker = _maker(service, param)
    most = service.llm.max_model_len
    if not isinstance(prefix, str) and len(prefix) > most:
        raise too_long(most, len(prefix))
    text = (prefix if isinstance(prefix, str) else "") + suffix
    num_chars = len(text) + sum(len(one.text) for one in others)

    def made() -> FilledPrompt:
        service.check_fits(text)
        return maker.prompt(prefix, suffix, others, room=room)

    return await service.run_in_thread(num_chars >= LONG_CHARS, made)


def with_ends(service: Service, params: SamplingParams) -> SamplingParams:
    """Return the parameters of an answer that ends where the model ends a gap."""
    maker = service.infill
    if params.ignore_eos or maker is None:
        return params
    return params.replace(
        stop=(*params.stop, *maker.end_texts), stop_token_ids=(*params.stop_token_ids, *sorted(maker.end_ids))
    )


def _maker(service: Service, param: str) -> Infill:
    if service.infill is None:
        raise bad_request(f"{param}: {_NO_MARKS.format(param)}", param, "unsupported_parameter")
    return service.infill
