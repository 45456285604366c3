"""What these tests share: an engine of the embedded model, with few buckets, which open fast."""

import subprocess
import sys
from pathlib import Path

import pytest

from spark_engine.runtime.offline.embedded import find_checkpoint


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedded") / "tiny"
    sizes = ["--decode", "1,8", "--prefill", "64", "--max-context", "512", "--max-seqs", "8"]
    command = [sys.executable, "-m", "spark_engine.builder.cli", str(find_checkpoint())]
    command += ["-o", str(folder), *sizes, "--no-record"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder
