"""Answers of one turn of the loop leave one after the other, none is lost, and none overtakes another."""

import asyncio
from typing import Any

from charonia.api.http.response_parts import MOST_PARTS, WriteCoalescer


class Transport(asyncio.Transport):
    """Notes in `sent` what is written, by its name."""

    def __init__(self, name: str, sent: list[str]) -> None:
        super().__init__()
        self.name, self.sent, self.closing = name, sent, False

    def write(self, data: Any) -> None:
        assert not self.closing
        self.sent.append(f"{self.name}{data.decode()}")

    def is_closing(self) -> bool:
        return self.closing


def transports(count: int) -> tuple[list[str], list[Transport]]:
    sent: list[str] = []
    return sent, [Transport(chr(ord("a") + number), sent) for number in range(count)]


async def test_answers_wait_for_those_of_the_same_turn_and_no_longer() -> None:
    coalescer, (sent, [one, other]) = WriteCoalescer(range(2)), transports(2)
    coalescer.write_soon(one, b"1")
    coalescer.write_soon(other, b"2")
    assert not sent
    await asyncio.sleep(0)
    assert sent == ["a1", "b2"]
    coalescer.write_soon(other, b"3")
    await asyncio.sleep(0)
    assert sent[2:] == ["b3"]


async def test_a_long_turn_keeps_nobody_waiting_for_its_end() -> None:
    coalescer, (sent, many) = WriteCoalescer(range(2)), transports(20)
    for each in many:
        coalescer.write_soon(each, b"")
    assert sent == [each.name for each in many[:16]]
    await asyncio.sleep(0)
    assert sent == [each.name for each in many]


async def test_parts_of_responses_wait_for_more_of_each_other() -> None:
    coalescer, (sent, many) = WriteCoalescer(range(2)), transports(MOST_PARTS + 2)
    for transport in many:
        coalescer.write_part(transport, b"")
    assert sent == [transport.name for transport in many[:MOST_PARTS]]
    await asyncio.sleep(0)
    assert sent == [transport.name for transport in many]


async def test_what_is_to_go_before_is_written_first() -> None:
    coalescer, (sent, [one, other, third]) = WriteCoalescer(range(2)), transports(3)
    coalescer.write_soon(one, b"1")
    coalescer.flush_for(other)
    assert not sent, "nothing of its own waits"
    coalescer.flush_for(one)
    assert sent == ["a1"]
    coalescer.parts += [(one, b"2"), (other, b"3"), (one, b"4")]
    coalescer.bound(3, MOST_PARTS)
    coalescer.flush_for(third)  # which may be any of theirs
    assert sent[1:] == ["a2", "b3", "a4"]
    coalescer.write_part(other, b"5")
    coalescer.write_part(other, b"6")
    assert sent[4:] == ["b5"], "there might be no room for more"
    await asyncio.sleep(0)
    assert sent[5:] == ["b6"]


async def test_an_answer_to_the_only_client_does_not_wait() -> None:
    connections = ["a", "b"]
    coalescer, (sent, [one]) = WriteCoalescer(connections), transports(1)
    coalescer.write_soon(one, b"1")
    assert not sent
    connections.pop()
    coalescer.write_soon(one, b"2")
    assert sent == ["a1", "a2"]
    await asyncio.sleep(0)
    assert sent == ["a1", "a2"]


async def test_two_answers_to_one_client_keep_their_order() -> None:
    coalescer, (sent, [one]) = WriteCoalescer(range(2)), transports(1)
    coalescer.write_soon(one, b"1")
    coalescer.write_soon(one, b"2")
    assert sent == ["a1"]
    await asyncio.sleep(0)
    assert sent == ["a1", "a2"]


async def test_who_left_is_passed_over() -> None:
    coalescer, (sent, [one, other]) = WriteCoalescer(range(2)), transports(2)
    coalescer.write_soon(one, b"1")
    coalescer.write_soon(other, b"2")
    one.closing = True
    coalescer.flush()
    assert sent == ["b2"]
    await asyncio.sleep(0)
    assert sent == ["b2"]
