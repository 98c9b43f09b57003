"""Several replicas of a model with TIDE behind one address, by Ray Serve (`pip install "ray[serve]"`).

python examples/ray_serve.py HuggingFaceTB/SmolLM2-135M-Instruct --replicas 2 --cpus 2
curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \
    -d '{"messages": [{"role": "user", "content": "Why does bread rise?"}], "max_tokens": 64}'

Each replica is a process that answers one request at a time, without streaming; other requests wait.
"""

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from tide_hf import TIDEModelForCausalLM
from tide_hf.hub.load import shipped_routers


class Replica:
    """One attached model, warmed up before the first request."""

    def __init__(self, model: str, routers: str | None, engine: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.name, self.tokenizer = model, AutoTokenizer.from_pretrained(model)
        self.model = TIDEModelForCausalLM.from_pretrained(
            model, routers=routers or shipped_routers(model), engine=engine, device_map="auto"
        )
        self.model.tide_warm_up()

    async def __call__(self, request: Any) -> Any:
        """Answer an HTTP request in the format of OpenAI's chat API."""
        return await asyncio.to_thread(self.answer, await request.json())

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer the body of a request."""
        inputs = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.model.device)
        options: dict[str, Any] = {"max_new_tokens": body.get("max_tokens", 256)}
        if "temperature" in body:
            options |= {"do_sample": body["temperature"] > 0, "temperature": body["temperature"] or 1.0}
        prompt_tokens = inputs["input_ids"].shape[1]
        new_tokens = self.model.generate(**inputs, **options)[0, prompt_tokens:]
        message = {"role": "assistant", "content": self.tokenizer.decode(new_tokens, skip_special_tokens=True)}
        reason = "length" if len(new_tokens) == options["max_new_tokens"] else "stop"
        return {
            "object": "chat.completion",
            "model": self.name,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(new_tokens)},
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub name or folder; on a cluster, one that every node can read")
    parser.add_argument("--routers", help="Hub name or folder (default: those shipped for the model)")
    parser.add_argument("--engine", default="eager", help="or compiled (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--cpus", type=int, default=1, help="cores and threads of each (default: %(default)s)")
    parser.add_argument("--gpus", type=float, default=0, help="of each (default: %(default)s)")
    parser.add_argument("--ray-address", help="of a cluster, or auto (default: one is started on this machine)")
    args = parser.parse_args(argv)
    import ray  # noqa: PLC0415 - an optional package
    from ray import serve  # noqa: PLC0415

    ray.init(address=args.ray_address)
    resources = {"num_cpus": args.cpus, "num_gpus": args.gpus}
    settings = {"num_replicas": args.replicas, "max_ongoing_requests": 1, "ray_actor_options": resources}
    deployment = serve.deployment(Replica, **settings)
    app = deployment.bind(args.model, args.routers, args.engine, args.cpus)
    serve.run(app, route_prefix="/v1/chat/completions", blocking=True)


if __name__ == "__main__":
    main()
