"""README's example runs as it is printed, and says what README says of it."""

from __future__ import annotations

from pathlib import Path

from programs import output

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_ten_lines_run_and_hit(tmp_path: Path) -> None:
    """Copied out of README, but for the place of the store: the first request computes, the second hits the device, and
    in a second process the first hits the disk."""
    text = README.read_text()
    code = text.split("```python\n")[1].split("```\n")[0]
    assert code.count("/tmp/pages") == 1
    code = code.replace("/tmp/pages", str(tmp_path / "pages"))
    told = [output(code).splitlines() for _ in range(2)]
    whole = "960 of 1000 tokens need no computing"
    assert told[0] == [
        "first: 0 of 1000 tokens need no computing, Hit(device=0, host=0, disk=0, remote=0)",
        f"second: {whole}, Hit(device=960, host=0, disk=0, remote=0)",
    ]
    assert told[1] == [f"first: {whole}, Hit(device=0, host=0, disk=960, remote=0)", told[0][1]]
    assert "finds 960 of them, 15 whole pages" in text
