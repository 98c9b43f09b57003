"""Settings and fixtures that tests share.

The default run needs the Hub or PyPI once, for the real model; `pytest -m "not real_model and not slow and not gpu"`
needs no network.
"""

import io
import os
import sys
from pathlib import Path

# Set before the libraries that read them are imported. The telemetry switches are removed because kernels sends an
# illegal header if one of them is set.
for _name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
    os.environ.pop(_name, None)
os.environ.update(
    HF_HUB_USER_AGENT_ORIGIN="tide_hf",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_HUB_DISABLE_XET="1",
    DISABLE_SAFETENSORS_CONVERSION="1",
    TOKENIZERS_PARALLELISM="false",
)

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, as transformers does

import pytest  # noqa: E402
import tokenizers  # noqa: E402
from cpu_kernels import shared_builds  # noqa: E402
from draft_heads import draft_head_for  # noqa: E402
from loopback_hub import loopback_hub  # noqa: E402
from records import record  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from tide_hf import TIDERouters  # noqa: E402
from tide_hf.cli.demo_model import load_demo_model  # noqa: E402
from tide_hf.cli.main import main  # noqa: E402
from tide_hf.common import measurements  # noqa: E402
from tide_hf.common.files import cache_folder  # noqa: E402
from tide_hf.kernels.cpu import cpp_kernels as kernels  # noqa: E402
from tide_hf.kernels.cpu.cpp_kernels import load_op  # noqa: E402
from tide_hf.kernels.fetch import KERNELS_REPO  # noqa: E402
from tide_hf.weights.fused_layers import FusedLayers  # noqa: E402
from tide_hf.weights.layouts import _fastest_layout  # noqa: E402


