"""Mutants are drawn from their number, are of every kind, and begin as requests that are right."""

import json

from .disconnecting_clients import LeaveMoment, plan_client
from .grpc_mutations import OF_THE_BYTES, OF_THE_MESSAGE, rpc_mutant
from .http_mutations import (
    BINARIES,
    FRAMINGS,
    encode_request,
    http_mutant,
    to_raw_request,
    valid_requests,
)
from .json_mutations import MUTATIONS

VALID = valid_requests("m", "echo")
MANY = range(1500)


def test_http_mutants_repeat_and_are_of_every_kind() -> None:
    made = [http_mutant(VALID, 3, number) for number in MANY]
    assert made[700:] == [http_mutant(VALID, 3, number) for number in MANY[700:]]
    assert made != [http_mutant(VALID, 4, number) for number in MANY]
    assert {each.kind for each in made} == {*MUTATIONS, *FRAMINGS, *BINARIES}
    assert {each.path for each in made} == {each.path for each in VALID}


def test_rpc_mutants_repeat_and_are_of_every_kind() -> None:
    made = [rpc_mutant("m", 3, number) for number in MANY]
    assert made[700:] == [rpc_mutant("m", 3, number) for number in MANY[700:]]
    assert {each.kind for each in made} == {*OF_THE_MESSAGE, *OF_THE_BYTES}
    assert {each.streaming for each in made} == {True, False}


def test_making_mutants_leaves_the_valid_ones_as_they_are() -> None:
    before = json.dumps([each.body for each in VALID])
    for number in MANY:
        http_mutant(VALID, 5, number)
    assert json.dumps([each.body for each in VALID]) == before


def test_visitors_leave_at_every_moment_by_every_door() -> None:
    made = [plan_client(1, number) for number in range(500)]
    assert made == [plan_client(1, number) for number in range(500)]
    assert len({(each.door, each.moment) for each in made}) == 4 * len(LeaveMoment)


def test_a_binary_mutant_begins_as_a_request_that_is_right() -> None:
    from charonia.api.triton.infer_request import InferRequestReader
    from charonia.core.model import ModelConfig

    for document in (each.body for each in VALID if "inputs" in each.body):
        body, [header] = encode_request(to_raw_request(document))
        call = InferRequestReader().read(ModelConfig("m", "1", "b"), body, int(header.partition(": ")[2]))
        [given] = document["inputs"]
        [tensor] = call.request.inputs.values()
        assert (tensor.name, tensor.data.size) == (given["name"], len(given["data"]))
