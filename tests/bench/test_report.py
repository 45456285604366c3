"""A result as a table, a page and a picture."""

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from spark_engine.bench import figures, plot, report
from spark_engine.bench.timings import ClientShare
from spark_engine.errors import OptionError
from tests.bench.test_figures import took


def result(count: int = 2, **more: Any) -> dict[str, Any]:
    runs = []
    for run in range(count):
        each = [
            took(i / 10, [i / 10 + 0.05 * (run + 1), i / 10 + 1], prompt_tokens=9) for i in range(5)
        ]
        each.append(took(1.0, [1.2], turn=1, prompt_tokens=30, cached_tokens=20))
        row = figures.figures(0.0, [ClientShare(each, 0.1, [0.001])], {"ttft": 70})
        runs.append({**row, "card": None})
    whole = {"model": "m", "load": "5 at a time", "targets": {"ttft": 70}, "others": []}
    whole |= {"repeats": count}
    whole |= {"command": "spark-bench serve <x> & y", "runs": runs, "spread": figures.spread(runs)}
    return {**whole, **more}


def shown(row: dict[str, Any]) -> str:
    stream = io.StringIO()
    report.show(row, Console(file=stream, width=100))
    return stream.getvalue()


def test_a_table_has_median_least_and_most() -> None:
    text = shown(result())
    (line,) = [x for x in text.splitlines() if "first token, p50" in x and "│" in x][:1]
    assert re.findall(r"[\d.]+", line.split("p50")[1]) == ["75.0", "50.0", "100.0"]
    assert "their share" in text and "by turn" in text and "m: 6 requests, 5 at a time" in text
    alone = shown(result(1, targets={}))
    assert "median" not in alone and "their share" not in alone


def test_what_may_have_spoilt_it_is_said() -> None:
    assert report.notes(result()) == ["26.7% of the prompts' tokens were cached"]
    row = result(others=["4711, /usr/bin/other, 1024"])
    row["runs"][0] |= {"failed": 2, "errors": {"503: [full]": 2}}
    row["runs"][1]["client"]["warning"] = "a client process was 90% busy"
    row["runs"][1]["card"] = {"sm_mhz": [1500, 1700, 1980], "watts": [300, 400.4, 500]}
    row["runs"][0]["cards"] = {n: {"sm_mhz": [1, int(n), 9]} for n in ("3", "4")}
    text = " ".join(shown(row).split())
    for words in ("card 3: 3 MHz (1 to 9)", "card 4: 4 MHz (1 to 9)",
                  "2 requests failed, e.g. 503: [full]", "90% busy", "4711, /usr/bin/other",
                  "1700 MHz (1500 to 1980), 400 W"):  # fmt: skip
        assert words in text


def test_a_page_shows_every_run(tmp_path: Path) -> None:
    plot.save(result(3), tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert "&lt;x&gt; &amp; y" in page and "<x>" not in page
    assert page.count("<svg") == page.count("</svg>") == 1
    picture = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    curves = [e for e in picture.iter() if e.get("id", "").startswith("line2d_")]
    assert len(curves) > 4 * 3, "of three runs in four plots, and ticks"


def test_running_requests_by_hand() -> None:
    run = {"each": [[0, 0, 1.0, 5.0, 3.0, 1, 1], [1, 0, 2.0, 5.0, 4.0, 1, 1]]}
    assert plot.running(run) == ([0, 1, 2, 3, 4], [0, 1, 2, 1, 0])


def test_a_picture_by_itself(tmp_path: Path) -> None:
    plot.save(result(), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_another_kind_of_picture_is_refused() -> None:
    with pytest.raises(OptionError, match="must end in .html or .png"):
        plot.check(Path("p.pdf"))
