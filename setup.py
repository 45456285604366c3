"""Lists the packages with the names that they are imported by (pyproject.toml).

The metadata's readme is README.md without links into the repository. A build from a git checkout,
or with SPARK_COMMIT in the environment, stores the commit.
"""

import os
import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PACKAGES = ("bench", "builder", "check", "device", "models", "plugins", "runtime")
FOUND = find_packages(
    include=[pattern for package in PACKAGES for pattern in (package, f"{package}.*")]
)
ROOT = Path(__file__).resolve().parent


def commit() -> str:
    """The commit that is built; empty if unknown."""
    given = os.environ.get("SPARK_COMMIT", "").strip()
    if given or not (ROOT / ".git").exists():
        return given
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def readme() -> str:
    """README.md outside the repository: links into it are paths, pictures are left out."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    text = re.sub(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)", _path, text)
    return re.sub(r"<!--.*?-->\n", "", text)


def _path(link: re.Match[str]) -> str:
    """A link's text, and its file where the text is not that."""
    return f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`)"


class Build(build_py):
    """Writes `spark_engine/commit.txt`, which runtime/server/operation/release.py reads."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and (found := commit()):
            (Path(self.build_lib) / "spark_engine" / "commit.txt").write_text(found + "\n")


setup(
    packages=["spark_engine", *(f"spark_engine.{name}" for name in FOUND)],
    cmdclass={"build_py": Build},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
