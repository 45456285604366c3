"""Which release this is: the version, and the commit that was built, where that is known."""

from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files

COMMIT = "commit.txt"  # in the package `spark_engine`: setup.py writes it


def release() -> Mapping[str, str]:
    """`version`, and `commit` in hexadecimal; an editable install does not know its commit."""
    found = {"version": version("spark-engine")}
    path = files("spark_engine").joinpath(COMMIT)
    if path.is_file() and (commit := path.read_text().strip()):
        found["commit"] = commit
    return found
