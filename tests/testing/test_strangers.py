"""The suites fail plugins that were written without knowledge of them; the recorded results, which
the documents show, are current.

`python -m tests.testing.test_strangers [KIND ...]` records the results again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.testing.mutants import kill_table
from tests.testing.strangers import load_strangers

RESULTS = Path(__file__).with_name("strangers") / "results.json"

if __name__ == "__main__":
    lists = load_strangers()
    for name in sys.argv[1:] or sorted(lists):
        started = time.perf_counter()
        found = kill_table(lists[name])
        recorded = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        RESULTS.write_text(json.dumps(dict(sorted({**recorded, name: found}.items())), indent=2) + "\n")
        left = [mutant for mutant, result in found.items() if not result["killed_by"]]
        print(f"{name}: {len(found) - len(left)} of {len(found)} killed, in {time.perf_counter() - started:.0f} s; survive: {', '.join(left)}", flush=True)
