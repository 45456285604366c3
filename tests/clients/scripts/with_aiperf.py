"""aiperf, which measures requests and reads /metrics."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from verdicts import MODEL, URL, Trial, holds, same

trial = Trial()
CHECKPOINT = Path(__file__).parents[3] / "models" / "tiny" / "checkpoint"  # for its tokenizer
# a folder is no name of the hub, and is not found as one where the hub is switched off
ENV = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}


@trial("benchmark")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "--model": MODEL,
            "--url": URL,
            "--endpoint-type": "chat",
            "--tokenizer": CHECKPOINT,
            "--concurrency": 2,
            "--request-count": 4,
            "--isl": 64,
            "--osl": 8,
            "--extra-inputs": "ignore_eos:true",
            "--artifact-dir": folder,
            "--ui": "none",
        }
        command = [Path(sys.executable).with_name("aiperf"), "profile", "--streaming"]
        command += ["--use-server-token-count"]
        command += [str(word) for pair in options.items() for word in pair]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENV)
        same((done.returncode, done.stdout[-300:] if done.returncode else ""), (0, ""))
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        metrics = json.loads((Path(folder) / "server_metrics_export.json").read_text())
    same(found["request_count"]["avg"], 4.0)
    same(found["output_token_count"]["avg"], 8.0)
    first, whole = (found[name]["avg"] for name in ("time_to_first_token", "request_latency"))
    holds(1 < first < whole, first, whole)
    same(metrics["summary"]["endpoints_successful"], [f"{URL}/metrics"])


trial.run()
