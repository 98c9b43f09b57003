"""Routers that come with the library: found by the base model's head, wherever it was loaded from, and told of."""

import shutil

import pytest
from repository import SHIPPED
from transformers import AutoModelForCausalLM

from tide_hf import TIDELogitsProcessor, TIDEModelForCausalLM, TIDERouters
from tide_hf.cli.chat import MAKING_READY
from tide_hf.cli.main import main
from tide_hf.cli.model_arguments import NO_ROUTERS
from tide_hf.common.errors import RoutersNotFoundError
from tide_hf.hub import load as loading

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = ("--max-new-tokens", "4")


@pytest.fixture
def shipped(tmp_path, tiny_llama, monkeypatch):
    """The folder of routers, of a library that has them for two models, `org/other` and that of `tiny_model_folder`."""
    cards = tmp_path / "site-packages" / "tide_hf" / "model_cards"
    for name, model in {"org--other": tiny_llama(seed=1), "org--tiny": tiny_llama()}.items():
        routers = TIDERouters.for_model(model, exit_layers=[2])
        routers.config.base_model_name_or_path = name.replace("--", "/")
        routers.save_pretrained(cards / name)
    monkeypatch.setattr(loading, "__file__", str(cards.parent / "hub" / "load.py"))
    return cards / "org--tiny"


def test_a_local_folder_of_a_model_has_the_routers_that_fit_its_head(shipped, tiny_model_folder, tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    assert loading.shipped_routers(model) == str(shipped)
    assert loading.shipped_routers(model.bfloat16()) == str(shipped)
    assert loading.shipped_routers("org/tiny") == str(shipped)
    assert loading.shipped_routers(tiny_llama(seed=2)) is None
    assert loading.shipped_routers(tiny_llama(hidden_size=64)) is None


def test_default_stands_for_them_in_python(shipped, tiny_model_folder, tiny_llama):
    model = TIDEModelForCausalLM.from_pretrained(tiny_model_folder, routers="default")
    assert model._tide.routers.config.base_model_name_or_path == "org/tiny"
    assert TIDEModelForCausalLM.attach(tiny_llama(), "default")._tide.routers.exit_layers == [2]
    with TIDELogitsProcessor(tiny_llama(), "default") as processor:
        assert processor.routers.config.base_model_name_or_path == "org/tiny"


@pytest.mark.usefixtures("shipped")
def test_default_without_any_that_fit_is_an_error_that_lists_what_there_is(tiny_llama):
    for use in (TIDEModelForCausalLM.attach, TIDELogitsProcessor):
        with pytest.raises(RoutersNotFoundError, match=r"routers='default'.*got LlamaForCausalLM.*org/other, org/tiny"):
            use(tiny_llama(seed=2), "default")


def test_the_shipped_routers_name_their_model():
    config = TIDERouters.from_pretrained(SHIPPED).config
    assert config.base_model_name_or_path.replace("/", "--") == SHIPPED.name
    assert config.unembed_hash is not None


def test_attaching_without_routers_is_logged(shipped, tiny_llama, caplog):
    caplog.set_level("INFO", logger="tide_hf")
    TIDEModelForCausalLM.attach(tiny_llama(seed=2))
    assert caplog.messages[0] == "no routers: drafts come from n-grams of the context alone"
    caplog.clear()
    TIDEModelForCausalLM.attach(tiny_llama())
    assert caplog.messages[0].endswith("; those for org--tiny fit this model: routers='default'")
    caplog.clear()
    TIDEModelForCausalLM.attach(tiny_llama(), "default")
    assert not any("no routers" in message for message in caplog.messages)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_say_which_routers_they_use_or_that_there_are_none(
    shipped, tiny_model_folder, pipe_in, capsys, command
):
    line = [command, str(tiny_model_folder), *WORDS]
    for options, said in (([], "shipped, org--tiny"), (["--routers", "default"], "shipped, org--tiny")):
        pipe_in(b"hello\n")
        assert main([*line, *options]) == 0
        assert f"routers: {said}" in capsys.readouterr().err
    shutil.rmtree(shipped)
    pipe_in(b"hello\n")
    assert main(line) == 0
    assert f"routers: {NO_ROUTERS}" in " ".join(capsys.readouterr().err.split())
    pipe_in(b"hello\n")
    assert main([*line, "--routers", "default"]) == 2
    assert "no routers for this model come with the library" in capsys.readouterr().err


def test_chat_over_a_pipe_says_that_it_makes_the_engine_ready_before_it_does(
    tiny_model_folder, pipe_in, monkeypatch, capsys
):
    heard = []
    monkeypatch.setattr(
        "tide_hf.generation.TIDEGenerationMixin.tide_warm_up", lambda model: heard.append(capsys.readouterr().err)
    )
    pipe_in(b"hello\n")
    assert main(["chat", str(tiny_model_folder), *WORDS]) == 0
    assert MAKING_READY in heard[0]
