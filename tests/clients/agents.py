"""Runs coding agents against the embedded model, and writes their table in docs/use/clients.md.

    python -m tests.clients.agents [--url URL] [--keep FOLDER] [--write-fixtures] [NAME ...]

The agents are the unmodified programs of npm packages, pinned with hashes in `npm/`. Each does
one task through the proxy of `agent_proxy.py`: it calls its shell, reads an image and answers. With
names only those are run; the page has the latest result of each. The exit code is 1 where one
fails. `--keep` stores what was exchanged; `--write-fixtures` writes the shortened requests that
`tests/runtime/server/api/test_agents.py` replays.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from spark_engine.runtime.offline.embedded import find_checkpoint, is_stale
from tests.clients import tower_model
from tests.clients.agent_proxy import (
    ANSWER,
    APIS,
    IMAGE,
    REPLY,
    SHELL,
    STEPS,
    THOUGHT,
    Call,
    Exchange,
    Proxy,
)
from tests.clients.agent_rows import AGENTS, ASKED, CONTEXT, GIVEN, PICTURE, Agent, filled
from tests.clients.run import HERE, OFFLINE, VENVS, write_part
from tests.ports import served
from tests.repository import ROOT

LOCK = HERE / "npm"
FOLDER = VENVS / "agents"
MODULES = FOLDER / "node_modules"
ENGINE = FOLDER / f"tiny-{CONTEXT // 1000}k"
AGENT_S = 2400
CACHED = 0.8  # of a later turn's prompt, at least
_OPTIONS = ("--think-budget", str(THOUGHT))
_BUILD = ("--max-seqs", "2", "--cache-gib", "2", "--no-record")
FIXTURES = ROOT / "tests" / "runtime" / "server" / "api" / "agents"
_TEXT, _NOTE = 160, 40  # characters of a text, and of a description
_IMAGE = re.compile(r"^(data:image/|iVBORw0KGgo)")  # kept whole
_SCHEMAS = ("parameters", "input_schema")  # kept without what explains them
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_IDENT = re.compile(rf"{_UUID}|(?<![0-9A-Za-z])[0-9a-f]{{24,}}\b")


@dataclass
class Run:
    """What came of one agent: `code` is None where it did not end, `seen` what it asked."""

    agent: Agent
    code: int | None
    output: str
    seconds: float
    seen: list[Exchange]

    def turn(self, step: str) -> Exchange | None:
        """The exchange of a step that was answered."""
        return next((x for x in self.seen if x.step == step and x.status == 200), None)

    def shell(self) -> bool:
        """Whether the command ran: its output came back."""
        turn = self.turn(IMAGE)
        return turn is not None and GIVEN in json.dumps(turn.asked)

    def image(self) -> str:
        """How the agent sent what it read: "image", "text" (that says "image"), or ""."""
        if (turn := self.turn(REPLY)) is None:
            return ""
        if re.search(r'data:image/|"media_type": "image/', json.dumps(turn.asked)):
            return "image"
        results = APIS[turn.path.partition("?")[0]].results(turn.asked or {})
        return "text" if "image" in json.dumps(results[-1:]).lower() else ""

    def problems(self) -> list[str]:
        found = [] if self.code == 0 else [f"exit code {self.code}: {self.output[-300:]}"]
        if ANSWER not in self.output:
            found.append("it did not show the answer")
        for x in self.seen:
            if x.status >= 400 or not x.status:
                found.append(f"{x.method} {x.path} {x.step}: {x.status} {x.answer[:300]}")
        found += [f"no {step} turn was answered" for step in STEPS if not self.turn(step)]
        if self.turn(IMAGE) and not self.shell():
            found.append("the command's output was not sent back")
        if self.turn(REPLY) and not self.image():
            found.append("the image was not sent back")
        for step in (IMAGE, REPLY):
            if turn := self.turn(step):
                prompt, cached = turn.usage()
                if cached < CACHED * prompt:
                    found.append(f"{step}: {cached} of {prompt} prompt tokens were cached")
        return found

    def row(self) -> dict[str, Any]:
        turns = [turn for step in STEPS if (turn := self.turn(step))]
        body = turns[0].asked or {} if turns else {}
        kinds = sorted({tool.get("type", "custom") for tool in body.get("tools", [])})
        return {
            "package": f"{self.agent.package} {version(self.agent)}",
            "api": turns[0].path.partition("?")[0] if turns else "",
            "tools": f"{len(body.get('tools', []))} ({', '.join(kinds)})",
            "usage": [turn.usage() for turn in turns],
            "seconds": [round(turn.seconds) for turn in turns],
            "shell": self.shell(),
            "image": self.image(),
            "code": self.code,
            "requests": len(self.seen),
            "problems": self.problems(),
        }


def version(agent: Agent) -> str:
    version = json.loads((LOCK / "package.json").read_text())["dependencies"][agent.package]
    return str(version).removesuffix("-linux-x64")


def install() -> None:
    """The agents' packages, again where the lock file changed. Raises CalledProcessError."""
    names = ("package.json", "package-lock.json")
    installed = FOLDER / "installed.json"
    wanted = json.dumps([(LOCK / name).read_text() for name in names])
    if installed.exists() and installed.read_text() == wanted:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(LOCK / name, FOLDER / name)
    # `npm ci` refuses a lock file without the optional packages of other systems
    flags = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(["npm", "install", *flags], cwd=FOLDER, check=True)
    installed.write_text(wanted)


