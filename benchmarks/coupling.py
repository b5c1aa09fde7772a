"""What does coupled noise earn? Teacher-forced on text that the target sampled, with no engine in the way.

For each token of that text: where does it rank among the draft model's candidates, with and without the target's own
sampling noise; how sharp should the coupled scores be (mean log-likelihood of the truth); and what could the ratio rule
of speculative sampling accept at best (mean over positions of sum min(p, q)).

    python benchmarks/coupling.py --prompts FILE.jsonl --limit 40 --out benchmarks/results/coupling.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from card import LLM, SamplingParams
from card.models.loading import load_model
from card.models.protocol import Extension
from card.models.torch_runner import TorchRunner
from card.tree.sampling import CandidateScorer, GumbelNoise, Sampler, SamplingRule, filter_logits
from card.tree.verify import acceptance_probs

RANKS = (1, 2, 4, 8)
SHARPNESS_GRID = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)


def logits_over(runner: TorchRunner, token_ids: list[int], first: int) -> torch.Tensor:
    """Return the float32 logits after each token from index ``first - 1`` to the last but one."""
    slot = runner.open()
    rows = range(-1, len(token_ids) - 2)
    logits = runner.forward([Extension(slot, token_ids[:-1], list(rows), first - 1)])[0].float()
    runner.close(slot)
    return logits


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Return the figures over all prompts."""
    lines = args.prompts.read_text().splitlines()[: args.limit]
    target = TorchRunner(load_model(args.target, dtype="float32"), max_model_len=1024)
    draft = TorchRunner(load_model(args.draft, dtype="float32"), max_model_len=1024)
    found = {name: dict.fromkeys(RANKS, 0) for name in ("plain", "coupled")}
    likelihood = dict.fromkeys(SHARPNESS_GRID, 0.0)
    ratio_bound, num_tokens = 0.0, 0
    with LLM(args.target, dtype="float32") as llm:
        for i, line in enumerate(lines):
            params = SamplingParams(temperature=args.temperature, seed=args.seed + i, max_tokens=args.max_tokens)
            output = llm.chat([{"role": "user", "content": json.loads(line)["question"]}], params)[0]
            truth = list(output.outputs[0].token_ids)
            text, first = [*output.prompt_token_ids, *truth], len(output.prompt_token_ids)
            positions = list(range(first, len(text)))
            target_logits, draft_logits = logits_over(target, text, first), logits_over(draft, text, first)
            rule = SamplingRule.of(params)
            assert Sampler(rule, target.vocab_size).choose(target_logits, positions) == truth, "not the target's text"
            for name, coupled in (("plain", False), ("coupled", True)):
                top = CandidateScorer(rule, draft.vocab_size, coupled=coupled).top(draft_logits, positions, max(RANKS))[
                    0
                ]
                hits = top == torch.tensor(truth)[:, None]
                for rank in RANKS:
                    found[name][rank] += int(hits[:, :rank].any(1).sum())
            noise = GumbelNoise(rule.seed, draft.vocab_size).rows(positions)
            scores = filter_logits(draft_logits, rule) + noise
            for sharpness in SHARPNESS_GRID:
                logprobs = (scores * sharpness).log_softmax(-1).gather(1, torch.tensor(truth)[:, None])
                likelihood[sharpness] += float(logprobs.clamp_min(-20).sum())
            draft_probs = filter_logits(draft_logits, rule).softmax(-1)
            kept = draft_probs * acceptance_probs(filter_logits(target_logits, rule).softmax(-1), draft_probs)
            ratio_bound += float(kept.sum())
            num_tokens += len(truth)
    return {
        "question": "what coupled noise earns",
        "command": " ".join(sys.argv),
        "temperature": args.temperature,
        "num_prompts": len(lines),
        "num_tokens": num_tokens,
        "ratio_rule_bound": ratio_bound / num_tokens,
        "truth_within_top": {name: {k: v / num_tokens for k, v in ranks.items()} for name, ranks in found.items()},
        "mean_loglikelihood_by_sharpness": {k: v / num_tokens for k, v in likelihood.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a `question`")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--draft", default="demo-draft")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as out:
        out.write(json.dumps(figures) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
