"""Train a draft head on whole documents, over several of its own steps.

In a draft the head reads its own output instead of the base model's states, from the second token on. EAGLE-3 (arXiv
2503.01840) therefore trains it over several steps: step k reads the outputs of step k - 1, attends to the K/V of the
text up to the start of its draft, and to those of its own earlier steps.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from ..base_model.structure import DecoderStructure, output_device
from ..base_model.unembed import Unembed
from ..common.errors import ConfigurationError, UnsupportedModelError
from ..routers.draft_head import DraftHead, rotate
from ..routers.exit_points import logit_of
from ..routers.routers import TIDERouters
from .arguments import Settings
from .documents import TokenBatch
from .heads import FrequentUnembed, round_weights
from .router_training import area_under_curve, expected_calibration_error, platt_scaling
from .states import StateBatch, StateStore
from .training import mixed_precision, seeded, train_epochs

STEPS = 3
SINGLE_STEP = 0.65  # share of the training on the first step alone, which costs a third of the time
STEP_WEIGHT = 0.8  # of each step's loss, relative to that of the step before
LEARNING_RATE, FLOOR = 1.5e-3, 0.03
MAX_GRADIENT = 1.0
FUSED = ("cpu", "cuda")  # devices for which PyTorch has a fused AdamW
# Number of epochs, unless the time budget ends first, and factor on the learning rate.
FRESH = 12, 1.0  # for a new head
FURTHER = 6, 0.5  # for a trained one; the lower rate keeps it from forgetting
TOKENS_PER_STEP = 1200  # padding included
REGRESSION_BATCHES = 80
MEASURED_STEPS = 8  # of a draft, whose agreement is in the record
HEAD_DIM = 64  # of heads for base models whose config names no attention heads
RIDGE_PENALTY = 1e-2
INITIAL_STD = 0.02
SELF_ATTENTION = 2 / 3  # share of heads that attend to the token itself at first
SELF_LOGIT = 12.0  # their initial logit for the token itself


@dataclass(frozen=True)
class TappedBatch(TokenBatch):
    """Whole documents, right-padded, with the base model's states before the final norm, and its tokens."""

    tapped: Tensor  # (rows, length, taps * D) at the tap layers
    final: Tensor  # (rows, length, D) after the last layer
    top: Tensor  # (rows, length) the full model's token after each counted position


