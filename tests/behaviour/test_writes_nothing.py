"""Loading routers writes nothing but the Hub's cache, whatever their folder holds."""

import shutil

import pytest

from tide_hf import TIDEModelForCausalLM, TIDERouters


def listing(folder):
    """What a folder holds; a link counts as itself."""
    found = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {path: (stat.st_ino, stat.st_size, stat.st_mode, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.parametrize("state", ["whole", "without config", "another's config", "damaged"])
def test_loading_leaves_a_folder_unchanged(routers_folder, tmp_path, tiny_llama, state):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in (".saving-killed", ".saving-other"):  # as a save that was killed may have left them
        (routers_folder / name).mkdir()
        shutil.copy(routers_folder / "config.json", routers_folder / name)
        (routers_folder / name / "config.copy").symlink_to(outside)
    config = routers_folder / "config.json"
    match state:
        case "without config":
            config.unlink()
        case "another's config":  # as a save that was killed between the two files leaves it
            sha256 = TIDERouters.from_pretrained(routers_folder).config.weights_sha256
            (routers_folder / "tide").mkdir(exist_ok=True)
            shutil.copy(config, routers_folder / "tide" / f"{sha256}.json")
            config.write_text(config.read_text().replace(sha256, "0" * 64))
        case "damaged":
            (routers_folder / "model.safetensors").write_bytes(b"damaged")
    before = listing(tmp_path)
    if state in ("without config", "damaged"):
        with pytest.raises((OSError, ValueError), match="Expected"):
            TIDERouters.from_pretrained(routers_folder)
    else:
        TIDEModelForCausalLM.attach(tiny_llama(), routers=routers_folder)
    assert listing(tmp_path) == before
    assert outside.read_text() == "mine"


def test_a_read_only_folder_can_be_loaded(routers_folder):
    for path in (*routers_folder.iterdir(), routers_folder):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert TIDERouters.from_pretrained(routers_folder).exit_layers == [2]
    finally:
        routers_folder.chmod(0o755)


@pytest.mark.usefixtures("on_hub")
def test_loading_from_the_hub_writes_only_its_cache(tmp_path, monkeypatch):
    def others():
        return {path: found for path, found in listing(tmp_path).items() if cache not in (path, *path.parents)}

    monkeypatch.chdir(tmp_path)  # where relative paths lead
    cache = tmp_path / "cache"
    before = others()
    TIDERouters.from_pretrained("org/base-tide")
    assert others() == before
