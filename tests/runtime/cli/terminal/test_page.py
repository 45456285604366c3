"""docs/use/terminal.md lists every /command; configuration.md has a valid file."""

import re
from pathlib import Path

from spark_engine.runtime.cli.options import config_file
from spark_engine.runtime.cli.options.run_options import OF_FILE
from spark_engine.runtime.cli.terminal.commands import COMMANDS
from tests.repository import ROOT

TERMINAL = (ROOT / "docs" / "use" / "terminal.md").read_text()
CONFIGURATION = (ROOT / "docs" / "operate" / "configuration.md").read_text()


def test_the_table_of_commands_is_the_commands() -> None:
    table = TERMINAL.partition("<!-- commands -->\n")[2].partition("<!-- end commands -->")[0]
    rows = ["| typed | does |", "| --- | --- |"]
    for row in COMMANDS:
        typed = f"/{row.name} {row.takes}".rstrip().replace("|", "\\|")
        rows.append(f"| `{typed}` | {row.help} |")
    assert table.splitlines() == rows


def test_the_example_of_a_file_is_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"```\n(engine = .*?)```", CONFIGURATION, re.DOTALL)
    (tmp_path / "spark.toml").write_text(example)
    read = config_file.read(tmp_path / "spark.toml", OF_FILE)
    assert read["serve"] is True and read["served_model_name"] == ("27b", "default")
