"""What of a source is compared: applied, still in Kafka, readable by read_committed readers, not verified before."""

from typing import Any

import pytest

from spark_jobs.cut import (
    Cut,
    OpenTransaction,
    PartitionFacts,
    Position,
    SourceCut,
    cut_source,
    feed_ranges,
    merge,
    width_of,
)
from spark_jobs.hanging import Owner, told
from spark_jobs.publish import feed_from
from spark_jobs.snapshot import feed_gaps


def position(**more: Any) -> Position:
    given: dict[str, Any] = {"source": 1, "topic": "t", "topic_id": "ab", "partition": 0, "start": 0, "next": 100}
    return Position(**(given | {"beyond": (), "high": 100} | more))


def facts(**more: Any) -> PartitionFacts:
    given: dict[str, Any] = {"topic_id": "ab", "log_start": 0, "stable": 200, "high": 200}
    return PartitionFacts(**(given | more))


def cut(*sources: SourceCut, **more: Any) -> Cut:
    given: dict[str, Any] = {
        "relay": "r", "mode": "transaction", "fence": 1, "snapshot_text": "", "xmin": 1, "system": 1, "lsn": "0/1",
        "config_hash": "", "dead_letters": (), "replayed": {}, "letters_replayed": 0, "tables": (), "feed": {},
        "mapped": frozenset({"t"}), "has_more_letters": False,
        "at_ms": 1, "feed_whole_from_ms": {}, "feed_applied": {},
        "compacted": frozenset(), "unpositioned": (), "notes": (), "told": (),
    }  # fmt: skip
    return Cut(sources=sources, **(given | more))


def test_frontier_and_intervals_beyond():
    cut = cut_source(position(beyond=((120, 130), (150, 151))), facts(), verified=0)
    assert cut.ranges == ((0, 100), (120, 130), (150, 151))
    assert cut.end == 151
    assert cut.lag == 200 - 100 - 11


def test_clamped_to_the_last_stable_offset():
    cut = cut_source(position(next=100, beyond=((120, 130),)), facts(stable=90), verified=0)
    assert cut.ranges == ((0, 90),)
    assert cut.lag == 0


def test_retention_has_passed_the_start():
    cut = cut_source(position(), facts(log_start=40), verified=0)
    assert cut.ranges == ((40, 100),)
    assert cut.expired == 40
    assert cut_source(position(), facts(log_start=40), verified=40).expired == 0
    assert cut_source(position(), facts(log_start=40), verified=10).expired == 30
    # Also of what is applied beyond the frontier, where the last run has been up to that.
    ahead = position(next=10, beyond=((20, 30), (35, 60)))
    assert cut_source(ahead, facts(log_start=40), verified=10).expired == 10 + 5
    assert cut_source(ahead, facts(log_start=40), verified=0).expired == 10 + 10 + 5


def test_only_what_is_new_since_the_last_run():
    assert cut_source(position(), facts(), verified=80).ranges == ((80, 100),)
    assert cut_source(position(), facts(), verified=100).ranges == ()


def test_another_incarnation_of_the_topic_is_not_compared():
    cut = cut_source(position(), facts(topic_id="cd"), verified=0)
    assert cut.facts is None
    assert cut.ranges == ()


def test_ranges_that_touch_are_one():
    assert merge([(5, 9), (0, 5), (20, 21)]) == ((0, 9), (20, 21))


def test_buckets_are_as_wide_as_they_must_be():
    small = [cut_source(position(), facts(), verified=0)]
    assert width_of(small, 4096) == 1024
    large = [
        cut_source(position(next=10_000_000, high=10_000_000), facts(stable=10_000_000, high=10_000_000), verified=0)
    ]
    assert width_of(large, 4096) == 4096


