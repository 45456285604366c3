"""Tries every client against the embedded model with a vision tower, and writes
docs/use/clients.md.

    python -m tests.clients.run [--url URL] [NAME ...]

Each client gets a separate environment under `.venv-clients/`, since their pins conflict; its
script there prints a verdict for each feature. With names only those clients are tried; the page
has the latest verdicts of every client. The exit code is 1 where something failed.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.clients.tower_model import engine
from tests.ports import served
from tests.repository import ROOT

HERE = ROOT / "tests" / "clients"
VENVS = ROOT / ".venv-clients"
PAGE = ROOT / "docs" / "use" / "clients.md"
PACKAGES = HERE / "packages.toml"
MARK = "<!-- from here: python -m tests.clients.{} -->\n"
LATEST = "verdicts.json"  # in a client's environment
CLIENT_S = 900
CRASH = "the script's end"  # what failed where a script gave no verdicts
Verdicts = dict[str, str]  # by feature: "" or what failed


def clients() -> dict[str, list[str]]:
    rows = tomllib.loads(PACKAGES.read_text())
    return {name: row["packages"] for name, row in rows.items() if isinstance(row, dict)}


def install(name: str, packages: list[str]) -> Path:
    """The interpreter of a client's environment, which is made where its packages changed."""
    folder = VENVS / name
    python, record = folder / "bin" / "python", folder / "packages.json"
    if record.exists() and json.loads(record.read_text()) == packages:
        return python
    tool = VENVS / "uv"
    if not (tool / "bin" / "uv").exists():
        pinned = tomllib.loads(PACKAGES.read_text())["uv"]
        subprocess.run([sys.executable, "-m", "venv", tool], check=True)
        subprocess.run([tool / "bin" / "pip", "install", "--quiet", pinned], check=True)
    uv = str(tool / "bin" / "uv")
    subprocess.run([uv, "venv", "-q", "--clear", "-p", sys.executable, folder], check=True)
    subprocess.run([uv, "pip", "install", "-q", "-p", python, *packages], check=True)
    record.write_text(json.dumps(packages))
    return python


def tried(name: str, python: Path, url: str, home: Path) -> Verdicts:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    env = {**os.environ, **OFFLINE, "HOME": str(home), "PYTHONPATH": "", "PYTHONSAFEPATH": ""}
    command = [python, HERE / "scripts" / f"with_{name}.py", url, model]
    try:
        done = subprocess.run(
            command, cwd=home, env=env, capture_output=True, text=True, timeout=CLIENT_S
        )
        found = json.loads((done.stdout.splitlines() or [""])[-1])
    except subprocess.TimeoutExpired:
        return {CRASH: f"it had not ended after {CLIENT_S} s"}
    except json.JSONDecodeError:
        return {CRASH: (done.stderr or done.stdout)[-600:]}
    return dict(found)


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def table(found: Mapping[str, Verdicts], packages: Mapping[str, list[str]]) -> str:
    """The generated part of the page: each client, what works, and the words of what does not."""
    lines = ["| client | packages |", "|---|---|"]
    lines += [f"| {name} | {', '.join(packages[name])} |" for name in found]
    features = list(dict.fromkeys(f for verdicts in found.values() for f in verdicts))
    lines += ["", f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for feature in features:
        cells = [_cell(verdicts.get(feature)) for verdicts in found.values()]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    failed = [
        f"- {name}, {feature}: `{_line(words)}`"
        for name, verdicts in found.items()
        for feature, words in verdicts.items()
        if words
    ]
    return "\n".join([*lines, *(["", "What fails:", *failed] if failed else [])]) + "\n"


def _line(words: str) -> str:
    return re.sub(r"[`\s]+", " ", words)


def _cell(words: str | None) -> str:
    return "" if words is None else "**fails**" if words else "yes"


def write_part(module: str, text: str) -> None:
    """Writes the part of the page that `python -m tests.clients.MODULE` makes: from its mark to
    the next heading."""
    head, mark, tail = PAGE.read_text().partition(MARK.format(module))
    _, heading, rest = tail.partition("\n## ")
    PAGE.write_text(head + mark + text + heading + rest)


def main() -> int:
    """Tries them, says what came of it; the exit code."""
    packages = clients()
    parser = argparse.ArgumentParser(description="Real clients against the embedded model.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(packages))
    parser.add_argument("--url", help="of a server that runs, without /v1")
    given = parser.parse_args()
    if unknown := set(given.names) - set(packages):
        parser.error(f"{', '.join(unknown)}: known are {', '.join(packages)}")
    names = given.names or list(packages)
    pythons = {name: install(name, packages[name]) for name in names}
    found: dict[str, Verdicts] = {}
    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(served(str(engine(VENVS / "tower"))))
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="clients-"))
        for name, python in pythons.items():
            begin = time.monotonic()
            found[name] = tried(name, python, url, Path(home))
            wrong = {f: words for f, words in found[name].items() if words}
            took = time.monotonic() - begin
            print(f"{name}: {len(found[name]) - len(wrong)} of {len(found[name])}, {took:.0f} s")
            print("".join(f"  {f}: {words}\n" for f, words in wrong.items()), end="", flush=True)
    for name, verdicts in found.items():
        (VENVS / name / LATEST).write_text(json.dumps(verdicts))
    latest = {
        name: json.loads((VENVS / name / LATEST).read_text())
        for name in packages
        if (VENVS / name / LATEST).exists()
    }
    write_part("run", table(latest, packages))
    return int(any(words for verdicts in found.values() for words in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
