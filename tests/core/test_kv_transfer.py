"""What a body says of a prompt that another server computes or answers."""

from charonia.core.kv_transfer import KVTransferParams, parse_kv_transfer


def test_what_is_null_says_nothing() -> None:
    unset = dict.fromkeys(KVTransferParams.__struct_fields__)
    assert parse_kv_transfer(unset) is None
    assert parse_kv_transfer(unset | {"do_remote_decode": True}) == KVTransferParams(do_remote_decode=True)
