"""Mistakes of new users, by the real commands: exit code 2, one line of value and remedy.

Those of single options are next to the options; what a server answers to requests is in
tests/runtime/server, what make and pip say in tests/repository_checks.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spark_engine.builder.cli import main as build
from spark_engine.engine_file import MANIFEST
from spark_engine.manifest import FORMAT
from spark_engine.runtime.cli.spark_run import main as run
from tests.repository import ROOT
from tests.runtime import small_engine

CHECKPOINT = ROOT / "models" / "tiny" / "checkpoint"
INSTEAD = ("nvidia/Qwen3.6-27B-NVFP4", "docs/models.md")
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Mistake:
    """`command`: words, with {engine}, {checkpoint} and {here} for paths and {port} for one that is
    taken; `says` is in the last line. `change` is done to a copy of the engine or checkpoint."""

    command: str
    says: tuple[str, ...]
    change: Change | None = None


def _json(name: str, **more: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | more))

    return change


def _write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def _quantised(**more: Any) -> Change:
    return _json("config.json", quantization_config=more)


def _flip(folder: Path) -> None:
    path = folder / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _other_family(folder: Path) -> None:
    _json("config.json", model_type="llama", architectures=["LlamaForCausalLM"])(folder)
    (folder / "model.safetensors").unlink()


MISTAKES = {
    "no such engine": Mistake(
        "run engines/none --serve", ("engines/none", "spark-build CHECKPOINT")
    ),
    "no such checkpoint": Mistake("build nowhere", ("nowhere", "give the folder")),
    "a checkpoint is served": Mistake(
        "run {checkpoint} --serve", ("is a checkpoint", "spark-build")
    ),
    "a name of the hub": Mistake("run Qwen/Qwen3.6-27B --serve", ("spark-build Qwen/Qwen3.6-27B",)),
    "a name of Ollama": Mistake("run qwen3.6:27b --serve", ("`spark-build Qwen/Qwen3.6-27B`",)),
    "it is built": Mistake("build qwen3.6:27b", ("did you mean `spark-build Qwen/Qwen3.6-27B`?",)),
    "as vLLM serves": Mistake("run serve", ("did you mean `spark-run ENGINE --serve`?",)),
    "a port is taken": Mistake(
        "run {engine} --serve --port {port}", ("{port}", "another --host or --port")
    ),
    "an address is not here": Mistake(
        "run {engine} --serve --host 192.0.2.1", ("192.0.2.1", "another --host or --port")
    ),
    "too long": Mistake("run {engine} --serve --max-model-len 999999", ("999999", "reaches 2 to")),
    "half of TLS": Mistake(
        "run {engine} --serve --tls-cert x.pem", ("--tls-cert needs --tls-key",)
    ),
    "an older engine": Mistake(
        "run {engine} --prompt a", ("has format 6", "spark-build"), _json(MANIFEST, format=6)
    ),
    "a newer engine": Mistake(
        "run {engine} --prompt a",
        (f"has format {FORMAT + 1}", "upgrade spark-engine"),
        _json(MANIFEST, format=FORMAT + 1),
    ),
    "a flipped bit": Mistake(
        "run {engine} --prompt a", ("weights.safetensors was changed", "rebuild"), _flip
    ),
    "a download that was cut": Mistake(
        "build {checkpoint}", ("model.safetensors", "download this file again"), _cut
    ),
    "a pointer of Git LFS": Mistake(
        "build {checkpoint}",
        ("model.safetensors", "git lfs pull"),
        _write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    ),
    "no JSON": Mistake(
        "build {checkpoint}", ("config.json", "download"), _write("config.json", '{"a":')
    ),
    "nothing can be written": Mistake("build {checkpoint} -o /proc/x", ("-o /proc/x", "choose")),
    "a target": Mistake("build {checkpoint} --target sm_90", ("did you mean sm_90a?",)),
    "a card": Mistake("build {checkpoint} --card rtx4090", ("rtx4090", "--target rtx")),
    "a GPU for the CPU": Mistake(
        "run {engine} --prompt a --device 1", ("--device", "leave it out")
    ),
    "ranks": Mistake("run {engine} --serve --tp 2", ("--tp is 2", "spark-build --tp 2")),
    "a temperature": Mistake("run {engine} --prompt a --temperature 5", ("5.0", "from 0 to 2")),
    "a configuration": Mistake("run --config {here}/c.toml --serve", ("c.toml", "`port = 8000`")),
    "another family": Mistake("build {checkpoint}", ("'llama'", "qwen3_5"), _other_family),
    "GGUF": Mistake("build {here}/m.gguf", ("GGUF", "m.gguf", *INSTEAD)),
    "GGUF is served": Mistake("run {here}/m.gguf --serve", ("GGUF", "m.gguf", *INSTEAD)),
    "AWQ": Mistake(
        "build {checkpoint}",
        ("'gemv'", *INSTEAD),
        _quantised(quant_method="awq", bits=4, group_size=128, version="gemv", zero_point=True),
    ),
    "GPTQ": Mistake(
        "build {checkpoint}",
        ("bits 8", *INSTEAD),
        _quantised(quant_method="gptq", bits=8, group_size=128),
    ),
    "bitsandbytes": Mistake(
        "build {checkpoint}", ("bitsandbytes", *INSTEAD), _quantised(quant_method="bitsandbytes")
    ),
    "two of one name": Mistake(
        "run {engine} {engine} --serve", ("name one of them, as in other=",)
    ),
    "models without a server": Mistake("run {engine} b={engine} --prompt a", ("--serve",)),
    "too little for a model": Mistake(
        "run {engine} b={engine} --serve --models-gib 1e-9", ("GiB", "raise --models-gib")
    ),
    "a name for two": Mistake(
        "run {engine} b={engine} --serve --served-model-name x", ("--served-model-name", "b=")
    ),
    "idle without a server": Mistake(
        "run {engine} --prompt a --idle-unload 5", ("--idle-unload", "--serve")
    ),
    "a file for a folder": Mistake(
        "run {engine} --serve --cache-dir {here}/c.toml", ("c.toml", "file")
    ),
    "a size without a folder": Mistake(
        "run {engine} --serve --cache-dir-gib 3", ("add --cache-dir",)
    ),
    "activations": Mistake("build {checkpoint} --mlp-activations fp4", ("'fp4'", "'bf16', 'fp8'")),
    "activations of another format": Mistake(
        "build {checkpoint} --mlp-activations fp8", ("--mlp-activations fp8", "leave it out")
    ),
    "a list of ids": Mistake(
        "build {checkpoint} --draft-vocab many", ("many", "full, auto, list, a number")
    ),
    "no ids": Mistake("build {checkpoint} --draft-vocab 0", ("--draft-vocab 0", "1")),
    "a length of text": Mistake("build {checkpoint} --draft-suffix 99", ("99", "choose 0 to 16")),
    "an image without a tower": Mistake(
        "run {engine} --prompt a --image {here}/c.toml", ("no images",)
    ),
    "no batch": Mistake("run {engine} --batch none.jsonl --out o", ("none.jsonl", "JSON lines")),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_engine.build(tmp_path_factory.mktemp("engine"), tokenizer=True)


@pytest.fixture
def port() -> Iterator[int]:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_one_line_names_value_and_remedy(
    mistake: Mistake, engine: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text('{"engine": "x"}')
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    given = {"engine": engine, "checkpoint": CHECKPOINT, "port": port, "here": tmp_path}
    if mistake.change is not None:
        name = "engine" if "{engine}" in mistake.command else "checkpoint"
        given[name] = tmp_path / "copy"
        shutil.copytree(engine if name == "engine" else CHECKPOINT, tmp_path / "copy")
        mistake.change(tmp_path / "copy")
    tool, *words = mistake.command.format(**given).split()
    done = CliRunner().invoke(run if tool == "run" else build, words)
    line = (
        " ".join(done.stderr.split()) if "Usage:" in done.stderr else done.stderr.splitlines()[-1]
    )
    assert done.exit_code == 2 and "Traceback" not in done.stderr, done.stderr
    for said in mistake.says:
        assert said.format(**given) in line, done.stderr
    own = [
        row for row in done.stderr.splitlines() if row.startswith(("spark-run:", "spark-build:"))
    ]
    assert len(own) == (0 if "Usage:" in done.stderr else 1), done.stderr
