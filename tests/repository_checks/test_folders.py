"""At most 20 files per folder."""

from collections import Counter

from tests.repository import files

LIMIT = 20


def test_no_folder_has_too_many_files() -> None:
    found = Counter(path.parent.as_posix() for path in files())
    many = {folder: n for folder, n in found.items() if n > LIMIT}
    assert not many, f"split these folders ({LIMIT} files at most): {many}"
    assert {"plugins/kernels/attention", "tests/plugins"} <= found.keys()