def test_the_feed_goes_on_behind_what_is_applied():
    behind, level = (cut_source(position(next=each), facts(stable=100), verified=0) for each in (60, 100))
    feed = {0: (10, 90), 1: (20, 80)}
    assert feed_from(cut(level, feed=feed, feed_applied={0: 90, 1: 95})) == {"0": 90, "1": 80}
    # Nothing stable is left to apply, and yet the relay has not come to the end of the feed.
    assert feed_from(cut(level, feed=feed, feed_applied={0: 70, 1: 95})) == {"0": 70, "1": 80}
    assert feed_from(cut(behind, feed=feed, feed_applied={0: 70, 1: 95})) == {"0": 70, "1": 80}
    assert feed_from(cut(behind, feed=feed)) == {"0": 10, "1": 20}
    open_one = cut_source(position(), facts(stable=100, high=101), verified=0)
    done = cut_source(position(), facts(stable=100, high=100), verified=0)
    assert feed_from(cut(done, feed=feed, mode="partition")) == {"0": 90, "1": 80}
    for each in (behind, open_one):
        assert feed_from(cut(done, each, feed=feed, mode="partition")) == {"0": 10, "1": 20}


def test_the_feed_is_read_from_what_was_too_young_for_the_last_run():
    there = {0: facts(stable=90), 1: facts(stable=80)}
    assert feed_ranges(there, {}, {}) == ({0: (0, 90), 1: (0, 80)}, {0, 1})
    assert feed_ranges(there, {0: 50, 1: 60}, {0: 40, 1: -1}) == ({0: (40, 90), 1: (60, 80)}, {0, 1})
    assert feed_ranges(there, {0: 50}, {0: 70, 1: 5}) == ({0: (50, 90), 1: (0, 80)}, {0, 1})
    lost = {0: facts(log_start=45, stable=90)}
    assert feed_ranges(lost, {0: 50}, {0: 40}) == ({0: (45, 90)}, set())
    assert feed_ranges(lost, {0: 50}, {0: 45}) == ({0: (45, 90)}, {0})
    assert feed_ranges(lost, {}, {}) == ({0: (45, 90)}, set())


def test_what_retention_took_from_the_feed_is_told():
    assert feed_gaps({}, {0: facts()}) == ([], [])
    assert feed_gaps({0: 40}, {0: facts(log_start=40)}) == ([], [])
    (lost,), _ = feed_gaps({0: 40}, {0: facts(log_start=45), 1: facts()})
    assert "5 records of the feed are past retention and were not read before" in lost
    _, (old,) = feed_gaps({}, {0: facts(log_start=45)})
    assert "45 records of the feed" in old


def test_a_rewound_position_is_not_one_with_holes():
    assert not position(next=50, beyond=((60, 100),)).is_rewound
    assert position(next=50, beyond=((60, 90),)).is_rewound
    assert [position(next=50, beyond=((60, 90),)).has_applied(each) for each in (0, 49, 50, 60, 90)] == [
        True, True, False, True, False,
    ]  # fmt: skip
    # What a rewind has still before it stands in the database; a hole was never there.
    assert position(next=50, beyond=((60, 90),)).written == ((0, 100),)
    assert position(next=50, beyond=((60, 100),)).written == ((0, 50), (60, 100))


@pytest.mark.parametrize(
    ("owner", "wanted"),
    [
        (None, "oncebox txn hanging --topic t --end"),
        (Owner("a", 7, "PREPARED", 1, 60_000), "a number 7 is prepared: its owner or the resolver decides it"),
        (Owner("a", 7, "PREPARE_COMMIT", 1, 60_000), "the coordinator owes its marker"),
        (Owner("a", 7, "ONGOING", 1, 60_000), "oncebox txn describe 'a'"),
    ],
)
def test_only_commands_that_ask_the_coordinators_are_given(owner, wanted):
    text = told("t", 3, facts(), OpenTransaction(producer_id=5, epoch=1, offset_first=9, age_ms=2_000), owner)
    assert wanted in text
    assert "oncebox partition who-blocks t:3" in text
    assert "kafka-transactions" not in text
    assert ("--end" in text) == (owner is None)
