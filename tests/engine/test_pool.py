"""The pool gives up the state that was not used for longest, and none that is spared or pinned."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from slow import examples

from griffin_eval.engine.pool import Pool

ACTIONS = st.sampled_from(["take", "hold", "pin", "use", "drop", "take over", "free"])


def runner_of(fits):
    """A runner whose pools are their numbers of states, and that has no memory for more."""

    def grow(states, rows, capacity):
        if rows > fits:
            raise RuntimeError("out of memory")
        return rows

    return SimpleNamespace(open_pool=lambda rows, capacity: rows, grow_pool=grow)


@settings(max_examples=examples(200))
@given(
    slots=st.integers(1, 4),
    more=st.integers(0, 4),
    fits=st.integers(0, 9),
    calls=st.lists(st.tuples(ACTIONS, st.integers(0, 5)), max_size=40),
    spared=st.sets(st.integers(0, 40)),
)
def test_slots_are_lent_once_and_states_are_kept_as_long_as_possible(
    slots, more, fits, calls, spared
):
    evicted = []
    pool = Pool(runner_of(fits), slots, slots + more, 8, evicted.append)
    room = slots + more if slots + more <= fits else slots
    held, pinned, lent, edges = {}, {}, [], 0  # held: in the order of their last use
    for action, number in calls:
        one = list(held)[number % len(held)] if held else None
        if action == "take":
            before, slot = len(evicted), pool.take(lambda: spared)
            free = room - len(held) - len(pinned) - len(lent)
            victims = [edge for edge in held if edge not in spared]
            if not free and victims:
                assert evicted[-1] == victims[0]
                assert slot == held.pop(victims[0])
            assert (slot is None) == (not free and not victims)
            assert len(evicted) - before == (not free and bool(victims))
            if slot is not None:
                taken = [*held.values(), *pinned.values(), *lent]
                assert slot not in taken and 0 <= slot < room
                lent.append(slot)
        elif action in ("hold", "pin") and lent:
            slot = lent.pop()
            (pinned if action == "pin" else held)[edges] = slot
            pool.hold(edges, slot, pinned=action == "pin")
            edges += 1
        elif action == "use" and one is not None:
            pool.used(one)
            held[one] = held.pop(one)
        elif action == "drop" and one is not None:
            pool.drop(one)
            del held[one]
        elif action == "take over" and one is not None:
            lent.append(pool.take_over(one))
            assert lent[-1] == held.pop(one)
        elif action == "free":
            pool.free(lent.pop() if lent else -1)
        for edge in range(edges):
            known = held.get(edge, pinned.get(edge, -1))
            assert pool.slot_of(edge) == known and (edge in pool) == (known >= 0)
        assert pool.taken == len(held) + len(pinned) + len(lent)
    assert pool.states in (slots, room)
    assert all(edge not in spared for edge in evicted)
