"""guidellm, which measures requests over synthetic text."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from verdicts import MODEL, URL, Trial, holds, same

trial = Trial()
CHECKPOINT = Path(__file__).parents[3] / "models" / "tiny" / "checkpoint"  # for its tokenizer


@trial("benchmark")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "found.json"
        options = {
            "--backend": f"kind=openai_http,target={URL},model={MODEL}",
            "--profile": "kind=concurrent,streams=2",
            "--constraint": "kind=max_requests,count=6",
            "--tokenizer": f"kind=huggingface_auto,model={CHECKPOINT}",
            "--data": "kind=synthetic_text,prompt_tokens=64,output_tokens=8",
            "--output": f"kind=json,path={saved}",
        }
        command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-console"]
        command += [word for pair in options.items() for word in pair]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        same((done.returncode, done.stderr[-300:] if done.returncode else ""), (0, ""))
        [row] = json.loads(saved.read_text())["benchmarks"]
    found = row["metrics"]
    counts = found["request_totals"]
    same((counts["successful"], counts["errored"]), (6, 0))
    same(found["output_token_count"]["successful"]["mean"], 8.0)
    holds(found["time_to_first_token_ms"]["successful"]["mean"] > 1, found)


trial.run()
