"""Draft heads and routers that a stranger made to crash, hang or exhaust who loads them, and a script that loads them.

`python hostile_heads.py FOLDER ...` attaches each to a tiny model and prints a line of JSON for each: the classes of
the error, its message, the seconds of the processor, and by how many megabytes the process has grown.
"""

import json
import resource
import struct
import sys
import time
import zipfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from shutil import copytree

import torch
from draft_heads import REFERENCE, base_model, draft_head_for, original_format
from safetensors.torch import load_file, save_file

from tide_hf import TIDEModelForCausalLM

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
FOLDER = "pytorch_model"  # of the records in the archive
HONEST = ("speculators", "eagle3", "own")  # kinds of heads


def base():
    """The same weights at each call, as routers recognise them."""
    torch.manual_seed(0)
    return base_model()


def honest(kind, folder):
    """Write a head that fits: in the format of speculators, in EAGLE-3's with a pickle, or in the library's own."""
    if kind == "own":
        draft_head_for(base()).save_pretrained(folder)
    else:
        copytree(REFERENCE / "plain", folder)
    if kind == "eagle3":
        original_format(folder)


def edit(folder, change):
    """Change the config, as a dictionary; routers of our own have their fields in `tide`, without checksums."""
    config = json.loads((folder / "config.json").read_text())
    if "tide" in config:
        config["tide"]["weights_sha256"] = None
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def top(**fields):
    return lambda folder: edit(folder, lambda config: config.update(fields))


def layer(**fields):
    return lambda folder: edit(folder, lambda config: config["transformer_layer_config"].update(fields))


def rope(**fields):
    return layer(rope_parameters={"rope_theta": 10000.0, **fields})


def own(**fields):
    return lambda folder: edit(folder, lambda config: config["tide"].update(fields))


def own_head(**fields):
    return lambda folder: edit(folder, lambda config: config["tide"]["draft_head"].update(fields))


def text(content):
    return lambda folder: (folder / "config.json").write_text(content)


def tensors(**changes):
    """Replace tensors; `None` removes one. In names, `__` stands for a dot."""

    def change(folder):
        edit(folder, lambda config: None)
        held = load_file(folder / WEIGHTS)
        for name, tensor in changes.items():
            held.pop(name.replace("__", "."), None)
            if tensor is not None:
                held[name.replace("__", ".")] = tensor
        save_file(held, folder / WEIGHTS)

    return change


def header(entries, data=b""):
    """A safetensors file of that header, as JSON or text."""
    content = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return lambda folder: (folder / WEIGHTS).write_bytes(len(content).to_bytes(8, "little") + content + data)


def empty_rows(name, rows):
    """Give a tensor `rows` rows of no columns, and take `d2t` away."""

    def change(folder):
        edit(folder, lambda config: None)
        held = {key: one for key, one in load_file(folder / WEIGHTS).items() if key not in ("d2t", "t2d", name)}
        save_file(held, folder / WEIGHTS)
        content = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        entry = {name: {"dtype": "F32", "shape": [rows, 0], "data_offsets": [len(content) - end] * 2}}
        header({**json.loads(content[8:end]), **entry}, content[end:])(folder)

    return change


def own_config_copy(folder):
    """A save that was killed, whose copy of the config is nested deep."""
    edit(folder, lambda config: config["tide"].update(weights_sha256="0" * 64))
    weights = sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    (folder / f"tide/{weights}.json").write_text("[" * 10**5)


def others(change):
    """Change the file of the other tensors in a head of our own, and name it right."""

    def changed(folder):
        (file,) = (folder / "tide").iterdir()
        held = load_file(file)
        change(held)
        save_file(held, file)
        name = sha256(file.read_bytes()).hexdigest()
        file.rename(file.with_stem(name))
        own(others_sha256=name)(folder)

    return changed


def saved(make, **options):
    """A pickle of what `make` returns for the head's tensors."""

    def change(folder):
        held = torch.load(folder / PICKLED)
        torch.save(make(held), folder / PICKLED, **options)

    return change


def records(change, **options):
    """Change the archive's records, a dictionary of bytes, and write them anew."""

    def changed(folder):
        with zipfile.ZipFile(folder / PICKLED) as archive:
            held = {name: archive.read(name) for name in archive.namelist()}
        change(held)
        with zipfile.ZipFile(folder / PICKLED, "w", **options) as archive:
            for name, content in held.items():
                archive.writestr(name, content)

    return changed


