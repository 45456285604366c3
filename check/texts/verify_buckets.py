"""Compares rounds of drafts with decode: a verify bucket must sample the tokens of decode.

Texts that one bucket decoded greedily run again in each bucket that verifies. The drafts are right,
except the last of every third round. The sample after every accepted token must be the decoded
token, and the number of accepted tokens must follow from the samples. If the states hold the next
position, the next round starts from them. Knows one engine; needs no reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spark_engine.check.engines import prompts
from spark_engine.check.engines.runner import SessionRunner, feed
from spark_engine.check.verdicts.compare import Verdict
from spark_engine.check.verdicts.metrics import near_tie_rows
from spark_engine.check.verdicts.report import Finding
from spark_engine.interface import drafts_of
from spark_engine.progress import Progress
from spark_engine.runtime.executors.memory import BucketKey
from spark_engine.tensors import Array

WRONG = 3  # in every third round the last draft is wrong


@dataclass(frozen=True)
class Decoded:
    """The decoded tokens by slot, and the logits [V] of each."""

    tokens: Mapping[int, Sequence[int]]
    logits: Mapping[int, Sequence[Array]]


def check_verify_buckets(
    runner: SessionRunner,
    keys: Sequence[BucketKey],
    session: prompts.CheckSession,
    decoded: Decoded,
    tie: float,
    shown: Progress,
) -> list[Finding]:
    """A finding for each bucket of `keys`. `session` has the texts and their prefills.

    A sample may differ from the decoded token only if decode's logits of the two are within `tie`
    of their range.
    """
    found = []
    with shown.track("text level, buckets that verify", len(keys)) as step:
        for number, (family, rows) in enumerate(sorted(keys)):
            run = _Run(runner, session, decoded, tie, 1 + number)
            run.go(drafts_of(family), rows)
            name = f"{family} of {rows} rows"
            finding = Finding(name, "rounds of drafts")
            finding.add(run.verdict(name), run.wrong[0] if run.wrong else "")
            found.append(finding)
            step()
    return found


class _Run:
    def __init__(
        self,
        runner: SessionRunner,
        session: prompts.CheckSession,
        decoded: Decoded,
        tie: float,
        number: int,
    ) -> None:
        self._runner, self._decoded, self._tie, self._number = runner, decoded, tie, number
        self._session = session
        tokens = decoded.tokens  # nothing was decoded after the last one
        self._texts = {
            text.slot: replace(text, ids=(*text.ids[: text.prompt], *tokens[text.slot][:-1]))
            for text in session.texts
        }
        self._at = {slot: text.prompt for slot, text in self._texts.items()}
        self._known: set[int] = set()  # slots with the right position in their states
        self.wrong: list[str] = []
        self._tokens = self._near = self._rounds = self._accepted = 0

    def go(self, k: int, rows: int) -> None:
        """Runs the prefills, then rounds until every text is complete."""
        for launch in self._session.launches:
            self._launch(launch)
        going = list(self._texts.values())
        while going := [t for t in going if self._at[t.slot] < len(t.ids)]:
            for first in range(0, len(going), rows):
                self._round(k, rows, going[first : first + rows])

    def _round(self, k: int, rows: int, texts: Sequence[prompts.CheckText]) -> None:
        self._rounds += 1
        counts = [min(1 + k, len(t.ids) - self._at[t.slot]) for t in texts]
        given = [(t, self._at[t.slot], n) for t, n in zip(texts, counts, strict=True)]
        launch = prompts.verified(rows, k, given)
        ids = launch.token_ids.reshape(rows, -1)
        for row, (text, n) in enumerate(zip(texts, counts, strict=True)):
            if self._rounds % WRONG == 0 and n > 1:
                ids[row, n - 1] = (ids[row, n - 1] + 1) % len(self._decoded.logits[text.slot][0])
        fed = ids.copy()
        for row, text in enumerate(texts):
            if text.slot in self._known:
                ids[row, 0] = launch.starts[row] = prompts.FROM_STATE
        shown = self._launch(launch)
        at = 0
        for row, (text, n) in enumerate(zip(texts, counts, strict=True)):
            sampled = shown["next_tokens"][at : at + n]
            self._judge(text, fed[row, :n], sampled, int(shown["accepted"][row]))
            at += n

    def _judge(self, text: prompts.CheckText, fed: Array, sampled: Array, accepted: int) -> None:
        """Checks one row: its input tokens, the samples after each, and the number accepted."""
        slot, place = text.slot, self._at[text.slot] - text.prompt
        right = 1 + int(np.cumprod(fed[1:] == sampled[:-1]).sum())
        where = f"text in slot {slot}, token {place}"
        if accepted != right:
            self.wrong.append(f"{where}: {accepted} tokens accepted for {right}")
            accepted = min(accepted, right)
        tokens = self._decoded.tokens[slot]
        for j in range(accepted):
            self._tokens += 1
            chosen, logits = int(sampled[j]), self._decoded.logits[slot][place + 1 + j]
            best = int(logits.argmax())
            if chosen == best:
                continue
            if near_tie_rows(logits[None], np.asarray([chosen]), self._tie)[0]:
                self._near += 1
            else:
                self.wrong.append(f"{where} and {1 + j}: {chosen} for {best}")
        # An accepted draft differs from decode only at a near tie: the text ends there.
        followed = [int(x) for x in fed[:accepted]] == list(tokens[place : place + accepted])
        self._accepted += accepted
        self._at[slot] += accepted if followed else len(text.ids)
        continues = int(sampled[accepted - 1]) == tokens[place + accepted]
        (self._known.add if followed and continues else self._known.discard)(slot)

    def verdict(self, name: str) -> Verdict:
        """The finding over all rounds."""
        figures = {
            "texts": float(len(self._texts)),
            "tokens": float(self._tokens),
            "near_ties": float(self._near),
        }
        reason = f"{len(self.wrong)} rounds differ from decode" if self.wrong else ""
        return Verdict(name, reason, figures, hard=bool(self.wrong))

    def _launch(self, launch: prompts.CheckLaunch) -> dict[str, Array]:
        return self._runner.launch(feed(self._session, launch, self._number))
