"""Extracts structured data: the schema of a pydantic model constrains what the model writes, so
every response parses.

    frame serve --model /models/Qwen3-8B
    python extract.py --model Qwen3-8B "Two teapots for Ada, by Friday, please."
"""

from __future__ import annotations

import argparse
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Order(BaseModel):
    customer: str = Field(max_length=20)
    item: Literal["teapot", "cup", "kettle"]
    count: int = Field(ge=1, le=99)
    is_urgent: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--model", default="frame-tiny")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key="none")
    messages = [{"role": "system", "content": "Extract the order."}, {"role": "user", "content": args.text}]
    reply = client.chat.completions.parse(model=args.model, messages=messages, response_format=Order, max_tokens=256)  # type: ignore[arg-type]
    order = reply.choices[0].message.parsed
    if order is None:
        raise SystemExit(f"the response was cut off: {reply.choices[0].finish_reason}")
    print(order.model_dump_json(indent=2))


if __name__ == "__main__":
    main()
