"""A real engine of a random checkpoint, for tests of endpoints that report an engine's facts."""

import subprocess
import sys
from pathlib import Path

from tests.checkpoints import write_checkpoint
from tests.runtime import small_tokenizer

CONTEXT, SLOTS = 256, 4


def build(folder: Path, tokenizer: bool, context: int = CONTEXT) -> Path:
    """Writes a checkpoint and its engine under `folder`; returns the engine folder."""
    checkpoint, engine = folder / "checkpoint", folder / "small"
    generation = {"do_sample": True, "temperature": 0.9, "top_k": 20, "eos_token_id": [1, 2]}
    write_checkpoint(checkpoint, moe=True, generation=generation)
    if tokenizer:
        small_tokenizer.write(checkpoint)
    sizes = ["--decode", "1,4", "--prefill", "64", "--max-context", str(context)]
    sizes += ["--max-seqs", str(SLOTS), "--no-record"]
    command = [sys.executable, "-m", "spark_engine.builder.cli", str(checkpoint)]
    subprocess.run([*command, "-o", str(engine), *sizes], check=True, stdout=subprocess.DEVNULL)
    return engine
