"""`early_exit` with a draft head: which tokens exit, how many passes remain, and what ends a call."""

import pytest
import torch
from draft_heads import draft_head_for, drafts_after, most_likely
from families import LAYERS, tiny_model
from on_steps import attach_captured, attach_compiled, prompts, steps_of
from transformers import LogitsProcessor, StoppingCriteria
from transformers.cache_utils import DynamicCache
from transformers.generation.stopping_criteria import MaxTimeCriteria

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import UnsupportedOptionError
from tide_hf.engines.eager import EagerEngine
from tide_hf.speculation.exits import MAX_EXITS

NEW, PROMPT = 24, 8
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = ("llama", "gemma2", "qwen3_moe", "falcon", "opt")  # plain; windows, softcapped; experts; tuples; positions
SOME = 0.4  # a threshold that some scores of the random heads reach


ON_STEPS = {"compiled": attach_compiled, "captured": attach_captured}
ENGINES = ("eager", *ON_STEPS)


def attached(family="llama", engine="eager", **changes):
    model = tiny_model(family)
    changes = {"has_embedding": True, **changes} if family == "opt" else changes  # whose own may be narrower
    routers = draft_head_for(model, **changes)
    routers.draft_head.confidence.data = torch.tensor([8.0, 29.0 if family == "opt" else 28.0])  # spreads the scores
    ON_STEPS.get(engine, TIDEModelForCausalLM.attach)(model, routers, mode="early_exit")
    return model


@torch.no_grad()
def reference(model, text, threshold, new=NEW, choose=most_likely):
    """The new tokens after a text without padding, and their depths; every pass and draft is over the whole text."""
    tokens, depths = [], []
    while len(tokens) < new:
        tokens.append(choose(model(torch.tensor([text + tokens])).logits[0, -1]))
        exits = drafts_after(model, text + tokens, min(MAX_EXITS, new - len(tokens) - 1), threshold, choose)
        tokens += exits
        depths += [LAYERS, *[0] * len(exits)]
    return tokens, depths


def answers(model, batch, **options):
    """Each row's new tokens, up to its end, and their depths."""
    tokens = model.generate(**batch, **OPTIONS | options)[:, batch["input_ids"].shape[1] :].tolist()
    depths = model.last_exit_stats.per_token
    return [row[: len(own)] for row, own in zip(tokens, depths, strict=True)], depths


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threshold", [0.0, SOME])
def test_tokens_exit_while_their_scores_reach_the_threshold(family, threshold, engine):
    model, batch = attached(family, engine), prompts()
    expected, depths = reference(model, batch["input_ids"][0].tolist(), threshold)
    assert answers(model, batch, exit_threshold=threshold) == ([expected], [depths])
    if threshold == 0.0:
        assert depths == ([LAYERS, *[0] * MAX_EXITS] * NEW)[: NEW - 1] + [LAYERS]
    else:
        assert 1 < depths.count(LAYERS) < NEW
    assert model.last_exit_stats.engine == ("eager" if engine == "eager" else "compiled")
    if engine != "eager" and steps_of(model).refused is None:
        assert {kind for _, kind, _ in steps_of(model)._steps} == {"draft_logits", "verify"}


@pytest.mark.parametrize("rows", [1, 3])
def test_above_one_it_gives_the_base_models_tokens(rows):
    model, batch = attached(), prompts(rows, pads=2)
    expected = tiny_model("llama").generate(**batch, **OPTIONS)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)  # nothing has been certified
    assert torch.equal(model.generate(**batch, **OPTIONS, exit_threshold=1.5), expected)
    assert model.last_exit_stats.depth_fraction == 1.0


