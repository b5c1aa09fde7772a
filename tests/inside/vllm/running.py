"""Run vLLM in a process of its own: one job in, one report out. The process is started from this very file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_TIMEOUT_S = 900.0
_SOURCES = Path(__file__).parents[3] / "src"


def run_vllm(folder: Path, **job: Any) -> dict[str, Any]:
    """Return what vLLM made of a job.

    Args:
        folder: for job and report.
        job: ``model``, ``prompts`` (lists of ids), ``sampling``, ``engine`` (arguments of LLM); ``card`` and
            ``num_speculative_tokens`` with the plug-in; ``kill_at``, a step before which the drafter is killed.
    """
    (folder / "job.json").write_text(json.dumps(job))
    done = start_vllm(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def start_vllm(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the job in ``folder`` and return how the process ended."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(_SOURCES),
    }
    command = [sys.executable, __file__, str(folder)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=folder
    )


def _main(folder: Path) -> None:
    from vllm import LLM, SamplingParams

    job = json.loads((folder / "job.json").read_text())
    speculation = None
    if job.get("card") is not None:
        speculation = {
            "method": "custom_class",
            "model": "card.vllm.CardProposer",
            "num_speculative_tokens": job.get("num_speculative_tokens", 5),
        }
    llm = LLM(
        model=job["model"],
        speculative_config=speculation,
        additional_config={"card": job["card"]} if speculation else {},
        enforce_eager=True,
        disable_log_stats=False,
        **job["engine"],
    )
    params = SamplingParams(detokenize=False, **job["sampling"])
    engine: Any = llm.llm_engine
    for idx, prompt_ids in enumerate(job["prompts"]):
        engine.add_request(str(idx), {"prompt_token_ids": prompt_ids}, params)
    drafter: Any = None
    if speculation:
        drafter = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    texts: dict[str, list[int]] = {}
    step_s: list[float] = []
    while engine.has_unfinished_requests():
        if len(step_s) == job.get("kill_at"):
            os.kill(drafter.proposer.link.link.pid, signal.SIGKILL)
        began = time.perf_counter()
        for output in engine.step():
            texts[output.request_id] = list(output.outputs[0].token_ids)
        step_s.append(time.perf_counter() - began)
    preemptions = next((m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"), 0)
    report = {
        "texts": [texts[str(idx)] for idx in range(len(job["prompts"]))],
        "step_s": step_s,
        "preemptions": preemptions,
    }
    if drafter is not None:
        figures = drafter.proposer.figures
        report["figures"] = {name: getattr(figures, name) for name in figures.__slots__}
        status = drafter.proposer.link.status
        report["restarts"], report["state"] = status.num_restarts, status.state
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
