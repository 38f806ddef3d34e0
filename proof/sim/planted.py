"""Known bugs of other systems, planted into the real code one at a time: each must be caught by a check named with it.

A checker that has never caught anything proves nothing. Each bug is what the code would be without one of its rules.
"""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from proof.sim import bugs_core, bugs_debts, bugs_log


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    what: str
    plant: Callable[[ExitStack], None]
    # Any of them shows that it was caught.
    caught_by: AbstractSet[str]


BUGS = {
    "R1": Planted(
        what="a delayed commit or abort ends the next transaction",
        plant=bugs_core.number_is_not_looked_at,
        caught_by={"decision divergence", "lost write", "manifest"},
    ),
    "R2": Planted(
        what="a late write after an abort leaves a hanging transaction",
        plant=bugs_debts.aborts_mark_what_was_reported,
        caught_by={"hanging transaction"},
    ),
    "R3": Planted(
        what="a new leader forgets transactions that have begun",
        plant=bugs_log.ongoing_is_not_replayed,
        caught_by={"hanging transaction", "stuck"},
    ),
    "R4": Planted(
        what="the resume token follows the commit too late: stale offsets are used again",
        plant=bugs_core.token_comes_with_completion,
        caught_by={"duplicate"},
    ),
    "R5": Planted(
        what="a new leader serves before it has replayed everything",
        plant=bugs_log.only_the_first_chunk_is_replayed,
        caught_by={"acknowledged but absent after replay"},
    ),
    "R6": Planted(
        what="an exhausted epoch starts at 0 again",
        plant=bugs_core.epochs_wrap,
        caught_by={"number reused"},
    ),
    "R7": Planted(
        what="two concurrent inits share an epoch",
        plant=bugs_core.init_does_not_raise,
        caught_by={"number reused"},
    ),
    "R8": Planted(
        what="a timeout is reported as fencing",
        plant=bugs_core.timeouts_fence,
        caught_by={"fenced without cause"},
    ),
    "R9": Planted(
        what="a marker is sent for ever to a broker that does not lead the partition any more",
        plant=bugs_debts.leaders_are_asked_for_once,
        caught_by={"stuck"},
    ),
    "R10": Planted(
        what="a zombie's init with a stale grant aborts the newer owner's transaction",
        plant=bugs_core.claims_are_not_checked,
        caught_by={"stale owner accepted"},
    ),
    "R11": Planted(
        what="a failed append leaves its change in memory",
        plant=bugs_log.applied_before_it_is_appended,
        caught_by={"acknowledged but absent after replay", "memory is not the log"},
    ),
    "R13": Planted(
        what="a sequence is used again after an unknown append",
        plant=bugs_log.sequences_are_used_again,
        caught_by={"acknowledged but absent after replay"},
    ),
    "R14": Planted(
        what="a deposed leader answers without an append",
        plant=bugs_log.answers_without_an_append,
        caught_by={"stale answer"},
    ),
    "R15": Planted(
        what="a repeated marker ends the next transaction of its slot",
        plant=bugs_core.epochs_are_raised_by_one,
        caught_by={"cross-transaction capture"},
    ),
    "R16": Planted(
        what="two decisions on one id in one group commit",
        plant=bugs_log.an_id_is_decided_twice_in_a_batch,
        caught_by={"acknowledged but absent after replay", "number reused"},
    ),
    "R17": Planted(
        what="a resolver and a late database commit disagree: it looks for the application's row, and writes none",
        plant=bugs_core.the_database_is_only_looked_at,
        caught_by={"decision divergence"},
    ),
    "R18": Planted(
        what="a lost begin notice leaves data open for ever",
        plant=bugs_core.only_begun_transactions_expire,
        caught_by={"hanging transaction", "stuck"},
    ),
    "R19": Planted(
        what="one dead data partition blocks a whole log partition",
        plant=bugs_debts.debts_are_paid_one_by_one,
        caught_by={"blocked by a stranger"},
    ),
    "R20": Planted(
        what="a marker request that is never answered is waited for",
        plant=bugs_debts.markers_have_no_deadline,
        caught_by={"stuck", "hanging transaction"},
    ),
    "R21": Planted(
        what="a marker overtakes an owed one of the same producer id",
        plant=bugs_core.slots_with_debts_are_used,
        caught_by={"cross-transaction capture", "torn transaction"},
    ),
    "R22": Planted(
        what="numbers start anew after an id has expired",
        plant=bugs_core.numbers_start_anew,
        caught_by={"number reused"},
    ),
    "R23": Planted(
        what="the feed's old leader appends after the new one has read the tail",
        plant=bugs_log.the_feed_is_not_fenced,
        caught_by={"manifest"},
    ),
    "R24": Planted(
        what="idle chained transactions stay open after a fail-over",
        plant=bugs_core.clocks_do_not_start_at_a_take_over,
        caught_by={"hanging transaction", "stuck"},
    ),
    "R12": Planted(
        what="a producer id is used on a topic created again: a late write is committed with the next transaction",
        plant=bugs_core.changes_of_topics_are_not_counted,
        caught_by={"aborted read", "cross-transaction capture"},
    ),
    "mixed-topics": Planted(
        what="a transaction is committed although its topic was created again since it was registered",
        plant=bugs_core.commits_go_by_name,
        caught_by={"manifest", "lost write", "torn transaction", "aborted read"},
    ),
    "prepared-fenced": Planted(
        what="fencing ends what is prepared",
        plant=bugs_core.fencing_ends_what_is_prepared,
        caught_by={"decision divergence"},
    ),
    "prepared-timeout": Planted(
        what="a timeout ends what is prepared",
        plant=bugs_core.timeouts_end_what_is_prepared,
        caught_by={"decision divergence"},
    ),
    "prepared-init": Planted(
        what="a new instance ends what is prepared",
        plant=bugs_core.inits_end_what_is_prepared,
        caught_by={"decision divergence"},
    ),
    "outcomes-untold": Planted(
        what="outcomes are not told",
        plant=bugs_core.outcomes_are_not_told,
        caught_by={"unknown outcome"},
    ),
    "old-commits-untold": Planted(
        what="commits that the log has forgotten are not looked for in the feed",
        plant=bugs_log.the_feed_is_not_asked,
        caught_by={"unknown outcome"},
    ),
    "markers-first": Planted(
        what="markers are sent before the decision is durable",
        plant=bugs_debts.markers_before_the_decision,
        caught_by={"marker before decision"},
    ),
    "manifest-last": Planted(
        what="markers do not wait for the manifest",
        plant=bugs_debts.markers_before_the_manifest,
        caught_by={"marker before manifest", "read before commit"},
    ),
    "spans": Planted(
        what="manifests name spans of offsets, not runs",
        plant=bugs_debts.manifests_name_spans,
        caught_by={"manifest"},
    ),
    "first-marker-only": Planted(
        what="a commit marks one of its partitions",
        plant=bugs_debts.one_marker_is_enough,
        caught_by={"torn transaction", "hanging transaction"},
    ),
    "always-commit": Planted(
        what="aborts are written as commits",
        plant=bugs_debts.markers_always_commit,
        caught_by={"aborted read", "decision divergence"},
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        BUGS[name].plant(stack)
        yield
