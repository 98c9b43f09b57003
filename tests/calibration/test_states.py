"""Hidden states of documents: read from the base model, and stored in shards that are read one at a time."""

import pytest
import torch

from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.documents import Document, plan_batches, split_documents
from tide_hf.calibration.states import StateReader, StateStore
from tide_hf.calibration.work_folder import WorkFolder
from tide_hf.common.errors import CalibrationError

pytestmark = pytest.mark.usefixtures("one_thread")


def reader_of(model, exit_layers):
    structure = find_structure(model)
    return StateReader(model, structure, Unembed(model, structure), exit_layers)


@pytest.fixture(scope="module")
def store(parts, tmp_path_factory):
    documents = [Document([3 + i, 4, 5, 6 + i], first=2) for i in range(20)]
    folder = tmp_path_factory.mktemp("work")
    store = StateStore(WorkFolder(folder), split_documents(documents, 0), 4, [1, 3], torch.float32)
    expected = store.missing_bytes(hidden_size=32)
    for shard in store.shards():
        store.write(shard, reader_of(parts[0], [1, 3]))
    assert store.missing_bytes(hidden_size=32) == 0
    actual = sum(file.stat().st_size for file in folder.glob("states/*"))
    assert 0.8 * actual < expected + 1000 * len(store.shards()) < 1.5 * actual
    return store


def test_states_are_those_before_the_final_norm(parts):
    model, _ = parts
    documents = [Document([5, 6, 7, 8], first=1), Document([9, 10], first=0)]
    batch = reader_of(model, [1, 3]).read(documents, [0, 1])
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True)
    rows = batch.document_ids == 0
    torch.testing.assert_close(batch.hidden_states[1][rows], output.hidden_states[1][0])
    torch.testing.assert_close(batch.hidden_states[3][rows], output.hidden_states[3][0])
    assert batch.top_tokens[rows].tolist() == [0, *output.logits[0].argmax(-1).tolist()[1:]]
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.counted.tolist() == [False, True, True, True, True, True]
    assert batch.document_ids.tolist() == [0, 0, 0, 0, 1, 1]
    torch.testing.assert_close(Unembed(model, find_structure(model))(batch.final_states[rows]), output.logits[0])
    assert batch.only_counted().tokens.tolist() == [6, 7, 8, 9, 10]


def test_states_that_are_nan(tiny_llama):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(CalibrationError, match=r"after layer 2 cannot be used: got NaN.*Expected finite"):
        reader_of(model, [2]).read([Document([3, 4, 5], 0)], [0])
    assert not any(module._forward_hooks for module in model.modules())


def test_a_shard_holds_the_states_of_whole_documents_and_is_read_alone(parts, store, monkeypatch):
    for shard, batch in zip(store.shards("fit"), store.batches("fit"), strict=True):
        expected = reader_of(parts[0], [1, 3]).read(store.splits["fit"], shard.rows)
        for name in ("tokens", "top_tokens", "counted", "document_ids"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))
        for layer in (1, 3):
            assert torch.equal(batch.hidden_states[layer], expected.hidden_states[layer].bfloat16().float())
        assert torch.equal(batch.final_states, expected.final_states.bfloat16().float())
    read, names = WorkFolder.read, []
    monkeypatch.setattr(WorkFolder, "read", lambda self, name, keys: names.append(name) or read(self, name, keys))
    next(store.batches("fit"))
    assert names == ["states/fit-00000"]
    assert store.read(store.shards("fit")[0]).final_states.dtype == torch.bfloat16
    assert store.read(store.shards("certify")[0]).final_states.dtype == torch.float32


def test_samples_are_bounded_and_seeded(store):
    assert store.num_counted("fit") == 20
    samples = [store.sample("fit", [3], capacity=9, seed=seed) for seed in (0, 0, 1)]
    assert all(len(sample) == 9 and bool(sample.counted.all()) for sample in samples)
    assert torch.equal(samples[0].tokens, samples[1].tokens)
    assert not torch.equal(samples[0].document_ids, samples[2].document_ids)
    assert len(store.sample("fit", [3], capacity=100, seed=0)) == 20


def test_splits_are_disjoint_and_complete():
    documents = [Document([number, 1], first=0) for number in range(50)]
    splits = split_documents(documents, seed=0)
    assert sorted(document.tokens[0] for part in splits.values() for document in part) == list(range(50))
    assert {name: len(part) for name, part in splits.items()} == {"fit": 25, "tune": 5, "certify": 20}


def test_long_documents_share_no_batch():
    documents = [Document([1] * length, first=0) for length in (3, 9000, 4, 9000, 5)]
    assert plan_batches(documents, 8) == [[0, 2, 4], [1], [3]]
    assert plan_batches(documents, 2)[0] == [0, 2]
