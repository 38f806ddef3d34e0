"""Counts words: lines in, words out, each line handled exactly once however often this is stopped and started.

    python examples/word_count.py --kafka localhost:9092 --coordinators localhost:7171

The lines are written without asyncio, by the blocking producer; oncebox.transform() makes words of them.
"""

# ruff: noqa: T201 - an example prints what it found

import asyncio
from collections import Counter

from common import arguments, create_topics

import oncebox
from oncebox import blocking
from oncebox.reader import Record

LINES = ["the cat sat on the mat", "the dog sat on the cat", "the mat lay flat"]


async def lines_so_far(kafka: str, feed: str, lines: str) -> list[str]:
    """Also those of former runs: their words are counted as well."""
    found: list[str] = []
    async with oncebox.read_transactions(lines, kafka, feed_topic=feed, until_end=True) as reader:
        async for transaction in reader:
            for records in transaction.records.values():
                found += [(record.value or b"").decode() for record in records]
    return found


async def count_words(kafka: str, feed: str, words: str, expected: int, stop: asyncio.Event) -> Counter[str]:
    """Until as many have come as have to; then the transform may stop."""
    counts: Counter[str] = Counter()
    async with oncebox.read_transactions(words, kafka, feed_topic=feed) as reader:
        async for transaction in reader:
            for records in transaction.records.values():
                counts.update((record.value or b"").decode() for record in records)
            if counts.total() >= expected:
                break
    stop.set()
    return counts


async def main() -> None:
    given = arguments("words counted exactly once")
    lines, words = f"{given.prefix}-lines", f"{given.prefix}-words"
    create_topics(given.kafka, lines, words)
    written = [LINES[number % len(LINES)] for number in range(given.count)]

    def write() -> None:
        with blocking.Producer(given.kafka) as producer:
            for line in written:
                producer.send(lines, line.encode())

    await asyncio.to_thread(write)
    everything = await lines_so_far(given.kafka, given.feed, lines)

    async def split(record: Record, transaction: oncebox.Transaction) -> None:
        for word in (record.value or b"").split():
            await transaction.send(words, word, key=word)

    stop = asyncio.Event()
    expected = sum(len(line.split()) for line in everything)
    counts, _ = await asyncio.gather(
        count_words(given.kafka, given.feed, words, expected, stop),
        oncebox.transform(
            lines,
            f"{given.prefix}-word-count",
            split,
            kafka=given.kafka,
            coordinators=given.coordinators,
            transactional_id=f"{given.prefix}-word-count-1",
            stop=stop,
        ),
    )
    print(f"{counts.total()} words of {len(everything)} lines")
    most = sorted(counts.items(), key=lambda found: (-found[1], found[0]))[:4]
    print(", ".join(f"{word} {count}" for word, count in most))


asyncio.run(main())
