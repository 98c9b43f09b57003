"""What runs where there is no GPU does on another device too: the same, without asking for what such a device has not.

`test_pretend_device.py` runs this in a process of its own. What runs on CPUs alone is not here: packed and joined
weights, compiled engines.
"""

import copy
from functools import partial

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from block_heads import WITH_BLOCK, block_layer_of, routers_for
from calibrations import texts
from drafters import Alternating, HeadDrafter, ScriptedDrafter, use_drafter, use_heads
from families import ATTENTION, LAYERS, VOCAB, slow_but, tiny_model
from images import image_prompts, seeing_model
from on_steps import COPYING, FEW, WINDOWED, linear_heads, prompts, use_steps
from pretend_device import NAME, times_waited
from recorded import Recorder
from transformers import TextStreamer

from tide_hf import TIDEModelForCausalLM, TIDERouters, calibrate
from tide_hf.base_model.structure import CACHE, find_structure
from tide_hf.engines.steps.step_store import CapturedSteps
from tide_hf.evaluation import QualityOptions, exit_logits, measure_quality
from tide_hf.evaluation.benchmark import compare, tide_methods
from tide_hf.evaluation.inspection import convergence_by_layer
from tide_hf.logits_process import TIDELogitsProcessor

GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 20}
FIT = {"samples": 24, "max_length": 12, "batch_size": 8, "exit_layers": [1, 2], "progress": False}
APPROXIMATE = [("post_hoc", "propagate"), ("early_exit", "propagate"), ("early_exit", "recompute")]
APPROXIMATE += [("early_exit", "zero_pad"), ("early_exit", "prompt")]  # prompts' tokens leave as well


def there(batch, device=NAME):
    return {name: value.to(device) for name, value in batch.items()}


def spread(model, *, cut=2, head=1):
    """Over both devices: embeddings and the first layers on one, the rest on the other, and the head as told."""
    structure = find_structure(model)
    names = {module: name for name, module in model.named_modules()}
    layers = [names[layer] for layer in structure.layers]
    decoder = layers[0].rpartition(".")[0]
    places = dict(zip(layers, [f"{NAME}:0"] * cut + [f"{NAME}:1"] * (len(layers) - cut), strict=True))
    for name in names.values():
        holds_layers = decoder.startswith(name)
        if not holds_layers and not any(name.startswith(f"{place}.") for place in places):
            places[name] = f"{NAME}:0"
    if structure.norm is not None:
        places[names[structure.norm]] = f"{NAME}:1"
    places[names[structure.head]] = f"{NAME}:{head}"
    return dispatch_model(model, places, main_device=f"{NAME}:0", force_hooks=True)


def two(family, **overrides):
    """The same model twice: on the CPU, and on the device."""
    return tiny_model(family, **overrides), tiny_model(family, **overrides).to(NAME)


def answer(model, batch, **options):
    torch.manual_seed(0)
    found = model.generate(**batch, **options)
    assert found.device == batch["input_ids"].device
    return found.cpu()


def test_the_pretend_device_behaves_like_an_accelerator():
    tensor = torch.ones(3, device=NAME)
    with pytest.raises(RuntimeError, match="same device"):
        torch.where(torch.ones(3, dtype=torch.bool), tensor, tensor)
    with pytest.raises(TypeError, match="no float64"):
        tensor.double()
    before = times_waited()
    assert (tensor + 1).sum().item() == 6
    assert torch.equal(copy.deepcopy(tensor).cpu(), torch.ones(3))
    assert times_waited() - before == 2


@pytest.mark.parametrize(
    ("rows", "family"), [*((3, family) for family in ATTENTION), *slow_but(("llama",), ATTENTION, 1)]
)
def test_every_familys_tokens_are_the_base_models(family, rows):
    plain, model = two(family)
    batch = prompts(rows, pads=2 if rows > 1 else 0)
    expected = answer(plain, batch, **GREEDY)
    TIDEModelForCausalLM.attach(model, linear_heads(plain))
    continuations = expected[:, batch["input_ids"].shape[1] :].tolist()

    def make(_, prompt, engine):
        heads = HeadDrafter(prompt, engine, 1 if rows > 1 else 3, 3)
        return Alternating(heads, ScriptedDrafter("mixed", continuations, VOCAB))

    model._tide.make_drafter = make
    assert torch.equal(answer(model, there(batch), **GREEDY), expected)
    assert model.last_exit_stats.drafted > 0


