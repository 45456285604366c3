"""Answers a file of requests, OpenAI's batch lines. `python examples/batch.py [ENGINE]`

An interrupted `spark-run --batch` continues when the same command runs again.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    requests, answers = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
    with requests.open("w") as file:
        for n in range(4):
            messages = [{"role": "user", "content": f"What is {n} plus 4?"}]
            body = {"messages": messages, "max_tokens": 120, "temperature": 0}
            row = {"custom_id": f"sum-{n}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**row, "body": body}) + "\n")
    command = [sys.executable, "-P", "-m", "spark_engine.runtime.cli.spark_run", *sys.argv[1:2]]
    subprocess.run([*command, "--batch", str(requests), "--out", str(answers)], check=True)
    for line in answers.read_text().splitlines():  # in the order in which they were complete
        row = json.loads(line)
        choice = row["response"]["body"]["choices"][0]
        print(row["custom_id"], choice["message"]["content"])
