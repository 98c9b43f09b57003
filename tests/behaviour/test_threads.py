"""Several threads at once: modes do not mix, engines are compiled by one at a time, and models load side by side."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import prompt
from on_steps import attach_without_compiler, steps_of
from skipping_calls import OPTIONS, attached
from transformers import AutoModelForCausalLM

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.engines.steps import graphs


def test_threads_generate_in_different_modes_at_once():
    model = attached("llama", [1], exit_threshold=0.0)
    modes = ("early_exit", "self_speculative", "post_hoc") * 2
    expected = {mode: model.generate(prompt(), tide_mode=mode, **OPTIONS) for mode in set(modes)}
    with ThreadPoolExecutor(len(modes)) as pool:
        results = list(pool.map(lambda mode: model.generate(prompt(), tide_mode=mode, **OPTIONS), modes))
    assert all(torch.equal(result, expected[mode]) for result, mode in zip(results, modes, strict=True))


@pytest.mark.parametrize("shared", [True, False], ids=["one model", "three models"])
def test_first_calls_on_compiled_engines_at_once(tiny_llama, monkeypatch, caplog, shared):
    """One thread traces and compiles at a time, and nothing is refused."""
    busy, alone, make_fx = threading.RLock(), [], graphs.make_fx

    def alone_in(function):
        def run(*args, **kwargs):
            is_free = busy.acquire(blocking=False)
            alone.append(is_free)
            try:
                threading.Event().wait(0.02)  # in which another would come
                return function(*args, **kwargs)
            finally:
                if is_free:
                    busy.release()

        return run

    monkeypatch.setattr(graphs, "make_fx", lambda *args, **kwargs: alone_in(make_fx(*args, **kwargs)))
    expected = tiny_llama().generate(prompt(), **OPTIONS)
    modes = ("self_speculative", "post_hoc", "post_hoc") if shared else ("self_speculative",) * 2 + ("early_exit",)
    models = [tiny_llama() for _ in range(1 if shared else 3)] * (3 if shared else 1)
    for model in dict.fromkeys(models):
        routers = TIDERouters.for_model(model, exit_layers=[2])
        attach_without_compiler(model, routers, engine="compiled", exit_threshold=2.0)
    together = threading.Barrier(3, timeout=60)

    def first_call(number):
        together.wait()
        return models[number].generate(prompt(), tide_mode=modes[number], **OPTIONS)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(first_call, range(3)))
    assert all(torch.equal(result, expected) for result in results)
    assert len(alone) > 3
    assert all(alone)
    for model in models:
        assert steps_of(model).refused is None
        assert steps_of(model).prompts.refused == {}


def test_models_load_in_several_threads_at_once(tmp_path, tiny_llama):
    """transformers alone would leave the process unable to tie a head to its embeddings."""
    tiny_llama(tie_word_embeddings=True, num_hidden_layers=2).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: TIDEModelForCausalLM.from_pretrained(tmp_path), range(12)))
    models.append(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in models)
