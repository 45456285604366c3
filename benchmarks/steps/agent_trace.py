"""What drafts from the text bring to a recorded conversation of an agent that edits files.

`python -m benchmarks.steps.agent_trace [ENGINE]` takes `bench/agent.json` (`--replay FILE`: another
recording) and the embedded model's tokenizer. It prints twice tokens per round:

- forced: the recorded answers, whatever a model would say. Each round has the drafts that
  `match_drafts` finds before the recorded position; a draft is kept where the recorded id is the
  same. The rates by position are for `benchmarks.time_step --acceptance`. `--round-ms 0:5.8,3:6.8,
  7:8.4` (of `time_step --drafts`) gives tokens a second: of steps, of rounds with drafts of a
  head that are right by `--head`, and of both with the text's.
- run: the ENGINE's own greedy answers to the same prompts, one after the other, without drafts,
  with drafts as it chooses, and with the largest k in every round; tokens a second are of this
  machine. ENGINE may be any that has the ids, e.g. one of drawn weights.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path

import numpy as np

from benchmarks.result_files import ROOT
from spark_engine.bench.replay import OWN, read
from spark_engine.interface import MOST_DRAFTS
from spark_engine.plugins.ops.drafts.match_drafts import OP
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.request import Request, SamplingParams, capacity
from spark_engine.runtime.offline.embedded import find_checkpoint
from spark_engine.runtime.text.chat import ChatTemplate, Ending
from spark_engine.runtime.text.tokenizer import Tokenizer

LEAST = 6  # ids of a match, as docs/models.md has them
Turn = tuple[list[int], list[int]]  # ids of a prompt, and of the recorded answer
Rates = Sequence[float]


def turns_of(path: Path) -> list[Turn]:
    """Every answer of a recording, with all that is before it as its prompt."""
    folder, found = find_checkpoint(), list[Turn]()
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    assert template is not None
    for row in read(path):
        messages = [{k: v for k, v in m.items() if k not in OWN} for m in row["messages"]]
        for i in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
            prompt = template.prompt(messages[:i], row.get("tools")).text
            whole = template.prompt(messages[: i + 1], row.get("tools"), ending=Ending.NOTHING).text
            answer = whole[len(commonprefix([prompt, whole])) :]
            found.append((tokenizer.encode(prompt), tokenizer.encode(answer)))
    return found


@dataclass
class Rounds:
    """Rounds of one row: how many by k, their tokens, and the text's drafts by position."""

    by_k: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    verified: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    kept: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    def add(self, k: int, kept: int) -> None:
        """Counts a round of k drafts of which the first `kept` were right."""
        self.by_k[k] = self.by_k.get(k, 0) + 1
        self.tokens += 1 + kept

    @property
    def per_round(self) -> float:
        return self.tokens / sum(self.by_k.values())

    def rates(self) -> list[float]:
        """How often the text's draft of each position was right, where those before it were."""
        return [round(k / max(v, 1), 3) for k, v in zip(self.kept, self.verified, strict=True)]


def forced(turns: Sequence[Turn], head: Rates, text: bool, seed: int = 0) -> Rounds:
    """The recorded answers in rounds of the head's drafts, right by `head`, and with `text` of what
    matches, in the place of the head's."""
    found, rng = Rounds(), np.random.default_rng(seed)
    for prompt, answer in turns:
        ids, at = np.array([*prompt, *answer]), len(prompt) + 1  # prefill says the first token
        while at < len(ids):
            right = int((rng.random(len(head)) < np.array(head)).cumprod().sum())
            drafts = ids[at] if right else -1  # the head's first draft
            matched = following(ids[:at], int(drafts), len(head)) if text else []
            k, kept = len(matched) or len(head), right
            if len(matched):
                wanted = ids[at : at + k]
                kept = int((matched[: len(wanted)] == wanted).cumprod().sum())
                for i in range(min(kept + 1, k)):
                    found.verified[i] += 1
                    found.kept[i] += i < kept
            kept = min(kept, len(ids) - at - 1)
            found.add(k, kept)
            at += 1 + kept
    return found


