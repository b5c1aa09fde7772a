"""Run the checks in their order, and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Literal

from card.errors import SettingsError
from card.tools.verify_server.answers import ServerAnswer
from card.tools.verify_server.checks import CHECKS, NUM_TOP, AnswerPair, Material, NotSupportedError, ServerCheck
from card.tools.verify_server.client import Client, LostServerError, RefusedError, ServerError
from card.tools.verify_server.comparing import Difference, compare, gap_at
from card.tools.verify_server.settings import Address, VerifySettings
from card.tools.verify_server.sides import ServerQuestion, Side, open_side, switched_off

Outcome = Literal["equal", "differs", "not supported", "failed"]
Tell = Callable[[str], None]
_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one check."""

    name: str
    title: str
    outcome: Outcome
    num_equal: int = 0
    num_asked: int = 0
    reason: str = ""  # why the check is not supported or failed; or a remark
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of a run."""

    url: str
    model: str
    path: str
    reference: str | None  # URL of the other server
    reference_model: str | None
    compared_with: str  # in words
    compares_ids: bool
    num_drafted: int | None  # tokens, during the run; None: the server does not say
    num_plain_drafted: int | None  # while plain greedy answers were written
    num_prompts: int
    settings: VerifySettings
    results: tuple[Result, ...] = ()

    def count(self, outcome: Outcome) -> int:
        """Return how many checks have this outcome."""
        return sum(result.outcome == outcome for result in self.results)

    @property
    def status(self) -> int:
        """The exit status: 1 if something differs, else 2 if something failed or nothing was compared, else 0."""
        if self.count("differs"):
            return 1
        return 2 if self.count("failed") or not self.count("equal") else 0


def chosen(only: Collection[str], skip: Collection[str]) -> list[ServerCheck]:
    """Return the checks to run. Raises: SettingsError for an unknown name, or if no check is left."""
    for name in (*only, *skip):
        if name not in CHECKS:
            raise SettingsError(f"unknown check {name!r}; known: {', '.join(CHECKS)}")
    chosen = [check for name, check in CHECKS.items() if (not only or name in only) and name not in skip]
    if not chosen:
        raise SettingsError("--only and --skip leave no check; name fewer in --skip")
    return chosen


async def verify(
    address: Address,
    reference: Address | None,
    prompts: Sequence[str],
    settings: VerifySettings,
    checks: Sequence[ServerCheck],
    tell: Tell,
) -> Report:
    """Ask all questions and compare the answers.

    Args:
        reference: the server without speculation; None asks the same one with speculation switched off, if it can.
        tell: called with a line about each step.
    Raises: ServerError if a server cannot be used at all. Once checks run, faults are in the report.
    """
    probe = ServerQuestion((prompts[0],), {"max_tokens": _PROBE_TOKENS, "temperature": 0})
    connections = 2 * settings.concurrency
    async with AsyncExitStack() as stack:
        client = Client(address, timeout_s=settings.timeout_s, connections=connections)
        await stack.enter_async_context(client)
        tell(f"asking {address.url} what it is")
        fast = await open_side(client, address, settings, probe)
        if reference is not None:
            tell(f"asking {reference.url} what it is")
            other = Client(reference, timeout_s=settings.timeout_s, connections=connections)
            await stack.enter_async_context(other)
            same_path = replace(settings, api=fast.path)
            plain: Side | None = await open_side(other, reference, same_path, probe)
        else:
            plain = await switched_off(fast, settings, probe)
        about = Material(fast, plain, prompts, settings)
        before = await fast.num_drafted_so_far()
        num_plain_drafted = await _ask_plainly(about)
        results = await _run(about, checks, tell)
        after = await fast.num_drafted_so_far()
        return Report(
            url=address.url,
            model=fast.model,
            path=fast.path,
            reference=reference.url if reference is not None else None,
            reference_model=plain.model if reference is not None and plain is not None else None,
            compared_with=_compared_with(about, reference),
            compares_ids=fast.tells_ids and about.base.tells_ids,
            num_drafted=None if after is None else after - (before or 0),
            num_plain_drafted=num_plain_drafted,
            num_prompts=len(prompts),
            settings=settings,
            results=tuple(results),
        )


async def _ask_plainly(about: Material) -> int | None:
    """Ask for the reference answers; return how many tokens were drafted for them."""
    before = await about.base.num_drafted_so_far()
    await about.greedy()
    after = await about.base.num_drafted_so_far()
    return None if after is None or about.plain is None else after - (before or 0)


def _compared_with(about: Material, reference: Address | None) -> str:
    if reference is not None:
        return f"plain answers of {reference.url}, {about.base.model}, one question at a time"
    if about.plain is None:
        return "itself alone: it cannot be asked without speculation; give --reference, or --plain-fields"
    switch = {name: value for name, value in about.plain.extra.items() if name not in about.fast.extra}
    return f"its plain answers, asked with {json.dumps(switch)}, one question at a time"


async def _run(about: Material, checks: Sequence[ServerCheck], tell: Tell) -> list[Result]:
    results: list[Result] = []
    is_lost = False
    for check in checks:
        outcome: Outcome = "failed"
        tell(f"{check.title} ({len(results) + 1} of {len(checks)})")
        about.remarks.clear()
        try:
            if not is_lost:
                results.append(await _judged(about, check, await check.run(about)))
                continue
            reason = "not asked: the server was lost"
        except (NotSupportedError, RefusedError) as error:
            outcome = "not supported"
            reason = f"status {error.status}: {error.said}" if isinstance(error, RefusedError) else str(error)
        except ServerError as error:
            reason, is_lost = str(error), isinstance(error, LostServerError)
        results.append(Result(name=check.name, title=check.title, outcome=outcome, reason=reason))
    return results


async def _judged(about: Material, check: ServerCheck, pairs: Sequence[AnswerPair]) -> Result:
    differences: list[Difference] = []
    for pair in pairs:
        difference = pair.found or compare(pair.expected, pair.got, by_text=pair.by_text)
        if difference is not None:
            differences.append(replace(await _with_gap(about, pair, difference), prompt_idx=pair.prompt_idx))
    return Result(
        name=check.name,
        title=check.title,
        outcome="differs" if differences else "equal",
        num_equal=len(pairs) - len(differences),
        num_asked=len(pairs),
        reason="; ".join(about.remarks),
        differences=tuple(differences),
    )


async def _with_gap(about: Material, pair: AnswerPair, difference: Difference) -> Difference:
    """Return the difference with the gap between the tokens, if the plain side reports it; only greedy answers tie."""
    if difference.gap is not None or difference.char_idx is None or pair.question.fields.get("temperature") != 0:
        return difference
    try:
        plain: ServerAnswer = (await about.base.ask(pair.question, num_top=NUM_TOP))[0]
    except LostServerError:
        raise
    except ServerError:
        return difference
    if plain.text != pair.expected.text:
        return replace(difference, note="asked again with log-probabilities, the plain answer is another one")
    gap = gap_at(difference, plain, pair.got)
    note = f"the other token is not among the {NUM_TOP} likeliest" if gap is None and plain.scores else difference.note
    return replace(difference, gap=gap, note=note)
