"""Routers with a random draft head, what it drafts and is trained on, and heads that `speculators` wrote."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from tide_hf.base_model.hooks import hook_layers
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.documents import token_batch
from tide_hf.calibration.draft_head_training import TappedBatch
from tide_hf.calibration.states import StateReader
from tide_hf.routers.routers import TIDERouters

REFERENCE = Path(__file__).parents[1] / "routers" / "eagle3_reference"
HEADS = ("llama", "qwen3", "plain")
SHAPE = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def base_model(**changes):
    """A Llama that the heads of `REFERENCE` fit."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 32, "num_hidden_layers": 4, **shape, **changes})).eval()


def draft_head_for(model, seed=0, **changes):
    """Routers with exit layer 2 and a random draft head, which taps the first, a middle and the last state."""
    structure = find_structure(model)
    size, layers = structure.hidden_size, structure.num_layers
    shape = SHAPE | {"hidden_size": size, "target_hidden_size": size, "draft_vocab_size": structure.vocab_size}
    shape |= {"tap_layers": [0, layers // 2, layers], "max_position_embeddings": 256} | changes
    torch.manual_seed(seed)
    routers = TIDERouters.for_model(model, exit_layers=[2], draft_head=shape)
    for parameter in routers.draft_head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return routers


def original_format(folder: Path, *, pickled: bool = True) -> None:
    """Turn a head in the speculators format into one as EAGLE-3's authors publish them."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    flat = config["transformer_layer_config"] | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 24}
    flat["eagle_config"] = {name: config[name] for name in ("eagle_aux_hidden_state_layer_ids", "norm_before_fc")}
    (folder / "config.json").write_text(json.dumps(flat))
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    (folder / "model.safetensors").unlink()
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


def drafts_after(model, text, width):
    """What the head drafts after a text without padding; all K/V are filled at once."""
    head, ids, structure, states = model._tide.routers.draft_head, torch.tensor([text]), find_structure(model), {}
    embed = head.embed_tokens or model.get_input_embeddings()
    embeddings = embed(ids)
    with torch.no_grad(), hook_layers(structure, range(1, structure.num_layers + 1), states.__setitem__):
        hook = structure.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: states.__setitem__(0, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        model(ids, use_cache=False)
        hook.remove()
    states = {layer: state[0] if isinstance(state, tuple) else state for layer, state in states.items()}
    fused = head.fuse(torch.cat([states[layer] for layer in head.config.tap_layers], dim=-1))
    kv, last = DynamicLayer(), len(text) - 1
    head.store(embeddings[:, 1:last], fused[:, : last - 1], torch.arange(1, last)[None], kv)
    state, token, drafted = fused[:, last - 1 : last], ids[:, -1], []
    for step in range(width):
        token, _, state = head.draft(head(embed(token)[:, None], state, torch.tensor([[last + step]]), kv, None))
        token = token[:, 0]
        drafted.append(int(token))
    return drafted


def tapped_batch(model, head, documents):
    """What a head is trained on, for whole documents."""
    structure = find_structure(model)
    taps = head.config.tap_layers
    reader = StateReader(
        model, structure, Unembed(model, structure), [tap for tap in taps if tap < structure.num_layers]
    )
    whole, batch = reader.read(documents, range(len(documents))), token_batch(documents, range(len(documents)))

    def padded(states):
        rows = [states[whole.document_ids == number] for number in range(len(documents))]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    tapped = [padded(whole.hidden_states.get(layer, whole.final_states)) for layer in taps]
    rest = torch.cat(tapped, dim=-1), padded(whole.final_states), padded(whole.top_tokens)
    return TappedBatch(batch.input_ids, batch.attention_mask, batch.counted, *rest)