@pytest.mark.parametrize(("rows", "family"), [(1, "llama"), *((3, family) for family in WITH_BLOCK if family in FEW)])
def test_the_block_head_drafts(family, rows):
    plain, model = two(family)
    layer, batch = block_layer_of(family), prompts(rows)
    expected = answer(plain, batch, **GREEDY)
    TIDEModelForCausalLM.attach(model, routers_for(plain, layer))
    use_heads(model, layer)
    assert torch.equal(answer(model, there(batch), **GREEDY), expected)
    assert model.last_exit_stats.drafted > 0


@pytest.mark.parametrize(
    ("head", "family"), [*slow_but(("llama", "gemma2"), ATTENTION, 1), *slow_but(("llama", "opt"), ATTENTION, 0)]
)
def test_a_model_on_two_devices_generates_the_base_models_tokens(family, head):
    """Heads draft on either side of the cut, whose head is with the embeddings or with the last layer."""
    expected = answer(tiny_model(family), prompts(3, pads=2), **GREEDY)
    kinds = [(2, linear_heads, 1), (2, linear_heads, 3)]
    if family in WITH_BLOCK:
        layer = block_layer_of(family)
        kinds += [(cut, lambda model, layer=layer: routers_for(model, layer), layer) for cut in (layer - 1, layer + 1)]
    for cut, make_routers, layer in kinds:
        model = spread(tiny_model(family), cut=cut, head=head)
        TIDEModelForCausalLM.attach(model, make_routers(tiny_model(family)))
        use_heads(model, layer)
        assert torch.equal(answer(model, there(prompts(3, pads=2)), **GREEDY), expected)
        assert model.last_exit_stats.drafted > 0


@pytest.mark.parametrize(("rows", "options"), [(1, SAMPLED), (3, GREEDY)], ids=["sampled", "greedy"])
@pytest.mark.parametrize(("mode", "strategy"), APPROXIMATE)
@pytest.mark.parametrize("family", slow_but(("llama",), ("llama", "gemma2", "qwen3_moe")))
def test_tokens_exit_as_on_a_cpu(family, mode, strategy, rows, options):
    in_prompt = {"exits_in_prompt": True} if strategy == "prompt" else {}
    found = []
    for model in (*two(family), spread(tiny_model(family))):
        routers = TIDERouters.for_model(model, exit_layers=[1, 3], exit_strategy="linear", exit_threshold=0.5)
        routers.config.kv_cache_strategy = "propagate" if in_prompt else strategy
        TIDEModelForCausalLM.attach(model, routers, mode=mode, pack_weights=False)
        batch = there(prompts(rows, pads=3), model.device)
        found.append((answer(model, batch, **options, **in_prompt), model.last_exit_stats))
    assert all(torch.equal(tokens, found[0][0]) for tokens, _ in found)
    assert all(stats == found[0][1] for _, stats in found)
    assert found[0][1].layers_executed < LAYERS * rows * GREEDY["max_new_tokens"] or mode == "post_hoc"


@pytest.mark.parametrize("rows", [1, 3])
def test_sampled_tokens_are_those_of_a_cpu(rows):
    plain, model = two("llama")
    expected = answer(plain, prompts(rows), **SAMPLED)
    TIDEModelForCausalLM.attach(model, linear_heads(plain))
    assert torch.equal(answer(model, there(prompts(rows)), **SAMPLED), expected)


@pytest.mark.parametrize(("family", "rows"), [("gemma3", 1), ("qwen2_5_vl", 3), ("llava", 3)])
def test_prompts_with_images(family, rows):
    batch = image_prompts(family, rows)
    expected = answer(seeing_model(family), batch, **GREEDY)
    model = TIDEModelForCausalLM.attach(seeing_model(family).to(NAME))
    use_drafter(model, "wrong at the last position", expected[:, batch["input_ids"].shape[1] :].tolist())
    assert torch.equal(answer(model, there(batch), **GREEDY), expected)


