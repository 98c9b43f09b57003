"""On a busy machine attaching and the statistics of a call say that one thread may be faster, and change nothing."""

import pytest
import torch
from families import prompt, tiny_model

from tide_hf import TIDEModelForCausalLM
from tide_hf.common import busy

CAN_BE = "one thread can be several times as fast: torch.set_num_threads(1)"
IS = "one thread is 3.0 times as fast at present: torch.set_num_threads(1), or --threads 1 on the command line."


@pytest.fixture
def two_threads(threads_restored, monkeypatch):
    """Two threads of PyTorch on a busy machine of two cores."""
    torch.set_num_threads(2)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (4.5, 0.0, 0.0), raising=False)
    monkeypatch.setattr(busy, "_warned", set())


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("gain", "said"), [(3.0, IS), (0.6, CAN_BE)])
def test_attach_warns_once_a_process_and_the_summary_of_each_call_says_it(monkeypatch, caplog, gain, said):
    monkeypatch.setattr(busy, "one_thread_gain", lambda: gain)
    for _ in range(2):
        model = TIDEModelForCausalLM.attach(tiny_model("llama"))
    (warning,) = [message for message in caplog.messages if "busy" in message]
    assert "This machine is busy: its load average is 4.5 on 2 cores." in warning
    assert said in warning
    model.generate(prompt(), max_new_tokens=4, do_sample=False)
    assert CAN_BE in model.last_exit_stats.summary()
    torch.set_num_threads(1)
    model.generate(prompt(), max_new_tokens=4, do_sample=False)
    assert "busy" not in model.last_exit_stats.summary()


@pytest.mark.usefixtures("two_threads")
def test_the_measurement_leaves_the_number_of_threads_as_it_is(monkeypatch):
    assert busy.one_thread_gain() > 0
    assert torch.get_num_threads() == 2
    clock = iter([0.0, 6.0, 10.0, 12.0])
    monkeypatch.setattr(busy, "perf_counter", lambda: next(clock))
    assert busy.one_thread_gain() == 3.0
