"""A consumer's membership is read from what confluent-kafka's own consumer gives for its own producer."""

import pytest
from confluent_kafka import Consumer

from oncebox.errors import UsageError
from oncebox.group_offsets import group_metadata
from oncebox.wire import GroupMember


def test_a_name_fences_nobody():
    found = group_metadata("g")
    assert (found.group_id, found.member) == ("g", GroupMember())
    assert group_metadata(found) is found


@pytest.mark.parametrize("instance_id", [None, "instance-1"])
def test_what_a_stock_consumer_says_of_itself(instance_id: str | None):
    config = {"bootstrap.servers": "127.0.0.1:1", "group.id": "grüppe", "log_level": 0}
    if instance_id is not None:
        config["group.instance.id"] = instance_id
    consumer = Consumer(config)
    try:
        found = group_metadata(consumer.consumer_group_metadata())
    finally:
        consumer.close()
    assert found.group_id == "grüppe"
    assert found.member == GroupMember(member_id="", generation_id=-1, group_instance_id=instance_id)


def test_a_member_with_its_generation():
    given = b"CGMDv2:" + (7).to_bytes(4, "little") + b"g\0m-1\0\1"
    assert group_metadata(given).member == GroupMember(member_id="m-1", generation_id=7)


def test_other_bytes_are_refused():
    with pytest.raises(UsageError):
        group_metadata(b"CGMDv1:abc")
