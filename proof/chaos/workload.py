"""What the clients do, and how it is copied.

bank     a transfer is one record in each of debits, credits and journal: hunts torn transactions and money that changes
lists    one to six records on any partitions of one topic: hunts lost, doubled, reordered and aborted records
outbox   a transfer is one database transaction of three outbox rows; the outbox relay publishes them, the relay brings
         them back into another database: hunts rows that are published twice, never, in part or in another order
copy     transform() copies the topic of the lists, partition by partition: hunts records copied twice or never
"""

import json
from random import Random

from oncebox.bulk import Outgoing
from proof.chaos.history import Write

ACCOUNTS = 20
MONEY = ACCOUNTS * 1_000
BANK = ("debits", "credits", "journal")
CIRCLE = ("withdrawals", "deposits", "receipts")
# In each of these a transfer stands once in each table, with the same amount.
BANKS = (BANK, CIRCLE)
LISTS = "lists"
TOPICS = (*BANK, *CIRCLE, LISTS)
COPIES = "copies"
PARTITIONS = 3
APPENDS_MAX = 6
# One in so many leaves in the middle, on purpose.
LEAVES_EVERY = 10
# Of clients that write to Kafka, and to a database.
WORKLOADS = ("bank", "lists")
OUTBOX = "outbox"
# Writes lists, too: once, and never ends it.
PASSER_BY = "passer"
COPY_RECORDS_MAX = 750

# One table of each bank is upserted by key, where a record applied twice would not show; the others are inserted, where
# it would.
RELAY_CONFIG = """\
name: chaos
kafka: {{bootstrap_servers: "{servers}"}}
postgres: {{dsn: "{dsn}"}}
listen_port: 0
http_port: 0
session_ms: {session_ms}
tables:
"""
UPSERTED = "key: item"
INSERTED = "insert_mode: insert"
TABLE = "  - {{topic: {topic}, {mode}, auto_create: true, columns: {{item: text, op: text, amount: int}}}}\n"

OUTBOX_CONFIG = """\
name: chaos
kafka: {{bootstrap_servers: "{servers}"}}
postgres: {{dsn: "{dsn}"}}
coordinators: "{coordinators}"
topic: "{{aggregatetype}}"
takeover_ms: {takeover_ms}
"""


def relay_config(*, servers: str, dsn: str, session_ms: int) -> str:
    upserted = {bank[0] for bank in BANKS}
    tables = [TABLE.format(topic=topic, mode=UPSERTED if topic in upserted else INSERTED) for topic in TOPICS]
    return RELAY_CONFIG.format(servers=servers, dsn=dsn, session_ms=session_ms) + "".join(tables)


def records(workload: str, op: str, random: Random) -> list[Outgoing]:
    if workload == "bank":
        return transfer(BANK, op, random)
    count = random.randint(1, APPENDS_MAX)
    return [
        _record(LISTS, op, index, random.randint(1, 100), partition=random.randrange(PARTITIONS))
        for index in range(count)
    ]


def transfer(topics: tuple[str, ...], op: str, random: Random) -> list[Outgoing]:
    amount = random.randint(1, 100)
    accounts = random.sample(range(ACCOUNTS), 2)
    keys = [str(account).encode() for account in (*accounts, accounts[0])]
    return [_record(topic, op, index, amount, key=keys[index]) for index, topic in enumerate(topics)]


def _record(
    topic: str, op: str, index: int, amount: int, *, key: bytes | None = None, partition: int | None = None
) -> Outgoing:
    value = json.dumps({"item": f"{op}#{index}", "op": op, "amount": amount}).encode()
    return Outgoing(topic=topic, value=value, key=key, partition=partition)


def write_of(record: Outgoing) -> Write:
    value = json.loads(record.value or b"")
    return Write(record.topic, value["item"], value["amount"])
