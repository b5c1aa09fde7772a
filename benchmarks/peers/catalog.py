"""What is compared: models, peers, and the rows of each peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from card.errors import SettingsError

OURS = "card"
BEAM_ALONE = f"{OURS}-beam"  # `card --writers beam`: without copies
IK = "ik_llama.cpp"  # from a build that the user names
OPENVINO = "openvino"  # reads some types of a GGUF file's blocks itself
LLAMAS = ("llama.cpp", IK)  # which read the same files
_OPENVINO_LENGTHS = (3, 5, 8)
_LLAMA_LENGTHS = (2, 4, 8, 12)
_VLLM_LENGTHS = (4, 8)
_SPS_LENGTHS = (2, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A pair of models, and how llama.cpp stores it."""

    name: str
    target: str  # a name, or a folder below that of the weights
    draft: str
    cost: str | None = None  # the price that the target is inflated to
    ggufs: tuple[str, ...] = ("bf16", "Q8_0", "Q4_0")
    has_writer_row: bool = False  # `card` with its draft model as the only writer is a row, too
    stored_gguf: str | None = None  # the quantisation of NAME.gguf beside the folders, from which they were unpacked
    prompts: tuple[str, ...] = ("questions", "code", "copy-edit")  # unless others are asked for


MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            ModelSpec(name="demo", target="demo-target", draft="demo-draft"),
            ModelSpec(name="demo-90M", target="demo-target", draft="demo-draft", cost="90M"),
            ModelSpec(name="demo-300M", target="demo-target", draft="demo-draft", cost="300M"),
            ModelSpec(
                name="qwen",
                target="qwen-1.5b",
                draft="qwen-0.5b",
                ggufs=("bf16", "Q8_0", "Q4_K_M"),
                stored_gguf="Q4_K_M",
                has_writer_row=True,
                prompts=("questions", "code"),
            ),
        )
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """An engine, the script that drives it, and what it may run."""

    name: str
    worker: str  # script
    environment: str | None  # folder of its own below that of the environments; None: the one this runs in
    plain: str  # its method without speculation, whose texts are the reference for its others
    options: Mapping[str, tuple[dict[str, Any], ...]]  # by method: settings, of which the fastest is kept
    batched: tuple[str, ...] = ()  # methods that are run with several requests at once
    shared: tuple[str, ...] | None = None  # methods that one worker holds, with all their options; None: every one

    def shares_worker(self, method: str) -> bool:
        """Return whether a worker that has this method may hold others, too."""
        return self.shared is None or method in self.shared


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRow:
    """One of our rows: a method as it is typed, with nothing set but what stands here."""

    method: str
    length: int | None = None  # draft tokens of a round
    has_all_cores: bool = False  # a thread for each core; else the start chooses how many
    writers: tuple[str, ...] | None = None  # None: those that the method has


OWN_ROWS: Mapping[str, OwnRow] = MappingProxyType(
    {
        "vanilla-all-cores": OwnRow(method="vanilla", has_all_cores=True),
        "vanilla": OwnRow(method="vanilla"),
        "suffix": OwnRow(method="suffix"),
        OURS: OwnRow(method="card"),
        BEAM_ALONE: OwnRow(method="card", writers=("beam",)),
        f"{OURS}-all-cores": OwnRow(method="card", has_all_cores=True),
        **{f"sps-{length}": OwnRow(method="sps", length=length, has_all_cores=True) for length in _SPS_LENGTHS},
    }
)
_SPS_ROWS = tuple(name for name, row in OWN_ROWS.items() if row.method == "sps")
LONGEST_SPS = max(_SPS_LENGTHS)


def _lengths(lengths: Sequence[int]) -> tuple[dict[str, Any], ...]:
    return tuple({"draft_tokens": length} for length in lengths)


_ITSELF: tuple[dict[str, Any], ...] = ({},)  # nothing to choose, or the row chooses by itself

