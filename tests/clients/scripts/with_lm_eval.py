"""lm-eval: texts that are generated, choices by their likelihood, perplexity. No hub is asked."""

import json
import math
import tempfile
from pathlib import Path

import lm_eval
from asked import CHECKPOINT, MODEL, V1
from verdicts import Trial, holds, same

trial = Trial()
WORDS = [
    {"text": "Once upon a", "choices": [" seventeen", " time"], "answer": 1},
    {"text": "Once upon a time, a little fox named Bramble lived in a", "answer": 0,
     "choices": [" valley full of flowers", " and and and the the"]},
    {"text": "The others laughed at", "choices": [" her", " =" ], "answer": 0},
]  # fmt: skip
SUMS = [{"text": f"What is {i} plus 4?", "answer": f"{i} + 4 = {i + 4}."} for i in range(4)]
STORY = [{"text": "Once upon a time, a little fox named Bramble lived in a valley."}]


def _evaluate(model: str, path: str, rows: list[dict], task: dict, **more: object) -> dict:
    """The task's results."""
    reach = {"model": MODEL, "base_url": f"{V1}/{path}", "max_retries": 1, "num_concurrent": 2}
    reach |= {"tokenizer": str(CHECKPOINT), "tokenizer_backend": "huggingface"}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.json"
        data.write_text(json.dumps(rows))
        config = {
            "task": "ours",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            **task,
        }
        found = lm_eval.simple_evaluate(model=model, model_args=reach, tasks=[config], **more)
    return found["results"]["ours"]


def _metric(name: str) -> list[dict]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True}]


@trial("chat")
def _() -> None:
    task = {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 200, "temperature": 0},
        "metric_list": _metric("exact_match"),
    }
    more = {"apply_chat_template": True}
    found = _evaluate("local-chat-completions", "chat/completions", SUMS, task, **more)
    same(found["exact_match,none"], 1.0)


@trial("completions")
def _() -> None:
    task = {
        "output_type": "generate_until",
        "doc_to_text": "Once upon a",
        "doc_to_target": "time",
        "generation_kwargs": {"until": [","], "max_gen_toks": 4, "temperature": 0},
        "metric_list": [{**_metric("exact_match")[0], "ignore_punctuation": True}],
        "filter_list": [{"name": "none", "filter": [{"function": "remove_whitespace"}]}],
    }
    found = _evaluate("local-completions", "completions", STORY, task)
    same(found["exact_match,none"], 1.0)


@trial("log-probabilities")
def _() -> None:
    task = {
        "output_type": "multiple_choice",
        "target_delimiter": "",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": _metric("acc"),
    }
    same(_evaluate("local-completions", "completions", WORDS, task)["acc,none"], 1.0)


@trial("perplexity")
def _() -> None:
    task = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    found = _evaluate("local-completions", "completions", STORY, task)["word_perplexity,none"]
    holds(math.isfinite(found) and 1 < found < 100, found)


trial.run()