def program(*parts):
    """A pickle of these bytes, in place of the head's."""
    return records(lambda held: held.update({f"{FOLDER}/data.pkl": b"\x80\2" + b"".join(parts) + b"."}))


def bomb(name):
    """A record that inflates to 256 MB, in an archive of about a megabyte."""
    inflated = {f"{FOLDER}/{name}": bytes(2**28)}
    return records(lambda held: held.update(inflated), compression=zipfile.ZIP_DEFLATED, compresslevel=1)


def overlapping(folder):
    """An archive whose directory names the largest record many times."""
    with zipfile.ZipFile(folder / PICKLED, "a") as archive:
        archive.filelist.extend([max(archive.infolist(), key=lambda info: info.file_size)] * 50)
        archive.writestr("last", b"")


def crowded(count):
    """An archive whose directory has an empty record many times."""

    def change(folder):
        content = (folder / PICKLED).read_bytes()
        start = len(content)
        name = b"a"
        local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name
        sizes = (0, 0, 0, 0, 0, 0, 0, len(name), 0, 0, 0, 0, 0, start)
        directory = (struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, *sizes) + name) * count
        at = start + len(local)
        big = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), at)
        end = struct.pack("<4sLQL", b"PK\6\7", 0, at + len(directory), 1)
        end += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
        (folder / PICKLED).write_bytes(content + local + directory + big + end)

    return change


def flipped(find):
    """Flip a bit of the pickled file, at the position that `find` returns for its content."""

    def change(folder):
        content = bytearray((folder / PICKLED).read_bytes())
        content[find(content)] ^= 1
        (folder / PICKLED).write_bytes(content)

    return change


class Code:
    def __reduce__(self):
        return Path.mkdir, (Path("code-ran"),)


def laughs(depth=40):
    """Bytes of a pickle: a tuple that holds itself 2 ** depth times over."""
    return b")" + b"".join(b"q\0h\0h\0\x86" for _ in range(depth))


