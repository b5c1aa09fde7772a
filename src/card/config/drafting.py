"""Settings of drafting and verification."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

from card.config.fields import Listed, Replaceable, check, declared, described, listed, make_plain, require, setting
from card.config.reading import CANDIDATES, DRAFTING, IMAGES
from card.errors import named

VerifyShape = Literal["chain", "tree", "trunk"]
Growth = Literal["layer", "best-first", "branch", "fan-out", "phrases"]

# The most that a drafter grants, wherever it runs.
MAX_BEAM_WIDTH = 256
MAX_BRANCH = 256
MAX_LEAD = 4096
MAX_NODES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """Shape of the tree of candidates that a drafter grows."""

    SECTION: ClassVar[str] = "Drafting"

    beam_width: int = setting(
        6, "Most candidates of a drafter pass.", least=1, most=MAX_BEAM_WIDTH, read_by=DRAFTING
    )  # K
    branch: int = setting(
        8, "Most continuations of one candidate.", least=1, most=MAX_BRANCH, read_by=DRAFTING
    )  # in both tiers together
    lead: int = setting(24, "Most layers ahead of the text.", least=1, most=MAX_LEAD, read_by=CANDIDATES)
    max_nodes: int = setting(
        4096, "Most candidates held at once.", least=1, most=MAX_NODES, read_by=DRAFTING, is_option=False
    )
    min_path_logprob: float = setting(
        -12.0, "Paths less likely are not expanded.", below=0, read_by=DRAFTING, is_option=False
    )
    growth: Growth = setting("layer", f"How the tree grows: {', '.join(get_args(Growth))}.", read_by=DRAFTING)
    branch_below: float = setting(
        0.7, "Probability below which growth branch takes alternatives.", least=0, most=1, read_by="growth branch"
    )
    fan_out: Listed[int] = listed(
        (3,),
        "Outcomes prepared at each position by growth fan-out.",
        least=0,
        most=MAX_BRANCH,
        num_items=(1, 64),
        read_by="growth fan-out",
        allowed=f"1 to 64 whole numbers from 0 to {MAX_BRANCH}",
    )
    num_speculative_tokens: int = setting(  # of each branch, for growth branch and fan-out
        6, "Tokens drafted per turn.", least=1, most=MAX_LEAD, read_by=CANDIDATES
    )
    coupled_noise: bool = setting(True, "Rank candidates with the target's noise.", read_by=DRAFTING)

    @classmethod
    def of(cls, draft: DraftSettings) -> TreeShape:
        """Return the shape alone, without settings that only the target needs."""
        return cls(**{one.name: getattr(draft, one.name) for one in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings(TreeShape, Replaceable):
    """Settings of drafting, and of how many candidates the target verifies."""

    verify: VerifyShape = setting(
        "chain", f"Shape that the target verifies: {' or '.join(get_args(VerifyShape))}.", read_by=CANDIDATES
    )
    budget: int = setting(
        16, "Most candidates verified in one target pass.", least=1, most=MAX_NODES, read_by=CANDIDATES
    )
    min_verify_prob: float = setting(
        0.2, "Less likely candidates are not verified.", least=0, below=1, read_by=CANDIDATES
    )
    max_wait_s: float = setting(
        0.0, "Longest wait for --min-depth candidates.", least=0, unit="seconds", read_by=DRAFTING
    )
    min_depth: int = setting(1, "Least path at which the target stops waiting.", least=1, read_by=DRAFTING)
    waits_after_miss: bool = setting(True, "Wait after a miss, too.", read_by=DRAFTING)
    hide_images: bool = setting(
        True, "Hide images from drafters.", shown="--hide-images", read_by=IMAGES, section="Images"
    )

    def __post_init__(self) -> None:
        make_plain(self)
        check(self)
        is_enough = self.max_nodes >= self.beam_width
        require(is_enough, "max_nodes", f"at least {named('beam_width')} ({self.beam_width})", self.max_nodes)


DraftSettings.__doc__ = f"{DraftSettings.__doc__}\n\n{described(declared(DraftSettings))}\n"
