"""Several threads at once: modes do not mix, engines are compiled by one at a time, and models load side by side."""

import threading
from concurrent.futures import ThreadPoolExecutor

import on_steps
import pytest
import torch
from drafters import use_heads
from families import prompt, tiny_model
from interruptions import Stops
from on_steps import attach_captured, attach_compiled, attach_without_compiler, linear_heads, steps_of
from skipping_calls import OPTIONS, attached_early
from transformers import AutoModelForCausalLM

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.unembed import DraftUnembed
from tide_hf.engines.steps import graphs


def test_threads_generate_in_different_modes_at_once():
    model = attached_early("llama", [1], exit_threshold=0.0)
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


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("attach", [attach_compiled, attach_captured])
def test_a_call_keeps_what_another_thread_releases(attach, rows):
    """From the first token on, when the call has no buffers yet; they are freed at its end."""
    model, batch = tiny_model("llama", attention="sdpa"), on_steps.prompts(rows)
    expected = model.generate(**batch, **on_steps.OPTIONS)
    steps = attach(model, linear_heads(model))
    use_heads(model, (1, 3))
    with ThreadPoolExecutor(1) as other:
        release = Stops(lambda _: bool(other.submit(model.tide_release).result(60)))
        for _ in range(2):
            prepared = steps.warm_up.num_prepared
            answer = model.generate(**batch, **on_steps.OPTIONS, stopping_criteria=[release])
            assert torch.equal(answer, expected)
            assert model.last_exit_stats.engine == "compiled"
            assert steps.warm_up.num_prepared > prepared
            assert not steps._buffers
    prepared = steps.warm_up.num_prepared
    for _ in range(2):
        assert torch.equal(model.generate(**batch, **on_steps.OPTIONS), expected)
        assert steps.warm_up.num_prepared > prepared  # by the first of the two
    assert steps._buffers


def test_rows_of_the_head_outlive_a_release_while_they_are_looked_up(monkeypatch):
    model = tiny_model("llama")
    TIDEModelForCausalLM.attach(model, linear_heads(model))
    found, is_current = model._tide.draft_unembed(), DraftUnembed.is_current

    def released(unembed):
        model.tide_release()
        return is_current(unembed)

    monkeypatch.setattr(DraftUnembed, "is_current", released)
    assert model._tide.draft_unembed() is found


def test_steps_serve_a_call_while_another_thread_decodes_a_batch_eagerly():
    """That call's attention, which it sets for the whole model, neither keeps others from steps nor makes new ones."""
    model = tiny_model("llama", attention="sdpa")
    expected = model.generate(**on_steps.prompts(), **on_steps.OPTIONS)
    steps = attach_compiled(model, remembered_tokens=0, successors=0)
    model.generate(**on_steps.prompts(), **on_steps.OPTIONS)
    prepared, replays = steps.warm_up.num_prepared, steps.replays
    inside, go_on = threading.Event(), threading.Event()
    waits = Stops(lambda _: inside.set() or not go_on.wait(60))
    eager = {**on_steps.OPTIONS, "tide_engine": "eager", "stopping_criteria": [waits]}
    with ThreadPoolExecutor(1) as other:
        batch = other.submit(model.generate, **on_steps.prompts(4), **eager)
        try:
            assert inside.wait(60)
            assert model.config._attn_implementation != "sdpa"
            assert torch.equal(model.generate(**on_steps.prompts(), **on_steps.OPTIONS), expected)
            assert model.last_exit_stats.engine == "compiled"
        finally:
            go_on.set()
        batch.result(60)
    assert steps.warm_up.num_prepared == prepared
    assert steps.replays > replays
    assert model.config._attn_implementation == "sdpa"


def test_models_load_in_several_threads_at_once(tmp_path, tiny_llama):
    """transformers alone would leave the process unable to tie a head to its embeddings."""
    tiny_llama(tie_word_embeddings=True, num_hidden_layers=2).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: TIDEModelForCausalLM.from_pretrained(tmp_path), range(12)))
    models.append(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in models)
