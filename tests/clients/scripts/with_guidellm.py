"""guidellm, which measures requests over synthetic text."""

import json
import tempfile
from pathlib import Path

from asked import CHECKPOINT, MODEL, URL
from verdicts import Trial, holds, run_tool, same

trial = Trial()


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
        run_tool("guidellm", ["run", "--disable-console"], options)
        [row] = json.loads(saved.read_text())["benchmarks"]
    found = row["metrics"]
    counts = found["request_totals"]
    same((counts["successful"], counts["errored"]), (6, 0))
    same(found["output_token_count"]["successful"]["mean"], 8.0)
    holds(found["time_to_first_token_ms"]["successful"]["mean"] > 1, found)


trial.run()
