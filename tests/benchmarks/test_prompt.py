"""Where prompts spend their time: code is named, samples are counted, work is that of the model's shape."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from card.errors import BenchError
from card.kernels.machine_code import has_machine_code
from card.models.loading import load_decoder

pytestmark = pytest.mark.skipif(not has_machine_code(), reason="needs machine code")


@pytest.fixture
def script(bench):
    return bench["prompt"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("q4_k_attend_part_wait", "products, q4_k"),
        ("byte_attend_part_wait", "products, byte"),
        ("q4_k_expanded_attend_part_wait", "products, q4_k"),
        ("q4_k_expander_attend_part_wait", "products, q4_k"),
        ("card.kernels.jit.attention.attend_part", "attention"),
        ("card.kernels.jit.attention_blocks.widen", "attention"),
        ("card.kernels.jit.sharing.wait", "waiting at barriers"),
        ("team_lead_attend_part_wait", "waiting at barriers"),
        ("sched_yield", "waiting at barriers"),
        ("card.kernels.jit.rows.prepare_rows", "norms and quantising"),
        ("", "Python and system"),
    ],
)
def test_functions_are_of_a_kind_of_work_by_their_names(script, name, kind):
    assert script.kind_of(name) == kind


def test_code_made_meanwhile_is_named_and_samples_are_counted_where_it_runs(bench):
    from card.kernels.jit.object_code import ObjectCode
    from card.kernels.jit.vectors import INT, loop, read

    samples = bench["code_samples"]

    def write(builder: Any, arguments: Any) -> None:
        _, _, end = loop(builder, read(builder, arguments, INT), [])
        end([])

    with pytest.raises(BenchError, match="no code of attend_part, wait was made"), samples.named_code() as codes:
        code = ObjectCode("spins_in_a_test", write)
    assert [(one.name, one.start) for one in codes] == [("spins_in_a_test_attend_part_wait", code.address)]
    enter, rounds = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address), np.array([1 << 22])
    sampler = samples.Sampler()
    with sampler.sampling():
        until = time.process_time() + 0.4
        while time.process_time() < until:
            enter(rounds.ctypes.data)
    counts = sampler.counts(codes)
    assert counts["spins_in_a_test_attend_part_wait"] > 0.8 * counts.total() > 0
    with sampler.sampling():
        assert sum(range(1 << 20))
    assert counts.total() > sampler.counts(codes).total(), "a block begins anew"
    assert ObjectCode.__init__.__name__ == "__init__", "all is as it was"


def test_the_work_of_a_prompt_is_that_of_the_shape_of_its_model(script):
    model = load_decoder("demo-target")
    work, config = script.work_of(model, 10), model.config
    heads = config.num_attention_heads * model.layers[0].shape.head_size
    assert work.attention_mads == config.num_hidden_layers * 2 * heads * (10 * 11 // 2)
    head = model.lm_head.weight.size
    assert sum(work.mads.values()) == 10 * (sum(one.weight.size for one in model.linears) - head) + head
    assert set(work.mads) == {"bf16"}


def test_a_rate_is_work_over_its_share_of_the_processors_time(script):
    samples = {"products, q4_k": 60, "attention": 30, "waiting at barriers": 10}
    reading = script.Reading(tokens=8, repeats=1, wall_s=1.0, cpu_s=2.0, samples=samples)
    work = script.Work(mads={"q4_k": 120.0}, attention_mads=6.0, row_bytes=1.0)
    peaks = SimpleNamespace(byte_mads=400.0, float_mads=40.0, memory_bytes=1.0)
    figures = script.figures_of(reading, work, peaks, 2)
    assert figures == {
        "products, q4_k": {"share": 0.6, "per_s": pytest.approx(100.0), "of_peak": pytest.approx(0.5)},
        "attention": {"share": 0.3, "per_s": pytest.approx(10.0), "of_peak": pytest.approx(0.5)},
        "waiting at barriers": {"share": 0.1},
    }
    shown = script.table([{"tokens": 8, "wall_s": 1.0, "kinds": figures}]).splitlines()
    assert shown[2:] == [
        *("| rows a second | 8 |", "| products, q4_k | 60 (50) |", "| attention | 30 (50) |"),
        "| waiting at barriers | 10 |",
    ]


def test_peaks_of_this_machine_are_above_nothing(bench):
    peaks = bench["machine_peaks"].measure_peaks(1, seconds=1e-4, read_bytes=1 << 20)
    assert min(peaks.byte_mads, peaks.float_mads, peaks.memory_bytes) > 0
