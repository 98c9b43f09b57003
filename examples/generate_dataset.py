"""Answer a file of prompts, split between processes by accelerate.

python examples/generate_dataset.py prompts.jsonl answers --model HuggingFaceTB/SmolLM2-135M-Instruct
torchrun --nproc_per_node 2 examples/generate_dataset.py prompts.jsonl answers --model ...

Each line of the file is a row with a "prompt" or "messages". Every process writes one file to the folder;
`cat answers/*.jsonl` has the rows in their order, each with its "answer".
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoTokenizer

from tide_hf import TIDEModelForCausalLM


def tokens_of(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """The prompt of a row."""
    if "messages" not in row:
        return tokenizer(row["prompt"])["input_ids"]
    return tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help=".jsonl file")
    parser.add_argument("output_dir", type=Path, help="folder for the answers")
    parser.add_argument("--model", required=True, help="Hub name or folder")
    parser.add_argument("--routers", help="Hub name or folder; without them only n-grams draft")
    parser.add_argument("--batch-size", type=int, default=8, help="rows at once (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    args = parser.parse_args()

    processes = PartialState(cpu=not torch.cuda.is_available())
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = TIDEModelForCausalLM.from_pretrained(args.model, routers=args.routers, device_map=processes.device)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    output = args.output_dir / f"{processes.process_index:05d}.jsonl"
    with processes.split_between_processes(rows) as mine, output.open("w", encoding="utf-8") as file:
        for start in range(0, len(mine), args.batch_size):
            batch = mine[start : start + args.batch_size]
            prompts = {"input_ids": [tokens_of(row, tokenizer) for row in batch]}
            inputs = tokenizer.pad(prompts, return_tensors="pt").to(model.device)
            tokens = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
            answers = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            file.writelines(json.dumps({**row, "answer": one}) + "\n" for row, one in zip(batch, answers, strict=True))
    processes.destroy_process_group()


if __name__ == "__main__":
    main()
