"""`LLM` and a batch on a real GPU: the tokens of an engine in this process, also next to a second
LLM on the same GPU.

The engine of the embedded model is built with `--invariant`: a sequence's bits depend neither on
its bucket nor on other rows.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spark_engine import LLM, SamplingParams
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.engine_file import TOKENIZER
from spark_engine.runtime.engine import request
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.device.on_gpu import HERE, on_gpu
from tests.repository import ROOT
from tests.runtime.engine.drive import said

pytestmark = on_gpu()
TINY = ROOT / "models" / "tiny" / "checkpoint"
PROMPTS = [f"Once upon a time there were {n} bears" for n in range(64)]
# (temperature, seed), in turn
KINDS = [(0.0, 0), (0.8, 5), (1.3, 11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llm") / "engine"
    sizes = {"decode": (1, 8, 24), "prefill": (64, 256), "max_seqs": 24, "max_context": 1024}
    options = Options(target=HERE, timing=False, invariant=True, **sizes)  # type: ignore[arg-type]
    build(TINY, made, options, lambda text: None)
    return made


def _alone(folder: Path) -> list[list[int]]:
    """The tokens of each prompt in an engine of this process."""
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    engine = Engine.open(folder, EngineOptions(cache_bytes=0, max_waiting=len(PROMPTS)))
    try:
        asked = []
        for n, prompt in enumerate(PROMPTS):
            temperature, seed = KINDS[n % len(KINDS)]
            params = request.SamplingParams(
                temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True
            )
            asked.append(request.Request(tuple(tokenizer.encode(prompt)), params))
        return said(engine, *asked)
    finally:
        engine.close()


def test_tokens_are_those_of_an_engine_alone(folder: Path, tmp_path: Path) -> None:
    truth = _alone(folder)
    fields = [
        {"temperature": t, "seed": s, "top_k": 0, "top_p": 1.0, "ignore_eos": True}
        for t, s in (KINDS[n % len(KINDS)] for n in range(len(PROMPTS)))
    ]
    params = [SamplingParams(max_tokens=24, **row) for row in fields]  # type: ignore[arg-type]
    with LLM(folder, device=0, cache_gib=1) as first, LLM(folder, cache_gib=1) as second:
        for llm in (first, second):
            found = llm.generate(PROMPTS, params)
            assert [one.error for one in found] == [None] * len(PROMPTS)
            assert [list(one.token_ids) for one in found] == truth
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for n, row in enumerate(fields):
            body = {"prompt": PROMPTS[n], "max_tokens": 24, "return_token_ids": True, **row}
            line = {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    command = [sys.executable, "-P", "-m", "spark_engine.runtime.cli.spark_run", str(folder)]
    command += ["--batch", str(source), "--out", str(target), "--device", "0"]
    subprocess.run(command, check=True, timeout=300)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    ids = {row["custom_id"]: row["response"]["body"]["choices"][0]["token_ids"] for row in rows}
    assert [ids[str(n)] for n in range(len(PROMPTS))] == truth
