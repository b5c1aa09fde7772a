"""Choose the verifier of an engine whose settings name a judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from card.config import EngineSettings
from card.errors import SettingsError
from card.family.judges.auto import AUTO_WISH, AutoJudge
from card.family.judges.judge import Judge, JudgingVerifier
from card.family.judges.knobs import parse_judge
from card.family.judges.record import JudgeSettings
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
    """Return the verifier of the settings' judge, and its name in words; None without a judge.

    Raises: SettingsError if a verifier is given, too; otherwise as `verifier_of`.
    """
    judge = settings.of(JudgeSettings).judge
    if judge is None:
        return None
    verifier = verifier_of(judge)
    if given is not MATCH:
        raise SettingsError(f"judge {judge} and a verifier of your own both decide what stays; leave one of them out")
    return verifier, f"judge {judge}"


def verifier_of(judge: str) -> Verifier:
    """Return the verifier of a judge by name, such as ``typical``, ``relaxed:0.5`` or ``judge.safetensors``.

    Raises: SettingsError for an unknown judge or a knob out of range; ModelError for a file that is no judge.
    """
    choice = parse_judge(judge)
    if choice.file is not None:
        return WishingVerifier(AutoJudge.load(choice.file, choice.knob), is_exact=choice.is_exact)
    assert choice.knob is not None
    return JudgingVerifier(_MAKERS[choice.kind](choice.knob), is_exact=choice.is_exact)
