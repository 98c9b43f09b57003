"""Answers a file of prompts, alone or shared between processes.

python examples/generate_dataset.py prompts.jsonl answers --model HuggingFaceTB/SmolLM2-135M-Instruct
torchrun --nproc_per_node 2 examples/generate_dataset.py prompts.jsonl answers --model ...
accelerate launch --multi_gpu --num_processes 2 examples/generate_dataset.py prompts.jsonl answers --model ...

Each line of the file is a row with a "prompt" or with "messages". Killed, it goes on where it was when it is started
again. `cat answers/*.jsonl` has the rows in their order.
"""

import argparse
import os

import torch
from transformers import AutoTokenizer

from tide_hf import TIDEModelForCausalLM, generate_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help=".jsonl or .json file")
    parser.add_argument("output_dir", help="folder for the answers")
    parser.add_argument("--model", required=True, help="Hub name or folder")
    parser.add_argument("--routers", help="Hub name or folder; without them drafts come from n-grams alone")
    parser.add_argument("--mode", default="self_speculative", help="or early_exit, post_hoc (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="such as float32 (default: what the model was saved in)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows at once (default: %(default)s)")
    parser.add_argument("--shard-size", type=int, default=64, help="rows a file (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, help="sample at this temperature (default: greedy)")
    args = parser.parse_args()
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    model = TIDEModelForCausalLM.from_pretrained(
        args.model, routers=args.routers, mode=args.mode, dtype=args.dtype, device_map=device
    )
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    generate_dataset(
        model,
        AutoTokenizer.from_pretrained(args.model),
        args.prompts,
        args.output_dir,
        batch_size=args.batch_size,
        shard_size=args.shard_size,
        max_new_tokens=args.max_new_tokens,
        **sampling,
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
