"""An agent: the model calls Python functions until it has an answer.

frame serve --model /models/Qwen3-8B --tool-call-parser hermes --reasoning-parser think-tags
python agent.py --model Qwen3-8B "How warm is it in Oslo, in Fahrenheit?"
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from openai import OpenAI

MAX_TURNS = 8


def get_temperature(city: str) -> float:
    return {"Oslo": 4.0, "Rome": 18.0}[city]


def to_fahrenheit(celsius: float) -> float:
    return celsius * 9 / 5 + 32


FUNCTIONS: dict[str, Callable[..., Any]] = {"get_temperature": get_temperature, "to_fahrenheit": to_fahrenheit}


def tool(name: str, description: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema, "strict": True}}


TOOLS = [
    tool("get_temperature", "The temperature in a city, in Celsius.", city={"type": "string", "enum": ["Oslo", "Rome"]}),
    tool("to_fahrenheit", "Convert degrees Celsius to Fahrenheit.", celsius={"type": "number"}),
]


def run_tool(name: str, arguments: str) -> str:
    """The result as text. An error is text too: the model may correct its call."""
    try:
        return json.dumps(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--model", default="frame-tiny")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key="none")
    messages: list[Any] = [{"role": "user", "content": args.question}]
    for _ in range(MAX_TURNS):
        message = client.chat.completions.create(model=args.model, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise SystemExit(f"no answer after {MAX_TURNS} turns")


if __name__ == "__main__":
    main()
