"""Say anew what the simulated GPU says of published figures: `python tests/freeze.py [ID …]`, all rows
without IDs.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from course_utils.evidence.published import FILES, HERE, rows_of, say


def save_frozen(ids: Sequence[str]) -> None:
    """Write down what is said now of the rows with these ids, or of all if there are none."""
    for name in FILES:
        asked = (row.family and (not ids or row.id in ids) for row in rows_of(name))
        rows = [
            replace(row, said=say(row)) if now else row for now, row in zip(asked, rows_of(name), strict=True)
        ]
        kept = (
            {key: value for key, value in asdict(row).items() if value or key == "certain"} for row in rows
        )
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
        (HERE / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    save_frozen(sys.argv[1:])
