"""Two ways through the world: Hypothesis, which finds the shortest way to a fault, and a seeded walk, which is quick.

Both make the moves of moves.py, with the same checks after each.
"""

import random
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.model.moves import EPOCHS, MOVES, SLOTS, Move
from tests.model.world import World


def walk(seed: int, steps: int) -> World:
    """The same seed goes the same way."""
    chance = random.Random(seed)
    world = World(epoch=chance.choice(EPOCHS), slots_max=chance.choice(SLOTS))
    # Not all of them: some faults are only met where others are absent.
    moves = [move for move in MOVES if chance.random() < 0.8] or list(MOVES)
    for move in chance.choices(moves, weights=[move.weight for move in moves], k=steps):
        move.make(world, **{name: chance.choice(choices) for name, choices in move.choices.items()})
        world.check()
    world.heal()
    return world


def walks(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            walk(seed, 80)
        except Exception as error:
            error.add_note(f"seed {seed}: repeat it with walk({seed}, 80)")
            raise


class Machine(RuleBasedStateMachine):
    """Its rules are added below, one for each move."""

    @initialize(epoch=st.sampled_from(EPOCHS), slots_max=st.sampled_from(SLOTS))
    def begin(self, *, epoch: int, slots_max: int) -> None:
        self.world = World(epoch=epoch, slots_max=slots_max)

    def teardown(self) -> None:
        self.world.heal()


def _add_rule(move: Move) -> None:
    def step(self: Machine, **arguments: Any) -> None:
        move.make(self.world, **arguments)
        self.world.check()

    step.__name__ = move.make.__name__
    strategies: dict[str, Any] = {name: st.sampled_from(choices) for name, choices in move.choices.items()}
    decorate: Any = rule(**strategies)
    setattr(Machine, step.__name__, decorate(step))


for _move in MOVES:
    _add_rule(_move)