def following(text: np.ndarray, first: int, held: int) -> np.ndarray:
    """The drafts of a text of ids, by the op's reference; none without a match."""
    pages = text.reshape(1, 1, -1, 1).astype(np.int32)
    drafts = np.full((1, MOST_DRAFTS), first, np.int32)
    zero, end = np.zeros(1, np.int32), np.array([len(text) - 1], np.int32)
    given = pages, zero.reshape(1, 1), text[-1:].astype(np.int32), drafts, zero, zero, end
    matched, drafts = OP.reference({"least": LEAST, "held": held}, given)
    return np.asarray(drafts[0] if matched[0] else [])


def forced_lines(turns: Sequence[Turn], head: Rates, ms: Mapping[int, float]) -> list[str]:
    """What is printed of the forced answers."""
    lines = []
    for name, own, text in (
        ("no drafts", (), False),
        ("the text's", (), True),
        ("the head's", head, False),
        ("both", head, True),
    ):
        rounds = forced(turns, own, text)
        line = f"forced, {name}: {rounds.tokens} tokens, {rounds.per_round:.2f} a round"
        if text:
            drafted = rounds.by_k.get(MOST_DRAFTS, 0) / sum(rounds.by_k.values())
            line += f"; {drafted:.0%} of the rounds match, right by position {rounds.rates()}"
        if all(k in ms for k in rounds.by_k):
            seconds = sum(n * ms[k] for k, n in rounds.by_k.items()) / 1e3
            line += f"; {rounds.tokens / seconds:.1f} tokens/s"
        lines.append(line)
    return lines


def run(folder: Path, turns: Sequence[Turn], **options: object) -> str:
    """What is printed of an engine's own answers, as many tokens as are recorded."""
    loaded = load(folder)
    engine = Engine(loaded, EngineOptions(**options))  # type: ignore[arg-type]
    tokens, rounds, seconds = 0, 0, 0.0
    for prompt, answer in turns:
        if len(prompt) + len(answer) >= capacity(loaded.limits):
            raise SystemExit(f"{len(prompt)} tokens of prompt: build with a larger --max-context")
        most = max(2, len(answer))
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        engine.submit(Request(tuple(prompt), params))
        made = 0
        while not engine.idle:
            before = time.perf_counter()
            made_now = sum(event.token is not None for event in engine.step())
            if made:  # after the first token
                seconds += time.perf_counter() - before
                tokens, rounds = tokens + made_now, rounds + bool(made_now)
            made += made_now
    engine.close()
    return f"{tokens} tokens, {tokens / rounds:.2f} a round, {tokens / seconds:.1f} tokens/s"


def round_ms(text: str) -> dict[int, float]:
    """`0:5.8,3:6.8` as milliseconds by k."""
    pairs = (word.partition(":") for word in text.split(","))
    return {int(k): float(ms) for k, _, ms in pairs}


def main(words: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("engine", nargs="?", type=Path, help="built with --draft-suffix")
    parser.add_argument("--replay", type=Path, default=ROOT / "bench" / "agent.json")
    parser.add_argument("--head", default="0.8,0.75,0.7", help="how often its drafts are right")
    parser.add_argument("--round-ms", type=round_ms, default={}, help="K:MS,…, of one row")
    args = parser.parse_args(words)
    turns = turns_of(args.replay)
    sizes = [(len(prompt), len(answer)) for prompt, answer in turns]
    print(f"{len(turns)} answers (tokens of prompt, of answer): {json.dumps(sizes)}")
    head = [float(word) for word in args.head.split(",")]
    print("\n".join(forced_lines(turns, head, args.round_ms)), flush=True)
    if args.engine is None:
        return
    kinds: dict[str, dict[str, object]] = {
        "no drafts": {"drafts": 0},
        "drafts as chosen": {},
        "the largest k": {"fixed_drafts": True},
    }
    for name, options in kinds.items():
        print(f"run, {name}: {run(args.engine, turns, **options)}", flush=True)


if __name__ == "__main__":
    main()