def pytest_configure(config):
    """Share the cores between the workers; without this each would use all of them."""
    transformers_logging.disable_progress_bar()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, min(2, cores // workers)))


@pytest.fixture
def threads_restored():
    """A test may set the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread(threads_restored):
    """Tiny models compute faster on one thread, and the same as processes that have one each."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_kernels():
    """A function that returns the folder of the kernels for a dtype, and builds them if no run has."""
    return shared_builds(cache_folder() / "kernels_of_tests")


@pytest.fixture(autouse=True)
def _same_start_for_every_test(shared_kernels):
    """The machine is not busy, and neither measurements nor kernels are found in the user's cache.

    The patches are not `monkeypatch`'s, which a test may undo.
    """
    _fastest_layout.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
        patch.setattr(measurements, "FILE", f"{os.devnull}/measurements")  # which can be neither read nor written
        patch.setattr(kernels, "built_folder", lambda _: Path(os.devnull) / "kernels")
        patch.setattr(kernels, "_built", shared_kernels)
        yield


@pytest.fixture
def fresh_kernels():
    """No kernels are ready, and those that a test builds are not those of other tests."""
    load_op.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_loaded", {})
        yield
    load_op.cache_clear()


@pytest.fixture(params=[None, "AVX2", "DEFAULT"], ids=["this CPU", "AVX2", "no vectors"])
def on_some_cpu(request, fresh_kernels, monkeypatch):
    """This CPU, and CPUs with fewer instructions."""
    known = ("DEFAULT", "AVX2", "AVX512")
    has = torch.backends.cpu.get_cpu_capability()
    if request.param is not None and (has not in known or known.index(request.param) >= known.index(has)):
        pytest.skip("this CPU has no more instructions than that")
    if request.param == "DEFAULT" and request.node.callspec.params["dtype"] is torch.float16:
        pytest.skip("bfloat16 takes the same path, and each build takes seconds")
    if request.param is not None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    kernels.stage_module().cpu_level.cache_clear()
    yield
    kernels.stage_module().cpu_level.cache_clear()


@pytest.fixture
def no_fused_layers(monkeypatch):
    """No call of a kernel runs whole layers, whatever was measured on this machine."""
    monkeypatch.setattr(FusedLayers, "with_limits", lambda *_: {})


@pytest.fixture(scope="session")
def stage():
    """The module that stages a build of the kernels; it is not part of a package."""
    return kernels.stage_module()


@pytest.fixture(scope="session")
def build(stage, tmp_path_factory):
    """A folder with the kernels staged for this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and torch.version.cuda is not None:
        pytest.skip("with a PyTorch for CUDA the client only loads builds for CUDA, and there is no GPU")
    folder = tmp_path_factory.mktemp("kernels")
    stage.stage_noarch(folder / "build", device)
    return folder


@pytest.fixture
def local_kernels(monkeypatch, build):
    """The environment in which the kernels are loaded from `build`."""
    kernels._fetched.cache_clear()
    monkeypatch.setenv("LOCAL_KERNELS", f"{KERNELS_REPO}={build}")
    yield
    kernels._fetched.cache_clear()


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 and its tokenizer; tests that attach TIDE to it detach it again.

    Tests that use it carry `@pytest.mark.real_model` and `@pytest.mark.xdist_group("real_model")`.
    """
    return load_demo_model(dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_llama():
    """A function that makes a small random Llama; keyword arguments go to its config."""

    def make(seed=0, **config):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "initializer_range": 0.2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        tokens = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 257, "pad_token_id": 257}
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(sizes | heads | tokens | config))).eval()

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """One token per byte, with a chat template. It fits `tiny_llama()`."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}<answer>"
    return fast


@pytest.fixture(scope="module")
def parts(tiny_llama, tiny_tokenizer):
    """A small random Llama and its tokenizer, which the tests of a module share and do not change."""
    return tiny_llama(), tiny_tokenizer


@pytest.fixture
def tiny_model_folder(tmp_path, tiny_llama, tiny_tokenizer):
    """A folder with a small random Llama and its tokenizer, which a test may change."""
    for part in (tiny_llama(), tiny_tokenizer):
        part.save_pretrained(tmp_path / "tiny-llama")
    return tmp_path / "tiny-llama"


@pytest.fixture
def model_hub(tmp_path, monkeypatch):
    """A Hub on this machine for the clients in this process, which have an empty cache and no token."""
    with loopback_hub() as hub:
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        constants = {"ENDPOINT": hub.address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
        constants |= {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN_PATH": str(tmp_path / "token")}
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.address)
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


@pytest.fixture
def hub_routers(model_hub, tiny_model_folder):
    """Calibrated routers, not on the Hub, for `org/base`, which is."""
    commit = model_hub.add("org/base", tiny_model_folder)
    model = AutoModelForCausalLM.from_pretrained("org/base", tie_word_embeddings=False)
    layers = {"1": {"agreement": 0.25, "exit_rate": 0.1}, "3": {"agreement": 0.75, "exit_rate": 0.1}}
    made = TIDERouters.for_model(model, exit_layers=[1, 3], exit_strategy="linear", exit_threshold=0.8)
    made.config.calibration = record(chosen=0.8) | {"exit_layers": layers}
    made.config.base_model_revision = commit
    return made


@pytest.fixture
def served_routers(model_hub, tiny_model_folder):
    """Calibrated routers with a draft head, not on the Hub, for `org/base`, which is."""
    model_hub.add("org/base", tiny_model_folder)
    made = draft_head_for(AutoModelForCausalLM.from_pretrained("org/base"), draft_vocab_size=100)
    made.config.calibration = record(chosen=0.8) | {"exit_layers": {"2": {"agreement": 0.25, "exit_rate": 0.1}}}
    made.config.exit_threshold = 0.8
    return made


@pytest.fixture
def on_hub(model_hub, hub_routers, tmp_path):
    """The folder that is `org/base-tide` on the Hub."""
    hub_routers.save_pretrained(tmp_path / "routers")
    model_hub.add("org/base-tide", tmp_path / "routers")
    return tmp_path / "routers"


@pytest.fixture
def routers_folder(tmp_path, tiny_llama):
    """A folder with routers for the model of `tiny_model_folder`."""
    calibration = {"exit_layers": {"2": {"agreement": 0.6}}}
    TIDERouters.for_model(tiny_llama(), exit_layers=[2], calibration=calibration).save_pretrained(tmp_path / "routers")
    return tmp_path / "routers"


@pytest.fixture
def without_matplotlib(monkeypatch):
    """As where it is not installed; cards without plots take less time."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def refused(capsys):
    """A function that runs a command line, which must end with status 2 and an explanation, and returns its output."""

    def run(arguments, message):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert "Expected" in captured.err
        assert "Traceback" not in captured.err
        return captured.out

    return run


@pytest.fixture
def pipe_in(monkeypatch):
    """A function that pipes bytes into this process's standard input."""
    return lambda data: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
