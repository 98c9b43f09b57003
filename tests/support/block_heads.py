"""Routers with a block head, and batches of documents to train it on."""

import torch
from drafters import use_heads
from families import ATTENTION

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.block_head import pad_documents
from tide_hf.calibration.documents import plan_batches
from tide_hf.calibration.states import StateReader
from tide_hf.routers.block_head import block_config_of
from tide_hf.routers.routers import TIDERouters

SLIDING = ("gemma2", "gemma3", "gemma3_text", "cohere2", "gpt_oss")  # every second layer attends to the whole sequence
WITHOUT = ("mistral", "llama4_text")  # at most one layer attends to the whole sequence
WITH_BLOCK = [family for family in ATTENTION if family not in WITHOUT]


def block_layer_of(family):
    return 3 if family in SLIDING else 1


def routers_for(model, block_layer, seed=0):
    torch.manual_seed(seed)
    config = block_config_of(model, find_structure(model), block_layer)
    routers = TIDERouters.for_model(model, exit_layers=[2], block_layer=block_layer, block_config=config)
    for parameter in routers.block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return routers


def attach_drafting(model, routers, width, every=1):
    TIDEModelForCausalLM.attach(model, routers)
    return use_heads(model, routers.config.block_layer, width, every)


def document_batches(model, block_layer, documents, rows):
    structure = find_structure(model)
    reader = StateReader(model, structure, Unembed(model, structure), [block_layer])
    for batch in plan_batches(documents, rows):
        yield pad_documents(reader.read(documents, batch), batch, block_layer)
