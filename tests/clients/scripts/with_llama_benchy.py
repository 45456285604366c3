"""llama-benchy, which measures prefill and decode: its rates must be such as can be."""

import http.server
import json
import tempfile
import threading
from functools import partial
from pathlib import Path

from asked import CHECKPOINT, MODEL, V1
from verdicts import Trial, holds, run_tool

trial = Trial()
MOST = 20_000  # tokens a second that no two cores prefill of this model


@trial("benchmark")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        book = Path(folder) / "book.txt"
        book.write_text("Once upon a time, a little fox lived in a valley full of flowers. " * 99)
        handler = partial(http.server.SimpleHTTPRequestHandler, directory=folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        saved = Path(folder) / "found.json"
        options = {
            "--base-url": V1,
            "--model": MODEL,
            "--tokenizer": CHECKPOINT,
            "--pp": 512,
            "--tg": 16,
            "--runs": 2,
            "--book-url": f"http://127.0.0.1:{server.server_port}/book.txt",
            "--format": "json",
            "--save-result": saved,
        }
        flags = ["--exact-tg", "--no-cache", "--skip-coherence", "--exit-on-first-fail"]
        run_tool("llama-benchy", flags, options)
        server.shutdown()
        rows = json.loads(saved.read_text())["benchmarks"]
    for row in rows:
        prefill, decode = row["pp_throughput"]["mean"], row["tg_throughput"]["mean"]
        holds(10 < prefill < MOST, "prefill", prefill)
        holds(0.5 < decode < MOST, "decode", decode)
        holds(row["ttfr"]["mean"] > 0.9 * row["e2e_ttft"]["mean"], row)


trial.run()
