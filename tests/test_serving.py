"""The chat server, through the real `openai` client and through sockets that misbehave."""

import json
import threading

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

from servers import ask, chat, client, metrics_of, serving  # noqa: E402
from test_compiled_steps import attach_without_compiler  # noqa: E402

from tide_hf import TIDEModelForCausalLM  # noqa: E402
from tide_hf.serving.protocol import Sampling  # noqa: E402
from tide_hf.serving.requests import parse_chat_request  # noqa: E402
from tide_hf.serving.served_model import ServedModel, ServingOptions  # noqa: E402

TEXTS = ("hello", "abcabcabcabc", "one two one two one", "x")


def plain_answer(served, text, max_new_tokens):
    """What the base model says: text and whether it ended by itself."""
    prompt = served.tokenizer(f"<user>{text}<answer>", return_tensors="pt", return_token_type_ids=False)
    model = TIDEModelForCausalLM.detach(served.model)
    tokens = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return served.tokenizer.decode(tokens, skip_special_tokens=True), int(tokens[-1]) == served.tokenizer.eos_token_id


@pytest.mark.parametrize("mode", ["self_speculative", "early_exit"])
def test_answers_are_the_models_own_whole_and_streamed_and_share_batches(make_served, mode):
    served = make_served(mode, max_batch=8, gather_ms=200)
    lengths = dict(zip(TEXTS, (24, 7, 16, 30), strict=True))
    answers = {}
    with serving(served) as (url, _, _):

        def whole(text):
            answer = ask(client(url), text, max_tokens=lengths[text])
            choice = answer.choices[0]
            answers[text] = choice.message.content, choice.finish_reason, answer.usage.completion_tokens

        def streamed(text):
            options = {"include_usage": True}
            chunks = list(
                ask(client(url), text, max_completion_tokens=lengths[text], stream=True, stream_options=options)
            )
            assert chunks[0].choices[0].delta.role == "assistant"
            text_pieces = [c.choices[0].delta.content for c in chunks[1:-2]]
            reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
            answers[text, "streamed"] = "".join(text_pieces), reason, usage.completion_tokens

        threads = [threading.Thread(target=f, args=[text]) for text in TEXTS for f in (whole, streamed)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = metrics_of(url)
    for text in TEXTS:
        assert answers[text] == answers[text, "streamed"]
        if mode == "self_speculative":
            expected, ended = plain_answer(served, text, lengths[text])
            TIDEModelForCausalLM.attach(served.model)
            assert answers[text][:2] == (expected, "stop" if ended else "length")
    assert counts["tide_batch_rows_total"] == 8
    assert counts["tide_batches_total"] < 8
    assert counts["tide_completion_tokens_total"] == sum(answer[2] for answer in answers.values())
    assert counts["tide_prompt_tokens_total"] == 2 * sum(len(f"<user>{text}<answer>") for text in TEXTS)
    assert counts['tide_responses_total{path="/v1/chat/completions",status="200"}'] == 8
    assert counts["tide_requests_open"] == 0
    plain = counts["tide_layers_plain_total"]
    assert counts["tide_depth_fraction"] == pytest.approx(counts["tide_layers_executed_total"] / plain)
    if mode == "self_speculative":
        assert counts["tide_acceptance_rate"] == pytest.approx(
            counts["tide_accepted_total"] / max(1, counts["tide_drafted_total"])
        )


def test_text_streams_while_it_is_made(make_served):
    with serving(make_served(slow=0.02)) as (url, batcher, _):
        stream = ask(client(url), "abc", max_tokens=60, stream=True)
        next(stream), next(stream)
        assert batcher._runner is not None
        assert metrics_of(url)["tide_requests_open"] == 1
        assert len(list(stream)) > 3


def test_models_health_and_what_is_not_there(make_served):
    with serving(make_served()) as (url, batcher, _):
        assert [model.id for model in client(url).models.list()] == ["tiny"]
        assert client(url).models.retrieve("tiny").owned_by == "tide_hf"
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        batcher.failures = 3
        assert httpx.get(f"{url}/health").status_code == 503
        for call in (
            lambda: client(url).models.retrieve("other/model"),
            lambda: client(url).embeddings.create(model="tiny", input="a"),
            lambda: client(url).chat.completions.create(model="gpt", messages=chat("a")),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            assert caught.value.body["type"] == "not_found_error"
        assert httpx.get(f"{url}/v1/chat/completions").status_code == 405


def test_sampling_stop_strings_and_seeds(make_served):
    served = make_served(gather_ms=100)
    with serving(served) as (url, _, _):
        connection = client(url)
        whole = ask(connection, "hello", max_tokens=24).choices[0].message.content
        stop = whole[5:7]
        answer = ask(connection, "hello", max_tokens=24, stop=[stop]).choices[0]
        assert (answer.message.content, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
        seeded = [ask(connection, "hello", temperature=1.5, seed=7, max_tokens=24).choices[0].message for _ in range(2)]
        assert seeded[0] == seeded[1]
        state = torch.get_rng_state()
        ask(connection, "hello", temperature=1.5, seed=7, max_tokens=4)
        assert torch.equal(torch.get_rng_state(), state)  # or all later answers could be foretold
        free = {ask(connection, "hello", temperature=1.5, max_tokens=24).choices[0].message.content for _ in range(4)}
        assert len(free) > 1
        assert ask(connection, "hello", temperature=1e-30, max_tokens=24).choices[0].message.content == whole
        assert ask(connection, "hello", temperature=1.0, top_p=0, max_tokens=24).choices[0].message.content == whole


LONG = "tell me all about the river " * 4


@pytest.mark.parametrize(
    ("options", "fields", "is_known"),
    [
        ({}, {}, True),
        ({"engine": "compiled"}, {}, True),
        ({"keep": 0}, {}, False),
        ({"mode": "early_exit"}, {}, False),
        ({}, {"seed": 3}, False),
    ],
)
def test_of_the_next_turn_only_what_is_new_is_read(make_served, options, fields, is_known):
    served = make_served(gather_ms=0, **options)
    if options.get("engine"):
        attach_without_compiler(served.model, engine=options["engine"])
    fed = []
    served.model.get_input_embeddings().register_forward_hook(lambda _module, args, _output: fed.append(args[0].shape))
    with serving(served) as (url, _, _):
        messages = chat(LONG)
        for turn in range(3):
            fed.clear()
            answer = client(url).chat.completions.create(
                model="tiny", messages=messages, max_tokens=8, temperature=0, **fields
            )
            longest, text = max(shape[1] for shape in fed), answer.choices[0].message.content
            assert (longest < 60) == (is_known and turn > 0)
            assert text == plain_turn(served, messages)
            messages = [*messages, {"role": "assistant", "content": text}, *chat("and then?")]


def test_requests_that_decode_together_leave_what_is_kept_alone(make_served):
    served = make_served()

    def job(text):
        body = json.dumps({"model": "tiny", "messages": chat(text), "max_tokens": 8, "temperature": 0}).encode()
        return served.prepare(parse_chat_request(body, "tiny"), lambda event: None)

    served.run([job(LONG)])
    (kept,) = served.caches._kept
    served.run([job(LONG), job(LONG + "bank")])
    assert served.caches._kept == [kept]
    assert kept.cache.get_seq_length() == len(kept.tokens)


def plain_turn(served, messages):
    """What the base model answers to a whole conversation."""
    text = served.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = served.tokenizer(text, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
    tokens = served.model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return served.tokenizer.decode(tokens, skip_special_tokens=True)


def test_no_request_waits_for_steps(tiny_model_folder, monkeypatch):
    """Layers run as they were traced, which takes no compiler."""
    monkeypatch.setattr(TIDEModelForCausalLM, "attach", attach_without_compiler)
    served = ServedModel.load(
        ServingOptions(model=str(tiny_model_folder), dtype="float32", engine="compiled", max_batch=4)
    )
    steps = served.model._tide.compiled_steps
    made = steps.warm_up.num_made
    replays = steps.replays
    lengths = dict(zip(TEXTS, (24, 7, 16, 30), strict=True))
    for texts in (TEXTS, TEXTS[:3], TEXTS[:1]):
        events = {text: [] for text in texts}
        jobs = []
        for text in texts:
            body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": lengths[text]}
            request = parse_chat_request(json.dumps(body | {"temperature": 0}).encode(), "tiny")
            jobs.append(served.prepare(request, events[text].append))
        served.run(jobs)
        for text in texts:
            assert events[text][-1].completion_tokens > 0
    assert steps.replays > replays
    assert steps.warm_up.num_made == made


@pytest.mark.parametrize(
    "own", [{"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2, "output_hidden_states": True}]
)
def test_a_model_may_come_with_settings_that_are_the_servers_to_choose(make_served, own):
    served = make_served()
    with serving(served) as (url, _, _):
        expected = ask(client(url), "hello", max_tokens=8).choices[0].message.content
    served.model.generation_config.update(**own)
    with serving(ServedModel(served.model, served.tokenizer, served.options)) as (url, _, _):
        assert ask(client(url), "hello", max_tokens=8).choices[0].message.content == expected


def test_a_model_may_come_with_strings_that_end_its_answers(make_served):
    served = make_served()
    with serving(served) as (url, _, _):
        whole = ask(client(url), "hello", max_tokens=8).choices[0].message.content
        served.model.generation_config.stop_strings = [whole[2]]
        assert ask(client(url), "hello", max_tokens=8).choices[0].message.content == whole[: whole.index(whole[2]) + 1]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"temperature": 0.7}, (0.7, 0.8, 20)),
        ({"top_p": 0.9}, (0.6, 0.9, 20)),
        ({}, (0.6, 0.8, 20)),
        ({"temperature": 0}, (None, None, None)),
    ],
)
def test_what_a_client_does_not_say_is_as_the_model_has_it(make_served, asked, expected):
    served = make_served()
    served.model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.8, top_k=20)
    config = served._generation_config(Sampling(**asked), 8)
    assert (config.temperature, config.top_p, config.top_k) == expected
