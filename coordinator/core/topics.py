"""Topics that are deleted and created again under the same name.

The new topic has forgotten every producer id: a late write of an old epoch is taken there, and the next marker of that
producer id would end it too. So a producer id is used only on topics that have not changed since it was taken. Changes
are counted per log partition, as they are noticed: when a topic is named with another id than the one last registered.
"""

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from coordinator.core.commands import ErrorCode, Refused, TopicIds
from coordinator.core.grants import Context
from coordinator.core.records import NOWHERE, IdState, Slot, TopicPartition, TopicState


def news(partitions: Collection[TopicPartition], topic_ids: TopicIds, context: Context) -> tuple[TopicState, ...]:
    """Records of what the log does not know of these topics yet: to be appended with their registration."""
    found: dict[str, TopicState] = {}
    for topic, _ in partitions:
        topic_id = topic_ids.get(topic)
        known = context.topics.get(topic)
        if topic_id and (known is None or known.topic_id != topic_id):
            # The first of its name: no producer id of this log partition was ever registered with another.
            change = 0 if known is None else context.topic_changes + 1
            found[topic] = TopicState(topic=topic, topic_id=topic_id, change=change)
    return tuple(found[topic] for topic in sorted(found)) if found else ()


def with_news(partitions: Collection[TopicPartition], found: Collection[TopicState], context: Context) -> Context:
    """As after these records; it knows no other topics than those of the partitions."""
    if not found:
        return context
    named = {partition.topic for partition in partitions}
    topics = {topic: context.topics[topic] for topic in named if topic in context.topics}
    return replace(
        context,
        topics=topics | {state.topic: state for state in found},
        topic_changes=max(context.topic_changes, *(state.change for state in found)),
    )


def is_older_than(slot: Slot, partitions: Collection[TopicPartition], context: Context) -> bool:
    """Whether the slot's producer id may have been used on an earlier topic of one of these names."""
    seen = slot.topic_changes
    if seen == NOWHERE:
        return True
    for topic, _ in partitions:
        known = context.topics.get(topic)
        if known is not None and seen < known.change:
            return True
    return False


def refuse_changed(
    state: IdState, named: Iterable[tuple[str, bytes]], topic_ids: TopicIds, context: Context
) -> Refused | None:
    """The open transaction can only be aborted where a topic has changed since it was registered.

    What was written before is gone with the old topic, and a manifest would name offsets that are another's. `named`:
    topics, and which one the client says it is (or nothing).
    """
    seen = state.slots[state.slot].topic_changes
    for topic, claimed_id in named:
        known = context.topics.get(topic)
        if known is None:
            continue
        topic_id = known.topic_id
        if seen < known.change or topic_ids.get(topic, topic_id) != topic_id or (claimed_id or topic_id) != topic_id:
            return Refused(
                code=ErrorCode.TRANSACTION_ABORTABLE,
                message=f"the topic {topic!r} was deleted, or deleted and created again, since transaction "
                f"{state.number} was granted: what it wrote there may be gone. Abort it and go on with the next one",
            )
    return None
