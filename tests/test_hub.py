"""Routers on the Hub: found by name, published, and loaded by transformers' own auto classes and pipelines."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from loopback_hub import TOKEN
from test_model_card import record
from test_readme import SNIPPETS
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, TextStreamer, pipeline

from tide_hf import TIDEModelForCausalLM, TIDERouters, __version__, cli
from tide_hf.errors import ConfigurationError, HubError, RoutersFileError, RoutersNotFoundError

ROOT = Path(__file__).parent.parent
PROMPT = "Bread rises because"
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def routers(model_hub, tiny_model_folder):
    """Calibrated routers of `org/base`, which is on the Hub, and they are not."""
    commit = model_hub.add("org/base", tiny_model_folder)
    model = AutoModelForCausalLM.from_pretrained("org/base", tie_word_embeddings=False)
    layers = {"1": {"agreement": 0.25, "exit_rate": 0.1}, "3": {"agreement": 0.75, "exit_rate": 0.1}}
    made = TIDERouters.for_model(model, exit_layers=[1, 3], exit_strategy="linear", exit_threshold=0.8)
    made.config.calibration = record(chosen=0.8) | {"exit_layers": layers}
    made.config.base_model_revision = commit
    return made


@pytest.fixture
def on_hub(model_hub, routers, tmp_path):
    """The folder whose files are `org/base-tide` on the Hub."""
    routers.save_pretrained(tmp_path / "routers")
    model_hub.add("org/base-tide", tmp_path / "routers")
    return tmp_path / "routers"


def plain_answer(**options):
    model, tokenizer = AutoModelForCausalLM.from_pretrained("org/base"), AutoTokenizer.from_pretrained("org/base")
    return model.generate(**tokenizer(PROMPT, return_tensors="pt"), **OPTIONS, **options)


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Found by name


def test_a_revision_is_a_commit_or_a_branch(model_hub, on_hub):
    old = model_hub.repos["models", "org/base-tide"].refs["main"]
    edit_config(on_hub, exit_threshold=0.5)
    model_hub.add("org/base-tide", on_hub)
    model_hub.repos["models", "org/base-tide"].refs["older"] = old
    assert TIDERouters.from_pretrained("org/base-tide").config.exit_threshold == 0.5
    for revision in (old, "older"):
        assert TIDERouters.from_pretrained("org/base-tide", revision=revision).config.exit_threshold == 0.8
        model = TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", routers_revision=revision)
        assert model._tide.exit_threshold == 0.8
    with pytest.raises(RoutersNotFoundError, match=r"no routers at org/base-tide: got .*Expected config\.json"):
        TIDERouters.from_pretrained("org/base-tide", revision="newer")


def test_private_repositories_take_a_token(model_hub, on_hub):
    for repo in model_hub.repos.values():
        repo.private = True
    for token in (None, "hf_another"):
        with pytest.raises(RoutersNotFoundError, match="no routers at org/base-tide"):
            TIDERouters.from_pretrained("org/base-tide", token=token)
    model = TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", token=TOKEN)
    assert model._tide.routers.exit_layers == [1, 3]


@pytest.mark.parametrize("how", ["local_files_only", "HF_HUB_OFFLINE"])
def test_what_was_fetched_once_needs_no_network(model_hub, on_hub, tmp_path, monkeypatch, how):
    where = {"cache_dir": str(tmp_path / "elsewhere")}
    TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", **where)
    offline = {"local_files_only": True} if how == "local_files_only" else {}
    if not offline:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model_hub.asked.clear()
    model = TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", **where, **offline)
    assert model._tide.routers is not None
    assert AutoModelForCausalLM.from_pretrained("org/base-tide", **where, **offline)._tide.routers is not None
    with pytest.raises(RoutersNotFoundError, match="no routers at org/base-tide"):
        TIDERouters.from_pretrained("org/base-tide", **offline)  # in the other cache
    # Where peft is installed, transformers' own auto class looks for an adapter without local_files_only.
    assert [path for path in model_hub.asked if not path.endswith("adapter_config.json")] == []


# Published


def test_push_to_hub_uploads_what_from_pretrained_reads_and_the_card_tells(model_hub, routers, tmp_path):
    commit = routers.push_to_hub("org/new-tide", token=TOKEN)
    repo = model_hub.repos["models", "org/new-tide"]
    assert commit == f"{model_hub.address}/org/new-tide/commit/{repo.refs['main']}"
    assert {"config.json", "model.safetensors", "README.md"} <= set(repo.files())
    assert any(name.startswith("plots/") for name in repo.files())
    assert repo.messages[-1] == "Upload routers"
    assert not repo.private
    loaded = TIDERouters.from_pretrained("org/new-tide")
    assert loaded.config.calibration == routers.config.calibration
    for name, tensor in routers.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    card = ModelCard.load("org/new-tide")
    assert card.data.base_model == "org/base"
    assert card.data.base_model_relation == "adapter"
    assert card.data.library_name == "tide_hf"
    assert {"early-exit", "tide"} <= set(card.data.tags)
    results = {(result.metric_type, result.metric_name): result for result in card.data.eval_results}
    assert results["agreement", "Agreement with the full model at exit layer 3"].metric_value == 0.75
    in_early_exit = "in early_exit at exit_threshold 0.8"
    assert results["disagreement", f"Disagreement with the full model {in_early_exit}"].metric_value == 0.01
    assert results["depth", f"Share of the layers that run {in_early_exit}"].metric_value == 0.8
    assert {result.dataset_name for result in card.data.eval_results} == {"texts given by the caller"}
    assert 'from_pretrained(\n    "org/base",\n    routers="org/new-tide",\n)' in card.text
    assert 'pipeline("text-generation", model="org/new-tide")' in card.text
    routers.save_pretrained(tmp_path / "again", push_to_hub=True, repo_id="org/again", token=TOKEN)
    assert set(model_hub.repos["models", "org/again"].files()) == set(repo.files())


def test_push_to_hub_privately_to_a_branch_and_as_a_pull_request(model_hub, routers):
    routers.push_to_hub("org/new-tide", private=True, revision="next", commit_message="First", token=TOKEN)
    repo = model_hub.repos["models", "org/new-tide"]
    assert repo.private
    assert (set(repo.files("main")), repo.messages[-1]) == ({".gitattributes"}, "First")
    assert TIDERouters.from_pretrained("org/new-tide", revision="next", token=TOKEN).exit_layers == [1, 3]
    commit = routers.push_to_hub("org/new-tide", create_pr=True, token=TOKEN)
    assert commit.pr_url.startswith(f"{model_hub.address}/org/new-tide/discussions/")
    assert set(repo.files("main")) == {".gitattributes"}
    assert "model.safetensors" in repo.files(commit.pr_revision)


def test_pushes_that_are_refused(model_hub, routers, tmp_path):
    with pytest.raises(HubError, match=r"org/new-tide cannot be uploaded to: got .*401.*Expected the Hub within reach"):
        routers.push_to_hub("org/new-tide")
    with pytest.raises(ConfigurationError, match=r"no name of a Hub repository: got '\.\./x'"):
        routers.push_to_hub("../x", token=TOKEN)
    routers.config.base_model_name_or_path = str(tmp_path)
    with pytest.raises(ConfigurationError, match=r"do not name a base model that others can load: got .*Expected the"):
        routers.push_to_hub("org/new-tide", token=TOKEN)
    routers.config.base_model_name_or_path, routers.config.calibration = "org/base", None
    with pytest.raises(ConfigurationError, match="these routers cannot have a card"):
        routers.push_to_hub("org/new-tide", token=TOKEN)
    assert ("models", "org/new-tide") not in model_hub.repos


def test_push_where_the_hub_is_away(routers, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="org/new-tide cannot be uploaded to"):
        routers.push_to_hub("org/new-tide", token=TOKEN)


def test_the_command(model_hub, on_hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    options = ["--private", "--revision", "next", "--commit-message", "From the command line"]
    assert cli.main(["push", str(on_hub), "org/by-command", *options]) == 0
    repo = model_hub.repos["models", "org/by-command"]
    assert capsys.readouterr().out == f"{model_hub.address}/org/by-command/commit/{repo.refs['next']}\n"
    assert repo.private
    assert repo.messages[-1] == "From the command line"
    assert cli.main(["push", str(on_hub), "org/by-command", "--create-pr"]) == 0
    assert "/org/by-command/discussions/" in capsys.readouterr().out
    monkeypatch.delenv("HF_TOKEN")
    assert cli.main(["push", str(on_hub), "org/by-command"]) == 2
    assert "tide-hf: org/by-command cannot be uploaded to" in capsys.readouterr().err


# Loaded by transformers


def test_auto_classes_load_base_and_routers_by_the_routers_name(on_hub):
    model = AutoModelForCausalLM.from_pretrained("org/base-tide")
    assert isinstance(model, TIDEModelForCausalLM)
    assert isinstance(model, LlamaForCausalLM)
    assert model.config._name_or_path == "org/base"
    assert model._tide.routers.exit_layers == [1, 3]
    assert model._tide.exit_threshold == 0.8
    tokenizer = AutoTokenizer.from_pretrained("org/base-tide")
    assert torch.equal(model.generate(**tokenizer(PROMPT, return_tensors="pt"), **OPTIONS), plain_answer())
    assert model.last_exit_stats.mode == "self_speculative"


def test_what_is_asked_of_the_auto_class_reaches_base_and_routers(
    model_hub, on_hub, routers, tiny_llama, tiny_model_folder
):
    tiny_llama(seed=1).save_pretrained(tiny_model_folder)  # the base moves on; the routers name the older commit
    model_hub.add("org/base", tiny_model_folder)
    edit_config(on_hub, exit_threshold=0.5)
    repo = model_hub.repos["models", "org/base-tide"]
    repo.commit({"config.json": (on_hub / "config.json").read_bytes()}, "next")
    for repo in model_hub.repos.values():
        repo.private = True
    options = {"revision": "next", "token": TOKEN}
    model = AutoModelForCausalLM.from_pretrained("org/base-tide", mode="early_exit", dtype="bfloat16", **options)
    assert (model._tide.mode, model._tide.exit_threshold, model.dtype) == ("early_exit", 0.5, torch.bfloat16)
    assert torch.equal(model._tide.routers[1].router.down.weight, routers[1].router.down.weight)  # never rounded
    surer = AutoModelForCausalLM.from_pretrained("org/base-tide", exit_threshold=0.9, **options)
    assert surer._tide.exit_threshold == 0.9
    with pytest.raises(ConfigurationError, match="exit_threshold is no usable number"):
        AutoModelForCausalLM.from_pretrained("org/base-tide", exit_threshold=-1.0, **options)
    assert AutoTokenizer.from_pretrained("org/base-tide", **options).vocab_size == 256


def test_a_name_of_routers_will_do_for_our_own_class(on_hub):
    for source in ("org/base-tide", on_hub):
        model = TIDEModelForCausalLM.from_pretrained(source, mode="early_exit")
        assert (model._tide.mode, model._tide.exit_threshold) == ("early_exit", 0.8)
        assert model._tide.routers.exit_layers == [1, 3]


def test_a_pipeline_of_the_routers_name(on_hub):
    generator = pipeline("text-generation", model="org/base-tide", device="cpu")
    answer = generator(PROMPT, return_tensors=True, **OPTIONS)[0]["generated_token_ids"]
    assert answer == plain_answer()[0].tolist()
    assert generator.model.last_exit_stats.mode == "self_speculative"


FRESH = """
import sys
import tide_hf
assert "transformers" not in sys.modules
from transformers import pipeline
print(type(pipeline("text-generation", model="org/base-tide", device="cpu").model.last_exit_stats))
"""


def test_importing_tide_hf_is_all_it_takes(model_hub, on_hub, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": model_hub.address, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FRESH], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "<class 'NoneType'>\n", done.stderr


# generate(custom_generate=...)


@pytest.fixture
def custom_generate(model_hub, tmp_path, monkeypatch):
    """The name of a custom_generate repository that the command has uploaded; tide-hf counts as installed."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert cli.main(["push", str(ROOT / "examples" / "custom_generate"), "org/decoding", "--custom-generate"]) == 0
    (tmp_path / f"tide_hf-{__version__}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: tide-hf\nVersion: {__version__}\n"
    (tmp_path / f"tide_hf-{__version__}.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"custom_generate": "org/decoding", "trust_remote_code": True}


class Collector(TextStreamer):
    """A streamer that keeps what it was given."""

    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.reshape(-1))

    def end(self):
        self.ended = True


def test_custom_generate_gives_the_tokens_of_plain_generate(model_hub, on_hub, custom_generate):
    expected = plain_answer()
    model, tokenizer = AutoModelForCausalLM.from_pretrained("org/base"), AutoTokenizer.from_pretrained("org/base")
    inputs, streamer = tokenizer(PROMPT, return_tensors="pt"), Collector()
    assert torch.equal(model.generate(**inputs, **OPTIONS, **custom_generate, streamer=streamer), expected)
    assert streamer.ended
    assert torch.equal(torch.cat(streamer.pieces), expected[0])
    assert model._tide.routers is None
    options = {**OPTIONS, **custom_generate, "routers": "org/base-tide"}
    assert torch.equal(model.generate(**inputs, **options), expected)
    attachment = model._tide
    assert attachment.routers.exit_layers == [1, 3]
    model.generate(**inputs, **options, tide_mode="early_exit", exit_threshold=0.0, revision="main")
    assert set(model.last_exit_stats.exits_per_layer) == {1}
    assert model._tide is attachment  # and its measured costs are kept
    readme = model_hub.repos["models", "org/decoding"].files()["README.md"].decode()
    assert 'custom_generate="org/decoding"' in readme
    assert "org/tide" not in readme


def test_custom_generate_takes_trust(on_hub, custom_generate, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    model = AutoModelForCausalLM.from_pretrained("org/base")
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(torch.tensor([[1, 2]]), **{**custom_generate, "trust_remote_code": False})
    assert not isinstance(model, TIDEModelForCausalLM)


def test_a_source_without_code_is_not_uploaded(model_hub, on_hub, capsys):
    assert cli.main(["push", str(on_hub), "org/decoding", "--custom-generate"]) == 2
    assert (
        "is no source of a custom_generate repository: got no generate.py and no README.md" in capsys.readouterr().err
    )
    assert ("models", "org/decoding") not in model_hub.repos


def test_the_snippets_of_the_readme(model_hub, routers, custom_generate, monkeypatch):
    """Those that name a repository, as they are written; `org/tide` is the custom_generate repository."""
    model_hub.repos["models", "org/tide"] = model_hub.repos["models", "org/decoding"]
    namespace = {"own": routers, "base": "org/base", "tokenizer": AutoTokenizer.from_pretrained("org/base")}
    snippets = [snippet for snippet in SNIPPETS if '"org/' in snippet]
    assert len(snippets) == 3
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), namespace)
    assert isinstance(namespace["generator"].model, TIDEModelForCausalLM)
    assert isinstance(namespace["plain"], TIDEModelForCausalLM)
    card = ModelCard.load("org/SmolLM2-135M-Instruct-tide")
    for snippet in re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL):
        exec(compile(snippet, "card", "exec"), namespace)
    assert namespace["model"]._tide.routers.exit_layers == [1, 3]


