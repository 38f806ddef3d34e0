"""The gateway by reflection alone, as grpcurl calls it: no generated code, messages from JSON."""

import asyncio
import json
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.integration.gateway.conftest import fresh
from tests.support.coordinator import Coordinators, values
from tests.support.kafka import TopicFactory


def call(address: str, method: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """As `grpcurl -plaintext -d @ ADDRESS oncebox.v1.Gateway/METHOD` with the requests one after another."""
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        described = pool.FindServiceByName("oncebox.v1.Gateway").FindMethodByName(method)
        path = f"/oncebox.v1.Gateway/{method}"
        request_class, answer_class = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
        sent = [json_format.Parse(json.dumps(each), request_class()) for each in requests]
        serialize, parse = request_class.SerializeToString, answer_class.FromString
        if described.server_streaming:
            answers = list(channel.stream_stream(path, serialize, parse)(iter(sent), timeout=60))
        else:
            answers = [channel.unary_unary(path, serialize, parse)(sent[0], timeout=60)]
        return [json_format.MessageToDict(answer) for answer in answers]


async def test_a_transaction_and_a_batch_by_reflection(coordinators: Coordinators, new_topic: TopicFactory):
    await asyncio.to_thread(coordinators.start, reflection="true")
    topic, address = new_topic(), coordinators.addresses[0]
    opened, begun, sent, outcome = await asyncio.to_thread(
        call,
        address,
        "Transact",
        {"requestId": 1, "open": {"transactionalId": fresh("curl")}},
        {"requestId": 2, "begin": {}},
        {"requestId": 3, "send": {"records": [{"topic": topic, "value": "aGVsbG8="}]}},
        {"requestId": 4, "commit": {}},
    )
    assert (opened["requestId"], begun["requestId"], sent["requestId"]) == ("1", "2", "3")
    assert outcome["outcome"]["result"] == "COMMITTED"
    request = {"transactionalId": fresh("curl"), "requestId": "1", "records": [{"topic": topic, "value": "d29ybGQ="}]}
    (answer,) = await asyncio.to_thread(call, address, "CommitBatch", request)
    assert answer["outcome"]["result"] == "COMMITTED"
    assert answer["records"][0]["topic"] == topic
    assert await asyncio.to_thread(values, coordinators.bootstrap_servers, topic) == [b"hello", b"world"]
