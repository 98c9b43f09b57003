"""States of a split on disk: whole documents in shards, which are read one at a time."""

import pytest
import torch

from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration import work_folder
from tide_hf.calibration.documents import Document, plan_batches, split_documents
from tide_hf.calibration.states import StateReader, StateStore
from tide_hf.common.errors import CalibrationError

pytestmark = pytest.mark.usefixtures("one_thread")


def made_store(model, folder, dtype=torch.float32):
    documents = [Document([3 + i, 4, 5, 6 + i], first=2) for i in range(20)]
    work = work_folder.WorkFolder(folder)
    states = StateStore(work, split_documents(documents, 0), 4, [1, 3], dtype)
    structure = find_structure(model)
    reader = StateReader(model, structure, Unembed(model, structure), [1, 3])
    expected = states.missing_bytes(structure.hidden_size)
    for shard in states.shards():
        states.write(shard, reader)
    assert states.missing_bytes(structure.hidden_size) == 0
    actual = sum(file.stat().st_size for file in folder.glob("states/*"))
    assert 0.8 * actual < expected + 1000 * len(states.shards()) < 1.5 * actual
    return states


def test_a_shard_keeps_whole_documents(parts, tmp_path):
    model, _ = parts
    states = made_store(model, tmp_path)
    documents = states.splits["fit"]
    for batch in states.batches("fit"):
        assert sorted(batch.hidden_states) == [1, 3]
        assert batch.final_states.dtype == torch.float32
        for document in batch.document_ids.unique().tolist():
            whole = batch.select(batch.document_ids == document)
            assert whole.tokens.tolist() == documents[document].tokens
            assert whole.counted.tolist() == [False, False, True, True]
            with torch.no_grad():
                output = model(whole.tokens[None], output_hidden_states=True)
            torch.testing.assert_close(whole.hidden_states[3], output.hidden_states[3][0], atol=0.05, rtol=0.01)
            assert whole.top_tokens.tolist() == output.logits[0].argmax(-1).tolist()
    (unrounded,) = {states.read(shard).final_states.dtype for shard in states.shards("certify")}
    assert unrounded == torch.float32
    assert states.read(states.shards("fit")[0]).final_states.dtype == torch.bfloat16


def test_samples_are_bounded_and_seeded(parts, tmp_path):
    states = made_store(parts[0], tmp_path)
    assert states.num_counted("fit") == 20
    kept = [states.sample("fit", [3], capacity=9, seed=seed) for seed in (0, 0, 1)]
    assert [len(part) for part in kept] == [9, 9, 9]
    assert all(bool(part.counted.all()) for part in kept)
    assert torch.equal(kept[0].tokens, kept[1].tokens)
    assert not torch.equal(kept[0].document_ids, kept[2].document_ids)
    assert len(states.sample("fit", [3], capacity=100, seed=0)) == 20


def test_shards_are_read_one_at_a_time(parts, tmp_path):
    states = made_store(parts[0], tmp_path)
    batches = states.batches("fit")
    next(batches)
    for file in tmp_path.glob("states/fit-*"):
        file.unlink()
    with pytest.raises(CalibrationError, match="cannot be read"):
        next(batches)


def test_long_documents_share_no_batch():
    documents = [Document([1] * length, first=0) for length in (3, 9000, 4, 9000, 5)]
    assert plan_batches(documents, 8) == [[0, 2, 4], [1], [3]]
    assert plan_batches(documents, 2)[0] == [0, 2]
