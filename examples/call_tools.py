"""An agent with two tools: the model asks for calls, this program makes them and sends back what they gave.

The loop is that of any agent over the Responses API, which keeps nothing: the whole history goes along each time. With
--auto the model chooses whether and what to call, as one that was trained for it can. The demo model was not, so here
each turn says which tool is called, and the model writes the arguments, which are held to the tool's schema.

    make serve
    python examples/call_tools.py
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from openai import OpenAI

PRICES = {"kettle": 31.5, "lamp": 44.0, "teapot": 27.25}
RATES = {"EUR": 0.92, "GBP": 0.79, "NOK": 10.6}


def find_price(item: str) -> dict[str, Any]:
    return {"item": item, "price": PRICES[item], "currency": "USD"}


def convert(amount: float, currency: str) -> dict[str, Any]:
    return {"amount": round(amount * RATES[currency], 2), "currency": currency}


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {"find_price": find_price, "convert": convert}


def tool(name: str, description: str, **properties: dict[str, Any]) -> Any:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "name": name, "description": description, "parameters": schema, "strict": True}


TOOLS = [
    tool("find_price", "The price of an item, in US dollars.", item={"enum": [*PRICES]}),
    tool(
        "convert",
        "An amount of US dollars in another currency.",
        amount={"type": "number", "minimum": 0, "maximum": 1000},
        currency={"enum": [*RATES]},
    ),
]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("question", nargs="?", default="What does a kettle cost in euros?")
    flags.add_argument("--url", default="http://localhost:8000/v1")
    flags.add_argument("--model", default="demo")
    flags.add_argument("--auto", action="store_true", help="let the model choose; at most eight turns")
    asked = flags.parse_args()
    client = OpenAI(base_url=asked.url, api_key="none")
    called: list[Any] = [{"type": "function", "name": name} for name in FUNCTIONS]
    history: list[Any] = [{"role": "user", "content": asked.question}]
    for choice in ["auto"] * 8 if asked.auto else [*called, "none"]:
        answer = client.responses.create(
            model=asked.model,
            input=history,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_output_tokens=256,
        )
        history += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        for call in calls:
            arguments = json.loads(call.arguments)
            result = FUNCTIONS[call.name](**arguments)
            print(f"{call.name}({json.dumps(arguments)}) gives {json.dumps(result)}")
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(result)})
        if not calls:
            print(f"answer: {answer.output_text}")
            break


if __name__ == "__main__":
    main()