# Repositories that mean ill


def with_outside_weights(folder):
    """Weights that an index looks for beside the folder; their bytes."""
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    index = {"metadata": {}, "weight_map": {"exits.1.router.up.bias": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return outside.read_bytes()


def test_an_index_in_a_folder_is_not_followed(on_hub):
    with_outside_weights(on_hub)
    with pytest.raises(RoutersFileError, match=r"got model\.safetensors\.index\.json, which points to other files"):
        TIDERouters.from_pretrained(on_hub)


def test_an_index_on_the_hub_does_not_lead_out_of_the_cache(model_hub, on_hub, tmp_path):
    weights = with_outside_weights(on_hub)
    model_hub.repos.pop(("models", "org/base-tide"))
    model_hub.add("org/base-tide", on_hub)
    model_hub.repos["models", "org/base-tide"].commit({"../outside.safetensors": weights})  # it would be sent
    with pytest.raises((RoutersFileError, RoutersNotFoundError), match="org/base-tide"):
        TIDERouters.from_pretrained("org/base-tide")
    assert list((tmp_path / "cache").rglob("outside.safetensors")) == []


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_weights": "../outside.safetensors"},
        {"attn_implementation": "org/kernel"},
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"custom_pipelines": {}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_names_no_files_and_no_code(model_hub, on_hub, change):
    edit_config(on_hub, **change)
    model_hub.add("org/base-tide", on_hub)
    for load in (TIDERouters.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ConfigurationError, match=rf"got \['{next(iter(change))}'\], which it must not have"):
            load("org/base-tide", trust_remote_code=True)


def test_a_repository_names_its_base_on_the_hub(model_hub, on_hub, tiny_model_folder):
    for base, got in {
        str(tiny_model_folder): "tiny-llama'",
        "../tiny-llama": "'../tiny-llama'",
        "org/base-tide": "'org/base-tide', which holds routers itself",
        None: "no base_model_name_or_path",
    }.items():
        edit_config(on_hub, base_model_name_or_path=base, base_model_revision=None)
        model_hub.add("org/base-tide", on_hub)
        for load in (AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained):
            with pytest.raises(ConfigurationError, match=f"which model to load: got .*{got}.* Expected the name"):
                load("org/base-tide")
    edit_config(on_hub, base_model_name_or_path=str(tiny_model_folder))
    assert isinstance(AutoModelForCausalLM.from_pretrained(on_hub), TIDEModelForCausalLM)  # a folder may name one


def test_a_base_that_is_gone_is_told_as_transformers_tells_it(model_hub, on_hub, tmp_path):
    del model_hub.repos["models", "org/base"]
    with pytest.raises(OSError, match="org/base is not"):
        AutoModelForCausalLM.from_pretrained("org/base-tide", cache_dir=tmp_path / "another")
