"""Several threads at once: one's mode is not another's, and models load side by side."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from families import prompt
from test_skipping import OPTIONS, attached
from transformers import AutoModelForCausalLM

from tide_hf import TIDEModelForCausalLM
from tide_hf.depth.early_exit import PropagateRun
from tide_hf.depth.gates import active


def test_other_threads_do_not_see_an_active_run():
    model = attached("llama", [1], exit_threshold=0.0)
    tokens = prompt()
    plain = model(input_ids=tokens).logits
    run = PropagateRun(model._tide.structure, None, model._tide.routers, model._tide.unembed, 0.0)
    seen = []
    with active(run):
        thread = threading.Thread(target=lambda: seen.append(model(input_ids=tokens).logits))
        thread.start()
        thread.join()
    torch.testing.assert_close(seen[0], plain)
    assert run.layers_executed == 0


def test_two_threads_generate_in_different_modes_at_once():
    model = attached("llama", [1], exit_threshold=0.0)
    modes = ("early_exit", "self_speculative", "post_hoc") * 2
    expected = {mode: model.generate(prompt(), tide_mode=mode, **OPTIONS) for mode in set(modes)}
    results = [None] * len(modes)

    def work(index):
        results[index] = model.generate(prompt(), tide_mode=modes[index], **OPTIONS)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(modes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected[mode]) for result, mode in zip(results, modes, strict=True))


def test_models_load_in_several_threads_at_once(tmp_path, tiny_llama):
    """transformers alone would leave the process unable to tie a head to its embeddings."""
    tiny_llama(tie_word_embeddings=True, num_hidden_layers=2).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: TIDEModelForCausalLM.from_pretrained(tmp_path), range(12)))
    models.append(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in models)
