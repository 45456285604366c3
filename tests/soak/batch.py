"""A batch of ten thousand lines on the embedded model, killed twice and ended once: `make batch`.

    python -m tests.soak.batch [LINES]

Every line must have one answer, and a run that continues answers nothing twice.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.repository import PATH

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
RUN = [sys.executable, "-P", "-m", "spark_engine.runtime.cli.spark_run"]


def _write(path: Path) -> None:
    with path.open("w") as file:
        for n in range(COUNT):
            chat = n % 3 == 0
            said = f"What is {n} plus 4?"
            body: dict[str, object] = {"max_tokens": 4 + n % 5, "seed": n}
            body |= {"messages": [{"role": "user", "content": said}]} if chat else {"prompt": said}
            if n % 100 == 99:
                body["temperature"] = -1  # refused
            url = "/v1/chat/completions" if chat else "/v1/completions"
            row = {"custom_id": f"r{n}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(row) + "\n")


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> int:
    draws = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        _write(source)
        command = [*RUN, "--batch", str(source), "--out", str(target)]
        environment = {**os.environ, "PYTHONPATH": PATH}
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            process = subprocess.Popen(command, env=environment)
            until = _lines(target) + draws.randrange(COUNT // 20, COUNT // 4)
            while _lines(target) < until:
                assert process.poll() is None, "it ended before it was killed"
                time.sleep(0.2)
            process.send_signal(number)
            process.wait()
            print(f"{signal.Signals(number).name} after {_lines(target)} lines", flush=True)
        left = COUNT - _lines(target)
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        rows = [json.loads(line) for line in target.read_text().splitlines()]
        assert Counter(row["custom_id"] for row in rows) == {f"r{n}": 1 for n in range(COUNT)}
        bad = [row["custom_id"] for row in rows if row["response"]["status_code"] != 200]
        assert sorted(bad) == sorted(f"r{n}" for n in range(99, COUNT, 100))
        answered = int(done.stderr.splitlines()[-1].split()[0])
        assert left <= answered <= left + 1, "a line was answered twice"  # one may have been torn
        print(f"{COUNT} lines, each with one answer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
