"""Profiles with simple prices, and recordings of toy pairs; shared by the planner's tests."""

from __future__ import annotations

from card.config import SamplingParams, SamplingRule
from card.tools.planner.profile import Overheads, PassTable, Profile, Setup
from card.tools.planner.recorder import record_texts
from card.tools.planner.recording import Recording, TargetText
from card.tools.planner.scenario import Scenario
from card.tree.sampling import Sampler
from tests.toy import TableModel

NO_OVERHEADS = Overheads(**{name: 0.0 for name in Overheads.__struct_fields__ if name.endswith("_s")}, source="none")


def flat(
    pass_s: float,
    each_s: float = 0.0,
    *,
    threads: tuple[int | None, ...] = (None,),
    overheads: Overheads = NO_OVERHEADS,
    **changes: str,
) -> Profile:
    """Return a profile: passes take ``pass_s``, and ``each_s`` more for each token after the first."""
    table = PassTable(points=((1, pass_s), (65, pass_s + 64 * each_s)))
    return Profile(
        name="toy",
        measured=False,
        source="a test",
        setups=tuple(Setup(threads=num, cost=table) for num in threads),
        overheads=overheads,
        **changes,
    )


def toy_models(agreement: float = 0.8) -> tuple[TableModel, TableModel]:
    target = TableModel(3, vocab_size=40, order=2, spread=1.5)
    return target, TableModel(4, vocab_size=40, order=2, spread=1.5).blend(target, agreement)


def write(target: TableModel, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """Return what plain decoding answers, token by token, without the engine."""
    sampler = Sampler(SamplingRule.of(params.resolved()), target.vocab_size)
    text = list(prompt)
    while len(text) < len(prompt) + params.max_tokens:
        text += sampler.choose(target.logits_after(text)[None], [len(text)])
    return tuple(text[len(prompt) :])


def toy_recording(
    *,
    temperature: float = 0.0,
    agreement: float = 0.8,
    num_texts: int = 3,
    num_tokens: int = 40,
    coupled_noise: bool = True,
    **changes: str,
) -> Recording:
    """Return a recording of a toy pair."""
    target, draft = toy_models(agreement)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=num_tokens)
    prompts = [tuple((7 * i + 3 * j) % 40 for j in range(9)) for i in range(num_texts)]
    answers = [
        TargetText(prompt, write(target, prompt, params.replace(max_tokens=num_tokens - 3 * (i % 2))), "length")
        for i, prompt in enumerate(prompts)
    ]
    answers[-1] = TargetText(answers[-1].prompt_ids, answers[-1].token_ids, "stop")
    return Recording(
        target="toy",
        draft="toy",
        source="a test",
        tokenizer=changes.get("tokenizer", ""),
        vocab_size=40,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=5,
        coupled_noise=coupled_noise,
        max_tokens=num_tokens,
        num_candidates=32,
        num_target_ids=8,
        texts=record_texts(target, draft, answers, params.resolved(), coupled_noise=coupled_noise),
    )


def toy_scenario(**changes: object) -> Scenario:
    """Return a scenario on two cores: the target takes 10 ms a pass and 0.3 ms a further token, the drafter 1 ms."""
    threads = (1, 2)
    defaults: dict[str, object] = {
        "target": flat(1e-2, 3e-4, threads=threads, overheads=Overheads()),
        "draft": flat(1e-3, 5e-5, threads=threads, overheads=Overheads()),
    }
    if "recording" not in changes:
        defaults["recording"] = toy_recording()
    return Scenario(**{**defaults, **changes})  # type: ignore[arg-type]
