"""The tracked files in another folder, and an environment that sees this interpreter's dependencies
but no installation of the project."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.repository import ROOT, files


def clone_into(target: Path) -> None:
    """Copies the tracked files, as in the working tree."""
    for path in files(tracked_only=True):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path)


def bare_environment(folder: Path) -> None:
    """Makes a virtual environment there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (dependencies := folder / "dependencies").mkdir()
    places = [p for p in (sysconfig.get_path("purelib"), *sys.path) if p and "-packages" in p]
    for entry in (entry for p in dict.fromkeys(places) for entry in Path(p).iterdir()):
        ours = entry.name.startswith(("__editable__", "spark_engine")) or entry.suffix == ".pth"
        if not ours and not (dependencies / entry.name).exists():
            (dependencies / entry.name).symlink_to(entry)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(f"{dependencies}\n")


def pip_into(folder: Path) -> tuple[str | Path, ...]:
    """The command that installs what follows into the environment, without its dependencies."""
    python = ("--python", folder / "bin" / "python", "install")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    return (sys.executable, "-m", "pip", *python, *quiet, "--force-reinstall")