@pytest.mark.parametrize("mode", ["self_speculative", "early_exit", "post_hoc"])
def test_a_prompt_may_be_on_the_cpu(mode, tiny_tokenizer, capsys):
    """As `generate` has it: it moves what the model reads, and leaves the answer where the prompt was."""
    plain, model = two("llama")
    routers = TIDERouters.for_model(plain, exit_layers=[2], exit_threshold=0.9)
    expected = answer(plain, prompts(), **GREEDY)
    TIDEModelForCausalLM.attach(model, routers, mode=mode)
    found = answer(model, prompts(), streamer=TextStreamer(tiny_tokenizer), **GREEDY)
    assert mode != "self_speculative" or torch.equal(found, expected)
    assert capsys.readouterr().out


def test_a_returned_cache_serves_the_next_call():
    plain, model = two("llama")
    first, second = prompts()["input_ids"], torch.tensor([[7, 9, 11]])
    expected = answer(plain, {"input_ids": first}, **GREEDY)
    longer = torch.cat([expected, second], dim=1)
    TIDEModelForCausalLM.attach(model, linear_heads(plain))
    kept = model.generate(first.to(NAME), **GREEDY, return_dict_in_generate=True)
    assert torch.equal(kept.sequences.cpu(), expected)
    found = answer(model, {"input_ids": longer.to(NAME)}, **GREEDY, **{CACHE: kept[CACHE]})
    assert torch.equal(found, answer(plain, {"input_ids": longer}, **GREEDY))


def rounds_and_waits(model, new):
    before = times_waited()
    model.generate(**there(prompts()), **{**GREEDY, "max_new_tokens": new})
    return model.last_exit_stats.rounds, times_waited() - before


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_round_waits_once_for_the_device(engine):
    plain, model = two("llama")
    continuations = answer(plain, prompts(), **GREEDY)[:, prompts()["input_ids"].shape[1] :].tolist()
    TIDEModelForCausalLM.attach(model, linear_heads(plain), engine=engine)
    if engine == "eager":
        use_drafter(model, "wrong at the last position", continuations, width=4)
    else:
        use_steps(model, CapturedSteps(Recorder(), compile_graph=None))
        use_heads(model, 1, width=7)
        rounds_and_waits(model, 24)  # which captures the steps
    (few, before), (many, after) = (rounds_and_waits(model, new) for new in (3, 24))
    assert many > few
    assert after - before == many - few


CAPTURED = [family for family in ATTENTION if family not in COPYING]  # the others copy from the host
IN_BATCHES = [family for family in FEW if family in CAPTURED and family not in WINDOWED]


@pytest.mark.parametrize(
    ("rows", "family"),
    [*slow_but(("llama", "gemma2", "gpt2"), CAPTURED, 1), *slow_but(("qwen3_moe", "bloom"), IN_BATCHES, 3)],
)
def test_captured_steps_never_wait_for_the_device(family, rows):
    plain, model = two(family)
    batch = prompts(rows)
    expected = answer(plain, batch, **GREEDY)
    TIDEModelForCausalLM.attach(model, linear_heads(plain), engine="compiled")
    waits = []

    def replay_of(function, state, device, pool):
        before = times_waited()
        replay = Recorder()(function, state, device, pool)
        waits.append(times_waited() - before)
        run = replay.run

        def counted():
            before = times_waited()
            found = run()
            waits.append(times_waited() - before)
            return found

        replay.run = counted
        return replay

    steps = use_steps(model, CapturedSteps(replay_of, compile_graph=None))
    use_heads(model, (1, 3))
    assert torch.equal(answer(model, there(batch), **GREEDY), expected)
    assert steps.refused is None
    assert steps.replays > 0
    assert not any(waits)


@pytest.mark.parametrize(("offload", "rows"), [(cpu_offload, 1), (disk_offload, 3)])
def test_offloaded_weights(tiny_llama, tiny_tokenizer, tmp_path, offload, rows):
    where = {"offload_dir": tmp_path} if offload is disk_offload else {}
    model = offload(tiny_llama(), execution_device=torch.device(f"{NAME}:0"), **where)
    expected = answer(tiny_llama(), prompts(rows), **GREEDY)
    routers = calibrate(model, tiny_tokenizer, texts(60), **FIT)
    TIDEModelForCausalLM.attach(model, routers)
    use_heads(model, 1)
    assert torch.equal(answer(model, there(prompts(rows)), **GREEDY), expected)


