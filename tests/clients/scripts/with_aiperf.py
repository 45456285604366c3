"""aiperf, which measures requests and reads /metrics."""

import json
import os
import tempfile
from pathlib import Path

from asked import CHECKPOINT, MODEL, URL
from verdicts import Trial, holds, run_tool, same

trial = Trial()
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
        flags = ["profile", "--streaming", "--use-server-token-count"]
        run_tool("aiperf", flags, options, env=ENV)
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        metrics = json.loads((Path(folder) / "server_metrics_export.json").read_text())
    same(found["request_count"]["avg"], 4.0)
    same(found["output_token_count"]["avg"], 8.0)
    first, whole = (found[name]["avg"] for name in ("time_to_first_token", "request_latency"))
    holds(1 < first < whole, first, whole)
    same(metrics["summary"]["endpoints_successful"], [f"{URL}/metrics"])


trial.run()
