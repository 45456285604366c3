"""The wheel has all tracked files, and works without the rest of the repository.

Built from a clean copy of the tracked files, because setuptools reuses a stale `build/`.
"""

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.server.process.open_service import worker_command
from tests.repository import PACKAGES, ROOT, files
from tests.repository_checks.clean_install import bare_environment, clone_into, pip_into

TOOLS = tuple("spark-replicas spark-bench spark-build spark-run spark-check spark-inspect".split())
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
COMMIT = "c0ffee" * 6 + "c0ff"  # passed to the build
TRACKED = files(*PACKAGES, tracked_only=True)
IMPORT_ALL = """
import importlib, pathlib, spark_engine
root = pathlib.Path(spark_engine.__file__).parent
packages = {packages!r}
for module in {modules!r}:
    importlib.import_module(module)
print(root)
"""


def _run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=env.pop("cwd", None),
        env={**os.environ, "PYTHONPATH": "", **env},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


CUDA = (
    *("builder/native/program.py", "builder/native/backend.py", "builder/native/nvrtc.py"),
    *("builder/native/gpu_timer.py", "device/cuda_driver.py", "device/gpu.py"),
    *(
        "runtime/executors/device_memory.py",
        "runtime/executors/native.py",
        "runtime/executors/upload.py",
    ),
    *("device/resources.py", "runtime/doctor/probe.py"),
)
EXTRAS = {"ray": "runtime/replicas/ray_serve.py", "nccl": "runtime/executors/nccl.py"}


def _installed(path: Path) -> str:
    """The path of a tracked file of a package inside site-packages."""
    return path.as_posix() if path.parts[0] == "spark_engine" else f"spark_engine/{path.as_posix()}"


def _modules() -> list[str]:
    """Every module that must import without torch or, where they are absent, `cuda` and extras."""
    sources = [p for p in TRACKED if p.suffix == ".py" and "tiny" not in p.parts]
    if importlib.util.find_spec("cuda") is None:
        sources = [p for p in sources if p.as_posix() not in CUDA]
    absent = {path for name, path in EXTRAS.items() if importlib.util.find_spec(name) is None}
    sources = [p for p in sources if p.as_posix() not in absent]
    names = (_installed(path)[:-3].replace("/", ".") for path in sources)
    return [name.removesuffix(".__init__") for name in names]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files, as in the working tree, in another folder."""
    target = tmp_path_factory.mktemp("clone")
    clone_into(target)
    return target


@pytest.fixture(scope="module")
def dist(clone: Path) -> Path:
    """A folder with the wheel and the sdist, built without fetching anything."""
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", clone / "dist", clone]
    _run(*command, SPARK_COMMIT=COMMIT)
    return clone / "dist"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv that sees this interpreter's dependencies, but no installation of the project."""
    venv = tmp_path_factory.mktemp("venv")
    bare_environment(venv)
    return venv


@pytest.fixture(scope="module")
def wheel_installed(dist: Path, bare: Path) -> Path:
    """The venv with the wheel; the last test of this file installs something else there."""
    (wheel,) = dist.glob("*.whl")
    _run(*pip_into(bare), wheel)
    return bare


def _works(venv: Path, away: Path, *tools: str) -> str:
    """Runs the tools' help and imports every module; returns the folder of the package."""
    for tool in tools:
        assert "Usage" in _run(venv / "bin" / tool, "--help", cwd=str(away))
    script = IMPORT_ALL.format(packages=PACKAGES, modules=_modules())
    return _run(venv / "bin" / "python", "-c", script, cwd=str(away)).strip()


def test_the_wheel_holds_what_git_tracks(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    assert held == {_installed(path) for path in TRACKED} | {"spark_engine/commit.txt"}


def test_the_metadata_is_complete_and_its_readme_has_no_dead_links(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(name))
    assert said["Version"] == re.search(r"^## \[(\d.*?)\]", CHANGELOG, re.M)[1]  # type: ignore[index]
    for field in ("Summary", "License-Expression", "Author", "Keywords", "Requires-Python"):
        assert said[field], field
    assert len(said.get_all("Classifier")) > 8
    assert {n.rpartition("/")[2] for n in names if "/licenses/" in n} == {
        "LICENSE", "Apache-2.0.txt", "MIT.txt"
    }  # fmt: skip
    text = said.get_payload()
    links = re.findall(r"\]\((?!https?:)[^)]*\)|<img|<!--", text)
    assert "## Install" in text and links == []


def test_forms_and_the_workflow_are_yaml_and_call_what_exists() -> None:
    forms = {p: yaml.safe_load((ROOT / p).read_text()) for p in files(".github/*.yml")}
    (job,) = forms[Path(".github/workflows/ci.yml")]["jobs"].values()
    (command,) = (step["run"] for step in job["steps"] if "run" in step)
    assert os.access(ROOT / command, os.X_OK)
    for path, form in forms.items():
        if "body" in form:
            ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
            assert form["name"] and form["description"] and len(ids) == len({*ids}), path


def test_the_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    (source,) = tmp_path.iterdir()
    held = {p.relative_to(source) for p in source.rglob("*") if p.is_file()}
    assert set(TRACKED) <= held
    assert Path("LICENSE") in held


def test_the_wheel_works_alone(wheel_installed: Path, tmp_path: Path) -> None:
    bare = wheel_installed
    assert Path(_works(bare, tmp_path, *TOOLS)).is_relative_to(bare)
    module = "spark_engine.runtime.server.operation.release"
    code = f"from {module} import release; print(release()['commit'])"
    assert _run(bare / "bin" / "python", "-c", code, cwd=str(tmp_path)).strip() == COMMIT


def test_the_engine_process_of_a_wheel_starts_in_the_root_of_a_clone(
    clone: Path, wheel_installed: Path, tmp_path: Path
) -> None:
    own = worker_command(tmp_path, EngineOptions())[1:]
    command = [wheel_installed / "bin" / "python", *own, f"ipc://{tmp_path}/x/y"]
    done = subprocess.run(command, cwd=clone, input="", capture_output=True, text=True)
    assert "No module named 'spark_engine" not in done.stderr


def test_an_editable_install_works(clone: Path, bare: Path, tmp_path: Path) -> None:
    _run(*pip_into(bare), "-e", clone)
    assert Path(_works(bare, tmp_path, "spark-run")) == clone / "spark_engine"
    code = "from spark_engine.runtime.server.operation.release import release; print(*release())"
    assert _run(bare / "bin" / "python", "-c", code, cwd=str(tmp_path)).strip() == "version"