def draft_head_shape(
    model: PreTrainedModel, structure: DecoderStructure, draft_vocab_size: int, intermediate_size: int | None = None
) -> dict[str, Any]:
    """The shape of a draft head for `model`: attention and MLP as in its layers, as far as its config names them.

    It taps a low, a middle and the last hidden state. `intermediate_size` is another width of the MLP.
    """
    config, size, layers = model.config.get_text_config(), structure.hidden_size, structure.num_layers
    embedding = getattr(model.get_input_embeddings(), "embedding_dim", None)
    if embedding != size:
        raise UnsupportedModelError(
            f"a draft head cannot be made for {type(model).__name__}",
            got=f"input embeddings of width {embedding}",
            expected=f"the hidden size, {size}",
            do="Pass exit_strategy='linear'.",
        )
    heads = getattr(config, "num_attention_heads", None) or max(1, size // HEAD_DIM)
    return {
        "hidden_size": size,
        "intermediate_size": intermediate_size or getattr(config, "intermediate_size", None) or 4 * size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,  # grouped ones would pass on too little of the embedding
        "head_dim": max(2, size // heads // 2 * 2),
        "draft_vocab_size": draft_vocab_size,
        "tap_layers": sorted({min(2, layers), -(-layers // 2), layers}),
        "target_hidden_size": size,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 8192,
    }


def head_to_train_further(
    start_from: TIDERouters | str | os.PathLike[str], model: PreTrainedModel, settings: Settings
) -> TIDERouters:
    """The routers whose draft head is trained further, loaded if `start_from` is a folder or Hub repository."""
    routers = start_from if isinstance(start_from, TIDERouters) else TIDERouters.from_pretrained(start_from)
    routers.check_base_model(model)
    head = routers.draft_head
    if head is None or head.config.has_embedding or settings.exit_strategy != "eagle3":
        kind = "no draft head" if head is None else "a draft head"
        embedding = " with embeddings of its own" if head is not None and head.config.has_embedding else ""
        raise ConfigurationError(
            "start_from works with draft heads that read the base model's embeddings, since no others are trained",
            got=f"routers with {kind}{embedding}, and exit_strategy={settings.exit_strategy!r}",
            expected="routers with a draft head that calibrate() made, and exit_strategy='eagle3'",
            do="Pass both, or leave start_from out to train a new draft head.",
        )
    width = settings.draft_intermediate_size
    if width not in (None, head.config.intermediate_size):
        raise ConfigurationError(
            "a draft head that is trained further keeps its shape",
            got=f"draft_intermediate_size={width}",
            expected=f"{head.config.intermediate_size}, as in start_from, or None",
            do="Leave it out, or leave start_from out to train a new draft head.",
        )
    return routers


class DraftHeadTrainer:
    """Trains one draft head, in float32, in place; `tokens` (V,) are the ids of its vocabulary, ascending."""

    def __init__(self, model: PreTrainedModel, unembed: Unembed, head: DraftHead, tokens: Tensor) -> None:
        self.model, self.unembed, self.tokens = model, unembed, tokens
        self.head: Any = head
        self.embed, self.teacher = model.get_input_embeddings(), FrequentUnembed(unembed, tokens)

    @torch.no_grad()
    def start(self, batches: Iterable[TappedBatch]) -> None:
        """Initialise the head as a ridge regression of the last hidden state on what it reads.

        `fc` gets the coefficients of the tapped states. Those of the embedding, which only attention reads, become
        values and outputs of heads that attend to the token itself: their queries equal their keys, by random
        projections of the embedding, so that a token is most similar to itself. The MLP starts as zero.
        """
        head, attention, size = self.head, self._attention, self.head.config.hidden_size
        for linear in (*attention.children(), *head.layers[0].mlp.children()):
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=INITIAL_STD)
        attention.o_proj.weight.mul_(0.1)
        head.layers[0].mlp.down_proj.weight.zero_()
        solution = self._regression(batches)
        head.fc.weight.copy_(solution[:, :-size])
        own = round(SELF_ATTENTION * head.config.num_attention_heads) * head.config.head_dim
        outputs, scales, inputs = torch.linalg.svd(solution[:, -size:])
        own, scales = min(own, len(scales)), scales.sqrt()
        std = (SELF_LOGIT / size) ** 0.5 * head.config.head_dim**-0.25
        projection = std * torch.randn(own, size, device=solution.device)
        for linear, weight in (
            (attention.q_proj, projection),
            (attention.k_proj, projection),
            (attention.v_proj, scales[:own, None] * inputs[:own]),
        ):
            linear.weight[:own] = nn.functional.pad(weight, (0, size))  # the fused state is not read
        attention.o_proj.weight[:, :own] = outputs[:, :own] * scales[:own]
        output: Any = self.unembed.structure.head
        scale = (self.unembed.factor or 1.0) / (self.unembed.divisor or 1.0)
        head.lm_head.weight.copy_(scale * output.weight[self.tokens.to(output.weight.device)])
        signs = 1.0 - 2.0 * (torch.arange(size, device=solution.device) % 2)  # of mean 0 and variance 1
        head.norm.weight.copy_(self.unembed.normalize(signs.to(self.model.dtype)) * signs)
        head.d2t.copy_(self.tokens - torch.arange(len(self.tokens)))

    def _regression(self, batches: Iterable[TappedBatch]) -> Tensor:
        """Coefficients (D, taps * D + D) of tapped states and embeddings for the next token's last hidden state."""
        size = self.head.config.hidden_size
        width = self.head.fc.weight.shape[1] + size
        products = torch.zeros(width, width, dtype=torch.float64)
        cross = torch.zeros(width, size, dtype=torch.float64)
        for batch in batches:
            seen = batch.attention_mask[:, 1:].bool().to(batch.final.device)
            embeddings = self.head.layers[0].input_layernorm(self._embeddings(batch))
            features = torch.cat([batch.tapped[:, :-1], embeddings], dim=-1)[seen]
            targets = batch.final[:, 1:][seen]
            weighted = features / targets.square().mean(dim=-1, keepdim=True).clamp_min(1e-12)
            products += (weighted.T @ features).cpu().double()
            cross += (weighted.T @ targets).cpu().double()
        penalty = torch.diag(RIDGE_PENALTY * products.diagonal().clamp_min(1e-9))
        return torch.linalg.solve(products + penalty, cross).T.float().to(self.head.fc.weight.device)

    @property
    def _attention(self) -> Any:
        return self.head.layers[0].self_attn

    def train(
        self,
        batches: Callable[[], Iterable[TappedBatch]],
        num_batches: int,
        epochs: int,
        rate: float = 1.0,
        *,
        deadline: float = math.inf,
    ) -> Iterator[tuple[int, float]]:
        """Train for `epochs`, or until `deadline` (in `perf_counter` seconds); `rate` scales the learning rate.

        Yields (training steps so far, mean loss of the head's first step) of each epoch; see [`train_epochs`].
        """
        fused = next(self.head.parameters()).device.type in FUSED  # saves a twelfth of a step on a CPU
        optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=rate * LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
        )
        self.head.requires_grad_(True)

        def step(batch: TappedBatch, progress: float) -> float:
            return self._step(batch, optimizer, 1 if progress < SINGLE_STEP else STEPS)

        yield from train_epochs(optimizer, step, batches, num_batches, epochs, floor=FLOOR, deadline=deadline)
        self.head.requires_grad_(False)

    def unroll(self, batch: TappedBatch, steps: int) -> list[Tensor]:
        """The head's outputs, (rows, length - 1, D), at each of its steps.

        Entry i of step k drafts the token after position i + 1 + k, having read the document's tokens up to there.
        """
        embeddings = self._embeddings(batch)
        kv: list[tuple[Tensor, Tensor]] = []
        state, outputs = self.head.fuse(batch.tapped[:, :-1]), []
        for step in range(steps):
            shifted = nn.functional.pad(embeddings[:, step:], (0, 0, 0, min(step, embeddings.shape[1])))
            output = self._layer(shifted, state, step, kv)
            outputs.append(output)
            state = self.head.norm(output) if self.head.config.norm_output else output
        return outputs

    @torch.no_grad()
    def _embeddings(self, batch: TappedBatch) -> Tensor:
        """(rows, length - 1, D) input embeddings of all tokens but the first, float32."""
        ids = batch.input_ids[:, 1:].to(next(self.embed.parameters()).device)
        return self.embed(ids).to(batch.final.device, torch.float32)

    def _layer(self, embeddings: Tensor, state: Tensor, step: int, kv: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The head's layer on all positions at once, (rows, width, D) each; its K/V are appended to `kv`."""
        head, layer, width = self.head, self.head.layers[0], state.shape[1]
        attention: Any = layer.self_attn
        inputs, residual = head.inputs(embeddings, state)
        rope = head.rope(inputs, torch.arange(step, step + width, device=state.device)[None])
        queries, keys = rotate(attention.queries(inputs), rope), rotate(attention.keys(inputs), rope)
        kv.append((keys, attention.values(inputs)))
        attended = _attend(queries, kv)
        return head.after_attention(residual, attended)

    def _step(self, batch: TappedBatch, optimizer: torch.optim.Optimizer, steps: int) -> float:
        total: Any = 0.0
        is_counted = batch.counted.to(batch.final.device)
        number = (is_counted.flatten().cumsum(0) - 1).view_as(is_counted)  # of each counted position
        with mixed_precision(batch.final.device):
            with torch.no_grad():
                teacher = self.teacher(batch.final[is_counted])
            losses = []
            for step, output in enumerate(self.unroll(batch, steps)):
                counted = is_counted[:, 1 + step :].to(output.device)
                student = self.head.lm_head(self.head.norm(output[:, : counted.shape[1]][counted])).float()
                target = teacher[number[:, 1 + step :][counted]]
                losses.append(nn.functional.kl_div(student.log_softmax(-1), target, log_target=True, reduction="sum"))
                total = total + STEP_WEIGHT**step * losses[-1] / max(1, len(target))
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRADIENT)
        optimizer.step()
        return float(losses[0].detach()) / max(1, int(batch.counted[:, 1:].sum()))


def _attend(queries: Tensor, kv: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention (rows, width, heads * head_dim) of the last step's queries (rows, heads, width, head_dim).

    Each attends to the keys of the first step up to its position, and to its own of later steps.
    """
    rows, heads, width, size = queries.shape
    (keys, values), own = kv[0], kv[1:]
    if not own:
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)
    grouped = queries.view(rows, keys.shape[1], -1, width, size) * size**-0.5
    scores = grouped @ keys[:, :, None].transpose(-1, -2)
    scores = scores.float().masked_fill(torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1), -torch.inf)
    later = [(grouped * found[:, :, None]).sum(dim=-1, keepdim=True).float() for found, _ in own]
    weights = torch.cat([scores, *later], dim=-1).softmax(dim=-1).to(values.dtype)
    attended = weights[..., :width] @ values[:, :, None]
    for position, (_, found) in enumerate(own, start=width):
        attended = attended + weights[..., position : position + 1] * found[:, :, None]
    return attended.reshape(rows, heads, width, size).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class DraftHeadStage:
    """The stage that trains and measures a draft head on stored states; `seed` determines the documents' order."""

    trainer: DraftHeadTrainer
    store: StateStore
    seed: int

    def make(self, deadline: float, *, is_fresh: bool) -> dict[str, Any]:
        """Train until `deadline` (in `perf_counter` seconds) at the latest; return facts about the training.

        A head that is not fresh keeps its old weights if the new ones agree less often on the tune split.
        """
        epochs, rate = FRESH if is_fresh else FURTHER
        head, facts = self.trainer.head, {}
        before = copy.deepcopy(head.state_dict())
        if is_fresh:
            with seeded(self.seed, output_device(self.trainer.unembed.structure)):
                self.trainer.start(itertools.islice(self._batches("fit", self.seed), REGRESSION_BATCHES))
        else:
            facts["tune_agreement_before"] = self._agreement("tune")
        documents, shards, seeds = self.store.splits["fit"], self.store.shards("fit"), itertools.count(self.seed)
        num_batches = sum(len(_grouped(documents[row].tokens for row in shard.rows)) for shard in shards)
        tokens, curve = sum(len(document.tokens) for document in documents), []
        for steps, loss in self.trainer.train(
            lambda: self._batches("fit", next(seeds)), num_batches, epochs, rate, deadline=deadline
        ):
            seen = round(tokens * steps / num_batches)
            curve.append({"tokens": seen, "loss": loss, "agreement": self._agreement("tune")})
        round_weights(head)
        if not is_fresh:
            facts["tune_agreement"] = self._agreement("tune")
            if facts["tune_agreement"] < facts["tune_agreement_before"]:
                head.load_state_dict(before)
        self.scale_confidence()
        stopped = steps < epochs * num_batches
        return {"epochs": len(curve), "steps": steps, "stopped": stopped, "curve": curve, **facts}

    def figures(self) -> dict[str, Any]:
        """Figures of the head and its confidence on the certify split, ready for JSON."""
        steps = self._drafts("certify", MEASURED_STEPS)
        log_probabilities, agrees = steps[0]
        head = self.trainer.head
        scores = head.score(log_probabilities.to(head.confidence.device)).cpu()
        by_step = [int(right.sum()) / max(1, len(right)) for _, right in steps]
        return {
            "layer": 0,
            "agreement": by_step[0],
            "agreement_by_step": by_step,
            "confidence_auc": area_under_curve(scores, agrees),
            "expected_calibration_error": expected_calibration_error(scores, agrees),
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
        }

    def _as_in_drafting(self) -> AbstractContextManager[Any]:
        """The precision in which an engine computes drafts: the model's, unless bfloat16 would take longer."""
        is_bfloat16 = self.trainer.model.dtype == torch.bfloat16
        return mixed_precision(output_device(self.trainer.unembed.structure)) if is_bfloat16 else nullcontext()

    def _read(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (...) of drafted tokens, and these tokens (...), of the head's outputs (..., D)."""
        head = self.trainer.head
        best, drafted = head.lm_head(head.norm(output)).float().log_softmax(dim=-1).max(dim=-1)
        return best, self.trainer.tokens.to(drafted.device)[drafted]

    def scale_confidence(self) -> None:
        """Fit the head's confidence to first drafts on the tune split, by Platt scaling."""
        log_probabilities, agrees = self._drafts("tune", 1)[0]
        scaling = platt_scaling(logit_of(log_probabilities), agrees)
        with torch.no_grad():
            self.trainer.head.confidence.copy_(torch.tensor(scaling).bfloat16())

    def _agreement(self, split: str) -> float:
        return float(self._drafts(split, 1)[0][1].double().mean())

    @torch.no_grad()
    def _drafts(self, split: str, steps: int) -> list[tuple[Tensor, Tensor]]:
        """For each step of drafts on a split: log-probabilities (N,) of the tokens, and whether the full model agrees.

        A draft is followed while its tokens are the full model's, and the document goes on with them.
        """
        found: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(steps)]
        for batch in self._batches(split):
            top, counted = batch.top, batch.counted.to(batch.top.device)
            ids = nn.functional.pad(batch.input_ids.to(top.device), (0, 1), value=-1)
            is_followed = counted[:, 1:]
            with self._as_in_drafting():
                for step, output in enumerate(self.trainer.unroll(batch, steps), start=1):
                    log_probabilities, drafted = self._read(output[:, : is_followed.shape[1]][is_followed])
                    agrees = drafted == top[:, step:][is_followed]
                    found[step - 1][0].append(log_probabilities.cpu())
                    found[step - 1][1].append(agrees.cpu())
                    goes_on = agrees & (drafted == ids[:, 1 + step :][is_followed])
                    is_followed = is_followed.masked_scatter(is_followed, goes_on)[:, :-1] & counted[:, 1 + step :]
        return [(torch.cat(first), torch.cat(second)) for first, second in found]

    def _batches(self, split: str, seed: int | None = None) -> Iterator[TappedBatch]:
        """Whole documents, as many as `TOKENS_PER_STEP` allows; shuffled if there is a seed."""
        device, taps = output_device(self.trainer.unembed.structure), self.trainer.head.config.tap_layers
        shards = self.store.shards(split)
        if seed is not None:
            random.Random(seed).shuffle(shards)
        for shard in shards:
            stored = [layer for layer in taps if layer < self.trainer.unembed.structure.num_layers]
            whole = self.store.read(shard, stored).to(device, torch.float32)
            rows = [(whole.document_ids == document).nonzero()[:, 0] for document in whole.document_ids.unique()]
            groups = _grouped(rows)
            if seed is not None:
                random.Random(seed + shard.number).shuffle(groups)
            yield from (_padded(whole, group, taps) for group in groups)


def _grouped(rows: Iterable[Any]) -> list[list[Any]]:
    """Group documents of similar length, so that no padded group of several exceeds `TOKENS_PER_STEP`."""
    groups: list[list[Any]] = []
    for row in sorted(rows, key=len):
        if groups and (len(groups[-1]) + 1) * len(row) <= TOKENS_PER_STEP:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _padded(whole: StateBatch, rows: list[Tensor], taps: tuple[int, ...]) -> TappedBatch:
    """Right-pad the documents at positions `rows` of `whole` into a batch."""

    def padded(tensor: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence([tensor[row] for row in rows], batch_first=True)

    tapped = [whole.hidden_states.get(layer, whole.final_states) for layer in taps]
    return TappedBatch(
        input_ids=padded(whole.tokens),
        attention_mask=padded(torch.ones_like(whole.tokens)),
        counted=padded(whole.counted),
        tapped=torch.cat([padded(state) for state in tapped], dim=-1),
        final=padded(whole.final_states),
        top=padded(whole.top_tokens),
    )
