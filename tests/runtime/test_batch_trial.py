"""The trial of batches sees every sampled token, also where a decode step is a round of drafts."""

from pathlib import Path

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from tests.checkpoints import write_checkpoint
from tests.runtime import batch_trial


@pytest.mark.parametrize("drafts", [0, 2])
def test_each_token_has_its_logits(
    drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"decode": (1, 4), "prefill": (64,), "max_seqs": 4, "max_context": 128}
    options = Options(**sizes, drafts=drafts)
    written = write_checkpoint(tmp_path / "checkpoint", {"mtp_num_hidden_layers": 1})
    build(written.path, tmp_path / "engine", options, lambda text: None)
    some = [r for r in batch_trial.ragged(512) if len(r.prompt) < 40][:3]
    monkeypatch.setattr(batch_trial, "ragged", lambda vocab: some)
    said = batch_trial.compare(tmp_path / "engine")
    tokens = sum(request.params.max_tokens or 0 for request in some)
    assert f"3 of 3 texts same, 0 differ (0 at a near tie), {tokens} of {tokens} logits" in said
