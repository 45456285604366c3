"""Polygraphy comparison functions for `defined_values`. Knows thresholds; runs nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.check.verdicts.defined_values import HEAD, LAST, PAIRED
from spark_engine.check.verdicts.metrics import distance, logit_distance, near_tie_rows
from spark_engine.check.verdicts.thresholds import Thresholds

Floats = NDArray[Any]
Named = Mapping[str, Floats]

MOST_OTHER_DRAFTS = 0.5  # part of a launch's sequences
LOGITS = ("logits", "logits_all")
TOKENS = ("next_tokens", "last_tokens")  # chosen by the row's logits
PROBABILITIES = ("logprobs", "top_logprobs")  # compared without the log, which has no scale


@dataclass(frozen=True)
class Verdict:
    """The verdict on one tensor of one launch; true in a boolean context if it is close enough,
    which has no `reason`.

    `outliers` of `rows` rows are beyond the limits; the thresholds may allow a few over a whole
    run. A `hard` failure is never allowed.
    """

    name: str
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    rows: int = 1
    outliers: int = 0
    hard: bool = False

    def __bool__(self) -> bool:
        return not self.reason


class Compare:
    """A compare function: (candidate's result, reference's result) -> verdict by name.

    Tensors that only one side has (outputs of a debug build) are left out.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._limits = thresholds

    def __call__(self, candidate: Named, reference: Named) -> dict[str, Verdict]:
        names = [name for name in candidate if name in reference and name not in (PAIRED, LAST)]
        return {name: self._one(name, candidate, reference) for name in names}

    def _one(self, name: str, candidate: Named, reference: Named) -> Verdict:
        a, b = candidate[name], reference[name]
        if name == "drafts":
            return self._drafts(a, b)
        if name.startswith(HEAD) and PAIRED in candidate and PAIRED in reference:
            # Another token of a near tie has other keys: `next_tokens` decides.
            same = candidate[PAIRED] == reference[PAIRED]
            a, b = a[same], b[same]
        if name in LOGITS:
            b = b[:, : a.shape[1]]  # several GPUs show rank 0's ids
        if a.shape != b.shape:
            return Verdict(name, f"shape {a.shape}, reference {b.shape}", hard=True)
        if not np.isfinite(a).all() or not np.isfinite(b).all():
            side = "candidate" if not np.isfinite(a).all() else "reference"
            return Verdict(name, f"the {side} holds NaN or infinity", hard=True)
        if name in TOKENS:
            return self._tokens(name, a, b, reference)
        if a.dtype.kind == "i":
            wrong = int((a != b).sum())
            return Verdict(name, f"{wrong} integers differ" if wrong else "", hard=wrong > 0)
        if name in PROBABILITIES:
            return self._probabilities(name, a, b)
        return self._floats(name, a, b)

    def _tokens(self, name: str, a: Floats, b: Floats, reference: Named) -> Verdict:
        """Another token is allowed if the reference has both at a near tie."""
        differ = a != b
        if not differ.any():
            return Verdict(name, rows=len(a))
        by_round = name == "last_tokens" and LAST in reference
        logits = reference["logits"][reference[LAST if by_round else "emitted"]]
        wrong = int((differ & ~near_tie_rows(logits, a, self._limits.tie)).sum())
        figures = {"flips": float(differ.sum()), "near_ties": float(differ.sum() - wrong)}
        reason = f"{wrong} tokens differ" if wrong else ""
        return Verdict(name, reason, figures, len(a), wrong)

    def _drafts(self, a: Floats, b: Floats) -> Verdict:
        """Drafts: a near tie in one changes all later ones, and no generated token depends on
        them."""
        places = min(a.shape[1], b.shape[1])
        outliers = int((a[:, :places] != b[:, :places]).any(axis=1).sum())
        part = outliers / max(len(a), 1)
        many = part > MOST_OTHER_DRAFTS
        reason = f"{part:.0%} of the sequences have other drafts" if many else ""
        return Verdict("drafts", reason, {"flips": float(outliers)}, len(a), hard=many)

    def _probabilities(self, name: str, a: Floats, b: Floats) -> Verdict:
        gaps = np.abs(np.exp(a) - np.exp(b)).reshape(len(a), -1).max(axis=1)
        gap, limit = float(gaps.max()), self._limits.rel_l2
        reason = f"probabilities differ by {gap:.2g} > {limit:g}" if gap > limit else ""
        outliers = int((gaps > limit).sum())
        return Verdict(name, reason, {"max_abs": gap}, len(a), outliers)

    def _floats(self, name: str, a: Floats, b: Floats) -> Verdict:
        limits = self._limits
        d = distance(a, b, limits.rel_l2, limits.cosine)
        figures = {k: float(getattr(d, k)) for k in ("cosine", "rel_l2", "max_abs")}
        complaints, outliers = [], d.outliers
        if name in LOGITS:
            more = logit_distance(a, b, limits.tie, limits.kl)
            figures |= {"kl": more.kl, "flips": more.flips, "near_ties": more.near_ties}
            outliers = max(outliers, more.outliers)
            if more.kl > limits.kl:
                complaints.append(f"KL {more.kl:.2g} nats > {limits.kl:g}")
            if more.wrong_flips:
                complaints.append(f"{more.wrong_flips} of {more.rows} rows choose another token")
        if d.rel_l2 > limits.rel_l2:
            complaints.append(
                f"relative L2 {d.rel_l2:.2g} > {limits.rel_l2:g} in row {d.worst_row}"
            )
        if d.cosine < limits.cosine:
            complaints.append(f"cosine {d.cosine:.5f} < {limits.cosine:g}")
        return Verdict(name, "; ".join(complaints), figures, d.rows, outliers)
