"""``tide-hf generate``: where the prompt comes from, and what is printed."""

import json

import pytest
import torch
from draft_heads import draft_head_for
from on_steps import attach_without_compiler
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide_hf import TIDEModelForCausalLM
from tide_hf.cli.main import main
from tide_hf.cli.prompts import read_prompts
from tide_hf.routers.files import write_speculators

NEW_TOKENS = 8


def plain_answer(folder, text):
    """The tokens that the base model's own `generate` goes on with, and their text."""
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture
def generate(tiny_model_folder, capsys):
    """A function that runs the command; it returns what went to standard output and to standard error."""

    def run(*arguments):
        options = ["--max-new-tokens", str(NEW_TOKENS)]  # before the prompt, which may come after options
        assert main(["generate", str(tiny_model_folder), *options, *map(str, arguments)]) == 0
        return capsys.readouterr()

    return run


def test_argument_pipe_and_file_give_the_plain_models_answer(generate, tiny_model_folder, tmp_path, pipe_in):
    tokens, text = plain_answer(tiny_model_folder, "<user>héllo\nyou<answer>")
    (tmp_path / "prompt").write_bytes("héllo\r\nyou\r\n".encode())
    pipe_in("héllo\nyou\n".encode())
    for arguments in (["héllo\nyou"], [], ["--prompt-file", tmp_path / "prompt"]):
        captured = generate(*arguments)
        assert captured.out == text + "\n"
        assert "full pass:" in captured.err
        assert f"self_speculative: {NEW_TOKENS} tokens" in captured.err
    record = json.loads(generate("héllo\nyou", "--json").out)
    assert (record["tokens"], record["text"], record["prompt"]) == (tokens, text, "héllo\nyou")
    assert (record["mode"], record["exit_threshold"], record["routers"]) == ("self_speculative", None, None)
    assert record["stats"]["total_tokens"] == NEW_TOKENS
    assert record["tokens_per_s"] == NEW_TOKENS / record["seconds"]


def test_a_draft_head_in_another_format_drafts_as_routers_do(generate, tiny_model_folder, tiny_llama, tmp_path):
    folder = tmp_path / "head"
    write_speculators(draft_head_for(tiny_llama()), folder)
    record = json.loads(generate("hello", "--routers", folder, "--json").out)
    assert record["routers"] == str(folder)
    assert record["tokens"] == plain_answer(tiny_model_folder, "<user>hello<answer>")[0]


def test_raw_does_not_use_the_chat_template(generate, tiny_model_folder):
    text = plain_answer(tiny_model_folder, "hello")[1] + "\n"
    assert generate("hello", "--raw").out == text
    assert generate("hello").out != text
    (tiny_model_folder / "chat_template.jinja").unlink()
    assert generate("hello").out == text


def test_mode_threshold_dtype_and_threads_are_used(generate, routers_folder, threads_restored):
    options = ["--routers", routers_folder, "--mode", "early_exit", "--dtype", "bfloat16", "--threads", "1"]
    captured = generate("hello", *options, "--exit-threshold", "0", "--device", "cpu")
    assert torch.get_num_threads() == 1
    assert f"exit layer 2: {NEW_TOKENS - 1}" in captured.err
    record = json.loads(generate("hello", *options, "--json").out)
    assert (record["mode"], record["exit_threshold"]) == ("early_exit", 0.9)


def test_a_folder_that_gives_no_prompt_is_explained(tiny_model_folder, refused, pipe_in, monkeypatch):
    command, template = ["generate", str(tiny_model_folder)], tiny_model_folder / "chat_template.jinja"
    template.write_text("{% if %}")
    refused([*command, "hello"], "chat template refuses the chat")
    template.write_text("{{ '' }}")
    refused([*command, "hello"], "got a prompt of no tokens")
    for file in tiny_model_folder.glob("tokenizer*"):
        file.unlink()
    refused([*command, "hello"], "Expected a folder with a causal language model and its tokenizer")
    pipe_in(b"never read")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    refused(command, "there is no prompt")


def test_prompts_are_read_from_files(tmp_path):
    rows = '{"text": "one"}\n{"prompt": "two\\nlines"}\n'
    for suffix, content in {"txt": "one\n\ntwo\nlines\n", "jsonl": rows, "json": '["one", "two\\nlines"]'}.items():
        file = tmp_path / f"prompts.{suffix}"
        file.write_text(content)
        assert read_prompts(file) == ["one", "two\nlines"]


def test_answers_are_computed_in_the_dtype_asked_for(generate):
    record = json.loads(generate("hello", "--dtype", "bfloat16", "--compute-dtype", "float32", "--json").out)
    assert (record["stats"]["dtype"], record["stats"]["compute_dtype"]) == ("bfloat16", "float32")


def test_the_engine_is_warmed_up_by_the_call_and_answers_the_same(generate, tiny_model_folder, monkeypatch):
    """Layers run as they were traced, which takes no compiler."""
    monkeypatch.setattr(TIDEModelForCausalLM, "attach", attach_without_compiler)
    record = json.loads(generate("hello", "--engine", "compiled", "--json").out)
    assert record["tokens"] == plain_answer(tiny_model_folder, "<user>hello<answer>")[0]
    assert record["stats"]["engine"] == "compiled"
    assert record["stats"]["warm_up_s"] > 0