@pytest.fixture
def device_llama(tiny_llama):
    return tiny_llama().to(NAME)


APART = pytest.param(partial(spread, head=0), marks=pytest.mark.slow)


@pytest.mark.parametrize("place", [lambda model: model.to(NAME), spread, APART])
@pytest.mark.parametrize(
    ("exit_strategy", "labels"),
    [("identity", "agreement"), ("linear", "cosine"), ("linear", "kl"), ("block", "agreement")],
)
def test_calibration_makes_the_routers_of_a_cpu(tiny_llama, tiny_tokenizer, exit_strategy, labels, place):
    options = {**FIT, "exit_strategy": exit_strategy, "labels": labels}
    models = (tiny_llama(), place(tiny_llama()))
    expected, found = (calibrate(model, tiny_tokenizer, texts(60), **options) for model in models)
    states = found.state_dict()
    assert {value.device.type for value in states.values()} == {"cpu"}
    for name, value in expected.state_dict().items():
        assert torch.allclose(states[name].float(), value.float(), atol=0.02), name
    assert found.config.calibration["exit_layers"].keys() == expected.config.calibration["exit_layers"].keys()


def test_calibration_on_text_of_the_models_own_and_from_routers(device_llama, tiny_tokenizer):
    assert calibrate(device_llama, tiny_tokenizer, **FIT, translator_rank=4).config.calibration["num_documents"] > 0
    block = calibrate(device_llama, tiny_tokenizer, texts(60), **FIT, exit_strategy="block")
    again = calibrate(device_llama, tiny_tokenizer, texts(60), **FIT, exit_strategy="block", start_from=block)
    assert again.config.calibration["block"]["agreement"] >= 0.0
    half = device_llama.to(torch.bfloat16)
    assert calibrate(half, tiny_tokenizer, texts(60), **FIT, exit_strategy="block").exit_layers == [1, 2]


@pytest.mark.parametrize("place", [lambda model: model.to(NAME), spread, partial(spread, head=0)])
def test_quality_is_measured_as_on_a_cpu(tiny_llama, tiny_tokenizer, place):
    device_llama = place(tiny_llama())
    options = QualityOptions(text=texts(12), samples=6, max_length=16)
    routers = TIDERouters.for_model(device_llama, exit_layers=[1, 3], exit_threshold=0.5)
    records = [measure_quality(model, tiny_tokenizer, routers, options) for model in (tiny_llama(), device_llama)]
    for one, other in zip(*(record["perplexity"]["rows"] for record in records), strict=True):
        assert one["perplexity"]["value"] == pytest.approx(other["perplexity"]["value"], rel=1e-4)
    ids = torch.arange(3, 12, device=NAME)[None]
    assert exit_logits(device_llama, routers, ids, exit_threshold=0.5).logits.device.type == NAME
    found = [convergence_by_layer(model, tiny_tokenizer, texts(4)) for model in (tiny_llama(), device_llama)]
    for one, other in zip(*found, strict=True):
        assert one.mean_cosine == pytest.approx(other.mean_cosine, rel=1e-5)


def test_methods_are_compared(device_llama):
    routers = TIDERouters.for_model(device_llama, exit_layers=[2], exit_strategy="linear")
    batch = there(prompts())
    results = compare(tide_methods(device_llama, routers, ["self_speculative"]), [batch], max_new_tokens=8, repeats=1)
    assert results[1].num_equal == 1


def test_the_published_selection_runs_as_a_logits_processor():
    found = []
    for model in (*two("llama"), spread(tiny_model("llama"))):
        routers = TIDERouters.for_model(model, exit_layers=[3], exit_strategy="linear", exit_threshold=0.5)
        batch = there(prompts(), model.device)
        with TIDELogitsProcessor(model, routers) as processor:
            found.append(answer(model, batch, logits_processor=[processor], **GREEDY))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
