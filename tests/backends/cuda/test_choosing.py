"""What runs models on CUDA: the plain runner, and recorded passes where a user asks for them. The device is made up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import MambaConfig, MambaForCausalLM

from card import LLM, SamplingParams
from card.backends.cuda import choosing
from card.backends.cuda.bucketed import BucketedRunner
from card.backends.cuda.device_beam import DeviceBeamWriter
from card.backends.transformers.hybrid import HybridRunner
from card.backends.transformers.runner import TorchRunner
from card.cli.main import cli
from card.config import EngineSettings
from card.errors import ModelError, SettingsError
from card.machine.lane import Lane
from card.models.runner import ExactRunner
from card.models.runners import make_runner
from tests.pair import Pair
from tests.static import make_model
from tests.tiny import NO_ENDS

PROMPT, GREEDY = "Anna has 3 apples", SamplingParams(temperature=0.0, max_tokens=12)
SIZES = {"max_model_len": 64, "max_tree_rows": 5}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make up a device cuda:0 that computes here; return what is made for it, in order."""
    found: list[str] = []

    def note(kind: type) -> None:
        init = kind.__init__  # type: ignore[misc]

        def noted(self: Any, *args: Any, **settings: Any) -> None:
            found.append(type(self).__name__)
            init(self, *args, **settings)

        monkeypatch.setattr(kind, "__init__", noted)

    class StreamLane(Lane):
        def __init__(self, device: str) -> None:
            found.append("StreamLane")

    for kind in (TorchRunner, DeviceBeamWriter):
        note(kind)
    monkeypatch.setattr("card.backends.transformers.devices.parse_device", lambda device: "cpu")
    monkeypatch.setattr("card.backends.transformers.devices.free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr("card.backends.cuda.choosing.is_cuda", lambda device: True)
    monkeypatch.setattr("card.backends.cuda.stream_lane.StreamLane", StreamLane)
    return found


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [({}, {"TorchRunner"}), ({"cuda_graphs": True}, {"BucketedRunner", "DeviceBeamWriter", "StreamLane"})],
)
def test_a_pair_on_a_device_runs_plainly_unless_graphs_are_asked_for(
    pair: Pair, made: list[str], asked: dict[str, Any], kinds: set[str]
) -> None:
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float64", "cache": False, "check": False}
    with LLM(pair.target, pair.draft, **settings, **asked) as llm:
        (found,) = llm.generate(PROMPT, GREEDY)
    assert set(made) == kinds and len([one for one in made if one.endswith("Runner")]) == 2
    with LLM(pair.target, method="vanilla", dtype="float64", cache=False, check=False) as llm:
        (alone,) = llm.generate(PROMPT, GREEDY)
    assert found.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(("graphs", "kind"), [(False, ExactRunner), (True, BucketedRunner)])
def test_the_runner_of_a_model_is_bucketed_where_graphs_are_asked_for(
    made: list[str], graphs: bool, kind: type
) -> None:
    model = copy.deepcopy(make_model())
    runner = make_runner(model, **SIZES, cuda_graphs=graphs)
    assert type(runner) is kind
    assert (runner.max_model_len, runner.max_rows) == (64, 69)


def test_a_model_with_a_state_runs_plainly_where_graphs_are_asked_for(made: list[str]) -> None:
    config = MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, state_size=4, **NO_ENDS)
    assert isinstance(make_runner(MambaForCausalLM(config).eval(), **SIZES, cuda_graphs=True), HybridRunner)


def test_a_model_on_the_cpu_runs_plainly_beside_one_with_graphs() -> None:
    assert type(make_runner(copy.deepcopy(make_model()), **SIZES, cuda_graphs=True)) is ExactRunner
    assert EngineSettings(draft_device="cuda:1", cuda_graphs=True).device == "cpu"


@pytest.mark.parametrize("command", [["generate", "hi"], ["serve"]])
def test_graphs_are_refused_on_a_cpu_in_one_line(command: list[str]) -> None:
    done = CliRunner().invoke(cli, [*command, "--cuda-graphs"])
    assert isinstance(done.exception, SettingsError)
    assert str(done.exception) == "--cuda-graphs must be set only together with --device cuda, got True"


def test_graphs_are_refused_where_no_cuda_device_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"^cuda_graphs must be set only together with device cuda, got True$"):
        LLM(pair.target, cuda_graphs=True)
    with pytest.raises(ModelError, match=r"^device 'cuda' is not available here; allowed: cpu[^\n]*$"):
        LLM(pair.target, device="cuda", cuda_graphs=True)


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cuda:1", True), ("cpu", False), ("mps", False)])
def test_passes_can_be_recorded_on_cuda_alone(device: str, expected: bool) -> None:
    assert choosing.is_cuda(device) is choosing.is_cuda(torch.device(device)) is expected
