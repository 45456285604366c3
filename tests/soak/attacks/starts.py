"""Engine folders that are made to harm: the start ends with one clear error, in bounded time and
memory."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.soak.attacks.attack import Attacker
from tests.soak.attacks.processes import SERVER, family, rss_mb

END_S, MOST_MB = 60.0, 2500.0
DIGITS = "1" * 5_000_000
Edit = Callable[[Path], None]


def _json(name: str, change: Callable[[Any], Any]) -> Edit:
    """Writes a file of the folder again, with what `change` makes of it."""

    def edit(folder: Path) -> None:
        path = folder / name
        value = change(json.loads(path.read_text()))
        path.unlink()
        path.write_text(json.dumps(value))

    return edit


def _text(name: str, text: str) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        path.write_text(text)

    return edit


def _numbers(value: Any, put: Any) -> Any:
    """All integers of a tree become another."""
    if isinstance(value, dict):
        return {key: _numbers(one, put) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one, put) for one in value]
    return put if type(value) is int else value


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {**split, "pattern": {"Regex": pattern}}}


def edits() -> Iterator[tuple[str, Edit]]:
    """(what, how) of each hostile folder."""
    manifest, tokens = "manifest.json", "tokenizer/tokenizer.json"
    for put in (2**31, 2**62, 2**64, -1, 0):
        yield f"manifest: all numbers {put}", _json(manifest, lambda v, put=put: _numbers(v, put))
    yield "manifest: rows x 100,000", _json(manifest, _many_rows)
    yield "manifest: deep", _text(manifest, "[" * 1_000_000)
    yield "manifest: long number", _text(manifest, f'{{"format": {DIGITS}}}')
    yield "tokenizer: deep", _text(tokens, '{"model":' * 200_000)
    yield "tokenizer: long number", _text(tokens, f'{{"version": {DIGITS}}}')
    yield "tokenizer: no JSON", _text(tokens, "{" + "\0" * 1_000_000)
    for pattern in ("(", "a{999999999}{999999999}", "(a+)+$", "((a{1,999}){1,999}){1,999}"):
        yield (
            f"tokenizer: pattern {pattern}",
            _json(tokens, lambda v, pattern=pattern: {**v, **_split(pattern)}),
        )
    yield "tokenizer: 3 million words", _json(tokens, _many_words)
    yield "tokenizer: ids of 2^32 - 1", _json(tokens, _far_words)
    yield "template: endless", _text("tokenizer/chat_template.jinja", _ENDLESS)
    yield "template: 1 GB", _text("tokenizer/chat_template.jinja", '{{ ("a" * 10**9)|length }}')


_ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def _many_rows(value: Any) -> Any:
    return {
        k: v * (100_000 // len(v)) if isinstance(v, list) and v else v for k, v in value.items()
    }


def _many_words(value: Any) -> Any:
    model = dict(value["model"])
    model["vocab"] = {**model["vocab"], **{f"zz{i}": 100_000 + i for i in range(3_000_000)}}
    return {**value, "model": model}


def _far_words(value: Any) -> Any:
    model = dict(value["model"])
    return {**value, "model": {**model, "vocab": {**model["vocab"], "zzz": 2**32 - 1}}}


def _start(folder: Path) -> tuple[int | None, float, float, str]:
    """(exit code or None where it serves, seconds, peak MiB, last words)."""
    command = [sys.executable, "-P", "-m", SERVER, "--serve", "--port", str(free_port())]
    log = folder.with_name("words")
    begin, peak = time.monotonic(), 0.0
    with log.open("wb") as words:
        process = subprocess.Popen([*command, str(folder)], stdout=words, stderr=words)
    try:
        while process.poll() is None and time.monotonic() < begin + END_S:
            peak = max(peak, sum(map(rss_mb, family(process.pid))))
            if "serving" in log.read_text(errors="replace"):
                return None, time.monotonic() - begin, peak, ""
            time.sleep(0.1)
        took = time.monotonic() - begin
        code = process.poll()
        return (-1 if code is None else code), took, peak, log.read_text(errors="replace")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            for pid in family(process.pid):
                os.kill(pid, 9)
            process.wait()


def hostile_folders(at: Attacker, engine: Path, folder: Path) -> None:
    """Starts a server of each."""
    for number, (name, edit) in enumerate(edits()):
        copy = folder / f"hostile-{number}" / "engine"
        link(engine, copy)
        edit(copy)
        code, took, peak, words = _start(copy)
        at.count("serves" if code is None else f"exit {code}")
        said = f"{name}: exit code {code} after {took:.0f} s, {peak:.0f} MiB: {words[-300:]!r}"
        at.expect(code in (None, 2), said)
        at.expect("Traceback" not in words and "our bug" not in words, said)
        at.expect(peak < MOST_MB, said)


def link(engine: Path, copy: Path) -> None:
    """The same folder of hard links, where files may be written again."""
    for path in engine.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(engine)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, target)
            except OSError:  # another file system
                target.write_bytes(path.read_bytes())