def test_the_statistics_count_the_passes_that_remain():
    model, batch = attached(), prompts()
    _, [flat] = answers(model, batch, exit_threshold=SOME)
    stats = model.last_exit_stats
    assert stats.mode == "early_exit"
    assert stats.layers_executed == LAYERS * flat.count(LAYERS)
    assert stats.rounds == flat.count(LAYERS) - 1  # without prefill
    assert stats.accepted == flat.count(0) == stats.exits_per_layer[0]
    assert stats.mean_acceptance_length == pytest.approx(1 + flat.count(0) / stats.rounds)
    tokens = f"{stats.accepted} tokens exited with the draft head, {stats.mean_acceptance_length:.2f} tokens a pass"
    assert tokens in stats.summary()


@pytest.mark.parametrize(("family", "engine"), [("gemma2", "eager"), *(("llama", engine) for engine in ENGINES)])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"stopping_criteria": [MaxTimeCriteria(10**6)]}])
def test_rows_of_a_batch_get_their_own_exits(family, engine, options):
    model, batch = attached(family, engine), prompts(3, pads=3)
    ids = [row[mask == 1][None] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    alone = [answers(model, {"input_ids": one}, exit_threshold=SOME, **options) for one in ids]
    tokens, depths = answers(model, batch, exit_threshold=SOME, **options)
    assert model.last_exit_stats.accepted
    if "stopping_criteria" in options:  # which is asked about all rows at once: they exit together, or none does
        assert depths[0] == depths[1] == depths[2]
        expected = [answers(model, {"input_ids": one}, exit_threshold=0.0, **options)[0][0] for one in ids]
        assert answers(model, batch, exit_threshold=0.0, **options)[0] == expected
    else:
        assert (tokens, depths) == ([row for [row], _ in alone], [own for _, [own] in alone])
        assert len({tuple(row) for row in depths}) > 1


class Stops(StoppingCriteria):
    """A criterion of the caller's own, which looks at the last token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("own", [True, False])
def test_a_token_that_exits_can_end_the_answer(rows, own, monkeypatch):
    steps, draft_logits = [], EagerEngine.draft_logits
    monkeypatch.setattr(EagerEngine, "draft_logits", lambda *args: steps.append(0) or draft_logits(*args))
    model, batch = attached(), prompts(rows)
    whole, depths = answers(model, batch, exit_threshold=0.0)
    assert depths[0][10] == 0
    token = whole[0][10]
    ends = {"stopping_criteria": [Stops(token)]} if own else {"eos_token_id": token}
    steps.clear()
    tokens, depths = answers(model, batch, exit_threshold=0.0, **ends)
    if rows == 1:  # the head does not go on after the end
        assert len(steps) == depths[0].count(0)
    output = model.generate(**batch, **OPTIONS | ends, exit_threshold=0.0, return_dict_in_generate=True)
    assert output[CACHE].get_seq_length() == output.sequences.shape[1] - 1  # as after plain decoding
    assert tokens[0] == whole[0][: whole[0].index(token) + 1]
    for row, complete in zip(tokens, whole, strict=True):
        assert row == complete[: len(row)]


def test_a_streamer_gets_each_token_once():
    class Streamer:
        def __init__(self):
            self.seen, self.passes = [], []

        def put(self, tokens):
            self.seen.append(tokens.flatten().tolist())
            self.passes.append(passes[0])

        def end(self):
            self.seen.append("end")

    model, batch, streamer, passes = attached(), prompts(), Streamer(), [0]
    hook = model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    [tokens], _ = answers(model, batch, exit_threshold=0.0, streamer=streamer)
    hook.remove()
    assert streamer.seen == [batch["input_ids"][0].tolist(), *[[token] for token in tokens], "end"]
    assert streamer.passes[1 : 3 + MAX_EXITS] == [1] * (1 + MAX_EXITS) + [2]  # exits do not wait for the next pass


class Forbids(LogitsProcessor):
    """Leaves only these tokens; not known to treat each row of a batch by itself."""

    def __init__(self, allowed):
        self.allowed = allowed

    def __call__(self, input_ids, scores):
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self.allowed] = scores[:, self.allowed]
        return kept


@pytest.mark.parametrize("rows", [1, 2])
def test_processors_decide_about_exits_too(rows):
    model, batch = attached(draft_vocab_size=20), prompts(rows)
    tokens, depths = answers(model, batch, exit_threshold=0.0, logits_processor=[Forbids([5, 9, 11])])
    assert {token for row in tokens for token in row} <= {5, 9, 11}
    assert 0 in depths[0]
    _, depths = answers(model, batch, exit_threshold=0.0, logits_processor=[Forbids([50, 60])])
    assert depths == [[LAYERS] * NEW] * rows  # the head can draft none of them


@pytest.mark.parametrize("engine", ENGINES)
def test_sampling_draws_from_the_heads_distribution(engine):
    model, batch = attached(engine=engine), prompts()

    def draw(logits):
        return int(torch.multinomial(torch.softmax(logits / 0.7, dim=-1), num_samples=1))

    sampling = {"do_sample": True, "temperature": 0.7, "top_k": None, "top_p": None}
    for threshold in (0.0, SOME):
        torch.manual_seed(1)
        expected = reference(model, batch["input_ids"][0].tolist(), threshold, choose=draw)
        torch.manual_seed(1)
        tokens, depths = answers(model, batch, exit_threshold=threshold, **sampling)
        assert (tokens, depths) == ([expected[0]], [expected[1]])
        assert 0 in depths[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_kv_of_tokens_that_exited_are_exact(rows, engine):
    model, batch = attached(engine=engine), prompts(rows)
    details = {"return_dict_in_generate": True, "output_scores": True}
    first = model.generate(**batch, **OPTIONS, exit_threshold=SOME, **details)
    assert len(first.scores) == NEW
    assert model.last_exit_stats.accepted
    whole = DynamicCache(config=model.config)
    tiny_model("llama")(input_ids=first.sequences[:, :-1], **{CACHE: whole})
    for ours, theirs in zip(first[CACHE].layers, whole.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)
    longer = torch.cat([first.sequences, batch["input_ids"]], dim=1)
    again = model.generate(longer, **OPTIONS, exit_threshold=SOME, **{CACHE: first[CACHE]})
    assert torch.equal(again, model.generate(longer, **OPTIONS, exit_threshold=SOME))


def test_a_cache_without_the_heads_state_is_refused():
    batch = prompts()
    cache = tiny_model("llama").generate(**batch, **OPTIONS, return_dict_in_generate=True)[CACHE]
    with pytest.raises(UnsupportedOptionError, match=r"the draft head cannot run.*Expected an empty cache"):
        attached().generate(batch["input_ids"].repeat(1, 5), **OPTIONS, **{CACHE: cache})


@pytest.mark.parametrize(
    "options", [{"min_layers": 2}, {"exit_criterion": "confidence"}, {"exits_in_prompt": True}], ids=str
)
def test_options_of_exit_layers_are_refused(options):
    model = attached()
    with pytest.raises(UnsupportedOptionError, match=rf"{next(iter(options))}=.*Expected exit_threshold alone"):
        model.generate(**prompts(), **OPTIONS, **options)
    model._tide.config.kv_cache_strategy = "propagate"  # then tokens exit at exit layers, as without a draft head
    if "exits_in_prompt" not in options:
        model.generate(**prompts(), **OPTIONS, **options, exit_threshold=0.0)
        assert model.last_exit_stats.rounds == 0


@pytest.mark.parametrize("mode", ["early_exit", "post_hoc"])
def test_routers_with_nowhere_to_exit_are_refused(mode):
    model = attached()
    model._tide.config.exit_layers, model._tide.config.kv_cache_strategy = [], "propagate"
    with pytest.raises(UnsupportedOptionError, match="has no layer at which tokens could exit: got routers without"):
        model.generate(**prompts(), **OPTIONS, tide_mode=mode)


def test_calls_that_the_loop_cannot_decode_are_refused():
    with pytest.raises(UnsupportedOptionError, match=r"'early_exit' cannot give .* got output_hidden_states=True"):
        attached().generate(**prompts(), **OPTIONS, return_dict_in_generate=True, output_hidden_states=True)
