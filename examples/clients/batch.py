"""Runs many prompts at low priority, by OpenAI's Batch API: one prompt a line of a file.

frame serve --model /models/Qwen3-8B --batch-folder /var/lib/frame/batches
python batch.py prompts.txt --model Qwen3-8B > answers.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from openai import OpenAI

ENDPOINT = "/v1/chat/completions"
FINAL = {"completed", "failed", "expired", "cancelled"}


def make_line(number: int, prompt: str, model: str, max_tokens: int) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--model", default="frame-tiny")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks at the batch")
    args = parser.parse_args()
    prompts = args.prompts.read_text().splitlines()
    lines = "\n".join(make_line(number, prompt, args.model, args.max_tokens) for number, prompt in enumerate(prompts))
    client = OpenAI(base_url=args.base_url, api_key="none")
    uploaded = client.files.create(file=("prompts.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=ENDPOINT, completion_window="24h")
    while batch.status not in FINAL:
        time.sleep(args.interval)
        batch = client.batches.retrieve(batch.id)
        if (counts := batch.request_counts) is not None:
            print(f"{batch.status}: {counts.completed} of {counts.total}, {counts.failed} failed", file=sys.stderr)
    for entry in (batch.errors.data if batch.errors else None) or ():
        print(f"line {entry.line}: {entry.message}", file=sys.stderr)
    answers: dict[int, str] = {}
    for name in (batch.output_file_id, batch.error_file_id):
        for text in client.files.content(name).text.splitlines() if name else ():
            record = json.loads(text)
            reply = record["response"]["body"]
            answers[int(record["custom_id"])] = (
                reply["choices"][0]["message"]["content"] if "choices" in reply else reply["error"]["message"]
            )
    for number, prompt in enumerate(prompts):
        print(json.dumps({"prompt": prompt, "answer": answers.get(number)}))
    raise SystemExit(batch.status != "completed")


if __name__ == "__main__":
    main()
