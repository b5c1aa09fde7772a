"""Choose the verifier of an engine whose settings name a judge, or a reward of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from card.config import EngineSettings
from card.errors import SettingsError, named
from card.family.judges.auto import AUTO_WISH, AutoJudge
from card.family.judges.judge import Judge, JudgingVerifier
from card.family.judges.knobs import parse_judge, parse_reward
from card.family.judges.record import METHOD, JudgeSettings
from card.family.judges.steps import StepReward
from card.family.judges.training_free import Fly, KullbackLeibler, Partial, Relaxed, Typical
from card.models.features import FeatureWish
from card.models.runner import RowRunner
from card.tree.verify import MATCH, Verifier

_MAKERS: Mapping[str, Callable[[float], Judge]] = MappingProxyType(
    {"typical": Typical, "relaxed": Relaxed, "kl": KullbackLeibler, "fly": Fly, "partial": Partial}
)


class WishingVerifier(JudgingVerifier):
    """A verifier whose judge reads hidden states of the target."""

    def wish_for(self, target: RowRunner, draft: str) -> FeatureWish:
        """Return the features that it needs. Raises: ModelError if its judge was trained for another pair."""
        assert isinstance(self.judge, AutoJudge)
        self.judge.check_pair(target, draft)
        return AUTO_WISH


def choose_verifier(settings: EngineSettings, given: Verifier) -> tuple[Verifier, str] | None:
    """Return the verifier of the settings' judge or reward, and its name in words; None without either.

    Raises: SettingsError if several are given, or a verifier, too; otherwise as `verifier_of`.
    """
    judging = settings.of(JudgeSettings)
    if settings.method == METHOD.name and judging.reward is None:
        raise SettingsError(
            f"method {METHOD.name} needs a reward: give {named('reward')} a file made with card train reward"
        )
    given_names = (("judge", judging.judge), ("reward", judging.reward))
    judges = [f"{kind} {name}" for kind, name in given_names if name is not None]
    if not judges:
        return None
    verifier = verifier_of(judging.judge) if judging.judge is not None else reward_verifier(str(judging.reward))
    judges += ["a verifier of your own"] if given is not MATCH else []
    if len(judges) > 1:
        raise SettingsError(f"{judges[0]} and {judges[1]} both decide what stays; leave one of them out")
    return verifier, judges[0]


def reward_verifier(reward: str) -> Verifier:
    """Return the verifier of a reward of steps, such as ``reward.safetensors:0.2``. Raises: as `verifier_of`."""
    choice = parse_reward(reward)
    return WishingVerifier(StepReward.load(str(choice.file), choice.knob), is_exact=choice.is_exact)


def verifier_of(judge: str) -> Verifier:
    """Return the verifier of a judge by name, such as ``typical``, ``relaxed:0.5`` or ``judge.safetensors``.

    Raises: SettingsError for an unknown judge or a knob out of range; ModelError for a file that is no judge.
    """
    choice = parse_judge(judge)
    if choice.file is not None:
        return WishingVerifier(AutoJudge.load(choice.file, choice.knob), is_exact=choice.is_exact)
    assert choice.knob is not None
    return JudgingVerifier(_MAKERS[choice.kind](choice.knob), is_exact=choice.is_exact)
