"""What two GPUs of one host give beside one: parts in the order of their value, each in a process
of its own and bounded in time; prints ratios, and stores raw results after each row.

    python benchmarks/two_cards.py --out two-cards.json
    python benchmarks/two_cards.py --parts tp,pp --part-seconds 120 --out two-cards.json
    python benchmarks/two_cards.py --tiny --device cpu --part-seconds 300 --out /tmp/tiny.json

Dummy weights. Baselines of one card are measured in the same run, those of two models side by side.
A part that fails, or is late, is stored as such with what it had found, and the next one runs.
`--tiny --device cpu`: two narrow layers, ranks over gloo; the figures mean nothing, `tests` skips
its tests, and `updates` has no process group between devices. The parts are in two_card_parts.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from with_wheels import prepare

if __name__ == "__main__":
    prepare()

from two_card_parts import PARTS, Bench, end, print_texts

HERE = Path(__file__).parent
SHORTEST = 20.0  # seconds in which no part can begin and measure
# Row, workload, baseline row, least ratio (None: it only informs).
RATIOS: Sequence[tuple[str, str, str, float | None]] = (
    ("llama tp2", "single", "llama tp1", 1.62), ("llama tp2", "batch8", "llama tp1", 1.56),
    ("llama tp2", "prefill", "llama tp1", 1.76), ("llama tp2", "mixed256", "llama tp1", 1.65),
    ("qwen3-moe tp2", "single", "qwen3-moe tp1", 1.33), ("qwen3-moe tp2", "prefill", "qwen3-moe tp1", None),
    ("qwen3-moe tp2", "mixed256", "qwen3-moe tp1", 1.5),
    ("qwen3-moe ep2", "prefill", "qwen3-moe tp2", 1.0), ("qwen3-moe ep2", "mixed256", "qwen3-moe tp2", 1.0),
    ("qwen3-moe ep2 eplb", "mixed256", "qwen3-moe ep2", None),
    ("llama pp2", "mixed256", "llama tp1", 1.45),
    ("llama tp2 deterministic", "single", "llama tp2", None), ("llama tp2 deterministic", "mixed256", "llama tp2", None),
    ("deepseek ep2 groups", "mixed256", "deepseek tp2", 1.1),
)  # fmt: skip
RATES = {"deepseek tp2": {"single": 352.0, "prefill": 65_000.0, "mixed256": 6_500.0}}  # least tokens a second, of 16 layers


def run_part(name: str, arguments: argparse.Namespace, seconds: float, report: dict[str, Any], log: Any) -> None:
    """A part in a process of its own; its rows go to the report as they come."""
    command = [sys.executable, str(HERE / "two_cards.py"), *device_flags(arguments), "--parts", arguments.parts, "--part", name]
    began, row = time.monotonic(), {"status": "failed", "error": ""}
    report["parts"][name] = row
    process = subprocess.Popen(
        [*command, "--part-seconds", str(seconds), "--out", str(arguments.out)], stdout=subprocess.PIPE, stderr=log, text=True
    )
    late = threading.Timer(seconds, end, [process])
    late.start()
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith('{"found"') and not line.startswith('{"ended"'):
            continue
        event = json.loads(line)
        if "found" in event:
            report["rows"][event["found"]] = event["value"]
            print(f"{name}: {event['found']} {brief(event['value'])}", flush=True)
        else:
            row |= {"status": "done" if not event["ended"] else "failed", "error": event["ended"]}
        write(report, arguments.out)
    code = process.wait()
    late.cancel()
    row["seconds"] = round(time.monotonic() - began, 1)
    if row["status"] != "done" and row["seconds"] >= seconds:
        row["status"] = "late"
    elif row["status"] == "failed" and not row["error"]:
        row["error"] = f"ended with {code}; see the log"
    write(report, arguments.out)
    print(f"{name}: {row['status']} after {row['seconds']} s {row['error']}", flush=True)


def device_flags(arguments: argparse.Namespace) -> list[str]:
    return ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]


def brief(value: Any) -> str:
    if isinstance(value, dict) and "rows" in value and isinstance(value["rows"], dict):
        return ", ".join(f"{name} {row['tokens_per_s']:,}" for name, row in value["rows"].items())
    return json.dumps(value)[:400]


def ratios(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was measured on two cards over what was measured on one, with the goal."""
    found: list[dict[str, Any]] = []

    def rate(row: str, workload: str) -> float | None:
        figure = rows.get(row, {}).get("rows", {}).get(workload, {}).get("tokens_per_s")
        return float(figure) if figure else None

    for row, workload, base, goal in RATIOS:
        if (high := rate(row, workload)) and (low := rate(base, workload)):
            found.append({"row": row, "workload": workload, "over": base, "ratio": round(high / low, 3), "goal": goal})
    for row, goals in RATES.items():
        found += [
            {"row": row, "workload": name, "tokens_per_s": rate(row, name), "goal": goal} for name, goal in goals.items() if rate(row, name)
        ]
    for speed in (key.removeprefix("pd divided") for key in rows if key.startswith("pd divided")):
        parts = [rows.get(f"pd {kind}{speed}", {}) for kind in ("divided", "replicas")]
        for name, goal in (("between_events_ms", 0.7), ("first_token_ms", None)):
            if all(part.get(name) for part in parts):
                found.append(
                    {
                        "row": f"pd{speed}",
                        "workload": f"{name} p99",
                        "ratio": round(parts[0][name]["p99"] / parts[1][name]["p99"], 3),
                        "goal": goal,
                    }
                )
    if "copy_bytes_per_s" in (transfer := rows.get("pd transfer", {})):
        found.append(
            {
                "row": "pd transfer",
                "workload": "rate over a copy's",
                "ratio": round(transfer["bytes_per_s"] / transfer["copy_bytes_per_s"], 3),
                "goal": 0.7,
            }
        )
    if "media tp1" in rows and "media tp2" in rows:
        ratio = rows["media tp2"]["requests_per_s"] / rows["media tp1"]["requests_per_s"]
        found.append({"row": "media tp2", "workload": "large images", "ratio": round(ratio, 3), "goal": 1.6})
    return found


