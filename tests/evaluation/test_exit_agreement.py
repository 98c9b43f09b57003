"""The metric `exit_agreement`, loaded as a user of the `evaluate` library loads it."""

import doctest

import pytest

from tide_hf.calibration.threshold import clopper_pearson
from tide_hf.common.errors import ConfigurationError
from tide_hf.evaluation.metrics import EXIT_AGREEMENT

evaluate = pytest.importorskip("evaluate")

PREDICTIONS = [[1, 2, 3, 4], [5, 6]]
REFERENCES = [[1, 2, 9, 4], [5, 6]]
LAYERS = [[8, 2, 2, 8], [4, 2]]


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    return evaluate.load(EXIT_AGREEMENT, cache_dir=str(tmp_path_factory.mktemp("evaluate")))


def test_agreement_and_depth_by_hand(metric):
    found = metric.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert found["agreement"] == pytest.approx(5 / 6)
    assert found["agreement_interval"] == list(clopper_pearson(5, 6, 0.95))
    assert found["disagreement_per_answer"] == pytest.approx(1 / 8)
    low, high = found["disagreement_per_answer_interval"]
    assert low <= 1 / 8 <= high
    assert found["equal_answers"] == 0.5
    assert found["equal_answers_interval"] == list(clopper_pearson(1, 2, 0.95))
    assert found["same_start"] == pytest.approx((2 / 4 + 1) / 2)
    assert (found["num_answers"], found["num_tokens"]) == (2, 6)
    assert "depth_fraction" not in found
    for prediction, reference in zip(PREDICTIONS, REFERENCES, strict=True):
        metric.add(prediction=prediction, reference=reference)
    found = metric.compute(exit_layers=LAYERS, num_layers=8, confidence=0.8)
    assert found["depth_fraction"] == pytest.approx(26 / 6 / 8)
    assert found["exited"] == pytest.approx(4 / 6)
    assert found["exited_interval"] == list(clopper_pearson(4, 6, 0.8))
    layers = found["agreement_by_layer"]
    assert list(layers) == ["2", "4", "8"]
    interval = list(clopper_pearson(2, 3, 0.8))
    assert layers["2"] == {"agreement": pytest.approx(2 / 3), "interval": interval, "num_tokens": 3}


def test_its_example_runs(metric):
    example = doctest.DocTestParser().get_doctest(metric.inputs_description, {}, "example", None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0
    assert len(example.examples) == 5


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"references": [[1, 2, 3], [5, 6]]}, r"predictions and references cannot be compared: got answers of \[4, 2"),
        ({"exit_layers": [[1, 2, 3, 4]], "num_layers": 8}, "predictions and exit_layers cannot be compared"),
        ({"exit_layers": LAYERS}, "exit_layers do not fit the model: got layers 2 to 8 with num_layers=None"),
        ({"exit_layers": LAYERS, "num_layers": "8"}, r"layers 2 to 8 with num_layers='8'\. Expected .*a whole number"),
        ({"confidence": 95}, "confidence makes no sense: got 95"),
    ],
)
def test_answers_that_cannot_be_compared_are_refused(metric, inputs, message):
    with pytest.raises(ConfigurationError, match=message):
        metric.compute(**{"predictions": PREDICTIONS, "references": REFERENCES} | inputs)
