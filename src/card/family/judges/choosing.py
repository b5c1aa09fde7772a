"""The verifier of an engine, as its settings name a judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from card.errors import SettingsError
from card.family.judges.auto import AUTO_WISH, AutoJudge
from card.family.judges.judge import Judge, JudgingVerifier
from card.family.judges.names import parse_judge
from card.family.judges.training_free import Fly, KullbackLeibler, Partial, Relaxed, Typical
from card.models.features import FeatureWish
from card.models.torch_runner import TorchRunner
from card.tree.verify import MATCH, Verifier

_MAKERS: Mapping[str, Callable[[float], Judge]] = MappingProxyType(
    {"typical": Typical, "relaxed": Relaxed, "kl": KullbackLeibler, "fly": Fly, "partial": Partial}
)


def choose_verifier(judge: str | None, given: Verifier) -> Verifier:
    """Return the verifier of an engine: the one that was given, unless a judge is named.

    Args:
        judge: such as ``typical``, ``relaxed:0.5`` or ``judge.safetensors``.
    Raises: SettingsError for a judge that is unknown, has a knob out of range, or stands beside a verifier; ModelError
        for a file that is no judge.
    """
    if judge is None:
        return given
    choice = parse_judge(judge)
    if given is not MATCH:
        raise SettingsError(f"judge {judge} and a verifier of your own both decide what stays; leave one of them out")
    if choice.file is not None:
        return JudgingVerifier(AutoJudge.load(choice.file, choice.knob), is_exact=choice.is_exact)
    assert choice.knob is not None
    return JudgingVerifier(_MAKERS[choice.kind](choice.knob), is_exact=choice.is_exact)


def attach_verifier(verifier: Verifier, target: TorchRunner, draft: str) -> FeatureWish | None:
    """Return the features that the verifier needs of the target; None for all but judges that were trained.

    Args:
        draft: name of the draft model; empty if nobody knows it: it is elsewhere, or an object.
    Raises: ModelError if its judge was made for another pair.
    """
    judge = verifier.judge if isinstance(verifier, JudgingVerifier) else None
    if not isinstance(judge, AutoJudge):
        return None
    judge.check_pair(target, draft)
    return AUTO_WISH