ONE = torch.ones(1)
FACTORS = {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 2.0}
EMPTY = json.dumps({"dtype": "I8", "shape": [0], "data_offsets": [0, 0]})
CROWD = "{" + ",".join(f'"{number:x}":{EMPTY}' for number in range(400_000)) + "}"
KIND = b"ctorch\nFloatStorage\n"
DEEP = "[" * 900 + "]" * 900
# Values that a field of a head in another format cannot have.
LAYER_FIELDS = {
    "intermediate_size": [2**20],
    "hidden_size": [2**20],
    "head_dim": [2**20, 7],
    "num_attention_heads": [2**20, 0, -4],
    "num_key_value_heads": [3],
    "num_hidden_layers": ["1"],
    "model_type": [["llama"], {"llama": 1}],
    "hidden_act": [["silu"]],
    "rms_norm_eps": ["small"],
    "max_position_embeddings": [10**30],
}
TOP_FIELDS = {
    "draft_vocab_size": [10**9, "24", -24, True, [24]],
    "target_hidden_size": ["16"],
    "eagle_aux_hidden_state_layer_ids": [[10**4000], [[1]]],
    "transformer_layer_config": [[1]],
    "speculators_model_type": [["eagle3"]],
}
FIELDS = [(layer, *one) for one in LAYER_FIELDS.items()] + [(top, *one) for one in TOP_FIELDS.items()]
SPECULATORS = {
    **{f"{name} of {value!r:.20}": change(**{name: value}) for change, name, values in FIELDS for value in values},
    "hidden_size, target": lambda folder: (layer(hidden_size=2**20)(folder), top(target_hidden_size=16)(folder)),
    "vocab_size a list": lambda folder: (tensors(t2d=None)(folder), layer(vocab_size=[32])(folder)),
    "rope without a factor": rope(rope_type="linear"),
    "rope with a factor of null": rope(rope_type="linear", factor=None),
    "rope with a factor of 0": rope(rope_type="linear", factor=0),
    "rope, dynamic, negative": rope(rope_type="dynamic", factor=-3.0),
    "rope, llama3, of 0": rope(rope_type="llama3", factor=8.0, low_freq_factor=0, high_freq_factor=4.0),
    "rope, longrope, 40,000": rope(**FACTORS, short_factor=[1.0] * 40_000, long_factor=[1.0] * 40_000),
    "rope, longrope, 10**6": rope(**FACTORS, short_factor=[1.0] * 10**6, long_factor=[1.0] * 10**6),
    "rope, longrope, long ones": rope(**FACTORS, short_factor=[1.0] * 4, long_factor=[1.0] * 5),
    "rope, longrope, zero": rope(**FACTORS, short_factor=[1.0] * 4, long_factor=[0] * 4),
    "rope, partial": rope(rope_type="linear", factor=2.0, partial_rotary_factor=10**9),
    "rope, half": rope(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
    "rope, theta of 0": rope(rope_theta=0),
    "rope, theta of null": rope(rope_theta=None),
    "rope, attention_factor": rope(rope_type="yarn", factor=2.0, attention_factor=1e300),
    "JSON nested too deep": text("[" * 10**5),
    "JSON nested deep": text(f'{{"architectures": ["Eagle3"], "speculators_model_type": {DEEP}}}'),
    "JSON deep in architectures": text(f'{{"architectures": {DEEP}}}'),
    "JSON of 32 MB": text('{"architectures": [' + "[]," * 10**7 + "1]}"),
    "t2d without dimensions": tensors(t2d=torch.tensor(True)),
    "t2d of NaN": tensors(t2d=torch.full((32,), torch.nan)),
    "t2d of numbers": tensors(t2d=torch.ones(32, dtype=torch.int8)),
    "t2d empty": tensors(t2d=torch.ones(0, dtype=torch.bool)),
    "d2t complex": tensors(d2t=torch.zeros(24, dtype=torch.complex64)),
    "d2t of booleans": tensors(d2t=torch.zeros(24, dtype=torch.bool)),
    "d2t of floats": tensors(d2t=torch.zeros(24)),
    "d2t with two dimensions": tensors(d2t=torch.zeros(24, 1, dtype=torch.long)),
    "d2t out of range": tensors(d2t=torch.full((24,), 2**62)),
    "float8": tensors(norm__weight=torch.ones(16).to(torch.float8_e4m3fn)),
    "a dtype that PyTorch lacks": header({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"0"),
    "infinite": tensors(norm__weight=torch.full((16,), torch.inf)),
    "unknown tensors": tensors(another=torch.ones(1)),
    "10**9 rows of nothing": empty_rows("lm_head.weight", 10**9),
    "10**9 embeddings of nothing": empty_rows("embed_tokens.weight", 10**9),
    "header of 24 MB": header(CROWD),
    "header of a megabyte": header(CROWD[: 10**6].rpartition(",")[0] + "}"),
    "header longer than the file": lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 99),
    "header nested deep": header("[" * 10**5),
}
EAGLE3 = {  # with a pickle
    "draft_vocab_size 10**9, no d2t": top(draft_vocab_size=10**9),
    "eagle_config a list": top(eagle_config=[1]),
    "rope_scaling in words": top(rope_parameters=None, rope_scaling="linear"),
    "expanded, unused": saved(lambda held: {**held, "unused": ONE.expand(10**9)}),
    "expanded, t2d": saved(lambda held: {**held, "t2d": torch.ones(1, dtype=torch.bool).expand(2**32)}),
    "expanded, known": saved(lambda held: {**held, "verifier_lm_head.weight": ONE.expand(10**9)}),
    "a storage many times": saved(lambda held: {f"{number}": held["fc.weight"][:] for number in range(999)}),
    "storages shorter than said": records(lambda held: held.update({f"{FOLDER}/data/2": bytes(8)})),
    "deflated weights": bomb("data/0"),
    "deflated pickle": bomb("data.pkl"),
    "deflated, but small": records(lambda held: None, compression=zipfile.ZIP_DEFLATED),
    "records that overlap": overlapping,
    "directory of 14 MB": crowded(300_000),
    "directory of a megabyte": crowded(22_000),
    "flipped bit of a weight": flipped(lambda content: content.index(b"/data/2") + 200),
    "flipped bit of the pickle": flipped(lambda content: content.index(b"FloatStorage") - 3),
    "cut off": lambda folder: (folder / PICKLED).write_bytes((folder / PICKLED).read_bytes()[:-30]),
    "legacy format": saved(dict, _use_new_zipfile_serialization=False),
    "sparse": saved(lambda held: {**held, "fc.weight": held["fc.weight"].to_sparse()}),
    "nested tensors": saved(lambda held: {**held, "fc.weight": torch.nested.nested_tensor([ONE, ONE])}),
    "quantised": saved(lambda held: {"fc.weight": torch.quantize_per_tensor(ONE, 1.0, 0, torch.qint8)}),
    "on the meta device": saved(lambda held: {**held, "a": torch.empty(10**12, device="meta")}),
    "complex, pickled": saved(lambda held: {**held, "d2t": held["d2t"].to(torch.complex64)}),
    "float8, pickled": saved(lambda held: {**held, "norm.weight": ONE.to(torch.float8_e5m2)}),
    "code": saved(lambda held: {"fc.weight": Code()}),
    "a list": saved(lambda held: [*held.values()]),
    "a tensor": saved(lambda held: held["fc.weight"]),
    "numbers for tensors": saved(lambda held: dict.fromkeys(held, 1)),
    "dictionaries for tensors": saved(lambda held: {"fc.weight": held}),
    "8 GB of bytes": program(b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\2\x85R"),
    "a memo of 2**31": program(b"}r\xff\xff\xff\x7f"),
    "keys of 2**40 values": program(b"}", laughs(), b"K\1s"),
    "values of 2**40 values": program(b"}X\1\0\0\0a", laughs(), b"s"),
    "names of 2**40 values": program(b"ctorch._utils\n_rebuild_tensor_v2\n((", KIND, laughs(), b"tQK\0))tR"),
    "sizes of 2**40 values": program(
        b"ctorch._utils\n_rebuild_tensor_v2\n((K\0", KIND, b"X\1\0\0\x000tQK\0", laughs(), b")tR"
    ),
    "keys nested 100,000 deep": program(b"})", b"\x85" * 100_000, b"K\1s"),
    "many small tensors": saved(lambda held: {f"{number}": ONE[:0] for number in range(600)}),
    "a pickle of 8 MB": program(b"}" * 2**23),
    "a pickle that takes more than it has": program(b"R"),
}
OWN = {
    "own intermediate_size": own_head(intermediate_size=2**20),
    "own head_dim": own_head(head_dim=2**20),
    "own embedding": own_head(has_embedding=True),
    "own rope without a factor": own_head(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0}),
    "own longrope": own_head(rope_parameters={**FACTORS, "short_factor": [1] * 40_000, "long_factor": [1] * 40_000}),
    "own bottleneck": own(router_bottleneck_dim=2**20),
    "own translator": own(exit_strategy="linear", translator_rank=2**20),
    "own size": own(hidden_size=2**20),
    "own layers": own(num_hidden_layers=2**12, exit_layers=list(range(1, 2**12))),
    "own exit layers": own(num_hidden_layers=2**9, exit_layers=list(range(1, 2**9))),
    "own draft_vocab_size": own(vocab_size=2**24, draft_vocab_size=2**24),
    "own 10**9 rows of nothing": empty_rows("lm_head.weight", 10**9),
    "own record nested deep": own(calibration={"another": json.loads(DEEP)}),
    "own record of half a megabyte": own(calibration={"another": [[]] * 125_000, "tolerances": 7}),
    "own copy of the config nested deep": own_config_copy,
    "own tensors missing": tensors(fc__weight=None),
    "own NaN": others(lambda held: held["exits.2.router.up.weight"].fill_(torch.nan)),
    "own complex": others(lambda held: held.update({"exits.2.router.up.bias": torch.ones(1, dtype=torch.complex64)})),
    "own float8": tensors(norm__weight=torch.ones(16).to(torch.float8_e4m3fn)),
}
KINDS = {"speculators": SPECULATORS, "eagle3": EAGLE3, "own": OWN}
HOSTILE = {name: (kind, change) for kind, heads in KINDS.items() for name, change in heads.items()}


def forget_largest():
    """Where the system can, measure the largest size of this process from now on."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def megabytes():
    """The largest size of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def load_all(folders):
    """Attach each head to a model, and print what came of it."""
    for folder in folders:
        model, kinds, message = base(), [], ""
        forget_largest()
        before, start = megabytes(), time.process_time()
        try:
            TIDEModelForCausalLM.attach(model, folder)
        except Exception as error:  # noqa: BLE001 - an error of any other class is what the test looks for
            kinds, message = [kind.__name__ for kind in type(error).__mro__], str(error)
        found = {"kinds": kinds, "message": message[:2000], "length": len(message)}
        print(json.dumps(found | {"seconds": time.process_time() - start, "grown": megabytes() - before}), flush=True)


if __name__ == "__main__":
    load_all(sys.argv[1:])
