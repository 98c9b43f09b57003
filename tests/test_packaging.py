"""What is built for PyPI holds all that is needed, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
from zipfile import ZipFile

import pytest
from repository import CARDS, ROOT

pytest.importorskip("setuptools", minversion="77")

IGNORED = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info", "results")


def files_in(folder):
    return {str(path.relative_to(ROOT)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def build(kind, folder):
    """Build a "sdist" or "wheel" from a folder; returns the file."""
    code = f"import setuptools.build_meta as backend; backend.build_{kind}('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    (file,) = (folder / "dist").iterdir()
    return file


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names in the source archive and in the wheel, which is built from what the archive holds."""
    source = tmp_path_factory.mktemp("source") / "clone"
    shutil.copytree(ROOT, source, ignore=IGNORED)
    with tarfile.open(build("sdist", source)) as archive:
        archive.extractall(source.parent / "unpacked", filter="data")
    (unpacked,) = (source.parent / "unpacked").iterdir()
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    with ZipFile(build("wheel", unpacked)) as wheel:
        return names, set(wheel.namelist())


def test_the_wheel_holds_the_package_and_the_shipped_routers(built):
    _, wheel = built
    shipped = files_in(ROOT / "model_cards").difference(*(files_in(folder / "plots") for folder in CARDS))
    routers = {f"tide_hf/{name}" for name in shipped}
    kernels = files_in(ROOT / "hub_kernels" / "tide-kernels")  # of which the package has a link
    kernels = {name for name in kernels if "/tide_kernels_cpu/" in name or "/torch-ext/tide_kernels/" in name}
    kernels = {f"tide_hf/kernels/hub/{name.partition('/tide-kernels/')[2]}" for name in kernels}
    inside = {name for name in wheel if ".dist-info/" not in name}
    assert inside == files_in(ROOT / "tide_hf") | routers | kernels | {"tide_hf/kernels/hub/stage.py"}


def test_the_source_archive_holds_what_the_readme_speaks_of(built):
    source, _ = built
    assert source >= files_in(ROOT / "tests") | files_in(ROOT / "model_cards") | files_in(ROOT / "examples" / "guides")
    assert source >= {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "examples/quickstart.py"}