def write(report: dict[str, Any], out: Path) -> None:
    """Rewrite the report; a cut leaves the one before."""
    report["ratios"] = ratios(report["rows"])
    made = out.with_suffix(".new")
    made.write_text(json.dumps(report, indent=1) + "\n")
    made.replace(out)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between them, run in the order of their value")
    parser.add_argument("--part-seconds", type=float, default=200.0, help="most seconds of a part")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds of all parts; those that are left then are not begun")
    parser.add_argument("--out", type=Path, default=Path("two-cards.json"), help="the report; with the suffix .log, what programs print")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers and short workloads")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--texts", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.parts.split(",") if name not in PARTS]:
        parser.error(f"--parts {unknown[0]}: there are {', '.join(PARTS)}")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.texts:
        print_texts(arguments)
        return
    if arguments.part:
        known = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                PARTS[arguments.part](Bench(arguments, known, Path(folder)))
                error = ""
            except (Exception, SystemExit) as caught:  # noqa: BLE001 - the report tells it
                error = f"{type(caught).__name__}: {caught}"
            print(json.dumps({"ended": error}), flush=True)
        return
    from frame.entrypoints.tools.bench.report import report

    about = {"device": arguments.device, "tiny": arguments.tiny, "parts": {}}
    found, deadline = report("two-cards", {}, **about), time.monotonic() + arguments.budget
    with arguments.out.with_suffix(".log").open("w") as log:
        for name in (each for each in PARTS if each in arguments.parts.split(",")):
            if (left := deadline - time.monotonic()) < SHORTEST:
                found["parts"][name] = {"status": "not begun", "error": "the time was over"}
                write(found, arguments.out)
                continue
            run_part(name, arguments, min(arguments.part_seconds, left), found, log)
    for each in found["ratios"]:
        print(json.dumps(each))


if __name__ == "__main__":
    main()