def build() -> Path:
    """The engine of the embedded model, with a tower, for CONTEXT tokens: its config.json allows
    fewer."""
    checkpoint = FOLDER / "checkpoint"
    if is_stale(ENGINE, find_checkpoint()):
        shutil.rmtree(checkpoint, ignore_errors=True)
        tower_model.write(checkpoint, max_position_embeddings=CONTEXT)
        command = [sys.executable, "-P", "-m", "spark_engine.builder.cli", checkpoint, "-o", ENGINE]
        command += ["--max-context", str(CONTEXT), *_BUILD]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        os.utime(ENGINE / "manifest.json")
    return ENGINE


def picture(size: int = 16) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (size, size), (120, 99, 180)).save(held, "PNG")
    return held.getvalue()


def run(agent: Agent, server: str, folder: Path) -> Run:
    """Runs one agent in a new folder."""
    home, project = folder / "home", folder / "project"
    home.mkdir(parents=True)
    project.mkdir()
    (project / PICTURE).write_bytes(picture())
    subprocess.run(["git", "init", "-q", project], check=True)
    model = httpx.get(f"{server}/v1/models").json()["data"][0]["id"]
    names = {"model": model, "home": home, "project": project, "modules": MODULES, "asked": ASKED}
    words = {key: str(value) for key, value in names.items()}
    calls = {SHELL: agent.shell, IMAGE: agent.image}
    forced = {step: Call(c.tool, filled(c.arguments, words)) for step, c in calls.items()}
    proxy = Proxy(server, forced)
    begin = time.monotonic()
    with proxy.running() as url, tempfile.TemporaryFile("w+") as output:
        words["url"] = url
        for path, content in agent.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(filled(content, words))
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **OFFLINE}
        env |= {"HOME": str(home), "SPARK_API_KEY": "any", **filled(agent.env, words)}
        process = subprocess.Popen(
            filled(agent.command, words),
            cwd=project,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(AGENT_S)
        end_all(home)
        process.wait()
        output.seek(0)
        return Run(agent, code, output.read(), time.monotonic() - begin, proxy.seen)


def end_all(home: Path) -> None:
    """Ends what an agent left running: every process with its HOME."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"HOME={home}".encode() in file.read_bytes().split(b"\0"):
                os.kill(int(file.parent.name), signal.SIGKILL)


def table(rows: dict[str, dict[str, Any]]) -> str:
    heads = ["agent", "package", "API", "tools", "prompt tokens", "cached", "shell", "image"]
    lines = [f"| {' | '.join([*heads, 'exit code', 'requests'])} |", f"|{'---|' * 10}"]
    for name, row in rows.items():
        usage = row["usage"]
        tokens = ", ".join(f"{prompt:,}" for prompt, _ in usage)
        shares = ", ".join(f"{cached / max(prompt, 1):.0%}" for prompt, cached in usage[1:])
        done = ["yes" if row["shell"] else "**fails**"]
        done.append({"image": "yes", "text": "as a text"}.get(row["image"], "**fails**"))
        cells = [name, row["package"], f"`{row['api']}`", row["tools"], tokens, shares, *done]
        lines.append(f"| {' | '.join([*cells, str(row['code']), str(row['requests'])])} |")
    failed = [f"- {name}: `{words}`" for name, row in rows.items() for words in row["problems"]]
    return "\n".join([*lines, *(["", "What fails:", *failed] if failed else [])]) + "\n"


def write_fixture(name: str, version: str, seen: Sequence[Exchange], folder: Path) -> None:
    """Writes `FIXTURES/NAME.json`: the last turn, which has the whole conversation, and requests
    outside the turns. Texts and descriptions are cut, and what names a machine, a person or a
    session is replaced, as is `folder`, in which the agent ran."""
    asked = [x for x in seen if x.path.partition("?")[0] in APIS and x.step in ("", REPLY)]
    short = Shortener({str(folder): "/user"})
    rows = [{"path": x.path, "step": x.step, "body": short(x.asked)} for x in asked]
    FIXTURES.mkdir(exist_ok=True)
    text = json.dumps({"agent": name, "version": version, "requests": rows}, indent=1)
    (FIXTURES / f"{name}.json").write_text(text + "\n")


class Shortener:
    """Shortens JSON and keeps its form. An identifier becomes a number, each time the same."""

    def __init__(self, words: dict[str, str]) -> None:
        """`words` are replaced."""
        self._words = words
        self._idents: dict[str, str] = {}

    def __call__(self, value: Any, most: int = _TEXT) -> Any:
        """The same in form, with texts of up to `most` characters."""
        if isinstance(value, str):
            return self._text(value, most)
        if isinstance(value, list):
            return [self(one, most) for one in value]
        if isinstance(value, dict):
            lengths = {"description": _NOTE, "encrypted_content": len(str(value))}
            return {
                key: self(_bare(one) if key in _SCHEMAS else one, lengths.get(key, most))
                for key, one in value.items()
            }
        return value

    def _text(self, text: str, most: int) -> str:
        if _IMAGE.match(text):
            return text
        for word, other in self._words.items():
            text = text.replace(word, other)
        text = _IDENT.sub(lambda found: self._number(found[0]), text)
        return text if len(text) <= most else f"{text[:most]} …"

    def _number(self, ident: str) -> str:
        return self._idents.setdefault(ident, f"{len(self._idents) + 1:024d}")


def _bare(schema: Any) -> Any:
    """A schema without descriptions; a property may have that name."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    words = isinstance(schema.get("description"), str)
    return {key: _bare(one) for key, one in schema.items() if key != "description" or not words}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs them, says what came of it; the exit code."""
    known = {agent.name: agent for agent in AGENTS}
    parser = argparse.ArgumentParser(description="Coding agents against the embedded model.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--url", help="of a server that runs, without /v1")
    parser.add_argument("--keep", type=Path, help="a folder for what was exchanged")
    parser.add_argument("--write-fixtures", action="store_true")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(known):
        parser.error(f"{', '.join(unknown)}: known are {', '.join(known)}")
    install()
    failed = False
    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(served(str(build()), *_OPTIONS))
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agents-", dir=FOLDER)))
        for name in given.names or known:
            done = run(known[name], url, root / name)
            row = done.row()
            (FOLDER / f"{name}.json").write_text(json.dumps(row))
            turns = [
                f"{p} ({c} cached) {s} s"
                for (p, c), s in zip(row["usage"], row["seconds"], strict=True)
            ]
            state = "FAILED" if row["problems"] else "passed"
            print(f"{name}: {state}, exit code {done.code}, {done.seconds:.0f} s: {turns}")
            print("".join(f"  {words}\n" for words in row["problems"]), end="", flush=True)
            failed |= bool(row["problems"])
            if given.keep:
                given.keep.mkdir(parents=True, exist_ok=True)
                said = {"output": done.output, "seen": [asdict(x) for x in done.seen]}
                (given.keep / f"{name}.json").write_text(json.dumps(said, indent=1))
            if given.write_fixtures and not row["problems"]:
                write_fixture(name, version(done.agent), done.seen, root / name)
    files = {name: FOLDER / f"{name}.json" for name in known}
    rows = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    write_part("agents", table(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
