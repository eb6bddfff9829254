"""Extraction: what a message says, as an object of a fixed shape.

The answer is held to the schema while it is written, so any model's can be parsed; whether it is right is the model's
affair, and the demo model knows little but Python.

    make serve
    python examples/extract.py "Two kettles and a lamp to Oslo, please, they need it tomorrow."
"""

import argparse
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Item(BaseModel):
    name: str = Field(max_length=20)
    count: int = Field(ge=1, le=99)


class Order(BaseModel):
    items: list[Item] = Field(min_length=1, max_length=3)
    city: Literal["Oslo", "Rome", "Lima"]
    express: bool


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("message", nargs="?", default="Two kettles and a lamp to Oslo, please, they need it tomorrow.")
    flags.add_argument("--url", default="http://localhost:8000/v1")
    flags.add_argument("--model", default="demo")
    asked = flags.parse_args()
    client = OpenAI(base_url=asked.url, api_key="none")
    answer = client.chat.completions.parse(
        model=asked.model,
        messages=[{"role": "user", "content": f"The order in this message: {asked.message}"}],
        response_format=Order,
        temperature=0,
        max_completion_tokens=400,
    )
    order = answer.choices[0].message.parsed
    assert order is not None
    for item in order.items:
        print(f"{item.count} x {item.name!r}")
    print(f"to {order.city}, {'express' if order.express else 'by the usual way'}")


if __name__ == "__main__":
    main()