PEERS: Mapping[str, PeerSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            PeerSpec(
                name="llama.cpp",
                worker="worker_llama_cpp.py",
                environment=None,  # the worker needs none; what it starts was built
                plain="plain",
                options={"plain": _ITSELF, "draft": _lengths(_LLAMA_LENGTHS), "ngram": _ITSELF},
                batched=("plain", "draft"),
            ),
            PeerSpec(
                name=IK,
                worker="worker_ik_llama.py",
                environment=None,
                plain="plain",
                options={"plain": _ITSELF, "draft": _lengths(_LLAMA_LENGTHS), "suffix": _ITSELF},
                batched=("plain", "draft"),
            ),
            PeerSpec(
                name=OPENVINO,
                worker="worker_openvino.py",
                environment="openvino",
                plain="plain",
                options={
                    "plain": ({"attention": "PA"}, {"attention": "SDPA"}),
                    "draft": _lengths(_OPENVINO_LENGTHS),
                    "lookup": _lengths(_OPENVINO_LENGTHS),
                },
            ),
            PeerSpec(
                name=OURS,
                worker="worker_card.py",
                environment=None,
                plain="vanilla-all-cores",
                options=dict.fromkeys(OWN_ROWS, _ITSELF),
                batched=("vanilla-all-cores", OURS, "sps-4"),
                shared=_SPS_ROWS,  # the others start as they do for users: each in a process of its own
            ),
            PeerSpec(
                name="transformers",
                worker="worker_transformers.py",
                environment=None,
                plain="transformers-all-cores",
                options=dict.fromkeys(("transformers-all-cores", "transformers-assisted-all-cores"), _ITSELF),
            ),
            PeerSpec(
                name="vllm",
                worker="worker_vllm.py",
                environment="vllm",
                plain="plain",
                options={"plain": _ITSELF, "draft": _lengths(_VLLM_LENGTHS), "ngram": _lengths((4,))},
                batched=("plain", "draft"),
                shared=(),
            ),
        )
    }
)
_QUANTISATIONS = MappingProxyType(
    {OPENVINO: ("int8",), OURS: ("bf16", "int8"), "transformers": ("bf16",), "vllm": ("bf16",)}
)
BITS = MappingProxyType({"bf16": 16, "int8": 8, "Q8_0": 8, "Q4_0": 4, "Q4_K_M": 4})


@dataclass(frozen=True, slots=True, order=True)
class RowKey:
    """One line of the comparison of one model."""

    peer: str
    quantisation: str
    method: str

    def __str__(self) -> str:
        return f"{self.peer}:{self.quantisation}:{self.method}"

    @property
    def spec(self) -> PeerSpec:
        """The peer."""
        return PEERS[self.peer]

    @property
    def is_own_fixed(self) -> bool:
        """Whether it is ours and one of those that `card` chooses from: all of ours but `card` and its variants."""
        return self.peer == OURS and not self.method.startswith(OURS)

    @property
    def reference(self) -> RowKey:
        """The row whose texts this one is compared with: plain decoding, same peer, same quantisation."""
        return RowKey(self.peer, self.quantisation, self.spec.plain)


def quantisations(peer: str, model: ModelSpec) -> tuple[str, ...]:
    """Return what a peer runs a model in: ours llama.cpp's smallest file, too, and OpenVINO one that was fetched."""
    if peer in LLAMAS:
        return model.ggufs
    reads_file = peer == OURS or (peer == OPENVINO and model.stored_gguf is not None)
    return (*_QUANTISATIONS[peer], model.ggufs[-1]) if reads_file else _QUANTISATIONS[peer]


def all_rows(model: ModelSpec) -> Iterator[RowKey]:
    """Yield every row of a model, plain decoding first for each peer and quantisation."""
    for peer, spec in PEERS.items():
        for quantisation in quantisations(peer, model):
            for method in spec.options:
                if method != BEAM_ALONE or model.has_writer_row:
                    yield RowKey(peer, quantisation, method)


def chosen_rows(model: ModelSpec, patterns: Sequence[str], *, has_ik: bool = False) -> list[RowKey]:
    """Return the rows that patterns such as ``card``, ``llama.cpp:Q8_0`` or ``card:int8:card`` mean; none means all.

    The plain row of each peer and quantisation comes along, as the others are compared with it.
    Args:
        has_ik: whether a build of ik_llama.cpp was named; without one its rows are left out.
    Raises: SettingsError for a peer that is not known, or not there.
    """
    for pattern in patterns:
        if pattern.partition(":")[0] not in PEERS:
            raise SettingsError(f"unknown peer in {pattern!r}; known: {', '.join(PEERS)}")
        if pattern.partition(":")[0] == IK and not has_ik:
            raise SettingsError(f"{pattern!r} needs a build of {IK}; name its folder by --ik")
    rows = [row for row in all_rows(model) if has_ik or row.peer != IK]
    wanted = {row for row in rows if not patterns or any(_fits(row, pattern) for pattern in patterns)}
    wanted |= {row.reference for row in wanted}
    return [row for row in rows if row in wanted]


def _fits(row: RowKey, pattern: str) -> bool:
    """Return whether each part that the pattern names is the row's; an empty part leaves it open."""
    parts = (row.peer, row.quantisation, row.method)
    return all(wanted in ("", part) for wanted, part in zip(pattern.split(":"), parts, strict=False))
